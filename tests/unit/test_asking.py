"""One HTTP request on a pooled connection, byte for byte (RFC 9112; M3.2, M4.1)."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from yarl import URL

from relay.upstreams.asking import Answer, RequestHead, ask
from relay.upstreams.connections import UpstreamConnector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "t"}


class Server:
    """Writes `answer` when a request's head has come, and keeps what it got.

    Args:
        reads: whether it reads on behind the head. closes: whether it closes then.
    """

    def __init__(self, answer: bytes, *, reads: bool = True, closes: bool = False) -> None:
        self.answer = answer
        self.reads = reads
        self.closes = closes
        self.got = bytearray()
        self.connections = 0
        self.port = 0
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        heads = 0
        try:
            while data := await reader.read(65536):
                self.got += data
                if self.got.count(b"\r\n\r\n") > heads:
                    heads += 1
                    writer.write(self.answer)
                    if self.closes:
                        break
                    if not self.reads:
                        await asyncio.sleep(3600)
        except ConnectionError:
            pass
        finally:
            self.gone.set()
            writer.close()


@asynccontextmanager
async def asking(
    server: Server, *, header_timeout_s: float = 30
) -> AsyncIterator[Callable[..., asyncio.Future[Answer]]]:
    """Serve, and ask with one pool."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    connector = UpstreamConnector()

    def do(
        body: bytes | None = b"{}", path: str = "/v1/x", **headers: str
    ) -> asyncio.Future[Answer]:
        url = f"http://127.0.0.1:{server.port}{path}"
        head = RequestHead("GET" if body is None else "POST", url, HEADERS | headers)
        return asyncio.ensure_future(
            ask(connector, head, body, TIMEOUT, header_timeout_s=header_timeout_s)
        )

    try:
        yield do
    finally:
        await connector.close()
        listening.close()


async def test_a_request_is_what_rfc_9112_wants() -> None:
    server = Server(OK)
    async with asking(server) as do:
        answer = await do(b'{"a":1}', "/v1/x?b=c%20d", Authorization="Bearer k")
        assert (answer.status, await answer.content.read()) == (200, b"ok")
    assert (
        bytes(server.got)
        == (
            f"POST /v1/x?b=c%20d HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: t\r\n"
            "Authorization: Bearer k\r\n"
            'Content-Length: 7\r\n\r\n{"a":1}'
        ).encode()
    )


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 3_000_000])
async def test_a_body_of_any_size_arrives_whole(size: int) -> None:
    server = Server(b"")
    async with asking(server) as do:
        asked = do(b"x" * size)
        async with asyncio.timeout(10):
            while server.got.count(b"x") < size or b"\r\n\r\n" not in server.got:
                await asyncio.sleep(0.005)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    head, _, body = bytes(server.got).partition(b"\r\n\r\n")
    assert head.endswith(b"\r\nContent-Length: %d" % size)
    assert body == b"x" * size


async def test_a_request_without_a_body_tells_no_length() -> None:
    server = Server(OK)
    async with asking(server) as do:
        await (await do(None)).content.read()
    assert server.got.startswith(b"GET /v1/x HTTP/1.1\r\n")
    assert b"ontent-" not in server.got


async def test_interim_answers_are_passed_over() -> None:
    """RFC 9110 §15.2."""
    server = Server(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + OK)
    async with asking(server) as do:
        answer = await do()
        assert (answer.status, await answer.content.read()) == (200, b"ok")


async def test_a_connection_is_used_again_and_one_that_had_not_all_of_the_request_is_not() -> None:
    server = Server(OK)
    async with asking(server) as do:
        for _ in range(3):
            await (await do()).content.read()
        assert server.connections == 1
    hasty = Server(OK, reads=False)
    async with asking(hasty) as do:
        answer = await do(b"x" * 30_000_000)
        assert await answer.content.read() == b"ok"
        await asyncio.wait_for((await do()).content.read(), 5)
        assert hasty.connections == 2


async def test_one_that_is_given_up_is_closed_at_once() -> None:
    """M4.1: also if the upstream does not read what is still to be sent."""
    server = Server(b"")
    async with asking(server) as do:
        asked = do(b"x" * 1000)
        async with asyncio.timeout(5):
            while not server.got:
                await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.wait_for(server.gone.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_a_head_that_does_not_come_in_time_closes_the_connection() -> None:
    server = Server(b"HTTP/1.1 103 Early Hints\r\n\r\n")  # an interim answer is none
    async with asking(server, header_timeout_s=0.1) as do:
        with pytest.raises(TimeoutError):
            await do()
        await asyncio.wait_for(server.gone.wait(), 5)


async def test_a_body_may_take_longer_than_the_head() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n")
    async with asking(server, header_timeout_s=0.1) as do:
        answer = await do()
        reading = asyncio.ensure_future(answer.content.read())
        await asyncio.sleep(0.5)
        assert not reading.done()
        assert answer.content.exception() is None
        answer.abort()
        with pytest.raises(aiohttp.ClientConnectionError):
            await reading


async def test_what_is_no_http_is_an_error_of_the_client_library() -> None:
    async with asking(Server(b"SSH-2.0-x\r\n\r\n")) as do:
        with pytest.raises(aiohttp.ClientError):
            await do()


async def test_an_end_before_the_head_is_told() -> None:
    async with asking(Server(b"HTTP/1.1 2", closes=True)) as do:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await do()


async def test_a_header_is_one_line() -> None:
    """What a configuration says cannot add headers, or requests."""
    for value in ("a\r\nX: y", "a\nb", "a\rb", "a\0b"):
        with pytest.raises(ValueError, match="one line"):
            RequestHead("POST", "http://h/", {"X-Key": value})


async def test_credentials_of_a_url_are_sent_as_basic() -> None:
    head = RequestHead("POST", "http://me:pass@h/v1", HEADERS)
    assert b"Authorization: Basic " + base64.b64encode(b"me:pass") in head.before(b"")
    assert b"Host: h\r\n" in head.before(b"")
    assert b"@" not in head.before(b"")


async def test_a_url_that_is_encoded_is_dialled_as_it_is_spelt() -> None:
    head = RequestHead("GET", URL("http://h/a%2Fb?c=%C3%A9", encoded=True), HEADERS)
    assert head.before(None).startswith(b"GET /a%2Fb?c=%C3%A9 HTTP/1.1\r\n")


async def test_a_url_without_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        RequestHead("POST", "/nowhere", HEADERS)
