"""D2.2, D2.5: a socket under aiohttp's upgrade, by raw sockets against the runner of production."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from planes.decision.frames import (
    ClientClose,
    FrameReader,
    Message,
    Ping,
    Violation,
    encode_close,
    encode_close_back,
    encode_text,
)
from planes.decision.wire import GONE, Arrival, Wire
from planes.runner import make_runner
from tests.support.checks import until
from tests.support.websocket import ACCEPT, CLOSE, PING, TEXT, RawSocket, close, frame
from tests.support.wire import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT = 200_000
HEADERS = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": ACCEPT}


@dataclass
class Echo:
    """Sends every message back, closes as the protocol says; what came stays in `seen`."""

    stall_s: float = 5.0
    hold: bool = False
    seen: list[Arrival] = field(default_factory=list)
    stalls: int = 0
    cancelled: bool = False
    wire: Wire = field(init=False)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.wire = Wire(request, FrameReader(LIMIT), stall_s=self.stall_s)
        response = await self.wire.accept(HEADERS)
        self.wire.listen(self)
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return response

    def arrived(self, arrival: Arrival) -> None:
        self.seen.append(arrival)
        if self.hold:
            return
        match arrival:
            case Message(data):
                self.wire.write(encode_text(data))
            case ClientClose(_, payload):
                self.wire.write(encode_close_back(payload))
                self.done.set()
            case Violation(code, _):
                self.wire.write(encode_close(code, ""))
                self.done.set()
            case _:
                pass

    def stalled(self) -> None:
        self.stalls += 1

    @property
    def texts(self) -> list[bytes]:
        return [event.data for event in self.seen if isinstance(event, Message)]


@asynccontextmanager
async def serving(echo: Echo, *, rcvbuf: int | None = None) -> AsyncIterator[RawSocket]:
    app = web.Application()
    app.router.add_get("/v1/system-zero/stream", echo.handle)
    runner = make_runner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with RawClient("127.0.0.1", port, rcvbuf=rcvbuf) as client:
            yield RawSocket(client)
    finally:
        await runner.cleanup()


async def test_the_101_and_an_echo() -> None:
    async with serving(Echo()) as ws:
        assert await ws.open() == 101
        assert ws.client.header("sec-websocket-accept") == ACCEPT
        assert ws.client.header("connection") == "Upgrade"
        for name in ("transfer-encoding", "content-length", "content-type"):
            assert ws.client.header(name) is None
        await ws.text("hi")
        found = await ws.frame()
        assert (found.opcode, found.payload) == (TEXT, b"hi")


async def test_frames_that_came_with_the_request_are_read() -> None:
    async with serving(Echo()) as ws:
        assert await ws.open(tail=frame(TEXT, b"eager")) == 101
        assert (await ws.frame()).payload == b"eager"


async def test_a_clean_close_ends_the_handler_and_the_connection() -> None:
    echo = Echo()
    async with serving(echo) as ws:
        await ws.open()
        await ws.send(close(1000, "done"))
        found = await ws.frame()
        assert (found.opcode, found.code, found.reason) == (CLOSE, 1000, "done")
        assert not await ws.client.read_some()
        assert not ws.client.was_reset
        assert not echo.cancelled


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        pytest.param(frame(TEXT, b"hi", masked=False), 1002, id="unmasked"),
        pytest.param(frame(TEXT, b"hi", rsv=4), 1002, id="rsv1"),
        pytest.param(frame(2, b"hi"), 1003, id="binary"),
        pytest.param(frame(TEXT, b"x" * (LIMIT + 1)), 1009, id="above the limit"),
        pytest.param(close(1006), 1002, id="close 1006"),
    ],
)
async def test_a_violation_is_told_in_a_close(wrong: bytes, code: int) -> None:
    async with serving(Echo()) as ws:
        await ws.open()
        await ws.send(frame(TEXT, b"x" * LIMIT), wrong)
        assert (await ws.frame()).payload == b"x" * LIMIT
        assert (await ws.frame()).code == code


async def test_bytes_just_before_a_fin_are_not_lost() -> None:
    """D2.2: and a client that has only closed its side still gets what is its due."""
    echo = Echo()
    async with serving(echo) as ws:
        await ws.open()
        await ws.send(*(frame(TEXT, b"%d" % i) for i in range(50)), close())
        ws.client.half_close()
        assert [(await ws.frame()).payload for _ in range(50)] == [b"%d" % i for i in range(50)]
        assert (await ws.frame()).code == 1000
        assert not await ws.client.read_some()


async def test_a_fin_without_a_close_is_told_after_what_came_before() -> None:
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()
        await ws.send(frame(TEXT, b"last"), frame(TEXT, b"half a frame")[:9])
        ws.client.half_close()
        await until(lambda: GONE in echo.seen)
        assert echo.seen == [Message(b"last"), GONE]
        assert not echo.cancelled
        echo.wire.abort()
        await until(lambda: echo.cancelled)
        assert echo.seen == [Message(b"last"), GONE]


async def test_a_reset_is_told_after_what_came_before() -> None:
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()
        await ws.send(frame(TEXT, b"last"))
        await until(lambda: echo.seen)
        ws.client.reset()
        await until(lambda: echo.cancelled)
        assert echo.seen == [Message(b"last"), GONE]


async def test_a_flood_of_pings_is_read_no_further_than_is_wanted() -> None:
    """Tens of thousands of frames in one read: who has seen enough stops there."""
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()

        class Enough(Exception):
            pass

        arrived = echo.arrived

        def stop(arrival: Arrival) -> None:
            arrived(arrival)
            if len(echo.seen) == 20:
                echo.wire.stop_reading()

        echo.arrived = stop  # type: ignore[method-assign]
        await ws.send(frame(PING) * 30_000)
        await until(lambda: len(echo.seen) >= 20)
        await asyncio.sleep(0.05)
        assert echo.seen == [Ping(b"")] * 20


async def test_a_client_that_reads_nothing_stalls() -> None:
    """D2.5: told once, after `stall_s`; `flushed` waits until the connection ends."""
    echo = Echo(stall_s=0.3, hold=True)
    async with serving(echo, rcvbuf=4096) as ws:
        await ws.open()
        started = asyncio.get_running_loop().time()
        echo.wire.write(encode_text(b"x" * 8_000_000))
        flushed = asyncio.ensure_future(echo.wire.flushed())
        await until(lambda: echo.stalls)
        assert asyncio.get_running_loop().time() - started >= 0.3
        assert echo.wire.unsent > 4_000_000
        assert not flushed.done()
        await asyncio.sleep(0.5)
        assert echo.stalls == 1
        echo.wire.abort()
        await asyncio.wait_for(flushed, 5)
        await until(lambda: GONE in echo.seen)
        assert echo.wire.unsent == 0


async def test_a_client_that_reads_slowly_does_not_stall() -> None:
    echo = Echo(stall_s=0.4, hold=True)
    async with serving(echo, rcvbuf=4096) as ws:
        await ws.open()
        echo.wire.write(encode_text(b"x" * 3_000_000))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 2
        while loop.time() < until_s:
            await ws.client.read_some(2048)
            await asyncio.sleep(0.05)
        assert echo.wire.unsent
        assert echo.stalls == 0


async def test_flushed_returns_when_the_kernel_has_it() -> None:
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()
        echo.wire.write(encode_text(b"x" * 3_000_000))
        flushed = asyncio.ensure_future(echo.wire.flushed())
        assert (await ws.frame()).payload == b"x" * 3_000_000
        await asyncio.wait_for(flushed, 5)
        assert echo.wire.unsent == 0


async def test_a_close_behind_a_stuck_frame_is_read_by_one_that_reads_again() -> None:
    echo = Echo(stall_s=0.2, hold=True)
    async with serving(echo, rcvbuf=4096) as ws:
        await ws.open()
        echo.wire.write(encode_text(b"x" * 6_000_000))
        await until(lambda: echo.stalls)
        echo.wire.write(encode_close(1013, "slow_reader"))
        assert len((await ws.frame()).payload) == 6_000_000
        assert (await ws.frame()).code == 1013


async def test_writes_after_the_end_go_nowhere() -> None:
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()
        ws.client.reset()
        await until(lambda: GONE in echo.seen)
        echo.wire.write(b"x" * 100)
        echo.wire.half_close()
        echo.wire.abort()
        await echo.wire.flushed()


async def test_a_request_before_the_upgrade_on_one_connection() -> None:
    echo = Echo()
    async with serving(echo) as ws:
        await ws.client.request("GET", "/nothing")
        await ws.client.read_all()
        assert ws.client.status == 404
        assert await ws.open() == 101
        await ws.text("hi")
        assert (await ws.frame()).payload == b"hi"


async def test_the_socket_of_a_stream_is_bounded() -> None:
    """What waits for a reader that pauses waits here, where it is counted, not in the kernel."""
    echo = Echo(hold=True)
    async with serving(echo) as ws:
        await ws.open()
        transport = echo.wire._transport
        assert transport is not None
        assert transport.get_write_buffer_limits() == (0, 0)
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 32 * 1024
