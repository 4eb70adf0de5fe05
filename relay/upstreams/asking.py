"""One HTTP request on a pooled connection, up to the head of its answer (RFC 9112).

An API is asked without redirects, cookies, forms or proxies, and all requests to one URL have the
same head: it is made once and sent with the body in one write. The general client of aiohttp costs
five times as much. The pool, name, TLS and the parser are aiohttp's.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from relay.upstreams.connections import UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.connector import Connection
    from aiohttp.streams import StreamReader

    from relay.upstreams.connections import UpstreamConnector

# A stale connection fails at once; what fails later was at work on the request.
_STALE_WITHIN_S: Final = 1.0
# aiohttp stops reading at twice this; one read of the socket may come on top.
_BUFFER_BYTES_MAX: Final = 16 * 1024
_COPIED_BYTES_MAX: Final = 64 * 1024
_LENGTH: Final = b"Content-Length"
_NO_FIELD: Final = re.compile(r"[\r\n\0]")


class RequestHead:
    """What all requests of one method to one URL share.

    Args:
        url: spelt as it is dialled, if it is a `URL`. headers: all but the length of a body.

    Raises:
        ValueError: HTTP has no words for the URL or a header.
    """

    __slots__ = ("_bytes", "target")

    def __init__(self, method: str, url: str | URL, headers: Mapping[str, str]) -> None:
        # Names the host, and the credentials of a URL that has some; the pool knows it by this.
        self.target = aiohttp.ClientRequest(
            method, URL(url), headers=headers, loop=asyncio.get_running_loop()
        )
        if self.target.url.raw_host is None:
            raise aiohttp.InvalidURL(url)
        self.target.headers.popall("Content-Length", None)
        lines = [f"{method} {self.target.url.raw_path_qs} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.target.headers.items()]
        if any(map(_NO_FIELD.search, lines)):
            raise ValueError("a header must be one line")
        self._bytes = "\r\n".join(lines).encode()

    def before(self, body: bytes | None) -> bytes:
        """Return the bytes that come before a body."""
        if body is None:
            return self._bytes + b"\r\n\r\n"
        return b"%b\r\n%b: %d\r\n\r\n" % (self._bytes, _LENGTH, len(body))


class Answer:
    """An answered request: its head is read, its body is still arriving in `content`.

    Attributes:
        status, headers: of the final answer. content: the body, decompressed.
    """

    __slots__ = ("_connection", "content", "headers", "status")

    def __init__(
        self, connection: Connection, status: int, headers: Mapping[str, str], content: StreamReader
    ) -> None:
        self._connection: Connection | None = connection
        self.status = status
        self.headers = headers
        self.content = content
        content.on_eof(self._at_the_end)

    @property
    def protocol(self) -> UpstreamConnection | None:
        """The connection, while the body is not all here."""
        connection = self._connection
        protocol = connection.protocol if connection is not None else None
        return protocol if isinstance(protocol, UpstreamConnection) else None

    def abort(self) -> None:
        """Close the connection at once, if the body is not all here; reads fail from now on."""
        if self.content.exception() is None:
            self.content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
        connection, self._connection = self._connection, None
        if connection is not None:
            _abort(connection)

    def _at_the_end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        transport = connection.transport
        if transport is None or transport.get_write_buffer_size():
            connection.close()  # it answered before it had the whole request
        else:
            connection.release()


async def ask(
    connector: UpstreamConnector,
    head: RequestHead,
    body: bytes | None,
    timeout: aiohttp.ClientTimeout,
    *,
    header_timeout_s: float,
) -> Answer:
    """Send a request and wait for the head of its answer.

    It is sent again on another connection if the one from the pool was stale: servers close kept
    connections whenever they like (llama.cpp after every stream, whatever its `Keep-Alive` says);
    the request that meets the close was never looked at. One that is given up before it is answered
    closes its connection at once (M4.1), whatever of it has not been sent.

    Args:
        timeout: of connecting. header_timeout_s: from the call to the head, connecting included.

    Raises:
        TimeoutError: no head came in time.
        aiohttp.ClientError, ConnectionError: it failed; `ConnectionTimeoutError` and
            `ClientConnectorError` before anything was sent.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + header_timeout_s
    while True:
        connection = await _connected(connector, head, timeout)
        started = clock()
        protocol: Any = connection.protocol
        reused, protocol.used = protocol.used, True
        try:
            return await _ask_on(connection, head, body, until)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            _abort(connection)
            if not reused or clock() - started > _STALE_WITHIN_S:
                raise
        except HttpProcessingError as error:
            _abort(connection)
            raise aiohttp.ClientPayloadError(error.message) from None
        except BaseException:
            _abort(connection)
            raise


async def _connected(
    connector: UpstreamConnector, head: RequestHead, timeout: aiohttp.ClientTimeout
) -> Connection:
    try:
        return await connector.connect(head.target, [], timeout)
    except TimeoutError:
        raise aiohttp.ConnectionTimeoutError from None


async def _ask_on(
    connection: Connection, head: RequestHead, body: bytes | None, until: float
) -> Answer:
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None:
        raise aiohttp.ServerDisconnectedError
    protocol.set_response_params(read_until_eof=True, read_bufsize=_BUFFER_BYTES_MAX)
    before = head.before(body)
    if body is None or len(body) > _COPIED_BYTES_MAX:
        transport.write(before)
        transport.write(body or b"")
    else:
        transport.write(before + body)
    # No `asyncio.timeout`: it costs four times as much, and each request has one.
    timer = asyncio.get_running_loop().call_at(until, protocol.set_exception, TimeoutError())
    try:
        while True:
            message, content = await protocol.read()
            if message.code >= 200 or message.code == 101:  # not one of the interim answers
                return Answer(connection, message.code, message.headers, content)
    finally:
        timer.cancel()


def _abort(connection: Connection) -> None:
    if connection.transport is not None:
        connection.transport.abort()  # close() would first flush what we still send
    connection.close()
