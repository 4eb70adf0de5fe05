"""Many clients that do anything, right and wrong, in any order: nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import time
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.checks import until
from tests.support.decisions import auth, config, decides, fresh_key, gateway, start
from tests.support.websocket import BINARY, CONT, PING, PONG, TEXT, RawSocket, close, frame
from tests.support.wire import WireError

if TYPE_CHECKING:
    from tests.support.gateway import GatewayProcess

CLIENTS: Final = 16
SECONDS: Final = 6.0


async def client(process: GatewayProcess, rng: random.Random, until_s: float) -> int:
    """Opens stream after stream on one account and returns how many."""
    key, opened = fresh_key(), 0
    while time.monotonic() < until_s:
        async with process.client(rcvbuf=rng.choice([None, None, 2048])) as raw:
            ws = RawSocket(raw)
            if await ws.open(headers=[auth(key)]) != 101:
                await asyncio.sleep(0.01)
                continue
            opened += 1
            try:
                await live(ws, rng)
            except (WireError, ConnectionError):
                pass  # it was closed for what it did
            except TimeoutError:
                raise AssertionError(f"a stream hung: {ws.messages[-2:]}") from None
    return opened


async def live(ws: RawSocket, rng: random.Random) -> None:
    """One stream: some right messages, then some way to end it."""
    await speak(ws, rng)
    await leave(ws, rng)


async def speak(ws: RawSocket, rng: random.Random) -> None:
    """Says some things that are right, most of the time."""
    version = 0
    if rng.random() < 0.9:
        state = rng.choice(
            ["a", "!delay=0.05 ", "!error=capacity_exhausted:10 !times=1 ", "x" * 90_000]
        )
        await ws.say(**start(state, mode=rng.choice(["on_change", "on_request"])))
        version = 1
    for _ in range(rng.randrange(8)):
        match rng.randrange(6):
            case 0 | 1:
                version += 1
                await ws.say(
                    type="append_text", event_id=f"evt_{version}", text="y" * rng.randrange(1, 3000)
                )
            case 2:
                await ws.say(type="decide", state_version=version)
            case 3:
                await ws.send(frame(PING, b"p"), frame(PONG, b"q"))
            case 4:
                half = json.dumps({"type": "decide", "state_version": version}).encode()
                await ws.send(frame(TEXT, half[:7], fin=False), frame(CONT, half[7:]))
            case _:
                await asyncio.sleep(rng.random() * 0.02)


async def leave(ws: RawSocket, rng: random.Random) -> None:
    """Ends a stream in some way."""
    match rng.randrange(8):
        case 0 | 1:
            await ws.send(close())
            await drain(ws)
        case 2:
            ws.client.reset()
        case 3:
            ws.client.half_close()
            await drain(ws)
        case 4:
            await ws.send(frame(BINARY))
            await drain(ws)
        case 5:
            await ws.send(frame(TEXT, b"{}") * 3, close())
            await drain(ws)
        case 6:
            await ws.send(frame(TEXT, b"x" * 50)[: rng.randrange(1, 50)])
        case _:
            await ws.send(frame(PING) * 100)


async def drain(ws: RawSocket) -> None:
    """Reads to the end of the connection."""
    while True:
        await ws.frame(timeout=15)


@pytest.mark.slow
async def test_nothing_is_left_of_any_client() -> None:
    """No lease, no socket, no slot, no task; each stream has had its one line."""
    async with gateway(config(limits={"close_handshake_timeout_ms": 1000})) as process:
        seed = random.randrange(1 << 32)
        print("seed", seed)
        sockets = process.open_sockets()
        until_s = time.monotonic() + SECONDS
        opened = await asyncio.gather(
            *(client(process, random.Random(seed + i), until_s) for i in range(CLIENTS))
        )
        assert min(opened) > 3, opened

        def lines() -> int:
            return process.stderr().count('"event":"stream"')

        await until(lambda: lines() == sum(opened), 15, what=f"{sum(opened)} lines")
        await until(lambda: process.open_sockets() <= sockets, 10, what="closing")
        with sqlite3.connect(process.workdir / "sluicegate.db") as db:
            assert db.execute("SELECT count(*) FROM streams").fetchone() == (0,)
        db.close()
        assert "Traceback" not in process.stderr()
        assert '"event":"fault"' not in process.stderr()
        began, ended = len(decides(process)), len(decides(process, "ended"))
        assert began == ended > 0
        process.terminate()
        assert await process.wait() == 0


async def test_a_sigterm_in_the_middle_of_it() -> None:
    """Every connection is closed, the process ends with 0, and the leases are free."""
    async with gateway(config(limits={"close_handshake_timeout_ms": 1000})) as process:
        until_s = time.monotonic() + 60

        async def run(i: int) -> None:
            try:
                await client(process, random.Random(i), until_s)
            except (OSError, WireError):
                return  # the process is gone

        running = [asyncio.ensure_future(run(i)) for i in range(CLIENTS)]
        await asyncio.sleep(2)
        process.terminate()
        assert await process.wait(15) == 0
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        with sqlite3.connect(process.workdir / "sluicegate.db") as db:
            assert db.execute("SELECT count(*) FROM streams").fetchone() == (0,)
        db.close()
        assert "Traceback" not in process.stderr()
        assert '"event":"fault"' not in process.stderr()
