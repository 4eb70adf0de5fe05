"""The head of an event stream (M1.3): at once, and in one packet with what is there already."""

from __future__ import annotations

import asyncio
import math
from unittest import mock

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.test_utils import make_mocked_request

from planes.sinks import SseResponse


class Wire:
    """A client's connection: what is written to it, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.transport = mock.Mock()
        self.transport.write = self.writes.append
        self.transport.is_closing.return_value = False
        protocol = mock.Mock(transport=self.transport, _paused=False)
        self.writer = StreamWriter(protocol, asyncio.get_running_loop())

    async def respond(self) -> SseResponse:
        response = SseResponse(
            sep="\n", allow_all_methods=True, ping_interval=math.inf, send_timeout=None
        )
        request = make_mocked_request(
            "POST", "/", writer=self.writer, transport=self.transport, app=web.Application()
        )
        await response.prepare(request)
        return response


async def test_the_head_goes_with_the_first_chunk() -> None:
    wire = Wire()
    response = await wire.respond()
    assert wire.writes == []
    await response.write(b"data: 1\n\n")
    (packet,) = wire.writes
    assert packet.startswith(b"HTTP/1.1 200 OK\r\n")
    assert packet.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n")


async def test_the_head_goes_with_the_end_of_a_short_stream() -> None:
    wire = Wire()
    response = await wire.respond()
    await response.write_eof(b"data: 1\n\n")
    (packet,) = wire.writes
    assert packet.startswith(b"HTTP/1.1 200 OK\r\n")
    assert packet.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n")


async def test_the_head_goes_alone_where_nothing_else_is_there() -> None:
    wire = Wire()
    response = await wire.respond()
    wire.writer.send_headers()
    (head,) = wire.writes
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")
    await response.write(b"data: 1\n\n")
    assert wire.writes[1:] == [b"9\r\ndata: 1\n\n\r\n"]
