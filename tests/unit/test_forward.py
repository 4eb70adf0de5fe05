"""HttpReply.forward: bytes handed on in the call that read them (M3.5, M4.1)."""

from __future__ import annotations

import asyncio
import gzip
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from relay.errors import UpstreamTruncated
from relay.upstreams.base import UpstreamRequest
from relay.upstreams.http import READ_BYTES_MAX, HttpReply, HttpUpstream
from tests.support.fake_upstream import FakeUpstream
from tests.support.script import Eof, Fin, Head, Raw, Rst, Send, Wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = UpstreamRequest(model="m", body={"model": "m"}, stream=True)


@asynccontextmanager
async def upstream_at(up: FakeUpstream) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream("fake", up.base_url)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()


class Taker:
    """Takes what is pushed.

    Args:
        reply: whose body it is. most: it can take no more after so many pieces.
    """

    def __init__(self, reply: HttpReply, most: int = 1 << 30) -> None:
        self.pieces: list[bytes] = []
        self.most = most
        self.reply = reply
        self.task = asyncio.create_task(reply.forward(self.push))

    def push(self, data: bytes) -> bool:
        self.pieces.append(data)
        return len(self.pieces) < self.most

    async def until(self, data: bytes) -> None:
        async with asyncio.timeout(5):
            while b"".join(self.pieces) != data:
                await asyncio.sleep(0.005)

    async def rest(self) -> bytes:
        out = bytearray()
        while data := await self.reply.read():
            out += data
        return bytes(out)


async def test_what_arrives_is_pushed_in_order_until_the_body_ends() -> None:
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        more = asyncio.Event()
        up.script(Head(), Send(b"one "), Wait(more), Send(b"two "), Send(b"three"), Eof())
        reply = await upstream.open(REQUEST)
        taker = Taker(reply)
        await taker.until(b"one ")
        assert not taker.task.done()
        more.set()
        await asyncio.wait_for(taker.task, 5)
        assert b"".join(taker.pieces) == b"one two three"
        assert await reply.read() == b""


async def test_what_came_before_is_pushed_first() -> None:
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        up.script(Head(), Send(b"early"), Wait(asyncio.Event()))
        reply = await upstream.open(REQUEST)
        await asyncio.sleep(0.1)
        taker = Taker(reply)
        await taker.until(b"early")
        taker.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taker.task
        reply.abort()


async def test_a_taker_that_has_enough_leaves_the_rest_for_read() -> None:
    """M3.5: nothing is pushed on a client that is slow, and nothing is lost."""
    body = bytes(range(256)) * 1024  # more than the buffers hold
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        up.script(Head(), Send(body), Eof())
        reply = await upstream.open(REQUEST)
        taker = Taker(reply, most=1)
        await asyncio.wait_for(taker.task, 5)
        assert len(taker.pieces[0]) <= READ_BYTES_MAX
        await asyncio.sleep(0.1)
        assert len(taker.pieces) == 1
        assert taker.pieces[0] + await taker.rest() == body


async def test_a_taker_can_stop_and_go_on() -> None:
    body = bytes(range(256)) * 1024
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        up.script(Head(), Send(body), Eof())
        reply = await upstream.open(REQUEST)
        got = b""
        while len(got) < len(body):
            taker = Taker(reply, most=1)
            await asyncio.wait_for(taker.task, 5)
            got += b"".join(taker.pieces)
            if not taker.pieces:  # the body has ended
                got += await taker.rest()
        assert got == body


@pytest.mark.parametrize("end", [Rst(), Fin()], ids=["reset", "cut"])
async def test_a_broken_body_ends_the_push_and_read_tells_why(end: Rst | Fin) -> None:
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        dying = asyncio.Event()
        up.script(Head(), Send(b"half"), Wait(dying), end)
        reply = await upstream.open(REQUEST)
        taker = Taker(reply)
        await taker.until(b"half")
        dying.set()
        await asyncio.wait_for(taker.task, 5)
        with pytest.raises(UpstreamTruncated):
            await reply.read()
        reply.abort()


