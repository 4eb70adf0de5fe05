"""D3: how a stream ends: clocks, SIGTERM at each phase, the lease and the store; by raw sockets."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.checks import has_read, until
from tests.support.decisions import (
    auth,
    config,
    decides,
    fresh_key,
    gateway,
    let_end,
    opened,
    start,
)
from tests.support.gateway import KEY, ROOT
from tests.support.websocket import BINARY, CONT, PING, TEXT, RawSocket, close, frame

if TYPE_CHECKING:
    from tests.support.gateway import GatewayProcess

LEASE: Final = {"lease_ttl_ms": 1500, "lease_renew_interval_ms": 300}


async def ends(ws: RawSocket, timeout: float = 10.0) -> tuple[int | None, str | None, int]:
    """Reads to the end: the close code, the goodbye's reason and its retry hint (D3.10)."""
    found = await ws.until_close(timeout)
    last = ws.messages[-1]
    assert last["type"] == "goodbye"
    assert last["resume"]["supported"] is False
    assert last["resume"]["action"] == "reconnect_and_replay"
    assert found.reason == (last["reason"] or "")
    await ws.send(close(found.code))
    assert not await ws.client.read_some()
    return found.code, last["reason"], last["resume"]["retry_after_ms"]


def append(version: int, text: str = "x") -> dict[str, Any]:
    return {"type": "append_text", "event_id": f"evt_{version}", "text": text}


def decide(version: int) -> dict[str, Any]:
    return {"type": "decide", "state_version": version}


async def read(ws: RawSocket, count: int) -> list[str]:
    """The types of the next messages."""
    return [(await ws.json())["type"] for _ in range(count)]


async def is_free(process: GatewayProcess, key: str) -> None:
    """Waits until the account may open a stream."""
    async with asyncio.timeout(10):
        while True:
            async with process.client() as client:
                if await RawSocket(client).open(headers=[auth(key)]) == 101:
                    return
            await asyncio.sleep(0.02)


# --- clocks ---------------------------------------------------------------------------------------


async def test_no_start_is_1008() -> None:
    """D3.1."""
    async with gateway(config(limits={"start_timeout_ms": 300})) as process, opened(process) as ws:
        assert await ends(ws) == (1008, "policy", 0)


async def test_idle_is_1000() -> None:
    """D3.4: heartbeats do not keep a stream alive, a message does."""
    limits = {"idle_timeout_ms": 2000, "heartbeat_interval_ms": 200}
    async with gateway(config(limits=limits)) as process, opened(process) as ws:
        await ws.say(**start())
        assert await read(ws, 1) == ["ack"]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await ws.say(**append(2))
        pings = 0
        while (message := await ws.json())["type"] != "goodbye":
            if message["type"] == "ping":
                pings += 1
                await ws.say(type="pong", nonce=message["nonce"])
        assert message["reason"] == "idle"
        assert time.monotonic() - began > 1.9
        assert pings >= 2
        assert (await ws.frame()).code == 1000


async def test_a_decide_keeps_a_stream_from_idling() -> None:
    """D3.4: the clock begins again when it settles."""
    async with gateway(config(limits={"idle_timeout_ms": 500})) as process, opened(process) as ws:
        began = time.monotonic()
        await ws.say(**start("!delay=1", mode="on_change"))
        assert await ends(ws) == (1000, "idle", 0)
        assert [m["type"] for m in ws.messages] == ["hello", "ack", "decision", "goodbye"]
        assert time.monotonic() - began > 1.4


async def test_an_hour_is_1001() -> None:
    """D3.5."""
    async with gateway(config(limits={"max_duration_ms": 400})) as process, opened(process) as ws:
        await ws.say(**start())
        assert await ends(ws) == (1001, "max_lifetime", 0)


async def test_a_decide_may_settle_at_the_end_of_a_lifetime() -> None:
    """D3.5: its frame goes out first."""
    async with gateway(config(limits={"max_duration_ms": 900})) as process, opened(process) as ws:
        await ws.say(**start("!delay=1", mode="on_change"))
        assert await ends(ws) == (1001, "max_lifetime", 0)
        assert [m["type"] for m in ws.messages] == ["hello", "ack", "decision", "goodbye"]


