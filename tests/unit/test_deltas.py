"""The text of our own streams, read back raw (W2.2, W3.4, B20)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoders.deltas import DeltaReader, RawText, decoded
from encoders.translator import NotAChunk, ReplyTooLarge
from encoders.usage import TokenUsage
from relay.upstreams.replay import Transcript
from tests.unit.test_golden import FIXTURES, TRANSCRIPTS, VARIANTS, relayed

GOLDEN = sorted((FIXTURES / "golden").glob("*.sse"))
DONE = b"data: [DONE]\n\n"


def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8") + b"\n\n"


def said(text: str) -> bytes:
    return event({"content": text})


def raw_event(raw: bytes) -> bytes:
    """A chunk whose text is spelled so."""
    return said("MARK").replace(b"MARK", raw)


def plainly(sse: bytes) -> tuple[str, str | None]:
    """Text and last finish_reason of choice 0, every event parsed."""
    text, finish = "", None
    for line in sse.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:]).get("choices") or ():
            if choice.get("index", 0) == 0:
                text += (choice.get("delta") or {}).get("content") or ""
                finish = choice.get("finish_reason") or finish
    return text, finish


def read(*reads: bytes) -> tuple[bytes, DeltaReader]:
    reader = DeltaReader()
    return b"".join(map(reader.feed, reads)), reader


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_what_every_shape_streams_is_read_as_if_all_was_parsed(path: Any) -> None:
    sse = path.read_bytes()
    text, finish = plainly(sse)
    raw, reader = read(sse)
    assert decoded(raw) == text
    assert reader.finish_reason == finish
    assert reader.done == sse.endswith(DONE)
    events = [part + b"\n\n" for part in sse.split(b"\n\n")[:-1]]
    singly, alone = read(*events)
    assert singly == raw
    assert (alone.finish_reason, alone.usage, alone.error) == (
        reader.finish_reason,
        reader.usage,
        reader.error,
    )


@given(st.sampled_from(sorted(TRANSCRIPTS)), st.data())
@settings(max_examples=150, deadline=None)
def test_the_reads_of_an_upstream_change_nothing(name: str, data: st.DataObject) -> None:
    path = TRANSCRIPTS[name]
    transcript = Transcript.parse(path.read_bytes(), str(path))
    body = b"".join(piece for _, piece in transcript.reads)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=12)))
    reads = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    reader = DeltaReader()
    out: list[bytes] = []

    whole = relayed(transcript, reads, VARIANTS[""])
    at = 0
    while at < len(whole):  # groups of whole events, of any size
        ends = [i + 2 for i in range(at, len(whole)) if whole.startswith(b"\n\n", i)]
        end = ends[data.draw(st.integers(0, min(5, len(ends) - 1)))]
        out.append(reader.feed(whole[at:end]))
        at = end
    text, finish = plainly(whole)
    assert decoded(b"".join(out)) == text
    assert reader.finish_reason == finish


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ['"', "\\", '\\"', "}", ']}],"x":[{', '","role":"tool', "\n\ndata: ", "é", "𝄞"]
    ),
)


@given(st.lists(st.one_of(texts, st.just(None)), max_size=30), st.data())
@example(["a", "b", "\ud83d", "\ude00"], None)
def test_any_grouping_gives_the_same_bytes(
    pieces: list[str | None], data: st.DataObject | None
) -> None:
    events = [
        event({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]})
        if piece is None
        else raw_event(json.dumps(piece)[1:-1].encode())
        for piece in pieces
    ]
    singly, _ = read(*events)
    together, _ = read(b"".join(events))
    assert together == singly
    assert decoded(singly) == "".join(piece or "" for piece in pieces).encode(
        "utf-16", "surrogatepass"
    ).decode("utf-16", "surrogatepass")
    if data is not None and events:
        cut = data.draw(st.integers(0, len(events)))
        assert read(b"".join(events[:cut]), b"".join(events[cut:]))[0] == singly


@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [
                    b"a",
                    b"\xc3",
                    b"\xa9",
                    b"\xf0\x9f",
                    b"\t",
                    b"\\",
                    b"\\n",
                    b"u00e9",
                    b'"',
                    b'\\"',
                    b",",
                ]
            ),
            max_size=3,
        ).map(b"".join),
        max_size=8,
    ),
    st.data(),
)
def test_garbage_in_texts_is_the_same_garbage_in_any_grouping(
    pieces: list[bytes], data: st.DataObject
) -> None:
    events = [said("a"), said("b"), *map(raw_event, pieces)]
    cut = data.draw(st.integers(0, len(events)))
    singly, one = read(*events)
    together, other = read(b"".join(events[:cut]), b"".join(events[cut:]))
    assert together == singly
    assert (one.fault is None) == (other.fault is None)
    decoded(singly)


def test_an_emoji_cut_in_two_stays_one_string() -> None:
    raw, _ = read(said("a"), raw_event(rb"\ud83d"), raw_event(rb"\ude00"), said("z"))
    assert json.loads(b'"%b"' % raw) == "a😀z"


def test_a_text_that_forges_the_end_of_its_string_is_only_text() -> None:
    forged = '"},"finish_reason":"stop"}],"error":{"x":"'
    raw, reader = read(said("a"), said("b") + said(forged) + said("c"))
    assert decoded(raw) == "ab" + forged + "c"
    assert reader.finish_reason is None
    assert reader.error is None


def test_what_only_begins_and_ends_like_a_text_is_parsed() -> None:
    """Between what stands around texts there is more than one string here."""
    more = raw_event(b'x","refusal":"no","content":"y')
    raw, _ = read(said("a"), said("b"), more)
    assert decoded(raw) == "aby"


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"\xff", "\ufffd"), (b"a\tb", "a\tb"), ("\u00e9".encode()[:1], "\ufffd")],
)
def test_bytes_that_no_string_may_hold_become_what_a_lenient_client_reads(
    raw: bytes, text: str
) -> None:
    odd = raw_event(raw)
    assert decoded(read(odd)[0]) == text
    assert decoded(read(said("a"), said("b"), odd)[0]) == "ab" + text
    assert decoded(read(said("a"), said("b") + odd)[0]) == "ab" + text


def test_an_escape_that_json_does_not_have_is_no_chunk() -> None:
    """What came before it in the same read is not lost; what comes after it is not looked at."""
    odd = raw_event(rb"\q")
    for reads in (
        [said("a"), said("b"), odd, said("c")],
        [said("a") + said("b") + odd + said("c")],
    ):
        raw, reader = read(*reads)
        assert raw == b"ab"
        assert isinstance(reader.fault, NotAChunk)


def test_padding_that_changes_with_each_chunk() -> None:
    events = [event({"content": text}, obfuscation="x" * n) for n, text in enumerate("stream")]
    assert read(*events)[0] == b"stream"
    assert read(events[0], b"".join(events[1:]))[0] == b"stream"
    odd = event({"content": 'q"\\'}, obfuscation="y")
    assert decoded(read(*events, odd)[0]) == 'streamq"\\'


def test_reasoning_other_choices_and_refusals_are_no_content() -> None:
    other = {"index": 1, "delta": {"content": "other"}, "finish_reason": None}
    second = b"data: " + json.dumps({"choices": [other]}).encode() + b"\n\n"
    raw, _ = read(
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "hm"}),
        event({"reasoning_content": "hm hm"}),
        second,
        said("yes"),
        event({"refusal": "no"}),
    )
    assert raw == b"yes"


def test_the_rest_of_a_stream() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    failed = {"message": "gone", "type": "upstream_error", "code": "upstream_error"}
    reader = DeltaReader()
    assert reader.feed(said("a") + event({}, "length") + b": a comment\n\n") == b"a"
    assert reader.finish_reason == "length"
    assert not reader.done
    assert (
        reader.feed(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        == b""
    )
    assert reader.usage == TokenUsage(prompt_tokens=3, completion_tokens=2)
    assert reader.feed(event({"content": ""}, "error", error=failed) + DONE) == b""
    assert reader.error == failed
    assert reader.finish_reason == "error"
    assert reader.done


def test_calls_are_put_together() -> None:
    reader = DeltaReader(collect=True)
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    out = reader.feed(
        event({"role": "assistant", "content": "I look"})
        + event({"tool_calls": [begun]})
        + said(" it up")
        + event({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]})
        + event({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]})
        + event({"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "s"}]})
        + event({}, "tool_calls")
    )
    assert out == b"I look it up"
    message = reader.message()
    assert message["role"] == "assistant"
    function = {"name": "f", "arguments": '{"a":1}'}
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert message["reasoning_details"][0]["signature"] == "s"


def test_what_is_collected_is_bounded() -> None:
    reader = DeltaReader(collect=True, collect_bytes_max=1000)
    piece = event({"tool_calls": [{"index": 0, "function": {"arguments": "x" * 100}}]})
    assert reader.feed(said("a") + piece * 10 + said("b")) == b"a"
    assert isinstance(reader.fault, ReplyTooLarge)


@given(st.lists(st.one_of(texts, st.sampled_from(["\ud83d", "\ude00"])), max_size=12))
def test_characters_are_counted_as_of_one_text(pieces: list[str]) -> None:
    counter = RawText()
    raws = [json.dumps(piece)[1:-1].encode() for piece in pieces]
    grown = [counter.add(raw) for raw in raws]
    assert counter.characters == sum(grown) == len(decoded(b"".join(raws)))
