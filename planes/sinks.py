"""The client's end of an answer, over aiohttp.

Rules M1.3 (headers, sent at once), M3.5 (backpressure, write stall), M4.1 (a half-close counts as
gone). aiohttp-sse brings the response; its own pings, its formatting and its timeout are not used
(they would put comments and CRLF on the wire, and TCP_USER_TIMEOUT cuts a client that does read,
only slowly).
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter
from aiohttp.web_protocol import RequestHandler
from aiohttp_sse import EventSourceResponse

from planes.tcp import bound_buffers, taken_and_waiting

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

_BUFFER_BYTES_MAX: Final = 32 * 1024
_WATCH_EVERY_S: Final = 0.1
_WATCH_KERNEL_EVERY_S: Final = 1.0


class SseResponse(EventSourceResponse):
    """An event stream without the ping task of aiohttp-sse, which every stream would pay for.

    Its head leaves with what is written next, or when `StreamWriter.send_headers` is called.
    aiohttp has this for whole responses only and not in public: if the attribute goes, the head
    leaves in a packet of its own, and tests/unit/test_sinks.py fails.
    """

    _send_headers_immediately = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        writer = await web.StreamResponse.prepare(self, request)
        self.enable_chunked_encoding()
        return writer


class SseSink:
    """Writes whole events to one client; see `relay.pump.Sink`.

    Args:
        request: the client's. request_id: for its header.
        write_stall_s: a client that takes nothing for so long has hung up (M3.5).
    """

    def __init__(self, request: web.Request, request_id: str, *, write_stall_s: float) -> None:
        self._request = request
        self._write_stall_s = write_stall_s
        self._writer: StreamWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        self._head_waits = False
        self._watch: StallWatch | None = None
        self._last = b""
        self.response = SseResponse(
            sep="\n",
            allow_all_methods=True,  # it answers 405 to a POST otherwise
            ping_interval=math.inf,
            send_timeout=None,
        )
        # Set after construction: it writes its own values over those it is given.
        headers = self.response.headers
        headers["Content-Type"] = "text/event-stream"
        headers["Cache-Control"] = "no-cache, no-transform"
        headers["X-Accel-Buffering"] = "no"
        headers["x-request-id"] = request_id
        del headers["Connection"]  # aiohttp knows better
        if request.version < HttpVersion11:  # without chunks only the connection's end is an end
            self.response.force_close()

    @property
    def committed(self) -> bool:
        return self._writer is not None

    async def commit(self) -> None:
        if self._writer is not None:
            return
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._watch = _watch(self._request, transport, self._write_stall_s)
        writer = await self.response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer, self._transport, self._chunked = writer, transport, writer.chunked
        # At once, but not before what this turn of the loop may bring: one packet for both.
        self._head_waits = True
        asyncio.get_running_loop().call_soon(self._send_head)

    def _send_head(self) -> None:
        if self._head_waits:
            self._head_waits = False
            assert self._writer is not None
            with suppress(ConnectionError):  # the client is gone; what is written next tells so
                self._writer.send_headers()

    async def write(self, data: bytes) -> None:
        if self._head_waits:
            self._head_waits = False
            await self.response.write(data)
            ready = self._taken()
        else:
            ready = self.push(data)
        del data  # it waits in the transport, not here too
        if not ready:
            await self.drain()

    def push(self, data: bytes) -> bool:
        transport, watch = self._transport, self._watch
        assert transport is not None, "push() before commit()"
        assert watch is not None
        if self._head_waits:
            self._send_head()
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        # One chunk (RFC 9112 §7.1); the headers have left, so this is all that aiohttp would do.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if watch.timer is not None and not transport.get_write_buffer_size():
            return True
        return self._taken()

    def _taken(self) -> bool:
        """Watch what was written just now; return whether the client may be sent more."""
        transport, watch = self._transport, self._watch
        assert transport is not None
        assert watch is not None
        if watch.timer is None or transport.get_write_buffer_size():
            watch.begin()
            return not self._request.protocol.writing_paused
        return True

    def last(self, data: bytes) -> bool:
        if self._request.protocol.writing_paused:
            return self.push(data)
        self._last = data  # one packet with the end of the response
        return True

    async def drain(self) -> None:
        assert self._writer is not None, "drain() before commit()"
        if self._request.protocol.writing_paused:
            # Shielded, as aiohttp fails every later drain once one was cancelled, and the end of
            # the stream is still to be written after the end of a grace (M3.6).
            await asyncio.shield(self._writer.drain())

    def waiting(self) -> int:
        transport = self._transport
        assert transport is not None, "waiting() before commit()"
        waiting = transport.get_write_buffer_size()
        if transport.is_closing():  # its socket may be another's by now
            return waiting
        acked, _ = taken_and_waiting(transport)
        return waiting - acked

    async def finish(self) -> None:
        assert self._watch is not None, "finish() before commit()"
        self._watch.begin()
        last, self._last = self._last, b""
        self._head_waits = False
        ending = self.response.write_eof(last)
        # Where nothing waits nothing can be cancelled: a shield is a task, for nothing.
        await (asyncio.shield(ending) if self._request.protocol.writing_paused else ending)


async def send_whole(request: web.Request, response: web.Response, *, write_stall_s: float) -> None:
    """Send a response that is complete.

    Args:
        write_stall_s: as for `SseSink`.

    Raises:
        ConnectionError: the client is gone.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    _watch(request, transport, write_stall_s).begin()
    await response.prepare(request)
    await response.write_eof()