@pytest.mark.parametrize("interval", ["heartbeat_interval_ms", "native_heartbeat_interval_ms"])
async def test_a_peer_that_never_pongs_is_1013(interval: str) -> None:
    """D3.2, D3.3: whichever of the two it owes."""
    limits = {interval: 200, "pong_timeout_ms": 300}
    async with gateway(config(limits=limits)) as process, opened(process) as ws:
        await ws.say(**start())
        assert await ends(ws) == (1013, "slow_reader", 1000)
        pinged = any(m["type"] == "ping" for m in ws.messages)
        assert pinged == (interval == "heartbeat_interval_ms")


async def test_a_peer_that_pongs_lives_on() -> None:
    """D3.2, D3.3: both kinds, for many times the timeout."""
    limits = {
        "heartbeat_interval_ms": 150,
        "native_heartbeat_interval_ms": 150,
        "pong_timeout_ms": 1000,
    }
    async with gateway(config(limits=limits)) as process, opened(process) as ws:
        await ws.say(**start())
        nonces: list[int] = []
        while len(nonces) < 20:
            message = await ws.json()  # answers native pings
            if message["type"] == "ping":
                nonces.append(message["nonce"])
                await ws.say(type="pong", nonce=message["nonce"])
        assert nonces == sorted(set(nonces))
        assert len(ws.pings) >= 10
        assert len(set(ws.pings)) == len(ws.pings)


async def test_a_peer_that_dies_in_the_middle_of_a_frame_is_1013() -> None:
    """D3.3: it is silent, not dribbling, so it may come back."""
    limits = {"native_heartbeat_interval_ms": 200, "pong_timeout_ms": 300}
    async with gateway(config(limits=limits)) as process, opened(process) as ws:
        await ws.say(**start())
        await ws.send(frame(TEXT, json.dumps(append(2)).encode())[:15])
        assert (await ws.until_close()).code == 1013


@pytest.mark.slow
async def test_a_dribble_is_1008() -> None:
    """D2.6: fragments that never become a message, though every heartbeat is answered."""
    async with (
        gateway(config(limits={"start_timeout_ms": 60_000})) as process,
        opened(process) as ws,
    ):
        await ws.send(frame(TEXT, b"{", fin=False))
        began = time.monotonic()
        closing = asyncio.ensure_future(ws.until_close(timeout=40))
        while not closing.done():
            await ws.send(frame(CONT, b" ", fin=False))
            await asyncio.sleep(0.5)
        found = await closing
        assert (found.code, ws.messages[-1]["reason"]) == (1008, "policy")
        assert 9 < time.monotonic() - began < 40


# --- SIGTERM --------------------------------------------------------------------------------------


async def stopped(process: GatewayProcess) -> None:
    process.terminate()
    await until(lambda: '"event":"draining"' in process.stderr(), what="the drain")


async def test_sigterm_before_start() -> None:
    """D3.6."""
    async with gateway(config()) as process, opened(process) as ws:
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        assert await process.wait() == 0


async def test_sigterm_on_an_idle_stream() -> None:
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start())
        await ws.json()
        began = time.monotonic()
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        assert await process.wait() == 0
        assert time.monotonic() - began < 4


async def test_sigterm_while_a_decide_runs() -> None:
    """D3.6: it settles; what is said meanwhile is acked unscheduled; a decide is refused."""
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start("!until=drained ", mode="on_change"))
        await ws.json()
        await until(lambda: decides(process))
        await stopped(process)
        await ws.say(**append(2))
        ack = await ws.json()
        assert (ack["state_version"], ack["scheduled"]) == (2, False)
        for _ in range(4):  # not counted: the third is not fatal
            await ws.say(**decide(2))
            refused = await ws.json()
            assert refused["envelope"]["error"]["code"] == "service_unavailable"
            assert (refused["phase"], refused["fatal"]) == ("protocol", False)
            assert refused["retry"]["should_retry"] is True
        let_end(process, "drained")
        assert (await ws.json())["state_version"] == 1
        assert await ends(ws) == (1012, "shutdown", 500)
        assert ws.messages[-1]["last_decision_state_version"] == 1
        assert await process.wait() == 0
        assert len(decides(process)) == 1


async def test_sigterm_while_a_decide_waits_for_its_interval() -> None:
    """D3.6: no new decide starts."""
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start(mode="on_change", min_interval_ms=60_000))
        assert await read(ws, 2) == ["ack", "decision"]
        await ws.say(**append(2))
        assert (await ws.json())["scheduled"] is True
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        assert len(decides(process)) == 1


