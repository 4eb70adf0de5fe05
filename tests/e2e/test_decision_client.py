"""The published client `rightnow-system-zero`, unmodified, through every ending and back again."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from system_zero import SystemZeroError
from system_zero.stream import StreamDisconnectedError

from bench.ports import free_port
from tests.support.checks import until
from tests.support.decisions import (
    MODEL,
    QUESTIONS,
    config,
    decides,
    fresh_key,
    gateway,
    let_end,
    real_client,
)
from tests.support.gateway import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from system_zero import SystemZeroStreamClient

    from tests.support.gateway import GatewayProcess

BOUND_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process
        assert "Traceback" not in process.stderr()
        assert '"event":"fault"' not in process.stderr()


def request(state: Any, **more: Any) -> Any:
    return {"model": MODEL, "state": state, "questions": QUESTIONS} | more


def png() -> str:
    """A whole PNG of one pixel, as a data URL."""

    def part(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack("!I", len(data)) + whole + struct.pack("!I", zlib.crc32(whole))

    head = struct.pack("!IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head)
    data += part(b"IDAT", zlib.compress(b"\x00\x00")) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(name: str) -> Any:
    return {"name": name, "type": "image", "data": png()}


async def decision(client: SystemZeroStreamClient, ack: Any) -> Any:
    """The first decision that covers an ack."""
    measured = await asyncio.wait_for(client.wait_for_decision(ack), BOUND_S)
    return measured.decision


class Events:
    """All events of a client, collected beside the test."""

    def __init__(self, client: SystemZeroStreamClient) -> None:
        self.seen: list[dict[str, Any]] = []
        self._events = client.events()
        self._task = asyncio.ensure_future(self._collect())

    async def _collect(self) -> None:
        async for event in self._events:
            self.seen.append({**event})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.seen if event["type"] == kind]

    async def wait(self, kind: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Waits for so many events of a kind, with these fields; returns the last."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.of(kind) if fields.items() <= e.items()]

        await until(lambda: len(found()) >= count, BOUND_S, what=f"{count} {kind} {fields}")
        return found()[count - 1]

    async def __aenter__(self) -> Events:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


# --- everything that it can say -------------------------------------------------------------------


async def test_on_request(shared: GatewayProcess) -> None:
    async with real_client(shared) as client, Events(client) as events:
        first = await client.start(request("Order received."), decision_mode="on_request")
        assert (first["state_version"], first["scheduled"]) == (1, False)
        ack = await client.append_text(" Payment received.")
        assert (ack["state_version"], ack["scheduled"]) == (2, False)
        scheduled = await client.decide()
        assert (scheduled["state_version"], scheduled["in_flight"]) == (2, False)
        found = await decision(client, ack)
        assert found["state_version"] == 2
        assert found["covered_event_ids"] == ["evt_1", "evt_2"]
        assert found["reply"]["answers"].keys() == {"ready"}
        assert not client.last_decision_stale
        again = await client.decide()
        assert again["state_version"] == 2
        second = await events.wait("decision", 2)
        assert second["covered_event_ids"] == []
        assert events.of("error") == []
    calls = [c for c in decides(shared) if "Payment" in c["state"]]
    assert len({c["key"] for c in calls}) == 1  # the key of the version is kept


async def test_on_change(shared: GatewayProcess) -> None:
    """Dense changes coalesce; every accepted one is covered by some decision."""
    async with real_client(shared) as client, Events(client) as events:
        ack = await client.start(request("!delay=0.3 "), decision_mode="on_change")
        assert ack["scheduled"] is True
        acks = [await client.append_text(f"{i} ") for i in range(4)]
        assert all(a["scheduled"] for a in acks)
        last = await decision(client, acks[-1])
        assert last["state_version"] == 5
        covered = [e for d in events.of("decision") for e in d["covered_event_ids"]]
        assert covered == [f"evt_{i}" for i in range(1, 6)]
        assert len(events.of("decision")) == 2
        assert len(client.event_latencies) >= 5


async def test_items(shared: GatewayProcess) -> None:
    async with real_client(shared) as client:
        await client.start(request([{"n": 1}]), decision_mode="on_change")
        ack = await client.append_items([{"n": 2}, "three", None, 4.5, ["five"]])
        await decision(client, ack)
        assert client.desired_state == [{"n": 1}, {"n": 2}, "three", None, 4.5, ["five"]]
    (call,) = [c for c in decides(shared) if "three" in c["state"]]
    assert json.loads(call["body"])["state"] == client.desired_state


async def test_attachments(shared: GatewayProcess) -> None:
    async with real_client(shared) as client:
        ack = await client.start(
            request("Shelf A", attachments=[image("before")]), decision_mode="on_change"
        )
        await decision(client, ack)
        ack = await client.append_attachments([image("after"), image("later")])
        await decision(client, ack)
        ack = await client.replace("Shelf B", attachments=[image("only")])
        await decision(client, ack)
        ack = await client.replace("Shelf C")
        await decision(client, ack)
        ack = await client.replace("Shelf D", attachments=[])
        await decision(client, ack)
    bodies = [json.loads(c["body"]) for c in decides(shared) if "Shelf" in c["state"]]
    names = [[a["name"] for a in body.get("attachments", [])] for body in bodies]
    assert names == [["before"], ["before", "after", "later"], ["only"], ["only"], []]
    assert "attachments" not in bodies[-1]


async def test_replace_of_an_object(shared: GatewayProcess) -> None:
    async with real_client(shared) as client:
        await client.start(request({"a": {"b": 1}}), decision_mode="on_request")
        ack = await client.replace({"a": {"b": 2}, "ü": "日本"})
        await client.decide()
        found = await decision(client, ack)
        assert found["state_version"] == 2
    (call,) = [c for c in decides(shared) if '"b": 2' in c["state"]]
    assert json.loads(call["body"])["state"] == {"a": {"b": 2}, "ü": "日本"}


async def test_a_refused_mutation_leaves_the_stream_as_it_was(shared: GatewayProcess) -> None:
    async with real_client(shared) as client:
        await client.start(request("a"), decision_mode="on_request")
        with pytest.raises(SystemZeroError) as raised:
            await client.append_attachments([image("same"), image("same")])
        assert raised.value.status == 400
        ack = await client.append_text("b")
        assert ack["state_version"] == 2
        assert client.desired_state == "ab"


async def test_a_model_that_is_not_there(shared: GatewayProcess) -> None:
    """D4.4: an ack promises none; the decide says so."""
    async with real_client(shared) as client, Events(client) as events:
        await client.start(request("a") | {"model": "other"}, decision_mode="on_change")
        failed = await events.wait("error", phase="decide")
        assert failed["envelope"]["error"]["code"] == "model_not_found"
        assert failed["http_status"] == 404
        assert (await client.append_text("b"))["state_version"] == 2


async def test_the_published_example(shared: GatewayProcess) -> None:
    """The seed's: an iterator of events beside the calls."""
    async with real_client(shared) as stream:
        events = stream.events()
        await stream.connect()
        await stream.start(request("Order received."), decision_mode="on_request")
        await stream.append_text(" Payment received.")
        await stream.decide()
        kinds = []
        async for event in events:
            kinds.append(event["type"])
            if event["type"] == "decision":
                break
        assert kinds == ["ack", "ack", "scheduled", "decision"]
        await events.aclose()