async def test_a_read_in_the_moment_of_the_connections_end_is_told_of_it() -> None:
    """M3.4: the connection is closed over bytes that are not HTTP, and not yet known to be."""
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        breaking = asyncio.Event()
        up.script(Head(), Send(b"half"), Wait(breaking), Raw(b"zz\r\n"), Wait(asyncio.Event()))
        reply = await upstream.open(REQUEST)
        assert await reply.read() == b"half"
        protocol = reply._answer.protocol
        assert protocol is not None
        breaking.set()
        async with asyncio.timeout(5):
            while protocol.connected:
                await asyncio.sleep(0)
        with pytest.raises(UpstreamTruncated):
            await reply.read()
        await reply.release()


async def test_what_the_taker_raises_is_raised_to_who_forwards() -> None:
    """And is no fault of the upstream: its connection is whole."""

    def refuse(_: bytes) -> bool:
        raise ConnectionResetError("the client is gone")

    async with FakeUpstream() as up, upstream_at(up) as upstream:
        more = asyncio.Event()
        up.script(Head(), Send(b"one"), Wait(more), Eof())
        reply = await upstream.open(REQUEST)
        with pytest.raises(ConnectionResetError, match="the client is gone"):
            await asyncio.wait_for(reply.forward(refuse), 5)
        more.set()
        while await reply.read():
            pass
        await reply.release()


async def test_a_kept_connection_pushes_nothing_to_the_taker_before() -> None:
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        more = asyncio.Event()
        up.script(Head(), Send(b"first"), Wait(more), Eof())
        up.script(Head(), Send(b"second"), Eof())
        reply = await upstream.open(REQUEST)
        first = Taker(reply)
        await first.until(b"first")
        more.set()
        await asyncio.wait_for(first.task, 5)
        await reply.release()
        second = await upstream.open(REQUEST)
        assert len(up.connections) == 1
        assert await second.read() == b"second"
        assert b"".join(first.pieces) == b"first"


async def test_a_kept_connection_with_unread_bytes_is_not_used_again() -> None:
    """They are in the kernel when the next request is sent, and would be taken for its answer."""
    stray = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray"
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        up.script(Head(), Send(b"first"), Eof())
        up.script(Head(), Send(b"second"), Eof())
        reply = await upstream.open(REQUEST)
        while await reply.read():
            pass
        await reply.release()
        os.write(up.connections[0].socket.fileno(), stray)  # no turn of the loop until it is asked
        second = await upstream.open(REQUEST)
        assert await second.read() == b"second"
        assert len(up.connections) == 2


async def test_a_cancelled_forward_pushes_nothing_more() -> None:
    """M4.1: a hang-up leaves nobody who writes to the client."""
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        more = asyncio.Event()
        up.script(Head(), Send(b"one"), Wait(more), Send(b"two"), Eof())
        reply = await upstream.open(REQUEST)
        taker = Taker(reply)
        await taker.until(b"one")
        taker.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taker.task
        more.set()
        assert await taker.rest() == b"two"
        assert taker.pieces == [b"one"]


async def test_a_body_that_grows_when_it_is_unpacked_gives_others_their_turn() -> None:
    """M3.2, M3.5: a small read can hold megabytes."""
    body = b"x" * (8 << 20)
    packed = gzip.compress(body)
    async with FakeUpstream() as up, upstream_at(up) as upstream:
        up.script(Head(headers={"content-encoding": "gzip"}), Send(packed), Eof())
        reply = await upstream.open(REQUEST)
        taken = turns = 0

        def push(data: bytes) -> bool:
            nonlocal taken
            assert len(data) <= READ_BYTES_MAX
            taken += len(data)
            return True

        while True:
            before = taken
            await asyncio.wait_for(reply.forward(push), 5)
            turns += 1
            data = await reply.read()
            taken += len(data)
            if not data and before == taken:
                break
        assert taken == len(body)
        assert turns > 8