async def test_sigterm_while_a_decide_hangs() -> None:
    """D3.6: it gets the time for settling and no more; then it is cancelled."""
    async with (
        gateway(config(limits={"decision_settlement_timeout_ms": 600})) as process,
        opened(process) as ws,
    ):
        await ws.say(**start("!delay=60", mode="on_change"))
        await until(lambda: decides(process))
        began = time.monotonic()
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        assert 0.5 < time.monotonic() - began < 6
        assert await process.wait() == 0
        assert len(decides(process, "cancelled")) == 1


async def test_sigterm_with_a_grace_shorter_than_a_decide() -> None:
    """O2, D3.6: the decide is told to have failed, the goodbye still goes out."""
    made = config(server={"shutdown_grace_s": 0.5})
    async with gateway(made) as process, opened(process) as ws:
        await ws.say(**start("!delay=60", mode="on_change"))
        await until(lambda: decides(process))
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        failed = [m for m in ws.messages if m["type"] == "error"]
        assert [m["envelope"]["error"]["code"] for m in failed] == ["service_unavailable"]
        assert await process.wait() == 0


async def test_sigterm_in_the_delay_of_a_retry() -> None:
    """D3.6: what failed is not tried again."""
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start("!error=capacity_exhausted:60000", mode="on_change"))
        assert await read(ws, 2) == ["ack", "error"]
        process.terminate()
        assert await ends(ws) == (1012, "shutdown", 500)
        assert len(decides(process)) == 1


async def test_sigterm_while_our_close_is_not_answered() -> None:
    """One goodbye, one Close, and the end of the process after the handshake's time."""
    limits = {"close_handshake_timeout_ms": 800}
    async with gateway(config(limits=limits)) as process, opened(process) as ws:
        await ws.send(frame(BINARY))
        assert (await ws.until_close()).code == 1003
        began = time.monotonic()
        process.terminate()
        assert await process.wait() == 0
        assert time.monotonic() - began < 5
        assert not await ws.client.read_some()
        assert [m["type"] for m in ws.messages] == ["hello", "goodbye"]


async def test_sigterm_in_the_middle_of_an_opening() -> None:
    """It waits for the store: what comes of it is a refusal, not a stream."""
    async with (
        gateway(config(limits={"lease_ttl_ms": 20_000})) as process,
        process.client() as client,
    ):
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        ws = RawSocket(client)
        opening = asyncio.ensure_future(ws.open(headers=[auth(KEY)]))
        await asyncio.sleep(0)  # it is sent
        await has_read(client.sock)
        await stopped(process)
        locker.execute("ROLLBACK")
        locker.close()
        assert await opening == 503
        assert client.json["error"]["code"] == "service_unavailable"
        assert await process.wait() == 0


async def test_sigterm_in_the_middle_of_a_message() -> None:
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start())
        await ws.json()
        await ws.send(frame(TEXT, json.dumps(append(2)).encode())[:9])
        process.terminate()
        found = await ws.until_close()
        assert (found.code, ws.messages[-1]["reason"]) == (1012, "shutdown")


async def test_sigterm_before_a_reader_that_stopped() -> None:
    """The process ends within the time for the handshake, whatever the peer does."""
    limits = {"close_handshake_timeout_ms": 600}
    questions = {
        f"q{i}": {
            "type": "choice",
            "instructions": "?",
            "criteria": {f"o_{j}": "x" for j in range(99)},
        }
        for i in range(200)
    }
    async with gateway(config(limits=limits)) as process, opened(process, rcvbuf=2048) as ws:
        await ws.say(**start(request={"questions": questions}, mode="on_change"))
        await until(lambda: decides(process, "ended"))
        began = time.monotonic()
        process.terminate()
        assert await process.wait() == 0
        assert time.monotonic() - began < 6


async def test_sigterm_in_the_middle_of_a_close() -> None:
    """A client that closed has nothing more to hear; its decide is settled all the same (D5.7)."""
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start("!until=drained", mode="on_change"))
        await until(lambda: decides(process))
        await ws.send(close())
        assert (await ws.until_close()).code == 1000
        await stopped(process)
        let_end(process, "drained")
        assert await process.wait() == 0
        assert len(decides(process, "ended")) == 1


# --- the lease and the store ----------------------------------------------------------------------


async def test_a_lost_lease_is_1013() -> None:
    """D3.8: another machine has found it expired and taken the place."""
    async with gateway(config(limits=LEASE)) as process, opened(process) as ws:
        await ws.say(**start())
        with sqlite3.connect(process.workdir / "sluicegate.db") as db:
            db.execute("DELETE FROM streams")
        db.close()
        assert await ends(ws) == (1013, "lease_lost", 0)


