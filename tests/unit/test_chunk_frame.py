"""ChunkFrame: reads spliced whole must be what their events are one by one (M2.2, M2.6)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkRewriter
from encoders.sse import SseDecoder

HEAD: dict[str, Any] = {"id": "c1", "object": "chat.completion.chunk", "created": 9, "model": "up"}
FIRST = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chunk(choice: Any, **more: Any) -> bytes:
    return compact({**HEAD, "choices": [choice], **more})


def text(value: str, **more: Any) -> bytes:
    return chunk({"index": 0, "delta": {"content": value}, "finish_reason": None}, **more)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def rewriter(**options: Any) -> ChunkRewriter:
    """A rewriter that has seen the first chunk and learned its frame."""
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    target = ChunkRewriter(identity, **options)
    more = options.pop("more", {})
    target.rewrite(chunk(FIRST, **more), [])
    target.rewrite(text("learned", **more), [])
    return target


def one_by_one(read: bytes, target: ChunkRewriter) -> bytes:
    out: list[bytes] = []
    for found in SseDecoder().feed(read):
        target.rewrite(found.data, out)
    return b"".join(out)


def assert_same(read: bytes, *, spliced: bool) -> None:
    whole, single = rewriter(), rewriter()
    got = whole.splice(read)
    assert (got is not None) == spliced
    if got is not None:
        assert got == one_by_one(read, single)
        assert whole.characters == single.characters


def test_one_content_chunk_is_spliced() -> None:
    assert_same(event(text("hello")), spliced=True)


def test_a_read_of_many_content_chunks_is_spliced() -> None:
    words = ["a", "", "\u4f60\u597d", 'q"\\', "\n", "[1, 2], ", "data: x"]
    assert_same(b"".join(event(text(word)) for word in words[:5]), spliced=True)
    # A bracket with a comma behind it might close `choices`: these are looked at.
    assert_same(b"".join(event(text(word)) for word in words), spliced=False)


@pytest.mark.parametrize(
    "read",
    [
        b"",
        b"\n\n",
        event(b"[DONE]"),
        event(text("a"))[:-1],  # its end has not come
        event(text("a"))[1:],
        event(text("a")) + b": ping\n\n",
        b": ping\n\n" + event(text("a")),
        event(text("a")) + b"\n" + event(text("b")),
        event(text("a")) + b"event: x\n" + event(text("b")),
        event(text("a")) + b"data: half",
        event(text("a")).replace(b"\n", b"\r\n"),
        event(text("a")) + event(text("b")).replace(b"\n", b"\r\n") + event(text("c")),
        event(text("a")).replace(b"data: ", b"data:"),
        b"data: " + text("a").replace(b'"index"', b'\ndata: "index"') + b"\n\n",
        event(text("a")) + event(chunk({"index": 0, "delta": {}, "finish_reason": "stop"})),
        event(text("a")) + event(chunk(FIRST)),
        event(text("a")) + event(chunk({"index": 1, "delta": {"content": "b"}})),
        event(text("a", usage={"prompt_tokens": 1})),
        event(text("a")) + event(compact({"error": {"message": "no"}})),
        event(chunk({"index": 0, "delta": {"tool_calls": [{"index": 0}]}})),
        event(compact({**HEAD, "choices": []})),
        event(compact({**HEAD, "model": "other", "choices": [FIRST]})),
    ],
)
def test_what_is_not_only_content_is_looked_at(read: bytes) -> None:
    assert_same(read, spliced=False)


def test_nothing_is_spliced_before_a_frame_is_learned() -> None:
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    assert ChunkRewriter(identity).splice(event(text("a"))) is None
    assert ChunkRewriter(identity).splice(b"") is None


pieces = st.one_of(
    st.text(max_size=8).map(text).map(event),
    st.sampled_from(
        [
            event(b"[DONE]"),
            event(chunk({"index": 0, "delta": {}, "finish_reason": "stop"})),
            event(text("x", obfuscation="abc")),
            b": ping\n\n",
            b"\n",
            b"data: ",
            text("cut"),
            b"\r\n",
            b"]",
            b"]}",
            b'{"choices":[',
        ]
    ),
    st.binary(max_size=6),
)


@given(st.lists(pieces, max_size=6).map(b"".join), st.integers(0, 40), st.integers(0, 40))
def test_whatever_is_spliced_is_what_its_events_are(read: bytes, start: int, end: int) -> None:
    for piece in (read, read[start:], read[: len(read) - end]):
        whole, single = rewriter(), rewriter()
        got = whole.splice(piece)
        if got is not None:
            assert got == one_by_one(piece, single)
            assert whole.characters == single.characters
            assert SseDecoder().feed(piece)  # whole events, and nothing is left over


@given(st.lists(st.text(max_size=12), min_size=1, max_size=20))
def test_content_is_spliced_unless_it_has_brackets(words: list[str]) -> None:
    read = b"".join(event(text(word)) for word in words)
    assert_same(read, spliced="]" not in read.decode().replace("}]}", ""))