async def test_a_large_state(shared: GatewayProcess) -> None:
    async with real_client(shared) as client:
        await client.start(request("x" * 3_000_000), decision_mode="on_request")
        ack = await client.append_text("y" * 500_000)
        assert ack["state_bytes"] == 3_500_002
        await client.decide()
        assert (await decision(client, ack))["state_version"] == 2


async def test_heartbeats() -> None:
    """Both directions, both kinds, for many intervals."""
    limits = {
        "heartbeat_interval_ms": 300,
        "native_heartbeat_interval_ms": 300,
        "pong_timeout_ms": 2000,
    }
    async with gateway(config(limits=limits)) as process, real_client(process) as client:
        await client.start(request("a"), decision_mode="on_request")
        await asyncio.sleep(3)
        ack = await client.append_text("b")
        assert ack["state_version"] == 2
        assert len([x for x in process.log_lines() if x["event"] == "stream"]) == 0


async def test_two_accounts_at_once(shared: GatewayProcess) -> None:
    """Each has its own state, keys and decisions."""
    keys = [fresh_key(), fresh_key()]

    async def run(key: str, word: str) -> list[int]:
        versions = []
        async with real_client(shared, key=key) as client:
            ack = await client.start(request(f"{word} "), decision_mode="on_change")
            for i in range(4):
                versions.append((await decision(client, ack))["state_version"])
                ack = await client.append_text(f"{word}{i} ")
            await decision(client, ack)
            assert word * 2 not in client.desired_state
        return versions

    left, right = await asyncio.gather(run(keys[0], "left"), run(keys[1], "right"))
    assert left == right == [1, 2, 3, 4]
    states = [c["state"] for c in decides(shared) if "left" in c["state"] or "right" in c["state"]]
    assert len(states) == 10
    assert not any("left" in s and "right" in s for s in states)


