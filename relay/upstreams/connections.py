"""Connections to providers: aiohttp's pool and protocol with what a relay needs of them.

Rules M3.5 (bounded buffers), M4.1 (aborted at once). What is added to aiohttp: bytes are handed on
in the call that read them, a pool tells which connection a request got and whether it was used
before, and the kernel's buffer is bounded.
"""

from __future__ import annotations

import socket
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from types import TracebackType

    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_RECEIVE_BUFFER_BYTES: Final = 48 * 1024  # Linux doubles it

_dialling: ContextVar[Dialling] = ContextVar("dialling")


class UpstreamConnection(ResponseHandler):
    """One connection.

    Attributes:
        on_data: called after each read of the socket, once its bytes stand in the reply's content:
            what a stream needs to go on without waking a task (docs/performance.md).
        used: whether it has served a request.
    """

    on_data: Callable[[], None] | None = None
    used = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.on_data is not None:
            self.on_data()


class UpstreamConnector(aiohttp.TCPConnector):
    """A connection pool that tells who dials which connection they got."""

    def __init__(self) -> None:
        super().__init__(limit=0, socket_factory=_upstream_socket)
        factory: Any = partial(UpstreamConnection, loop=self._loop)
        self._factory = factory

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        _dialling.get().got(connection)
        return connection


class Dialling:
    """The time from a request's start to its answer.

    One that is given up before it is answered closes its connection at once (M4.1). aiohttp would
    only close it in good order: after all of the request has been sent, which an upstream that does
    not read can put off for ever.

    Attributes:
        reused: whether the last connection that it got had served another request.
    """

    def __init__(self) -> None:
        self.reused = False
        self._transports: list[asyncio.Transport] = []

    def __enter__(self) -> Self:
        self._token = _dialling.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _dialling.reset(self._token)
        if kind is not None:
            for transport in self._transports:
                transport.abort()

    def got(self, connection: Connection) -> None:
        """The pool gave a connection."""
        protocol, transport = connection.protocol, connection.transport
        if transport is not None:
            self._transports.append(transport)
        if isinstance(protocol, UpstreamConnection):
            self.reused, protocol.used = protocol.used, True


def _upstream_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket whose kernel buffer is bounded.

    A client that does not read must stop its upstream soon (M3.5); with an unbounded kernel
    buffer megabytes wait for it, and one read can take 256 KiB at once.
    """
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return sock
