"""M1.1, M2.2: plain replies, what goes upstream, and connections that serve more than once."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.fake_upstream import (
    Eof,
    Head,
    Send,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import AUTH, KEY, MODEL, UPSTREAM_KEY, UPSTREAM_MODEL
from tests.support.stack import MESSAGES, SECRET_HEADER, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.fake_upstream import Step

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")

# --- plain replies --------------------------------------------------------------------------------

WHOLE: Final = (
    '{"id": "w", "object":"chat.completion", "created":1, "model": "up", "choices":[{"index":0,'
    '"message":{"role":"assistant","content":"é \\u00e9","refusal":null},"logprobs":null,'
    '"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"cost":1.50e-3},'
    '"x":[{"model":"up"}]}\n'
)


async def test_a_plain_reply_is_byte_identical(stack: Stack) -> None:
    """M1.1, M2.2: one `chat.completion` with its length; model and provider put in as bytes."""
    head = Head(headers={"content-type": "application/json"})
    answer = await stack.ask(head, Send(WHOLE.encode()), stream=False)
    expected = WHOLE.replace('"model": "up"', '"model": "test/model","provider":"fake"')
    assert (answer.status, answer.body) == (200, expected.encode())
    assert answer.header("content-type") == "application/json"
    assert answer.header("content-length") == str(len(answer.body))
    assert (answer.header("x-request-id") or "").startswith("req_")
    assert (await stack.request()).json["stream"] is False


async def test_a_plain_reply_from_a_stream(stack: Stack) -> None:
    """M4.1: a provider with `aggregate` is asked for a stream; the client gets one reply."""
    steps = [Send(sse(chunk(t, service_tier="auto"))) for t in "abc"]
    answer = await stack.ask(*steps, *openai_stream(["d"])[1:], model="aggregate/m", stream=False)
    document = answer.json
    assert document["object"] == "chat.completion"
    assert (document["model"], document["provider"]) == ("aggregate/m", "aggregate")
    assert document["service_tier"] == "auto"
    (choice,) = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcd"}
    assert choice["finish_reason"] == "stop"
    assert document["usage"]["prompt_tokens"] == 7
    asked = (await stack.request()).json
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


async def test_a_stream_from_a_plain_reply(stack: Stack) -> None:
    """M3.2: an upstream that answers a streaming request with one JSON document."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    reply = {"id": "w", "created": 5, "model": "up", "choices": [choice], "usage": usage}
    answer = await stack.ask(*json_answer(reply), stream_options={"include_usage": True})
    assert answer.header("content-type") == "text/event-stream"
    assert answer.text == "Hi"
    first, last, counted = answer.chunks
    assert first["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **calls[0]}]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (counted["choices"], counted["usage"]) == ([], usage)
    assert {(c["id"], c["object"]) for c in answer.chunks} == {("w", "chat.completion.chunk")}


# --- what goes upstream ---------------------------------------------------------------------------


async def test_the_request_goes_on_as_it_came(stack: Stack) -> None:
    """M1.1, M2.4: unknown fields pass; the model, the stream and the usage are ours."""
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "x_unknown": {"deep": [1, None, {"ü": "\ud800"}]},
        "seed": 18446744073709551615,
        "max_tokens": 7,
        "stop": ["\u2028"],
        "stream_options": {"include_obfuscation": False},
    }
    await stack.ask(*openai_stream(["Hi"]), **fields)
    asked = await stack.request()
    expected = {"model": UPSTREAM_MODEL, "messages": MESSAGES, "stream": True} | fields
    expected["stream_options"] = {"include_obfuscation": False, "include_usage": True}
    assert asked.json == expected
    assert asked.path == "/v1/chat/completions"


async def test_the_clients_headers_stay_here(stack: Stack) -> None:
    """M1.1: the provider gets our credential and the configured headers, never the client's."""
    sent = [("x-api-key", KEY), ("cookie", "a=b"), ("x-secret", "s"), ("user-agent", "me")]
    await stack.ask(*openai_stream(["Hi"]), headers=sent)
    asked = (await stack.request()).headers
    assert asked["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert asked["x-team"] == SECRET_HEADER
    assert asked["content-type"] == "application/json"
    assert asked["accept"] == "text/event-stream"
    assert KEY not in json.dumps(asked)
    assert not asked.keys() & {"cookie", "x-secret", "x-api-key"}
    assert asked["user-agent"].startswith("sluicegate")


# --- connections ----------------------------------------------------------------------------------


async def test_one_connection_serves_one_request_after_the_other(stack: Stack) -> None:
    """M2.1: after a stream, an error in-band, a refusal and a plain reply."""
    whole = json_answer({"choices": [{"index": 0, "message": {"content": "Hi"}}]})
    scripts: list[tuple[Sequence[Step], int]] = [
        (openai_stream(["Hi"]), 200),
        ([Send(sse(A)), Eof()], 200),
        (json_answer({}, status=500), 502),
        (whole, 200),
    ]
    async with stack.gateway.client() as client:
        for steps, expected in scripts * 2:
            stack.up.script(*steps)
            body = {"model": MODEL, "messages": MESSAGES, "stream": steps is not whole}
            await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
            await client.read_all()
            assert (client.status, client.complete) == (expected, True)


async def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    """M2.1: three requests in one packet, the last of which closes the connection."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()
    head = f"host: x\r\nx-api-key: {KEY}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    request = b"POST /v1/chat/completions?beta=true HTTP/1.1\r\n" + head + body
    last = request.replace(b"host: x", b"host: x\r\nconnection: close")
    for word in "abc":
        stack.up.script(*openai_stream([word], usage=False))
    reader, writer = await asyncio.open_connection(stack.gateway.host, stack.gateway.port)
    writer.write(request * 2 + last)
    async with asyncio.timeout(10):
        said = await reader.read(-1)
    writer.close()
    assert (said.count(b"HTTP/1.1 200 OK"), said.count(b"data: [DONE]")) == (3, 3)
    places = [said.index(b'"content":"%s"' % word) for word in (b"a", b"b", b"c")]
    assert places == sorted(places)


@pytest.mark.parametrize("headers", [[], [("connection", "keep-alive")]])
async def test_a_client_of_http_1_0(stack: Stack, headers: list[tuple[str, str]]) -> None:
    """M2.1: no chunks on its wire; the connection's end is the stream's."""
    async with stack.client(*openai_stream(["Hi"]), version="HTTP/1.0", headers=headers) as client:
        await client.read_to_eof()
        assert client.complete
        assert client.header("transfer-encoding") is None
    assert client.events[-1] == b"data: [DONE]"


async def test_upstream_connections_are_used_again(stack: Stack) -> None:
    """M4.1: after a complete answer, not after one that was cut."""
    for _ in range(3):
        await stack.ask(*openai_stream(["Hi"]))
    assert len({id(request.connection) for request in stack.requests}) == 1
    await stack.ask(Send(sse(A) + b"data: {\n\n"), Wait(asyncio.Event()))
    await stack.ask(*openai_stream(["Hi"]))
    assert stack.requests[-1].connection is not stack.requests[-2].connection


async def test_streams_at_once_do_not_mix(stack: Stack) -> None:
    """M2.1: a hundred streams, each word of each in its place."""
    scripts = [openai_stream([f"{n}-{word} " for word in range(20)]) for n in range(100)]
    answers = await stack.ask_all(scripts)
    expected = ["".join(f"{n}-{word} " for word in range(20)) for n in range(100)]
    assert [answer.text for answer in answers] == expected
    assert len({answer.header("x-request-id") for answer in answers}) == 100
