"""Connections to providers: aiohttp's pool and protocol with what a relay needs of them.

Rules M3.5 (bounded buffers), M4.1 (aborted at once). What is added to aiohttp: bytes are handed on
in the call that read them, a connection tells whether it was used before, what comes on one that
nobody asked is nobody's answer, and the kernel's buffer is bounded.
"""

from __future__ import annotations

import asyncio
import select
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import StreamReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_RECEIVE_BUFFER_BYTES: Final = 48 * 1024  # Linux doubles it
_SIZE_DIGITS_MAX: Final = 4  # of a chunk that a read can hold whole


class UpstreamConnection(ResponseHandler):
    """One connection.

    Attributes:
        forwarding: who takes a reply's bytes in the call that reads them, None if nobody does.
        used: whether it has served a request.
        idle: whether it waits in the pool. aiohttp would keep what comes then, a time-out that the
            server tells on its own or an answer too many, for the next request.
    """

    forwarding: Forwarding | None = None
    used = False
    idle = False

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls this for each chunk that is taken, and looks each time for more to parse:
        # there is only if it had been stopped.
        if self._reading_paused:
            ResponseHandler.resume_reading(self, resume_parser)

    def data_received(self, data: bytes) -> None:
        forwarding = self.forwarding
        if forwarding is not None and forwarding.between_chunks:
            # Nearly every read of a stream is one chunk (RFC 9112 §7.1): the parser stands before
            # it and would stand behind it, so it need not see it.
            at = data.find(b"\r\n", 1, _SIZE_DIGITS_MAX + 2)
            size = len(data) - at - 4
            if at > 0 and size > 0 and data.endswith(b"\r\n") and data[:at].lower() == b"%x" % size:
                forwarding.hand_on(data[at + 2 : -2])
                return
        if self.idle and data:  # no data: what it paused for is taken up again
            self.abort()
            return
        ResponseHandler.data_received(self, data)
        if forwarding is not None:
            # What follows a whole chunk and ends with a line is seen by the parser as another's
            # head. No end of a line: it may have a part of that.
            if not data.endswith(b"\r\n"):
                forwarding.between_chunks = False
            forwarding.read_is_over()


class Forwarding:
    """Takes the bytes of one reply as they are parsed, and hands on what one read gave.

    Args:
        push: takes them; returns whether it can take more at once. piece_max: bytes of one push.
        transport: of the connection.

    Attributes:
        between_chunks: whether the last read ended with the end of a chunk, and the body goes on.
        parsed: what the read that is going on has brought of the body.
        stopped: done when nothing can be pushed any more; holds what `push` raised.
        left: what was parsed and not taken, in order.
        paused: whether the socket is not read until that is taken.
    """

    __slots__ = (
        "_ended",
        "_piece_max",
        "_push",
        "_transport",
        "between_chunks",
        "left",
        "parsed",
        "paused",
        "stopped",
    )

    def __init__(
        self, push: Callable[[bytes], bool], piece_max: int, transport: asyncio.Transport
    ) -> None:
        self._push = push
        self._transport = transport
        self.paused = False
        self._piece_max = piece_max
        self.parsed: list[bytes] = []
        self.between_chunks = False
        self._ended = False
        self.left: list[bytes] = []
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def read_is_over(self) -> None:
        """All of one read of the socket is parsed: hand it on."""
        parsed = self.parsed
        if not parsed:
            return
        data = parsed[0] if len(parsed) == 1 else b"".join(parsed)
        parsed.clear()
        self.hand_on(data)

    def hand_on(self, data: bytes) -> None:
        """Push what one read brought."""
        if self.stopped.done():  # what comes until somebody reads is kept in order
            self.left.append(data)
            self._pause()
            return
        try:
            if len(data) <= self._piece_max:
                if not self._push(data):
                    self.stop()
            else:
                self._push_pieces(data)
            if self._ended:
                self.stop()
        except Exception as error:  # noqa: BLE001 - aiohttp would take it for the upstream's fault
            if not self.stopped.done():
                self.stopped.set_exception(error)

    def _push_pieces(self, data: bytes) -> None:
        most = self._piece_max
        for at in range(0, len(data), most):
            if not self._push(data[at : at + most]):
                if at + most < len(data):
                    self.left.append(data[at + most :])
                    self._pause()
                self.stop()
                return

    def _pause(self) -> None:
        """Read no more of the socket while something is left (M3.5).

        Not by aiohttp's own `pause_reading`: it would stop the parser, which only a read of its
        content sets going again, and what comes with the end of the connection would be lost.
        """
        if not self._ended:  # else the connection is not ours any more
            self.paused = True
            self._transport.pause_reading()

    def end(self) -> None:
        """The body has ended; what the same read brought of it is still handed on."""
        self._ended = True
        self.between_chunks = False
        if not self.parsed:
            self.stop()

    def stop(self, _: object = None) -> None:
        """The rest is for `read`."""
        if not self.stopped.done():
            self.stopped.set_result(None)


class ForwardedContent(StreamReader):
    """The content of a reply while its bytes are forwarded: a `StreamReader` made into one, so
    nothing is added to it but what it does with bytes.
    """

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        forwarding = self._protocol.forwarding  # type: ignore[attr-defined]
        if forwarding is None:
            return StreamReader.feed_data(self, data, size)
        forwarding.parsed.append(data)
        return False

    def begin_http_chunk_receiving(self) -> None:
        forwarding = self._protocol.forwarding  # type: ignore[attr-defined]
        StreamReader.begin_http_chunk_receiving(self)  # it insists on it before an end
        if forwarding is not None:
            forwarding.between_chunks = False

    def end_http_chunk_receiving(self) -> None:
        forwarding = self._protocol.forwarding  # type: ignore[attr-defined]
        if forwarding is None:
            StreamReader.end_http_chunk_receiving(self)
        else:
            forwarding.between_chunks = True

    def feed_eof(self) -> None:
        forwarding = self._protocol.forwarding  # type: ignore[attr-defined]
        StreamReader.feed_eof(self)
        if forwarding is not None:
            forwarding.end()


class UpstreamConnector(aiohttp.TCPConnector):
    """A connection pool that hands out no connection which holds what nobody asked for."""

    def __init__(self) -> None:
        super().__init__(limit=0, socket_factory=_upstream_socket)
        factory: Any = partial(UpstreamConnection, loop=self._loop)
        self._factory = factory

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            # One may hold what came in the same read as the end of the answer before.
            if not isinstance(protocol, UpstreamConnection) or not _is_spoilt(protocol):
                break
            connection.close()
        if isinstance(protocol, UpstreamConnection):
            protocol.idle = False
        return connection

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        if isinstance(protocol, UpstreamConnection):
            protocol.idle = True
        super()._release(key, protocol, should_close=should_close)


def _is_spoilt(protocol: UpstreamConnection) -> bool:
    """Whether something came on a kept connection: read, or waiting in the kernel. That would be
    taken for the answer of the request that is sent now.
    """
    return protocol.used and (protocol.should_close or _is_readable(protocol))


def _is_readable(protocol: UpstreamConnection) -> bool:
    sock = protocol.transport.get_extra_info("socket") if protocol.transport is not None else None
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _upstream_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket whose kernel buffer is bounded.

    A client that does not read must stop its upstream soon (M3.5); with an unbounded kernel
    buffer megabytes wait for it, and one read can take 256 KiB at once.
    """
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return sock
