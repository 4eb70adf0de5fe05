"""M1.2: what is not even HTTP gets the envelope and an id too, and no traceback in the log."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.gateway import AUTH, MODEL
from tests.support.script import Head, Send, Wait, chunk, sse

if TYPE_CHECKING:
    from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOOD_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"FOO /v1/models HTTP/1.1\r\n\r\n", id="method"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", id="tls"),
        pytest.param(b"GET /v1/models HTTP/9.9\r\n\r\n", id="version"),
        pytest.param(GOOD_HEAD + b"x: " + b"y" * 20_000 + b"\r\n\r\n", id="long header"),
        pytest.param(GOOD_HEAD + b"x\x00y: z\r\n\r\n", id="header name"),
        pytest.param(GOOD_HEAD + b"content-length: many\r\n\r\n", id="length"),
        pytest.param(
            GOOD_HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
            id="smuggling",
        ),
    ],
)
async def test_what_is_not_http(stack: Stack, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(stack.gateway.host, stack.gateway.port)
    writer.write(sent)
    async with asyncio.timeout(10):
        answer = await reader.read(-1)  # and the connection ends
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n")[0] + b" "
    assert b"x-request-id: req_" in head.lower()
    assert b"server: sluicegate\r\n" in head.lower() + b"\r\n"
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in stack.log
    assert '"unreadable request"' in stack.log


async def test_requests_pipelined_behind_a_stream_do_not_hide_a_hang_up(stack: Stack) -> None:
    """M4.1: aiohttp reads no further behind so many, and would not see the client leave."""
    stack.up.script(Head(), Send(sse(chunk("a"))), Wait(asyncio.Event()))
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user"}]}
    async with stack.gateway.client() as client:
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
        await client.read_until(lambda c: c.events, timeout=10)
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
        client.reset()
    assert await (await stack.request()).wait_closed(timeout=10)


async def test_requests_pipelined_in_good_order_are_all_served(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection(stack.gateway.host, stack.gateway.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 499)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(20):
        answers = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    assert answers.count(b"HTTP/1.1 200 OK") == 500
