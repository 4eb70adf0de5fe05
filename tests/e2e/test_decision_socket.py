"""D2: framing, limits and budgets of a stream, by raw sockets against the real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
import struct
import termios
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.checks import in_kernel, until
from tests.support.decisions import auth, config, decides, fresh_key, gateway, opened, start
from tests.support.websocket import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    RawSocket,
    close,
    frame,
)
from tests.support.wire import WireError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.gateway import GatewayProcess

MAX_MESSAGE = 4_194_304
START = json.dumps(start()).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process
        assert "Traceback" not in process.stderr()
        assert '"event":"fault"' not in process.stderr()


def goodbye(ws: RawSocket) -> dict[str, Any]:
    """The goodbye, which must be the last message."""
    last = ws.messages[-1]
    assert last["type"] == "goodbye"
    assert [m["type"] for m in ws.messages].count("goodbye") == 1
    return last


# --- what breaks the rules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "code", "reason"),
    [
        pytest.param(frame(TEXT, START, masked=False), 1002, None, id="unmasked text"),
        pytest.param(frame(PING, b"", masked=False), 1002, None, id="unmasked ping"),
        pytest.param(frame(TEXT, START, rsv=4), 1002, None, id="rsv1"),
        pytest.param(frame(TEXT, START, rsv=1), 1002, None, id="rsv3"),
        pytest.param(frame(CONT, b"x"), 1002, None, id="continuation of nothing"),
        pytest.param(
            frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002, None, id="text in a text"
        ),
        pytest.param(frame(PING, b"x" * 126), 1002, None, id="long ping"),
        pytest.param(frame(PING, b"", fin=False), 1002, None, id="ping in parts"),
        pytest.param(frame(5), 1002, None, id="reserved opcode"),
        pytest.param(close(1006), 1002, None, id="close 1006"),
        pytest.param(close(1005), 1002, None, id="close 1005"),
        pytest.param(close(5000), 1002, None, id="close 5000"),
        pytest.param(frame(CLOSE, b"\x03"), 1002, None, id="close of one byte"),
        pytest.param(frame(BINARY, START), 1003, None, id="binary"),
        pytest.param(frame(TEXT, b"\xff"), 1007, None, id="no utf-8"),
        pytest.param(frame(TEXT, b'{"type": "pong", "nonce": 1'), 1007, None, id="cut json"),
        pytest.param(
            frame(TEXT, b'{"type": "pong", "nonce": 1, "nonce": 1}'), 1007, None, id="a name twice"
        ),
        pytest.param(frame(TEXT, b'{"type": "pong", "nonce": NaN}'), 1007, None, id="nan"),
        pytest.param(frame(TEXT, b'{"type": "\\ud800"}'), 1007, None, id="lone surrogate"),
        pytest.param(
            frame(CLOSE, struct.pack("!H", 1000) + b"\xff"), 1007, None, id="close reason no utf-8"
        ),
        pytest.param(
            bytes([0x81, 0xFF]) + struct.pack("!Q", MAX_MESSAGE + 126),
            1009,
            None,
            id="above the limit",
        ),
        pytest.param(
            frame(TEXT, b"x", fin=False) + frame(CONT, b"", fin=False) * 400,
            1008,
            "policy",
            id="400 empty parts",
        ),
    ],
)
async def test_what_ends_a_stream(
    shared: GatewayProcess, wrong: bytes, code: int, reason: str | None
) -> None:
    """D2.2, D2.6: what came before is acked, a goodbye, then the code; what comes after is not."""
    async with opened(shared) as ws:
        await ws.send(frame(TEXT, START), wrong, frame(TEXT, b"after"))
        found = await ws.until_close()
        assert (found.code, found.reason) == (code, reason or "")
        assert [m["type"] for m in ws.messages] == ["hello", "ack", "goodbye"]
        last = goodbye(ws)
        assert last["reason"] == reason
        assert last["state_version"] == 1
        assert last["resume"]["retry_after_ms"] == 0
        await ws.send(close(code))
        assert not await ws.client.read_some()
        assert not ws.client.was_reset


async def test_a_message_of_exactly_the_limit_is_taken(shared: GatewayProcess) -> None:
    """D2.2: padded by spaces, whole and in fragments; one byte more is 1009."""
    padded = START + b" " * (MAX_MESSAGE - len(START))
    async with opened(shared) as ws:
        await ws.send(frame(TEXT, padded))
        assert (await ws.json())["type"] == "ack"
        await ws.send(frame(TEXT, padded[:9], fin=False), frame(CONT, padded[9:]))
        assert (await ws.json())["envelope"]["error"]["code"] == "stream_already_started"
        await ws.send(frame(TEXT, padded + b" "))
        assert (await ws.until_close()).code == 1009
        assert goodbye(ws)["reason"] is None


async def test_what_comes_behind_a_large_message_waits_its_turn(shared: GatewayProcess) -> None:
    """Large messages are decoded beside the loop: the order stays, and others are served."""
    async with opened(shared) as ws, opened(shared) as other:
        large = json.dumps(start("x" * 3_000_000)).encode()
        append = {"type": "append_text", "event_id": "evt_2", "text": "y"}
        await ws.send(frame(TEXT, large), frame(TEXT, json.dumps(append).encode()), frame(PING))
        await other.say(**start())
        assert (await other.json(timeout=2))["type"] == "ack"
        acks = [await ws.json(), await ws.json()]
        assert [ack["state_version"] for ack in acks] == [1, 2]
        assert acks[1]["state_bytes"] == acks[0]["state_bytes"] + 1
        assert (await ws.frame()).opcode == PONG


async def test_too_much_that_waits_is_1009(shared: GatewayProcess) -> None:
    """D2.2: messages that nobody has had the time to read, together over the limit."""
    async with opened(shared) as ws:
        padded = START + b" " * (MAX_MESSAGE - len(START))
        await ws.send(frame(TEXT, padded) * 5)
        assert (await ws.until_close()).code == 1009
        assert goodbye(ws)["reason"] is None


async def test_any_bytes_end_in_a_legal_close_or_in_nothing(shared: GatewayProcess) -> None:
    """D2.2: noise, frames of noise, and right frames with something wrong in them; nothing only
    where the FIN came in the middle of what claimed to be a frame."""
    rng = random.Random(6455)
    codes: Counter[int | None] = Counter()
    for i in range(60):
        async with opened(shared) as ws:
            noise = rng.randbytes(rng.randrange(1, 400))
            match i % 4:
                case 0:
                    sent = noise
                case 1:
                    sent = frame(rng.randrange(16), noise[:125], fin=rng.random() < 0.8)
                case 2:
                    sent = frame(TEXT, noise)
                case _:
                    broken = bytearray(frame(TEXT, START) + frame(PING, b"p") + frame(TEXT, START))
                    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
                    sent = bytes(broken)
            await ws.send(frame(PING, b"before"), sent, close(1001))
            ws.client.half_close()
            try:
                while (found := await ws.frame()).opcode != CLOSE:
                    pass
                codes[found.code] += 1
            except WireError:
                codes[-1] += 1
            assert ws.client.response.rest == b""
            assert not ws.client.was_reset
    assert codes.keys() <= {-1, None, 1000, 1001, 1002, 1003, 1007, 1008, 1009}
    assert codes[1002] > 5
    assert codes[1007] > 5
    assert codes[-1] < 20, codes


# --- control frames -------------------------------------------------------------------------------


async def test_pings_are_answered_with_their_payload(shared: GatewayProcess) -> None:
    async with opened(shared) as ws:
        for payload in (b"", b"p", b"\x00" * 125):
            await ws.send(frame(PING, payload))
            found = await ws.frame()
            assert (found.opcode, found.payload) == (PONG, payload)


async def test_a_ping_in_the_middle_of_a_message(shared: GatewayProcess) -> None:
    async with opened(shared) as ws:
        await ws.send(frame(TEXT, START[:10], fin=False), frame(PING, b"p"))
        assert (await ws.frame()).opcode == PONG
        await ws.send(frame(CONT, START[10:]))
        assert (await ws.json())["type"] == "ack"


@pytest.mark.parametrize(
    "flood", [frame(PING), frame(PONG), frame(PING, b"x" * 125)], ids=["ping", "pong", "bytes"]
)
async def test_a_flood_of_control_frames_is_1008(shared: GatewayProcess, flood: bytes) -> None:
    """D2.4: 16 frames or 1024 bytes at once; the reader stops there, however many follow."""
    async with opened(shared) as ws:
        await ws.send(flood * 30_000)
        found = await ws.until_close()
        assert (found.code, found.reason) == (1008, "policy")
        assert goodbye(ws)["reason"] == "policy"


async def test_control_frames_within_the_budget(shared: GatewayProcess) -> None:
    async with opened(shared) as ws:
        await ws.send(frame(PING) * 16)
        for _ in range(16):
            assert (await ws.frame()).opcode == PONG
        await asyncio.sleep(0.5)
        await ws.send(frame(PING) * 3)
        for _ in range(3):
            assert (await ws.frame()).opcode == PONG


async def test_an_unsolicited_pong_is_no_fault(shared: GatewayProcess) -> None:
    async with opened(shared) as ws:
        await ws.send(frame(PONG, b"hello"), frame(TEXT, START))
        assert (await ws.json())["type"] == "ack"


async def test_a_flood_of_messages_is_1008(shared: GatewayProcess) -> None:
    """D2.4."""
    async with opened(shared) as ws:
        await ws.say(**start())
        await ws.send(frame(TEXT, b'{"type": "decide", "state_version": 1}') * 200)
        found = await ws.until_close()
        assert (found.code, goodbye(ws)["reason"]) == (1008, "policy")
        assert len(ws.messages) == 1 + 1 + 79 + 1 + sum(
            m["type"] == "decision" for m in ws.messages
        )


async def test_a_flood_of_mutations_is_1008(shared: GatewayProcess) -> None:
    """D2.4."""
    async with opened(shared) as ws:
        await ws.say(**start())
        appends = [
            frame(
                TEXT,
                json.dumps({"type": "append_text", "event_id": f"evt_{i}", "text": "x"}).encode(),
            )
            for i in range(2, 20)
        ]
        await ws.send(*appends)
        assert (await ws.until_close()).code == 1008
        assert [m["type"] for m in ws.messages] == ["hello", *["ack"] * 10, "goodbye"]


# --- readers that do not read ---------------------------------------------------------------------


async def test_a_reader_that_stops_is_closed_1013_in_bounded_memory() -> None:
    """D2.5: what waits for it stays below the limit, whatever it asks for; nobody else is hurt."""
    limits = {
        "write_progress_timeout_ms": 700,
        "close_handshake_timeout_ms": 500,
        "max_messages_per_second": 100_000,
        "message_burst": 100_000,
        "protocol_refusal_limit": 1_000_000,
    }
    async with gateway(config(limits=limits)) as process, opened(process, rcvbuf=2048) as ws:
        before = process.rss_bytes()
        await ws.say(**start())
        # Each is answered by some 400 bytes that are not read.
        refused = frame(TEXT, b'{"type": "decide", "state_version": 7}') * 2000
        with_pings = refused
        for _ in range(20):
            try:
                await asyncio.wait_for(ws.send(with_pings), 2)
            except (TimeoutError, ConnectionError):
                break
        async with opened(process) as other:
            await other.say(**start())
            assert (await other.json())["type"] == "ack"
        await until(lambda: '"reason":"slow_reader"' in process.stderr(), timeout=20)
        assert process.rss_bytes() - before < 16 * 1024 * 1024
        (line,) = [x for x in process.log_lines() if x.get("reason") == "slow_reader"]
        assert line["close_code"] == 1013


async def test_a_stalled_reader_that_wakes_up_is_told_1013() -> None:
    """D2.5: no goodbye could leave; the Close stands behind what was stuck, in order."""
    limits = {"write_progress_timeout_ms": 500, "close_handshake_timeout_ms": 60_000}
    async with gateway(config(limits=limits)) as process, opened(process, rcvbuf=2048) as ws:
        questions = {
            f"q{i}": {"type": "choice", "instructions": "?", "criteria": _options()}
            for i in range(200)
        }
        await ws.say(**start(request={"questions": questions}, mode="on_change"))
        await until(lambda: decides(process, "ended"), 20)
        await until(lambda: not leases(process), 20)  # given back before the Close leaves
        found = await ws.until_close(timeout=20)
        assert (found.code, found.reason) == (1013, "slow_reader")
        assert [m["type"] for m in ws.messages] == ["hello", "ack", "decision"]


def leases(process: GatewayProcess) -> int:
    """How many streams hold a place."""
    with contextlib.closing(sqlite3.connect(process.workdir / "sluicegate.db")) as database:
        (count,) = database.execute("SELECT count(*) FROM streams").fetchone()
    return int(count)


def _options() -> dict[str, str]:
    return {f"option_{i}": "x" for i in range(100)}


async def test_pings_of_a_reader_that_stops_do_not_pile_up() -> None:
    """D2.5: two answers wait, the third is 1013."""
    limits = {"write_progress_timeout_ms": 60_000, "close_handshake_timeout_ms": 300}
    async with gateway(config(limits=limits)) as process, opened(process, rcvbuf=2048) as ws:
        questions = {
            f"q{i}": {"type": "choice", "instructions": "?", "criteria": _options()}
            for i in range(200)
        }
        await ws.say(**start(request={"questions": questions}, mode="on_change"))
        # Its decision is on the way: more than the ack, and more than anyone takes.
        await until(lambda: in_kernel(ws.client.sock, termios.FIONREAD) > 1000, 20)
        await ws.send(frame(PING) * 2)
        await asyncio.sleep(0.2)
        assert '"reason":"slow_reader"' not in process.stderr()
        await ws.send(frame(PING))
        await until(lambda: '"reason":"slow_reader"' in process.stderr())


# --- connections that end badly -------------------------------------------------------------------


async def test_half_a_frame_and_death(shared: GatewayProcess) -> None:
    """The place is free again; nothing of it is left."""
    key = fresh_key()
    async with opened(shared, key=key) as ws:
        await ws.send(frame(TEXT, START)[:20])
        ws.client.reset()
    async with asyncio.timeout(5):
        while True:
            async with shared.client() as client:
                if await RawSocket(client).open(headers=[auth(key)]) == 101:
                    break
            await asyncio.sleep(0.01)


async def test_what_came_just_before_a_fin_is_answered(shared: GatewayProcess) -> None:
    """D2.2: messages, a Close and the FIN in one go."""
    async with opened(shared) as ws:
        await ws.send(frame(TEXT, START), frame(PING, b"p"), close(1000))
        ws.client.half_close()
        found = await ws.until_close()
        assert found.code == 1000
        assert [m["type"] for m in ws.messages] == ["hello", "ack"]
        assert not await ws.client.read_some()


async def test_a_large_message_just_before_a_fin_is_applied(shared: GatewayProcess) -> None:
    """D2.2: it is still being decoded when the FIN comes; the log line tells its version."""
    async with opened(shared) as ws:
        stream_id = ws.messages[0]["stream_id"]
        await ws.send(frame(TEXT, json.dumps(start("x" * 2_000_000)).encode()))
        ws.client.half_close()
        await until(lambda: any(x.get("stream_id") == stream_id for x in shared.log_lines()))
        (line,) = [x for x in shared.log_lines() if x.get("stream_id") == stream_id]
        assert (line["reason"], line["state_version"]) == ("lost", 1)


async def test_a_client_that_does_not_answer_our_close_is_cut() -> None:
    """D3.10: after the time for the handshake."""
    async with (
        gateway(config(limits={"close_handshake_timeout_ms": 400})) as process,
        opened(process) as ws,
    ):
        await ws.send(frame(BINARY))
        assert (await ws.until_close()).code == 1003
        assert not await ws.client.read_some(timeout=5)