async def test_a_second_stream_of_an_account_is_refused(shared: GatewayProcess) -> None:
    """D1.5: as the client sees it."""
    key = fresh_key()
    async with real_client(shared, key=key):
        second = real_client(shared, key=key)
        with pytest.raises(SystemZeroError) as raised:
            await second.connect()
        assert (raised.value.status, raised.value.code) == (429, "stream_limit_exceeded")
        assert raised.value.details == {"limit": 1}
        await second.close()


async def test_an_opening_waits_for_a_place() -> None:
    """503 `service_unavailable`: the client tries again when it is told to, and comes in."""
    async with gateway(config(limits={"max_streams_per_process": 1})) as process:
        first, second = real_client(process), real_client(process)
        await first.connect()
        opening = asyncio.ensure_future(second.connect())
        await asyncio.sleep(1.5)
        assert not opening.done()
        await first.close()
        hello = await asyncio.wait_for(opening, BOUND_S)
        assert hello["limits"]["max_streams_per_process"] == 1
        await second.close()


async def test_an_opening_waits_for_the_store() -> None:
    """503 `limiter_unavailable`: likewise."""
    limits = {"lease_ttl_ms": 800, "lease_renew_interval_ms": 200}
    async with gateway(config(limits=limits)) as process:
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        client = real_client(process)
        opening = asyncio.ensure_future(client.connect())
        await asyncio.sleep(2)
        assert not opening.done()
        locker.execute("ROLLBACK")
        locker.close()
        assert (await asyncio.wait_for(opening, 30))["type"] == "hello"
        await client.close()


async def test_a_closed_client_may_come_again_at_once(shared: GatewayProcess) -> None:
    key = fresh_key()
    for _ in range(10):
        async with real_client(shared, key=key) as client:
            ack = await client.start(request("a"), decision_mode="on_request")
            assert ack["state_version"] == 1


# --- endings, and what it does then ---------------------------------------------------------------


async def test_idle_close_and_lazy_reopen() -> None:
    """1000: it stays away until there is something to say, then replays."""
    async with (
        gateway(config(limits={"idle_timeout_ms": 2000})) as process,
        real_client(process) as client,
        Events(client) as events,
    ):
        await client.start(request("a"), decision_mode="on_request")
        assert (await events.wait("goodbye"))["reason"] == "idle"
        await until(lambda: lines(process), BOUND_S)
        await asyncio.sleep(1)
        assert len(lines(process)) == 1
        ack = await client.append_text("b")
        assert (ack["state_version"], client.desired_state) == (1, "ab")
        await client.decide()
        found = await decision(client, ack)
        assert json.loads(decides(process)[-1]["body"])["state"] == "ab"
        assert found["covered_event_ids"] == ["evt_1"]


def lines(process: GatewayProcess) -> list[dict[str, Any]]:
    """Those of the streams that have ended."""
    return [line for line in process.log_lines() if line["event"] == "stream"]


async def test_lifetime_end_and_immediate_reopen() -> None:
    """1001: at once, with the whole state in one start; on_change decides it again."""
    async with gateway(config(limits={"max_duration_ms": 2000})) as process:
        async with real_client(process) as client, Events(client) as events:
            await client.start(request("a"), decision_mode="on_change")
            ack = await client.append_text("b")
            await decision(client, ack)
            assert (await events.wait("goodbye"))["reason"] == "max_lifetime"
            began = time.monotonic()
            await until(lambda: len(streams(events)) >= 2, BOUND_S)
            assert time.monotonic() - began < 2
            ack = await client.append_text("c")
            await decision(client, ack)
            assert client.desired_state == "abc"
        calls = decides(process)
        same = [c for c in calls if json.loads(c["body"])["state"] == "ab"]
        # D4.10, D6.2: equal bytes under an equal key, so that a replay can be known.
        assert len({(c["key"], c["body"]) for c in same}) == 1


def streams(events: Events) -> list[str]:
    return list(dict.fromkeys(e["stream_id"] for e in events.seen if e["type"] == "ack"))


async def test_a_server_restart_with_replay(tmp_path: Path) -> None:
    """1012: after the hint, on the new process, with the accepted state and its key."""
    port = free_port()
    async with gateway(config(), workdir=tmp_path, port=port) as process:
        client = real_client(process)
        events = Events(client)
        await client.connect()
        await client.start(request("a"), decision_mode="on_request")
        ack = await client.append_text("b")
        await client.decide()
        await decision(client, ack)
        process.terminate()
        assert (await events.wait("goodbye"))["reason"] == "shutdown"
        assert events.of("goodbye")[0]["resume"]["retry_after_ms"] == 500
        assert await process.wait() == 0
    async with gateway(config(), workdir=tmp_path, port=port) as process:
        ack = await asyncio.wait_for(client.append_text("c"), 30)
        assert client.desired_state == "abc"
        await client.decide()
        found = await decision(client, ack)
        assert json.loads(decides(process)[-1]["body"])["state"] == "abc"
        assert found["state_version"] == ack["state_version"]
        await client.close()
        async with events:
            pass


