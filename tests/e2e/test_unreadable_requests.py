"""M1.2: what is not even HTTP gets the envelope and an id too, and no traceback in the log."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.stack import Stack

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
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in stack.log
    assert '"unreadable request"' in stack.log
