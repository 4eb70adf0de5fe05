"""ChunkFrame: reads spliced whole must be what their events are one by one (M2.2, M2.6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkRewriter
from encoders.sse import SseDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD: dict[str, Any] = {"id": "c1", "object": "chat.completion.chunk", "created": 9, "model": "up"}
FIRST = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chunk(choice: Any, **more: Any) -> bytes:
    return compact({**HEAD, "choices": [choice], **more})


def text(value: str, **more: Any) -> bytes:
    return chunk({"index": 0, "delta": {"content": value}, "finish_reason": None}, **more)


def reasoning(value: str) -> bytes:
    delta = {"reasoning_content": value}
    return chunk({"index": 0, "delta": delta, "finish_reason": None})


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


def taught(chunk_of: bytes) -> ChunkRewriter:
    """A rewriter that has seen one chunk more."""
    target = rewriter()
    target.rewrite(chunk_of, [])
    return target


TEACHERS: dict[str, Callable[[], ChunkRewriter]] = {
    "content": rewriter,
    "reasoning": lambda: taught(reasoning("teach")),
    "no text": lambda: taught(chunk({"index": 0, "delta": {}, "finish_reason": None})),
}


def assert_same(read: bytes, *, whole: bool | None) -> None:
    """However much was learned, what is spliced is what its events are one by one.

    Args:
        whole: whether all of it is spliced once texts of content are known; None: either will do.
    """
    for name, teacher in TEACHERS.items():
        target, single = teacher(), teacher()
        got = target.splice(read)
        if name == "content" and whole is not None:
            assert (got is not None and got[1] == len(read)) == whole
        if got is not None:
            frames, size = got
            assert frames == one_by_one(read[:size], single)
            assert target.characters == single.characters
            assert SseDecoder().feed(read[:size])  # whole events
            assert read[:size].endswith(b"\n\n")


def test_content_chunks_are_spliced_whatever_stands_in_their_texts() -> None:
    words = ["hello", "", "\u4f60\u597d", 'q"\\', "\n", "[1, 2], ", "data: x", '"role":"x"']
    for count in range(1, len(words) + 1):
        assert_same(b"".join(event(text(word)) for word in words[:count]), whole=True)


def test_a_run_ends_where_something_else_begins() -> None:
    run = event(text("a")) + event(text("b"))
    finish = event(chunk({"index": 0, "delta": {}, "finish_reason": "stop"}))
    for behind in (finish, event(b"[DONE]"), event(reasoning("c"))):
        target = rewriter()
        assert target.splice(run + behind + event(text("d"))) == (
            one_by_one(run, rewriter()),
            len(run),
        )


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
        event(reasoning("a")) + event(text("b", usage=None)),
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
    assert_same(read, whole=False)


@pytest.mark.parametrize("inside", [b"a\\", b'a"', b'a","role":"x', b"a\n", b"a\r", b"\\u00"])
def test_what_is_no_string_is_not_taken_for_one(inside: bytes) -> None:
    """Broken JSON in a valid frame passes as sent; it never becomes another event."""
    read = event(text("MARK").replace(b"MARK", inside))
    got = rewriter().splice(read)
    if got is not None:
        assert got[0].count(b"\n") == 2
        assert got == (one_by_one(read, rewriter()), len(read))


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
        assert_same(piece, whole=None)


@given(st.lists(st.text(max_size=12), min_size=1, max_size=20))
def test_content_is_always_spliced(words: list[str]) -> None:
    assert_same(b"".join(event(text(word)) for word in words), whole=True)


@given(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), st.just("x")),
    st.sampled_from([None, "stop", ""]),
    st.sampled_from(["", "], [", '"usage":{}', '"error":1']),
)
def test_a_marked_chunk_in_the_frame_is_what_it_is_when_parsed_whole(
    delta: dict[str, Any], finish: str | None, content: str
) -> None:
    """The short way gives the bytes of the long one: here one space more keeps it out of the
    frame."""
    delta = delta | {"content": content}
    data = chunk({"index": 0, "delta": delta, "finish_reason": finish})
    in_frame, parsed = rewriter(), rewriter()
    short: list[bytes] = []
    long: list[bytes] = []
    in_frame.rewrite(data, short)
    parsed.rewrite(data[:-1] + b" }", long)
    assert b"".join(short) == b"".join(long).replace(b" }\n", b"}\n")
    assert in_frame.characters == parsed.characters
    assert in_frame.finished == parsed.finished


def test_a_text_that_is_none_of_the_answer_is_not_spliced_as_one() -> None:
    target = taught(chunk({"index": 0, "delta": {}, "note": {"content": "abc"}}))
    read = event(chunk({"index": 0, "delta": {}, "note": {"content": "abcdef"}})) * 3
    assert target.splice(read) is None
    before = target.characters
    one_by_one(read, target)
    assert target.characters == before == len("learned")