async def test_a_store_that_is_gone_is_1013() -> None:
    """D3.8: before the lease runs out, as another socket could have its place then."""
    async with gateway(config(limits=LEASE)) as process, opened(process, key=KEY) as ws:
        await ws.say(**start())
        await ws.json()
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        try:
            locker.execute("BEGIN EXCLUSIVE")
            began = time.monotonic()
            assert await ends(ws) == (1013, "store_unavailable", 0)
            assert time.monotonic() - began < 10
            locker.execute("ROLLBACK")
        finally:
            locker.close()
        await is_free(process, KEY)


async def test_a_store_that_is_gone_for_a_moment_ends_nothing() -> None:
    """D3.8: within the lease's length it is tried again."""
    async with (
        gateway(config(limits=LEASE | {"lease_ttl_ms": 6000})) as process,
        opened(process) as ws,
    ):
        await ws.say(**start())
        await ws.json()
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        await asyncio.sleep(1.5)
        locker.execute("ROLLBACK")
        locker.close()
        await asyncio.sleep(1.0)
        await ws.say(**append(2))
        assert (await ws.json())["type"] == "ack"


async def test_a_store_that_is_gone_in_flight_lets_a_running_decide_end() -> None:
    """D5.4: the next start waits for the store; the one that runs needs none."""
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start("!until=locked ", mode="on_change"))
        await until(lambda: decides(process))
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        await ws.say(**append(2))
        assert await read(ws, 2) == ["ack", "ack"]
        let_end(process, "locked")
        assert await read(ws, 1) == ["decision"]
        await asyncio.sleep(0.3)
        assert len(decides(process)) == 1
        locker.execute("ROLLBACK")
        locker.close()
        assert (await ws.json())["covered_event_ids"] == ["evt_2"]


async def test_a_refused_account_ends_its_stream_at_the_next_decide() -> None:
    """D5.6: the key was good at the opening and is revoked since."""
    async with gateway(config()) as process:
        key = await keys(process, "create", "--org", "late", "--name", "laptop")
        await is_free(process, key)  # the gateway has heard of it
        async with opened(process, key=key) as ws:
            await ws.say(**start())
            await ws.json()
            with sqlite3.connect(process.workdir / "sluicegate.db") as db:
                db.execute("UPDATE keys SET status = 'revoked'")
            db.close()
            await asyncio.sleep(1.5)
            await ws.say(**decide(1))
            assert await read(ws, 2) == ["scheduled", "error"]
            failed = ws.messages[-1]
            assert (failed["phase"], failed["http_status"], failed["fatal"]) == (
                "decide",
                403,
                True,
            )
            assert failed["envelope"]["error"]["code"] == "auth_error"
            assert await ends(ws) == (1008, "auth", 0)
        assert decides(process) == []


async def keys(process: GatewayProcess, *arguments: str) -> str:
    """Runs `sluicegate keys` on the gateway's store and returns the key that it prints."""
    command = [sys.executable, "-m", "planes.cli", "keys", *arguments]
    child = await asyncio.create_subprocess_exec(
        *(*command, "--config", "sluicegate.yaml"),
        cwd=process.workdir,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return next(word for word in out.decode().split() if word.startswith("ozk_"))


async def test_pings_are_answered_while_a_decide_runs() -> None:
    async with gateway(config()) as process, opened(process) as ws:
        await ws.say(**start("!until=answered", mode="on_change"))
        assert await read(ws, 1) == ["ack"]
        await ws.send(frame(PING, b"p"))
        assert (await ws.frame()).payload == b"p"
        let_end(process, "answered")
        assert await read(ws, 1) == ["decision"]


async def test_many_streams_of_many_accounts_end_at_a_sigterm() -> None:
    async with gateway(config()) as process:
        streams = [opened(process, key=fresh_key()) for _ in range(16)]
        sockets = [await s.__aenter__() for s in streams]
        for i, ws in enumerate(sockets):
            await ws.say(**start(f"!delay={0.1 * (i % 5)}", mode="on_change"))
        for ws in sockets:
            await ws.json()
        process.terminate()
        for ws in sockets:
            assert await ends(ws) == (1012, "shutdown", 500)
        assert await process.wait() == 0
        for stream in streams:
            await stream.__aexit__(None, None, None)
        assert "Traceback" not in process.stderr()