def _watch(request: web.Request, transport: asyncio.Transport, stall_s: float) -> StallWatch:
    """Return the watch of a request's connection; made for its first answer, with the bounds of
    what may wait for its client.
    """
    connection = request.protocol
    assert isinstance(connection, ClientConnection)
    if connection.stall_watch is None:
        bound_buffers(transport, _BUFFER_BYTES_MAX)
        connection.stall_watch = StallWatch(transport, stall_s)
    return connection.stall_watch


class ClientConnection(RequestHandler):
    """A connection of a client, with what outlives its requests.

    Attributes:
        stall_watch: of its answers; None before the first.
    """

    __slots__ = ("stall_watch",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stall_watch: StallWatch | None = None


class StallWatch:
    """While bytes for a client wait, here or in the kernel: aborts its connection if it takes none
    of them for too long, or if it closed its side (a closing transport would first wait for it to
    read).

    A timer, not a task or a timeout around a write: a write that is cancelled has still been sent,
    thousands of slow readers may wait at once, and what is unsent may outlive its request. It runs
    fast only while bytes wait in this process: those of a client that reads are in the kernel. One
    serves all answers of a connection: what it looks at is the connection's.

    Attributes:
        timer: of the next look; None while it does not watch.
    """

    def __init__(self, transport: asyncio.Transport, stall_s: float) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._slow = False
        self._unsent = 0
        self._acked = 0

    def begin(self) -> None:
        """Watch until nothing waits."""
        if self.timer is None:
            self._since = self._loop.time()
            self._unsent = 0
            self._slow = not self._transport.get_write_buffer_size()
            self._again()
        elif self._slow and self._transport.get_write_buffer_size():
            self.timer.cancel()
            self._slow = False
            self._again()

    def _again(self) -> None:
        every_s = min(self._stall_s / 4, _WATCH_KERNEL_EVERY_S) if self._slow else _WATCH_EVERY_S
        self.timer = self._loop.call_later(every_s, self._look)

    def _look(self) -> None:
        self.timer = None
        unsent = self._transport.get_write_buffer_size()
        if self._transport.is_closing():  # its socket may be another's by now
            if unsent:
                self._transport.abort()
            return
        acked, in_kernel = taken_and_waiting(self._transport)
        if not unsent and not in_kernel:
            return
        now = self._loop.time()
        if acked > self._acked or unsent < self._unsent:
            self._since = now
        self._acked, self._unsent = acked, unsent
        if now - self._since >= self._stall_s:
            self._transport.abort()
        else:
            self._slow = not unsent
            self._again()