async def test_a_restart_while_a_decide_runs(tmp_path: Path) -> None:
    """D3.6: its decision still comes; nothing is decided twice."""
    async with gateway(config(), workdir=tmp_path) as process:
        client = real_client(process)
        async with Events(client) as events:
            ack = await client.start(request("!delay=1"), decision_mode="on_change")
            await until(lambda: decides(process))
            process.terminate()
            await decision(client, ack)
            assert (await events.wait("goodbye"))["last_decision_state_version"] == 1
            assert events.of("possibly_decided") == []
            assert await process.wait() == 0
            await client.close()
        assert len(decides(process)) == 1


async def test_a_crash_is_survived(tmp_path: Path) -> None:
    """1006 as the client sees it: the lease runs out, and it comes back."""
    limits = {"lease_ttl_ms": 1000, "lease_renew_interval_ms": 300}
    port = free_port()
    async with gateway(config(limits=limits), workdir=tmp_path, port=port) as process:
        client = real_client(process)
        await client.start(request("a"), decision_mode="on_request")
        process.kill()
        await process.wait()
    async with gateway(config(limits=limits), workdir=tmp_path, port=port):
        ack = await asyncio.wait_for(client.append_text("b"), 60)
        assert client.desired_state == "ab"
        assert ack["state_version"] == 1
        await client.close()


async def test_overload_and_recovery() -> None:
    """1013: three failures of one version end the stream; it comes back and is answered."""
    async with gateway(config()) as process:
        async with real_client(process) as client, Events(client) as events:
            ack = await client.start(
                request("!error=capacity_exhausted:50 !times=3 "), decision_mode="on_change"
            )
            gone = await events.wait("goodbye")
            assert (gone["reason"], gone["resume"]["retry_after_ms"]) == ("overload", 50)
            errors = events.of("error")
            assert [e["fatal"] for e in errors] == [False, False, True]
            assert {e["http_status"] for e in errors} == {429}
            assert {e["retry"]["retry_after_ms"] for e in errors} == {50}
            del ack
            found = await events.wait("decision")
            assert found["state_version"] == 1
            assert (await client.append_text("!times=0 b"))["state_version"] == 2
        assert len(decides(process)) >= 4
        assert len({c["key"] for c in decides(process)[:4]}) == 1


async def test_retries_without_an_ending() -> None:
    """D5.5: two failures, then an answer, on one stream."""
    async with (
        gateway(config()) as process,
        real_client(process) as client,
        Events(client) as events,
    ):
        ack = await client.start(
            request("!error=system_zero_unavailable:50 !times=2"), decision_mode="on_change"
        )
        found = await decision(client, ack)
        assert found["covered_event_ids"] == ["evt_1"]
        assert [e["covered_event_ids"] for e in events.of("error")] == [["evt_1"]] * 2
        assert events.of("goodbye") == []


async def test_maintenance() -> None:
    """D3.7: a wait of five minutes, here of half a second, and back again."""
    limits = {"maintenance_retry_after_ms": 500}
    async with (
        gateway(config(limits=limits)) as process,
        real_client(process) as client,
        Events(client) as events,
    ):
        await client.start(request("!error=maintenance !times=1"), decision_mode="on_change")
        gone = await events.wait("goodbye")
        assert (gone["reason"], gone["resume"]["retry_after_ms"]) == ("maintenance", 500)
        assert not any(e.get("fatal") for e in events.of("error"))
        assert (await events.wait("decision"))["state_version"] == 1


async def test_a_refused_state_is_not_decided_again_after_a_reconnect() -> None:
    """A failure for good in on_change: the client asks for nothing until its state changes, then
    hands over to a new stream by itself (1001) and decides the changed one."""
    async with (
        gateway(config(limits={"max_duration_ms": 2500})) as process,
        real_client(process) as client,
        Events(client) as events,
    ):
        await client.start(request("!error=invalid_criteria "), decision_mode="on_change")
        await events.wait("error", phase="decide")
        assert (await events.wait("goodbye"))["reason"] == "max_lifetime"
        await until(lambda: len(streams(events)) == 2, BOUND_S)
        await asyncio.sleep(0.3)
        assert len(decides(process)) == 1
        ack = await asyncio.wait_for(client.append_text("!times=0 "), BOUND_S)
        await decision(client, ack)
        assert len(decides(process)) == 2
        assert json.loads(decides(process)[1]["body"])["state"] == client.desired_state


