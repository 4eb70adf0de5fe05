"""M3.4: what becomes of a stream whose upstream fails or dies after the first byte.

Cases B15, B44 to B49 and B54 of the hazards.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Fin,
    Flood,
    Head,
    Raw,
    Rst,
    Send,
    Sleep,
    Step,
    chunk,
    sse,
)
from tests.support.gateway import AUTH, MODEL
from tests.support.stack import MESSAGES, Stack, served

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")
B: Final = chunk("b")
STOP: Final = chunk(None, finish_reason="stop")

DEATHS: Final[dict[str, list[Step]]] = {
    "eof (B44b)": [Eof()],
    "no last chunk (B44a)": [Fin()],
    "reset (B45)": [Rst()],
    "half an event (B15)": [Send(b'data: {"id":"c","choi'), Rst()],
    "half an event, eof": [Send(b'data: {"id":"c","choi'), Eof()],
    "half an event, same packet": [],
    "bad chunk size": [Sleep(0.05), Raw(b"zz\r\nfoo\r\n")],
    "bad chunk end": [Sleep(0.05), Raw(b"3\r\nfooXX")],
    "too long a chunk size": [Sleep(0.05), Raw(b"f" * 20 + b"\r\n")],
}
ANSWERED: Final[dict[str, bytes]] = {
    "one word": sse(A),
    "forty words": sse(A) + sse(B) * 39,
    "a finish of another choice": sse(A)
    + sse(chunk("", index=1, role="assistant", finish_reason="stop")),
}


@pytest.mark.parametrize("end", DEATHS.values(), ids=DEATHS.keys())
@pytest.mark.parametrize("body", ANSWERED.values(), ids=ANSWERED.keys())
async def test_a_death_in_mid_stream(stack: Stack, body: bytes, end: list[Step]) -> None:
    """M3.4, B15, B44, B45: all whole events, the error chunk and `[DONE]`; a proper HTTP end."""
    last = Send(body if end else body + b"data: {")
    answer = await stack.ask(last, *(end or [Rst()]), n=2 if b'"index":1' in body else 1)
    assert answer.data.count(served(B)) == body.count(sse(B))
    error = answer.in_band
    assert error["code"] == "upstream_error"
    assert error["metadata"] == {"provider_name": "fake", "raw": None}
    assert "Error" not in error["message"]  # the name of a class tells a client nothing
    assert answer.chunks[-1]["id"] == "chatcmpl-fake"
    assert len(answer.data) == body.count(b"data:") + 2
    line = await stack.line(answer)
    assert (line["status"], line["error_code"]) == (502, "upstream_error")


@pytest.mark.parametrize("framing", ["close", "length"])
async def test_a_death_under_other_framings(stack: Stack, framing: Any) -> None:
    """M3.4, B44: a clean close that ends the body, and a length that is not reached."""
    head = Head(headers={"content-length": "99999"} if framing == "length" else {}, framing=framing)
    answer = await stack.ask(head, Send(sse(A) + sse(B)), Fin())
    assert answer.data[:2] == [served(A), served(B)]
    assert answer.in_band["code"] == "upstream_error"


@pytest.mark.parametrize("end", [[Fin()], [Rst()], [Raw(b"zz\r\n"), Fin()]])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "not complete"])
async def test_what_arrived_before_a_death_reaches_a_slow_client(
    stack: Stack, end: list[Step], complete: bool
) -> None:
    """M3.4: also what was still waiting here when the connection died."""
    count, block = 400, sse(chunk("x" * 1000))
    last = [Send(sse(STOP) + DONE)] if complete else []
    stack.up.script(Send(sse(A)), Flood(block, count), *last, *end)
    async with stack.gateway.client(rcvbuf=4096) as client:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
        await client.read_head()
        await asyncio.sleep(0.2)
        while not client.complete:
            assert await client.read_some(4096)
            await asyncio.sleep(0.0005)
    assert client.body.count(b'"content":"xxx') == count
    assert (b'"error"' in client.body) is not complete


@pytest.mark.parametrize(
    "body",
    [b"", DONE, b": hi\n\n" * 3, b": hi\n\n" + DONE, sse(b"{}") + DONE, b"\n\n\n", b"data"],
    ids=["empty", "only DONE", "comments", "comments and DONE", "no chunk", "lines", "half"],
)
async def test_a_stream_without_a_choice(stack: Stack, body: bytes) -> None:
    """M3.4: empty, only comments, only `[DONE]`: a failure, not an empty answer."""
    answer = await stack.ask(Send(body), Eof())
    assert answer.in_band["code"] == "upstream_error"
    assert len(answer.data) == 2
    assert answer.chunks[0]["id"].startswith("chatcmpl-")


async def test_a_stream_of_usage_alone(stack: Stack) -> None:
    """M2.4, M3.4: it has no choice either, and its usage is not told."""
    usage = sse(chunk(None, choices=[], usage={"prompt_tokens": 1}))
    answer = await stack.ask(Send(usage + DONE), stream_options={"include_usage": True})
    assert answer.in_band["code"] == "upstream_error"
    assert len(answer.data) == 2


async def test_a_whole_answer_without_done(stack: Stack) -> None:
    """M3.4, B21: EOF after a finish_reason is a normal end."""
    for end in (Eof(), Fin(), Rst()):
        answer = await stack.ask(Send(sse(A) + sse(STOP)), end)
        assert answer.data == [served(A), served(STOP), b"[DONE]"]
        assert (await stack.line(answer))["outcome"] == "completed"


async def test_done_without_a_finish_reason(stack: Stack) -> None:
    """M3.4: `[DONE]` says that it is all."""
    answer = await stack.ask(Send(sse(A) + DONE))
    assert answer.data == [served(A), b"[DONE]"]
    assert (await stack.line(answer))["outcome"] == "completed"


# --- error events ---------------------------------------------------------------------------------

OWN_ERRORS: Final[dict[str, bytes]] = {
    "object": b'{"error":{"message":"no","code":429,"x":[1.50]}}',
    "spaced": b'{ "error" : { "message" : "no" } }',
    "text": b'{"error":"no"}',
    "typed": b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',
    "flat": b'{"object":"error","message":"no","code":400}',
}


@pytest.mark.parametrize("name", [b"", b"event: error\n", b"event: message\nid: 1\n"])
@pytest.mark.parametrize("error", OWN_ERRORS.values(), ids=OWN_ERRORS.keys())
@pytest.mark.parametrize("before", [b"", sse(A), sse(A) + sse(B) * 3])
@pytest.mark.parametrize("after", [b"", DONE, sse(B) + DONE, sse(STOP)])
async def test_the_upstreams_own_error_event(
    stack: Stack, before: bytes, name: bytes, error: bytes, after: bytes
) -> None:
    """M3.4, B47, B49, B54: first, in the middle or last, it passes as sent; then `[DONE]`, once."""
    answer = await stack.ask(Send(before + name + b"data: " + error + b"\n\n" + after))
    assert answer.data[-2:] == [error, b"[DONE]"]
    assert len(answer.data) == before.count(b"data:") + 2
    assert (await stack.line(answer))["error_code"] == "upstream_error"


async def test_an_error_inside_a_chunk(stack: Stack) -> None:
    """M2.2, M3.4: passes as sent but for model and provider; nothing of the upstream's follows."""
    error = chunk("", finish_reason="error", error={"code": 502, "message": "no"})
    answer = await stack.ask(Send(sse(A) + sse(error) + sse(STOP) + DONE))
    assert answer.data == [served(A), served(error), b"[DONE]"]


@pytest.mark.parametrize(
    ("data", "raw"),
    [
        (b'{"message":"no","code":429}', {"message": "no", "code": 429}),
        (b'{"status":500}', {"status": 500}),
        (b'"overloaded"', "overloaded"),
        (b"overloaded", "overloaded"),
    ],
)
async def test_a_named_error_event_of_another_form(stack: Stack, data: bytes, raw: Any) -> None:
    """M3.4, B47: `event: error` is an error whatever its data; it becomes the error chunk."""
    answer = await stack.ask(Send(sse(A) + b"event: error\ndata: " + data + b"\n\n" + DONE))
    error = answer.in_band
    assert (error["code"], error["metadata"]["raw"]) == ("upstream_error", raw)
