"""The client's end of an SSE stream, over aiohttp.

Rules M1.3 (headers, sent at once), M3.5 (backpressure, write stall), M4.1 (a half-close counts as
gone). aiohttp-sse brings the response and the kernel's TCP_USER_TIMEOUT; its own pings and its
formatting are not used (they would put comments and CRLF on the wire).
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import TYPE_CHECKING, Final

from aiohttp_sse import EventSourceResponse

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter

_BUFFER_BYTES_MAX: Final = 32 * 1024
_UNSENT_BYTES_MAX: Final = 32 * 1024
_WATCH_EVERY_S: Final = 0.2


class SseSink:
    """Writes whole events to one client; see `relay.pump.Sink`.

    Args:
        request: the client's. request_id: for its header.
        write_stall_s: a client that takes nothing for so long has hung up (M3.5).
    """

    def __init__(self, request: web.Request, request_id: str, *, write_stall_s: float) -> None:
        self._request = request
        self._write_stall_s = write_stall_s
        self._writer: AbstractStreamWriter | None = None
        self.response = EventSourceResponse(
            sep="\n",
            allow_all_methods=True,  # it answers 405 to a POST otherwise
            ping_interval=math.inf,
            send_timeout=write_stall_s,
        )
        # Set after construction: it writes its own values over those it is given.
        headers = self.response.headers
        headers["Content-Type"] = "text/event-stream"
        headers["Cache-Control"] = "no-cache, no-transform"
        headers["X-Accel-Buffering"] = "no"
        headers["x-request-id"] = request_id
        del headers["Connection"]  # aiohttp knows better: a client may speak HTTP/1.0

    @property
    def committed(self) -> bool:
        return self._writer is not None

    async def commit(self) -> None:
        if self._writer is not None:
            return
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        _bound_buffers(transport)
        self._writer = await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        assert self._writer is not None, "write() before commit()"
        await self._writer.write(data)
        if self._request.protocol.writing_paused:
            await self._wait_for_the_client(self._writer)

    async def finish(self) -> None:
        await self.response.write_eof()
        self.close()

    def close(self) -> None:
        """End what aiohttp-sse runs beside the response. Idempotent; the response is not ended."""
        if self._writer is not None:
            self.response.stop_streaming()

    async def _wait_for_the_client(self, writer: AbstractStreamWriter) -> None:
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        watch = _StallWatch(transport, self._write_stall_s)
        try:
            await writer.drain()
        finally:
            watch.stop()


class _StallWatch:
    """While a client is behind: aborts its connection if it takes nothing for too long, or if it
    closed its side (a closing transport would first wait for it to read).

    A timer, not a task or a timeout around the write: a write that is cancelled has still been
    sent, and thousands of slow readers may wait at once.
    """

    def __init__(self, transport: asyncio.WriteTransport, stall_s: float) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._unsent = transport.get_write_buffer_size()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(_WATCH_EVERY_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._unsent, self._since = unsent, now
        if self._transport.is_closing() or now - self._since >= self._stall_s:
            self._transport.abort()
            return
        self._timer = self._loop.call_later(_WATCH_EVERY_S, self._look)


def _bound_buffers(transport: asyncio.WriteTransport) -> None:
    """Bound what may wait for a client: in the process, and unsent in the kernel (M3.5)."""
    transport.set_write_buffer_limits(high=_BUFFER_BYTES_MAX)
    sock = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if sock is not None and option is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES_MAX)