async def test_a_client_that_never_reconnects_by_deciding() -> None:
    """`reconnect_policy="never"`: the replay is on_request, and decides when it is told to."""
    async with (
        gateway(config(limits={"max_duration_ms": 2000})) as process,
        real_client(process, reconnect_policy="never") as client,
        Events(client) as events,
    ):
        ack = await client.start(request("a"), decision_mode="on_change")
        await decision(client, ack)
        await until(lambda: len(streams(events)) == 2, BOUND_S)
        await asyncio.sleep(0.2)
        assert len(decides(process)) == 1
        await client.decide()
        await events.wait("decision", 2)


async def test_a_policy_close_is_final() -> None:
    """1008: the client does not come back, and says why."""
    async with gateway(config(limits={"start_timeout_ms": 300})) as process:
        client = real_client(process)
        async with Events(client) as events:
            await client.connect()
            assert (await events.wait("goodbye"))["reason"] == "policy"
            await asyncio.sleep(0.5)
            with pytest.raises(StreamDisconnectedError) as raised:
                await client.start(request("a"))
            assert raised.value.close_code == 1008
            await client.close()
        await until(lambda: lines(process), BOUND_S)
        assert len(lines(process)) == 1


async def test_a_lost_lease_is_survived() -> None:
    """1013 `lease_lost`: it reconnects and replays."""
    limits = {"lease_ttl_ms": 1500, "lease_renew_interval_ms": 300}
    async with (
        gateway(config(limits=limits)) as process,
        real_client(process, key=KEY) as client,
        Events(client) as events,
    ):
        await client.start(request("a"), decision_mode="on_request")
        with sqlite3.connect(process.workdir / "sluicegate.db") as db:
            db.execute("DELETE FROM streams")
        db.close()
        assert (await events.wait("goodbye"))["reason"] == "lease_lost"
        ack = await asyncio.wait_for(client.append_text("b"), BOUND_S)
        assert (ack["state_version"], client.desired_state) == (1, "ab")


async def test_a_slow_decide_and_a_closing_client(shared: GatewayProcess) -> None:
    """D5.7: the client leaves at once; the decide it left is run to its end, once."""
    async with real_client(shared) as client:
        await client.start(request("left behind !until=left"), decision_mode="on_change")
        await until(lambda: [c for c in decides(shared) if "left behind" in c["state"]])
    let_end(shared, "left")
    await until(lambda: [c for c in decides(shared, "ended") if "left behind" in c["state"]])
    assert len([c for c in decides(shared) if "left behind" in c["state"]]) == 1


async def test_the_budget_of_an_account_makes_intents_wait(shared: GatewayProcess) -> None:
    """D5.4: five at once, then one a second; nothing fails, `queue_ms` says how long."""
    async with real_client(shared) as client, Events(client) as events:
        state = "budget "
        ack = await client.start(request(state), decision_mode="on_change")
        waits = [(await decision(client, ack))["queue_ms"]]
        for _ in range(6):
            ack = await client.append_text("b")
            waits.append((await decision(client, ack))["queue_ms"])
        began = [c["at"] for c in decides(shared) if state in c["state"]]
        assert began[6] - began[0] > 1.9
        assert max(waits[:5]) < 500
        assert sum(waits[5:]) > 100  # less than 2 s by what the others took
        assert max(waits[5:]) < 3000
        assert events.of("error") == []


async def test_a_full_account_is_told_which_cause(shared: GatewayProcess) -> None:
    """D5.4, D1.6: the slots of `max_concurrent` are taken for each dispatch."""
    made = config(account_streams=2)
    made["keys"][0]["max_concurrent"] = 1
    async with (
        gateway(made) as process,
        real_client(process, key=KEY) as one,
        real_client(process, key=KEY) as two,
        Events(two) as events,
    ):
        await one.start(request("!until=told"), decision_mode="on_change")
        await until(lambda: decides(process))
        ack = await two.start(request("b"), decision_mode="on_change")
        failed = await events.wait("error")
        problem = failed["envelope"]["error"]
        assert (failed["http_status"], problem["code"]) == (429, "concurrency_limit_exceeded")
        assert problem["details"] == {"cause": "account_concurrency"}
        assert problem["retryable"] is failed["retry"]["should_retry"] is True
        let_end(process, "told")
        assert (await decision(two, ack))["state_version"] == 1
