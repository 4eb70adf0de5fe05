"""A provider on the network, over aiohttp's client.

Rules M3.1 (never read by line), M3.2 (`Accept-Encoding: identity`, compressed bodies decoded as
they stream), M3.5 (bounded reads), M4.1 (abort at once). What the defaults of the client would
break: `total=300` kills long streams, redirects would carry our key elsewhere, a connection limit
of 100 would queue streams behind each other, a 256 KiB buffer doubles per slow stream.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from encoders.json_text import dumps
from encoders.shapes import OPENAI
from relay.errors import UpstreamTimeout, UpstreamTruncated, UpstreamUnreachable
from relay.upstreams.asking import RequestHead, ask
from relay.upstreams.connections import ForwardedContent, Forwarding, UpstreamConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from encoders.shape import Shape
    from relay.upstreams.asking import Answer
    from relay.upstreams.base import UpstreamRequest

READ_BYTES_MAX: Final = 32 * 1024
_RELEASE_WAIT_S: Final = 0.1
_HEADS_KEPT_MAX: Final = 64  # URLs differ by model in some shapes, and by port of a child process


class HttpUpstream:
    """One provider reached over HTTP.

    Args:
        name: its canonical id.
        base_url: without the route and without a trailing slash; a callable where it changes
            (the local model's child process gets a new port when it is restarted).
        shape: the wire that it speaks: route and authentication are the shape's.
        api_key: empty for none.
        headers: added to every request.
        connect_timeout_s: for name, TCP and TLS together.
        header_timeout_s: from dialling to the status line.
    """

    def __init__(
        self,
        name: str,
        base_url: str | Callable[[], str],
        *,
        shape: Shape = OPENAI,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 5.0,
        header_timeout_s: float = 120.0,
        user_agent: str = "sluicegate",
    ) -> None:
        self._name = name
        self._base_url = base_url
        self._shape = shape
        self._connect_timeout_s = min(connect_timeout_s, header_timeout_s)
        self._header_timeout_s = header_timeout_s
        ours = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": user_agent,
            **shape.auth(api_key),
        }
        # Names are equal in any case: a configured header takes the place of ours.
        theirs = {name.lower() for name in headers or ()}
        self._headers = {k: v for k, v in ours.items() if k.lower() not in theirs}
        self._headers |= headers or {}
        self._heads: dict[tuple[str, str | URL, tuple[tuple[str, str], ...]], RequestHead] = {}
        self._timeout = aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s)
        self._connector: UpstreamConnector | None = None

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Make the connection pool; there is nothing to reach yet."""
        self._connector = UpstreamConnector()

    async def open(self, request: UpstreamRequest) -> HttpReply:
        base_url = self._base_url if isinstance(self._base_url, str) else self._base_url()
        accept = "text/event-stream" if request.stream else "application/json"
        return await self.post(
            self._shape.url(base_url, request.model, stream=request.stream),
            dumps(request.body),
            {"Accept": accept},
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> HttpReply:
        """Send a request that is no chat; see `open`.

        Args:
            headers: added to those of every request.
        """
        return await self._request("POST", url, body, headers)

    async def get_stream(self, url: str, headers: Mapping[str, str]) -> HttpReply:
        """Ask for a body that arrives bit by bit; see `post`. `url` is dialled as it is spelt."""
        return await self._request("GET", URL(url, encoded=True), None, headers)

    async def _request(
        self, method: str, url: str | URL, body: bytes | None, headers: Mapping[str, str]
    ) -> HttpReply:
        assert self._connector is not None, "a request before start()"
        try:
            head = self._head(method, url, headers)
            answer = await ask(
                self._connector, head, body, self._timeout, header_timeout_s=self._header_timeout_s
            )
        except aiohttp.ConnectionTimeoutError:
            raise UpstreamUnreachable(
                f"{self._name}: no connection within {self._connect_timeout_s:g} s"
            ) from None
        except TimeoutError:
            raise UpstreamTimeout(
                f"{self._name} sent no response headers within {self._header_timeout_s:g} s"
            ) from None
        except aiohttp.ClientConnectorError as error:
            reason = _reason(error.os_error)
            raise UpstreamUnreachable(f"{self._name} cannot be reached: {reason}") from None
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise UpstreamTruncated(
                f"{self._name} closed the connection before it answered ({type(error).__name__})"
            ) from None
        return HttpReply(self._name, answer)

    def _head(self, method: str, url: str | URL, headers: Mapping[str, str]) -> RequestHead:
        key = (method, url, tuple(headers.items()))
        head = self._heads.get(key)
        if head is None:
            ours = self._headers
            if method == "GET":
                ours = {k: v for k, v in ours.items() if k.lower() != "content-type"}
            if len(self._heads) >= _HEADS_KEPT_MAX:
                del self._heads[next(iter(self._heads))]
            head = self._heads[key] = RequestHead(method, url, {**ours, **headers})
        return head

    async def fetch(self, path: str, *, max_bytes: int) -> tuple[int, bytes]:
        """Ask for something small below the base URL; return the status and the body, cut after
        `max_bytes`. Raises as `open`.
        """
        base_url = self._base_url if isinstance(self._base_url, str) else self._base_url()
        reply = await self.get_stream(base_url + path, {})
        body = b""
        try:
            while len(body) < max_bytes and (data := await reply.read()):
                body += data
        finally:
            reply.abort()
        return reply.status, body[:max_bytes]

    async def close(self) -> None:
        connector, self._connector = self._connector, None
        if connector is not None:
            await connector.close()


class HttpReply:
    """An answered request; see `UpstreamReply`."""

    __slots__ = ("_answer", "_content", "_ended", "_left", "_lost", "_name", "_paused")

    def __init__(self, name: str, answer: Answer) -> None:
        self._name = name
        self._answer = answer
        self._content = answer.content
        self._ended = False
        self._left: list[bytes] = []
        self._paused: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] | None = None
        protocol = answer.protocol  # None once the whole body is here
        if protocol is not None:
            self._lost = protocol.closed
        if self._lost is not None:
            self._lost.add_done_callback(self._on_lost)
            # Once for each connection, however often it is used: nobody else looks at its end.
            self._lost.remove_done_callback(_seen)
            self._lost.add_done_callback(_seen)

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._answer.headers

    async def read(self) -> bytes:
        if self._left:
            return self._read_left()
        protocol = self._answer.protocol
        if protocol is not None and not protocol.connected:
            self._on_lost()  # a moment before it is called, and aiohttp has no word for that
        try:
            return await self._content.read(READ_BYTES_MAX)
        except (aiohttp.ClientError, ConnectionError):
            # it raises at once; what had arrived by then still counts (M3.4)
            if data := self._content._read_nowait(READ_BYTES_MAX):
                return data
            raise UpstreamTruncated(f"the connection to {self._name} broke off") from None

    def _read_left(self) -> bytes:
        """Read what was parsed while the client could take no more."""
        data = self._left.pop(0)
        if len(data) > READ_BYTES_MAX:
            self._left.insert(0, data[READ_BYTES_MAX:])
            data = data[:READ_BYTES_MAX]
        if not self._left:
            self._resume()
        return data

    def _resume(self) -> None:
        """What was left is taken: read the socket again, if that was stopped."""
        transport, self._paused = self._paused, None
        if transport is not None and not transport.is_closing():
            transport.resume_reading()

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        if self._left or not self._hand_over(push):
            return
        content, protocol = self._content, self._answer.protocol
        if protocol is None or self._lost is None or self._lost.done():
            return
        transport = protocol.transport
        if transport is None:
            return
        forwarding = protocol.forwarding = Forwarding(push, READ_BYTES_MAX, transport)
        content.__class__ = ForwardedContent
        self._lost.add_done_callback(forwarding.stop)
        try:
            await forwarding.stopped
        finally:
            self._lost.remove_done_callback(forwarding.stop)
            content.__class__ = aiohttp.StreamReader
            if protocol.forwarding is forwarding:  # else it serves another request by now
                protocol.forwarding = None
            self._left = forwarding.left
            if forwarding.paused:
                self._paused = transport
            if forwarding.stopped.done() and not forwarding.stopped.cancelled():
                forwarding.stopped.exception()  # seen, also where a cancellation came first

    def _hand_over(self, push: Callable[[bytes], bool]) -> bool:
        """Push what came while nobody listened; return whether what comes can be pushed too."""
        content = self._content
        if content.total_compressed_bytes is not None:
            return False  # unpacking goes on as it is read, and no faster
        while content.exception() is None and (data := content.read_nowait(READ_BYTES_MAX)):
            if not push(data):
                return False
        return content.exception() is None and not content.is_eof()

    def _on_lost(self, _: asyncio.Future[None] | None = None) -> None:
        """The connection is gone. aiohttp tells a waiting read, but not where it closed the
        connection itself over a body that breaks HTTP's framing.
        """
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError("not HTTP any more"))

    def _end(self) -> None:
        self._ended = True
        if self._lost is not None:  # a pooled connection outlives this reply
            self._lost.remove_done_callback(self._on_lost)

    def abort(self) -> None:
        if self._ended:
            return
        self._end()
        self._answer.abort()

    async def release(self) -> None:
        if self._ended:
            return
        if self._content.at_eof() and self._content.exception() is None:
            self._end()  # at its end the connection went back by itself
            return
        with suppress(TimeoutError, UpstreamTruncated):
            async with asyncio.timeout(_RELEASE_WAIT_S):
                if not await self.read():
                    self._end()
        self.abort()


def _seen(lost: asyncio.Future[None]) -> None:
    """Take note of how a connection ended, lest asyncio complain: the body's error says more."""
    if not lost.cancelled():
        lost.exception()


def _reason(error: OSError) -> str:
    """Why a connection failed, in the system's words: asyncio's name addresses, which are no
    client's business.
    """
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return type(error).__name__
