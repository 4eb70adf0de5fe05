"""One WebSocket under aiohttp's upgrade (D2.2 to D2.6): events in, bytes out.

aiohttp answers the 101 and then gives its protocol's bytes to a parser, which this is. Its own
WebSocket reader takes unmasked frames and illegal close codes, hides fragments, closes by itself
and loses what came just before a FIN. `set_parser` is not documented: the upper bound of the
dependency and `tests/unit/test_decision_wire.py` cover that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from aiohttp import web
from aiohttp.http import StreamWriter

from planes.decision.frames import Event, FrameReader
from planes.tcp import bound_buffers, taken_and_waiting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.http_websocket import WebSocketReader

_LOOKS_IN_A_STALL: Final = 10


class Gone:
    """The client's side of the connection has ended; nothing follows."""


GONE: Final = Gone()
Arrival: TypeAlias = Event | Gone


class Peer(Protocol):
    """Who is told what comes; called from the loop, must not raise."""

    def arrived(self, arrival: Arrival) -> None:
        """Take one event; in the order of the wire."""

    def stalled(self) -> None:
        """Hear that the client has taken nothing for `stall_s` of what waits for it."""


class Wire:
    """One upgraded connection.

    Args:
        request: the client's opening. reader: of its frames.
        stall_s: see `Peer.stalled`.
    """

    def __init__(self, request: web.Request, reader: FrameReader, *, stall_s: float) -> None:
        self._request = request
        self._reader = reader
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._peer: Peer | None = None
        self._writer: StreamWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._gone = False
        self._watch: asyncio.TimerHandle | None = None
        self._progress_at = 0.0
        self._acked = 0
        self._unsent = 0

    async def accept(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Answer 101; what comes before `listen` waits.

        Args:
            headers: of the 101, those of the handshake too.

        Raises:
            ConnectionError: the client is gone.
        """
        request = self._request
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        response = web.StreamResponse(status=101, headers=headers)
        response.force_close()
        # At 0 a write is tried at once, and `drain` waits until the kernel has all of it.
        bound_buffers(transport, 0)
        writer = await response.prepare(request)
        assert isinstance(writer, StreamWriter)
        self._writer, self._transport = writer, transport
        request.protocol.keep_alive(False)
        return response

    def listen(self, peer: Peer) -> None:
        """Begin to read.

        Args:
            peer: who is told from here on.
        """
        self._peer = peer
        self._request.protocol.set_parser(cast("WebSocketReader", self))
        if self._request.transport is None:
            self._hear_end()

    # -- in: what aiohttp calls -----------------------------------------------------------------

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take bytes of the client."""
        assert self._peer is not None
        if not self._gone and not self._reader.ended:
            for event in self._reader.feed(data, self._loop.time()):
                self._peer.arrived(event)
        return False, b""

    def feed_eof(self) -> None:
        """Take the end of the connection."""
        self._hear_end()
        self._stop_watch()

    def half_closed(self) -> bool:
        """Take the client's FIN. True: the connection stays open until we close it, for what came
        before the FIN may still be answered.
        """
        self._hear_end()
        return True

    def _hear_end(self) -> None:
        assert self._peer is not None
        if not self._gone:
            self._gone = True
            self._peer.arrived(GONE)

    def stop_reading(self) -> None:
        """Drop whatever the client still sends."""
        self._reader.ended = True

    @property
    def reading_ended(self) -> bool:
        """Whether nothing more of the client is understood: its Close, or what broke the rules."""
        return self._reader.ended

    @property
    def pending_bytes(self) -> int:
        """Bytes of a message that is not whole yet."""
        return self._reader.pending_bytes

    # -- out ------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        if self._transport is None or self._transport.is_closing():
            return 0
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send whole frames; they go nowhere if the connection is gone."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._watch is None and self._transport.get_write_buffer_size():
            self._unsent = self._transport.get_write_buffer_size()
            self._progress_at = self._loop.time()
            self._look_later()

    async def flushed(self) -> None:
        """Wait until the kernel has taken all, or the connection is gone."""
        assert self._writer is not None
        try:
            # Shielded, as aiohttp fails every later drain once one was cancelled.
            await asyncio.shield(self._writer.drain())
        except ConnectionError:
            return

    def half_close(self) -> None:
        """Send a FIN behind what was written; nothing is written after it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        """End the connection now; what waits is lost."""
        self._stop_watch()
        if self._transport is not None:
            self._transport.abort()

    # -- the watch ------------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._watch = self._loop.call_later(self._stall_s / _LOOKS_IN_A_STALL, self._look)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        """A timer while bytes wait; see `planes.sinks.StallWatch`."""
        self._watch = None
        unsent = self.unsent
        if not unsent or self._transport is None:
            return
        now = self._loop.time()
        acked, _ = taken_and_waiting(self._transport)
        if acked > self._acked or unsent < self._unsent:
            self._progress_at = now
        self._acked, self._unsent = acked, unsent
        if now - self._progress_at < self._stall_s:
            self._look_later()
        elif self._peer is not None:
            self._peer.stalled()
