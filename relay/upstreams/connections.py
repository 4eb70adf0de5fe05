"""Connections to providers: aiohttp's pool and protocol with what a relay needs of them.

Rules M3.5 (bounded buffers), M4.1 (aborted at once). What is added to aiohttp: bytes are handed on
in the call that read them, a pool tells which connection a request got and whether it was used
before, and the kernel's buffer is bounded.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_RECEIVE_BUFFER_BYTES: Final = 48 * 1024  # Linux doubles it

_dialled: ContextVar[list[asyncio.Transport]] = ContextVar("dialled")


class UpstreamConnection(ResponseHandler):
    """One connection.

    Attributes:
        on_data: called after each read of the socket, once its bytes stand in the reply's content:
            what a stream needs to go on without waking a task (docs/performance.md).
    """

    on_data: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.on_data is not None:
            self.on_data()


class Sent:
    """What the pool did for one request."""

    reused_a_connection = False


def note_reuse() -> aiohttp.TraceConfig:
    async def reused(_: aiohttp.ClientSession, context: Any, __: object) -> None:
        context.trace_request_ctx.reused_a_connection = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


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
        if connection.transport is not None:
            _dialled.get().append(connection.transport)
        return connection


@contextmanager
def aborted_if_it_fails() -> Iterator[None]:
    """A request that is given up before it is answered closes its connection at once (M4.1).

    aiohttp would only close it in good order: after all of the request has been sent, which an
    upstream that does not read can put off for ever.
    """
    dialled: list[asyncio.Transport] = []
    token = _dialled.set(dialled)
    try:
        yield
    except BaseException:
        for transport in dialled:
            transport.abort()
        raise
    finally:
        _dialled.reset(token)


def _upstream_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket whose kernel buffer is bounded.

    A client that does not read must stop its upstream soon (M3.5); with an unbounded kernel
    buffer megabytes wait for it, and one read can take 256 KiB at once.
    """
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return sock
