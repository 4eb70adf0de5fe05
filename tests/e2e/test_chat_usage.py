"""M2.4, cases B22 to B31: usage is asked for always, read everywhere, and told once if asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Fin,
    Head,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    compact,
    openai_stream,
    sse,
)
from tests.support.stack import API_V1, V1, Stack, served

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED: Final[dict[str, Any]] = {"stream_options": {"include_usage": True}}
NOT_ASKED: Final[list[dict[str, Any]]] = [
    {},
    {"stream_options": None},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": None}},
    {"stream_options": {"include_obfuscation": True}},
]

COUNT: Final = {"prompt_tokens": 23, "completion_tokens": 235, "total_tokens": 258}
ZERO: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
DETAILED: Final = COUNT | {
    "prompt_tokens_details": {"cached_tokens": 20, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 64},
    "cost": 0.00014,
    "queue_time": 1.5e-05,
}
NULL: Final[dict[str, Any]] = {"usage": None}


def tally(usage: object, **more: Any) -> bytes:
    """The usage chunk of an upstream."""
    return chunk(None, choices=[], usage=usage, **more)


def spaced(*chunks: bytes) -> list[bytes]:
    """As `json.dumps` writes them, and with even more space."""
    return [json.dumps(json.loads(data)).replace(": ", ":  ").encode() for data in chunks]


def groq(usage: object) -> dict[str, Any]:
    return {"x_groq": {"id": "req_1", "usage": usage}}


def counted(completion: int) -> dict[str, int]:
    return {"prompt_tokens": 23, "completion_tokens": completion, "total_tokens": 23 + completion}


FIRST: Final = chunk("", role="assistant")
A: Final = chunk("a")
STOP: Final = chunk(None, finish_reason="stop")

# name → the chunks that the upstream sends, the usage that the client must get if it asked
STREAMS: Final[dict[str, tuple[list[bytes], dict[str, Any]]]] = {
    "usage chunk (B22)": ([FIRST, A, STOP, tally(COUNT)], COUNT),
    "with details": ([FIRST, A, STOP, tally(DETAILED)], DETAILED),
    "zero (B27)": ([FIRST, A, STOP, tally(ZERO)], ZERO),
    "null on every chunk": (
        [chunk("", role="assistant", **NULL), chunk("a", **NULL)] * 2
        + [chunk(None, finish_reason="stop", **NULL), tally(COUNT)],
        COUNT,
    ),
    "on the finish chunk": ([FIRST, A, chunk(None, finish_reason="stop", usage=COUNT)], COUNT),
    "on every chunk (B28)": (
        [chunk("", role="assistant", usage=counted(0))]
        + [chunk("a", usage=counted(n)) for n in range(1, 101)]
        + [chunk(None, finish_reason="stop", usage=counted(100))],
        counted(100),
    ),
    "on every chunk and at the end": (
        [FIRST, *(chunk("a", usage=counted(n)) for n in range(50)), STOP, tally(COUNT)],
        COUNT,
    ),
    "only in x_groq (B31)": ([FIRST, A, chunk(None, finish_reason="stop", **groq(COUNT))], COUNT),
    "in x_groq and again (B31)": (
        [FIRST, A, chunk(None, finish_reason="stop", **groq(COUNT)), tally(COUNT)],
        COUNT,
    ),
    "in x_groq of a chunk without choices": (
        [FIRST, A, STOP, chunk(None, choices=[], **groq(COUNT))],
        COUNT,
    ),
    "in x_groq, beside a null": ([FIRST, A, STOP, tally(None, **groq(COUNT))], COUNT),
    "before the finish": ([FIRST, tally(counted(1)), A, tally(COUNT), STOP], COUNT),
    "an empty one after it": ([FIRST, A, STOP, tally(COUNT), tally({})], COUNT),
    "without choices": ([FIRST, A, STOP, tally(COUNT).replace(b'"choices":[],', b"")], COUNT),
    "null choices": ([FIRST, A, STOP, tally(COUNT).replace(b"[]", b"null")], COUNT),
    "alone": ([FIRST, A, STOP, compact({"usage": COUNT})], COUNT),
    "spaced": (spaced(FIRST, A, STOP, tally(COUNT)), COUNT),
    "spaced, on every chunk": (
        spaced(FIRST, chunk("a", usage=counted(1)), STOP, tally(COUNT)),
        COUNT,
    ),
}
ENDS: Final[dict[str, list[Step]]] = {"done": [Send(DONE)], "eof": [Eof()], "cut": [Fin()]}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize(("chunks", "usage"), STREAMS.values(), ids=STREAMS.keys())
async def test_usage_is_told_once_if_asked(
    stack: Stack, chunks: list[bytes], usage: dict[str, Any], end: list[Step]
) -> None:
    """M2.4, B22, B31: the last chunk before `[DONE]`, without choices, and on no other chunk."""
    answer = await stack.ask(*(Send(sse(data)) for data in chunks), *end, **ASKED)
    *before, last = answer.chunks
    assert (last["choices"], last["usage"]) == ([], usage)
    assert (last["id"], last["object"]) == ("chatcmpl-fake", "chat.completion.chunk")
    assert (last["model"], last["provider"]) == ("test/model", "fake")
    assert all(not chunk.get("usage") for chunk in before)
    assert before[-1]["choices"][0]["finish_reason"] == "stop"
    line = await stack.line(answer)
    assert (line["outcome"], line["status"]) == ("completed", 200)


@pytest.mark.parametrize("options", NOT_ASKED, ids=json.dumps)
@pytest.mark.parametrize(("chunks", "usage"), STREAMS.values(), ids=STREAMS.keys())
async def test_usage_is_metered_but_not_told_if_not_asked(
    stack: Stack, chunks: list[bytes], usage: dict[str, Any], options: dict[str, Any]
) -> None:
    """M2.4, B22, B24, B27, B28: no chunk bears it, nor a null; none lacks choices."""
    answer = await stack.ask(*(Send(sse(data)) for data in chunks), Send(DONE), **options)
    assert answer.text == "a" * sum(b'"a"' in data for data in chunks)
    for chunk_ in answer.chunks:
        assert "usage" not in chunk_
        assert "usage" not in chunk_.get("x_groq", {})
        assert chunk_["choices"]
    line = await stack.line(answer)
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"]
    assert (await stack.request()).json["stream_options"]["include_usage"] is True


@pytest.mark.parametrize("base", [V1, API_V1])
async def test_both_bases_treat_usage_alike(stack: Stack, base: str) -> None:
    """M2.4: /api/v1 too tells it only if asked."""
    answer = await stack.ask(*openai_stream(["a"]), base=base)
    assert not any("usage" in chunk for chunk in answer.chunks)
    answer = await stack.ask(*openai_stream(["a"]), base=base, **ASKED)
    assert answer.chunks[-1]["usage"]["total_tokens"] == 8


# --- byte for byte --------------------------------------------------------------------------------

NULLS: Final[dict[str, tuple[str, str]]] = {
    "behind": ('"choices":[@],"usage":null}', '"choices":[@]}'),
    "before": ('"usage":null,"choices":[@]}', '"choices":[@]}'),
    "between": ('"choices":[@],"usage":null,"z":1}', '"choices":[@],"z":1}'),
    "spaced": ('"choices": [@] , "usage" : null , "z": 1 }', '"choices": [@] , "z": 1 }'),
}


@pytest.mark.parametrize(("sent", "left"), NULLS.values(), ids=NULLS.keys())
async def test_only_a_null_of_our_asking_is_cut_out(stack: Stack, sent: str, left: str) -> None:
    """M2.2, M2.4: as bytes, with one comma; one that the client asked for stays as sent."""

    def fill(tail: str, model: str) -> list[bytes]:
        choices = [
            '{"index":0,"delta":{"role":"assistant","content":""}}',
            *['{"index":0,"delta":{"content":"\\"usage\\":null"}}'] * 3,
            '{"index":0,"delta":{},"finish_reason":"stop"}',
        ]
        return [(f'{{"id":"i",{model},' + tail.replace("@", c)).encode() for c in choices]

    steps = [Send(sse(data)) for data in fill(sent, '"model":"up"')]
    ours = '"model":"test/model","provider":"fake"'
    answer = await stack.ask(*steps, Send(DONE))
    assert answer.data == [*fill(left, ours), b"[DONE]"]
    answer = await stack.ask(*steps, Send(DONE), **ASKED)
    assert answer.data == [*fill(sent, ours), b"[DONE]"]
    answer = await stack.ask(*steps, Send(DONE), model="plain/m")
    assert answer.data == [*fill(sent, '"model":"plain/m","provider":"plain"'), b"[DONE]"]
    assert "stream_options" not in stack.requests[-1].json


async def test_the_upstreams_own_usage_chunk_passes_as_sent(stack: Stack) -> None:
    """M2.2, M2.4: number spelling, order and unknown fields of the usage too."""
    raw = tally("@", z="é").replace(
        b'"@"', b'{"b":1.50,"prompt_tokens": 1,"completion_tokens":2e0}'
    )
    answer = await stack.ask(
        *openai_stream(["a"], usage=False, done=False), Send(sse(raw)), **ASKED
    )
    assert answer.data[-2:] == [served(raw), b"[DONE]"]


async def test_groq_keeps_the_rest_of_its_field(stack: Stack) -> None:
    """M2.2, B31: only the usage is withheld from `x_groq`; a first one without it is untouched."""
    first = chunk("", role="assistant", x_groq={"id": "req_1", "z": 1.50})
    last = chunk(None, finish_reason="stop", **groq(COUNT))
    answer = await stack.ask(Send(sse(first) + sse(A) + sse(last)))
    assert answer.data[0] == served(first)
    assert answer.chunks[-1]["x_groq"] == {"id": "req_1"}


# --- endings --------------------------------------------------------------------------------------

FAILURES: Final[dict[str, list[Step]]] = {
    "eof": [Eof()],
    "reset": [Rst()],
    "error event": [Send(sse(b'{"error":{"message":"no"}}'))],
    "error chunk": [Send(sse(chunk(None, finish_reason="error", error={"message": "no"})))],
    "not JSON": [Send(b"data: {\n\n")],
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_no_usage_after_an_error(stack: Stack, failure: list[Step]) -> None:
    """M2.4, B49: although the client asked and the upstream had told some; it is metered."""
    body = sse(FIRST) + sse(chunk("a", usage=COUNT)) + sse(tally(counted(7)))
    answer = await stack.ask(Send(body), *failure, **ASKED)
    assert any("error" in chunk for chunk in answer.chunks)
    assert not any(chunk.get("usage") for chunk in answer.chunks)
    line = await stack.line(answer)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (23, 7)
    assert line["outcome"] in ("upstream_error", "truncated")


async def test_reading_goes_on_after_the_finish_reason(stack: Stack) -> None:
    """B22: usage that comes a while after the finish is read and told."""
    gate = asyncio.Event()
    steps: list[Step] = [Send(sse(FIRST) + sse(chunk("a", finish_reason="length"))), Wait(gate)]
    async with stack.client(*steps, Send(sse(tally(COUNT)) + DONE), **ASKED) as client:
        await client.read_until(lambda c: b'"length"' in c.body)
        gate.set()
        await client.read_all()
    assert json.loads(client.events[-2][6:])["usage"] == COUNT


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_usage_that_lacks_its_blank_line_is_read(stack: Stack, missing: int) -> None:
    """B08, B22: the last event of a body without `[DONE]` counts if it is whole."""
    last = sse(tally(COUNT))
    body = sse(FIRST) + sse(A) + sse(STOP) + last[: len(last) - missing]
    answer = await stack.ask(Send(body), Eof(), **ASKED)
    assert answer.chunks[-1]["usage"] == COUNT


async def test_what_is_no_count_is_no_usage(stack: Stack) -> None:
    """M2.4: negative, textual or absurd counts are not metered, and do no harm."""
    for bad in (-1, "7", True, [1], 1e300, {"a": 1}):
        usage = tally({"prompt_tokens": bad, "completion_tokens": bad})
        answer = await stack.ask(Send(sse(FIRST) + sse(A) + sse(STOP) + sse(usage) + DONE))
        assert [chunk["choices"] != [] for chunk in answer.chunks] == [True, True, True]
        assert (await stack.line(answer))["source"] == "counted"


async def test_a_plain_reply_has_its_usage(stack: Stack) -> None:
    """M2.4: whatever was asked, and it is metered."""
    reply = compact({"choices": [{"index": 0, "message": {"content": "a"}}], "usage": DETAILED})
    head = Head(headers={"content-type": "application/json"})
    answer = await stack.ask(head, Send(reply), stream=False)
    assert answer.json["usage"] == DETAILED
    assert (await stack.line(answer))["completion_tokens"] == 235
