"""HttpUpstream: kept connections that the server has closed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from encoders.shapes import SHAPES
from relay.errors import UpstreamTruncated
from relay.upstreams.base import UpstreamRequest
from relay.upstreams.http import HttpUpstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: timeout=5\r\n\r\n{}"
REQUEST = UpstreamRequest(model="m", body={"model": "m"}, stream=False)


class Closer:
    """A server that answers so many requests of a connection, then closes it on the next one."""

    def __init__(self, answers: int, delay_s: float = 0.0) -> None:
        self.answers = answers
        self.delay_s = delay_s
        self.requests = 0
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for turn in range(self.answers + 1):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.requests += 1
            if turn < self.answers:
                writer.write(ANSWER)
                await writer.drain()
            else:
                await asyncio.sleep(self.delay_s)
        writer.close()


@asynccontextmanager
async def upstream_of(closer: Closer) -> AsyncIterator[HttpUpstream]:
    server = await asyncio.start_server(closer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = HttpUpstream("fake", f"http://127.0.0.1:{port}/v1")
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()
        server.close()
        await server.wait_closed()


async def test_a_configured_header_takes_the_place_of_the_shapes() -> None:
    """M5: names are equal in any case, so that none is sent twice."""
    shape = SHAPES["anthropic"]
    upstream = HttpUpstream(
        "fake", "http://h", shape=shape, api_key="sk", headers={"Anthropic-Version": "2030-01-01"}
    )
    sent = {name.lower(): value for name, value in upstream._headers.items()}
    assert len(sent) == len(upstream._headers)
    assert (sent["anthropic-version"], sent["x-api-key"]) == ("2030-01-01", "sk")


async def ask(upstream: HttpUpstream) -> int:
    reply = await upstream.open(REQUEST)
    while await reply.read():
        pass
    return reply.status


async def test_a_stale_connection_of_the_pool_is_not_the_clients_problem() -> None:
    closer = Closer(answers=1)
    async with upstream_of(closer) as upstream:
        assert [await ask(upstream) for _ in range(5)] == [200] * 5
    assert closer.connections == 5
    assert closer.requests == 9  # each but the first met a closed connection first


async def test_a_new_connection_that_is_closed_is_a_failure_told_at_once() -> None:
    closer = Closer(answers=0)
    async with upstream_of(closer) as upstream:
        with pytest.raises(UpstreamTruncated):
            await ask(upstream)
    assert closer.requests == 1


async def test_a_kept_connection_that_dies_at_work_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the provider has worked on is not sent twice."""
    monkeypatch.setattr("relay.upstreams.asking._STALE_WITHIN_S", 0.05)
    closer = Closer(answers=1, delay_s=0.5)
    async with upstream_of(closer) as upstream:
        assert await ask(upstream) == 200
        with pytest.raises(UpstreamTruncated):
            await ask(upstream)
    assert closer.requests == 2
