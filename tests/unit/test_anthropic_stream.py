"""M2.3 to M2.6, M3.4: streams and whole replies of the Messages API on the OpenAI wire."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.anthropic_stream import MessagesTranslator
from encoders.json_text import dumps, loads
from encoders.openai import ChunkIdentity
from encoders.shape_translator import ShapeTranslator
from encoders.shapes import SHAPES
from encoders.translator import CALLS_MAX, Kind, NotAChunk, ReplyTooLarge, StreamWants
from encoders.usage import TokenUsage
from relay.upstreams.replay import Transcript
from tests.unit.test_golden import FIXTURES, TRANSCRIPTS, relayed

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = SHAPES["anthropic"]
FOLDER = FIXTURES / "anthropic"
USAGE = {"input_tokens": 25, "output_tokens": 1}
START = {"type": "message_start", "message": {"id": "msg_1", "usage": USAGE}}
STOP = {"type": "message_stop"}


def identity() -> ChunkIdentity:
    return ChunkIdentity(model="m", provider="p", id="ours", created=7)


def opened(block: dict[str, Any], index: Any = 0) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(index: Any = 0, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def said(text: str, index: Any = 0) -> dict[str, Any]:
    return piece(index, type="text_delta", text=text)


def closed(index: Any = 0) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str | None = "end_turn", **usage: int) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": reason}}
    return event | ({"usage": usage} if usage else {})


class Reading:
    """What a translator makes of events."""

    def __init__(self, *events: Any, **wants: Any) -> None:
        self.translator = MessagesTranslator(identity(), StreamWants(**wants))
        self.out: list[bytes] = []
        self.kinds = [
            self.translator.rewrite(e if isinstance(e, bytes) else dumps(e), self.out)
            for e in events
        ]
        self.bytes = b"".join(self.out) + self.translator.flush() + self.translator.closing()
        self.chunks = [
            loads(line.removeprefix(b"data: ")) for line in self.bytes.split(b"\n\n") if line
        ]
        self.choices = [c["choices"][0] for c in self.chunks if c["choices"]]
        self.deltas = [choice["delta"] for choice in self.choices]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls as a client puts them together."""
        calls: dict[int, dict[str, Any]] = {}
        for delta in self.deltas:
            for part in delta.get("tool_calls", ()):
                if part["index"] not in calls:
                    calls[part["index"]] = part
                else:
                    assert part.keys() == {"index", "function"}
                    assert part["function"].keys() == {"arguments"}
                    call = calls[part["index"]]["function"]
                    call["arguments"] += part["function"]["arguments"]
        return [calls[index] for index in sorted(calls)]


# --- text, role, finish ---------------------------------------------------------------------------


def test_a_primer_precedes_the_first_content_and_no_other_chunk_has_a_role() -> None:
    """M2.3; a message that only began has none yet, so that it may still fail (B54)."""
    assert Reading(START, opened({"type": "text", "text": ""})).chunks == []
    reading = Reading(START, opened({"type": "text", "text": ""}), said("a"), said("b"), closed())
    assert reading.deltas == [{"role": "assistant", "content": ""}, {"content": "a"},
                              {"content": "b"}]  # fmt: skip
    assert {(c["id"], c["model"], c["provider"], c["created"]) for c in reading.chunks} == {
        ("msg_1", "m", "p", 7)
    }


def test_an_answer_of_nothing_is_an_answer() -> None:
    reading = Reading(START, ended("end_turn"), STOP)
    assert reading.choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert reading.choices[-1]["finish_reason"] == "stop"
    assert reading.kinds[-1] is Kind.DONE


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("", "stop"),
        ("a reason of tomorrow", "stop"),
    ],
)
def test_why_it_stopped(native: str, reason: str) -> None:
    """M2.5, B63: total, and the provider's own word stays beside it."""
    choice = Reading(START, said("a"), ended(native), ended("max_tokens"), STOP).choices[-1]
    assert (choice["finish_reason"], choice["native_finish_reason"]) == (reason, native)


def test_an_end_without_a_reason() -> None:
    """`message_stop` is the end all the same; a report of usage in between is none."""
    reading = Reading(START, said("a"), ended(None, output_tokens=3), said("b"), STOP)
    assert [choice["finish_reason"] for choice in reading.choices] == [None, None, None, "stop"]
    assert not Reading(START, said("a")).translator.finished


# --- tools ----------------------------------------------------------------------------------------


def use(call_id: str = "toolu_1", name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}} | more


def part(json_text: Any, index: int = 0) -> dict[str, Any]:
    return piece(index, type="input_json_delta", partial_json=json_text)


@pytest.mark.parametrize("fragments", [[], [""], ["", ""], [None]])
def test_empty_arguments_are_an_empty_object(fragments: list[Any]) -> None:
    """M2.6, B42."""
    reading = Reading(START, opened(use()), *map(part, fragments), closed(), ended("tool_use"))
    function = {"name": "f", "arguments": "{}"}
    assert reading.calls == [
        {"index": 0, "id": "toolu_1", "type": "function", "function": function}
    ]


def test_arguments_that_the_start_gives_whole() -> None:
    """M2.6; fragments that follow count instead of them."""
    whole = use(input={"city": "Å"})
    assert Reading(opened(whole), closed()).calls[0]["function"]["arguments"] == '{"city":"Å"}'
    (call,) = Reading(opened(whole), part('{"city":'), part('"B"}'), closed()).calls
    assert call["function"]["arguments"] == '{"city":"B"}'


def test_blocks_that_interleave_are_bound_by_their_index() -> None:
    """M2.6, M2.7: a call's number counts calls, not blocks."""
    reading = Reading(
        START,
        opened({"type": "text", "text": ""}, 0),
        opened(use("a"), 1),
        opened(use("b"), 4),
        part('{"x"', 4),
        said("t", 0),
        part('{"y"', 1),
        part(":1}", 4),
        closed(4),
        part(":2}", 1),
        said("u", 0),
        closed(0),
        closed(1),
    )
    assert [(c["index"], c["id"], c["function"]["arguments"]) for c in reading.calls] == [
        (0, "a", '{"y":2}'),
        (1, "b", '{"x":1}'),
    ]
    assert "".join(delta.get("content", "") for delta in reading.deltas) == "tu"


def test_a_call_that_was_cut_off_is_not_completed() -> None:
    """M2.7: nobody must dispatch it."""
    for events in ([opened(use())], [opened(use()), part('{"a": "b')]):
        reading = Reading(START, *events, ended("max_tokens"), STOP)
        with pytest.raises(ValueError, match=r"Expecting value|Unterminated"):
            json.loads(reading.calls[0]["function"]["arguments"])
        assert reading.choices[-1]["finish_reason"] == "length"


def test_a_call_without_an_id_gets_one() -> None:
    block = {"type": "tool_use", "name": "f"}
    calls = Reading(START, opened(block), closed(), opened(block, 1), closed(1)).calls
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"] for call in calls)


def test_the_providers_own_tools_are_no_calls_for_the_client() -> None:
    """Nobody could answer them; what they found is cited."""
    citation = {"type": "web_search_result_location", "url": "https://h", "cited_text": "c"}
    page = {"type": "page_location", "document_index": 0, "start_page_number": 1}
    reading = Reading(
        START,
        said("Well. "),
        opened({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, 1),
        part('{"query": 1}', 1),
        closed(1),
        opened({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, 2),
        closed(2),
        opened({"type": "text", "text": "", "citations": [page]}, 3),
        piece(3, type="citations_delta", citation=citation),
        said("Yes.", 3),
        closed(3),
    )
    assert reading.calls == []
    assert reading.deltas[-1]["annotations"] == [
        {"type": "page_location", "page_location": {"document_index": 0, "start_page_number": 1,
                                                    "start_index": 6, "end_index": 10}},
        {"type": "url_citation", "url_citation": {"url": "https://h", "title": "", "content": "c",
                                                  "start_index": 6, "end_index": 10}},
    ]  # fmt: skip


# --- thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_is_told_once_and_kept_with_its_signature(field: Any) -> None:
    """M2.6, B90."""
    reading = Reading(
        opened({"type": "thinking", "thinking": "a"}),
        piece(type="thinking_delta", thinking='b"\n'),
        piece(type="signature_delta", signature="sig"),
        closed(),
        opened({"type": "redacted_thinking", "data": "x"}, 1),
        closed(1),
        reasoning_field=field,
    )
    entry = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
    assert reading.deltas[1:] == [
        {field: "a", "reasoning_details": [entry | {"text": "a"}]},
        {field: 'b"\n', "reasoning_details": [entry | {"text": 'b"\n'}]},
        {"reasoning_details": [entry | {"text": "", "signature": "sig"}]},
        {"reasoning_details": [entry | {"type": "reasoning.encrypted", "data": "x", "index": 1}]},
    ]
    assert reading.translator.characters == 4


# --- usage ----------------------------------------------------------------------------------------


def test_usage_of_the_start_and_of_the_end_are_not_added_up() -> None:
    """M2.4, B29."""
    reading = Reading(START, said("a"), ended(output_tokens=15), STOP, include_usage=True)
    usage = {"prompt_tokens": 25, "completion_tokens": 15, "total_tokens": 40}
    assert reading.chunks[-1]["usage"] == usage
    assert "usage" not in Reading(START, said("a"), ended(output_tokens=15), STOP).chunks[-1]


def test_cached_tokens_are_prompt_tokens() -> None:
    """M2.4: llama.cpp reports 1 and 31 for a prompt of 32; the last report of each field holds."""
    start = {"input_tokens": 1, "cache_read_input_tokens": 31, "output_tokens": 0}
    reading = Reading({"type": "message_start", "message": {"usage": start}}, said("a"))
    assert reading.translator.usage == TokenUsage(prompt_tokens=32, cached_tokens=31)
    later = ended(input_tokens=5, cache_creation_input_tokens=100, output_tokens=9)
    translator = Reading({"type": "message_start", "message": {"usage": start}}, later).translator
    assert translator.usage == TokenUsage(prompt_tokens=136, cached_tokens=31, completion_tokens=9)


def test_a_first_guess_of_the_output_is_no_report() -> None:
    """M4.2: a stream that breaks off is billed by what was streamed; only an end without any
    other report leaves the guess.
    """
    broken = Reading(START, said("a" * 400)).translator
    assert broken.usage == TokenUsage(prompt_tokens=25)
    assert broken.characters == 400
    done = Reading(START, said("a"), ended(), STOP).translator
    assert done.usage == TokenUsage(prompt_tokens=25, completion_tokens=1)


def test_what_is_no_count_is_no_usage() -> None:
    usage = {"input_tokens": -1, "output_tokens": "7", "cache_read_input_tokens": True}
    start = {"type": "message_start", "message": {"usage": usage}}
    assert Reading(start, said("a"), ended() | {"usage": usage}, STOP).translator.usage is None
    thought = {"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}
    translator = Reading(START, ended() | {"usage": thought}).translator
    assert translator.usage is not None
    assert translator.usage.reasoning_tokens == 4


# --- errors and the unknown -----------------------------------------------------------------------

ERROR = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}


def test_an_error_is_an_error_whenever_it_comes() -> None:
    """M3.4, B47, B54."""
    assert Reading(ERROR).kinds == [Kind.FAILED]
    assert Reading({"error": {"message": "a proxy's"}}).kinds == [Kind.FAILED]
    reading = Reading(START, said("a"), ERROR)
    assert reading.kinds == [Kind.CHUNK, Kind.CHUNK, Kind.FAILED]
    assert not reading.translator.finished


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ping"},
        {"type": "vibe_check", "index": 0},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "hologram"}},
        {"type": "content_block_delta", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "hologram_delta"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": 1}},
        {"type": "content_block_stop", "index": 99},
        {"type": "message_start"},
        {"type": ["odd"]},
        {},
        [],
        7,
        None,
    ],
)
def test_what_is_unknown_is_passed_over(event: Any) -> None:
    """B89."""
    reading = Reading(START, said("a"), event, said("b"))
    assert reading.kinds[2] is Kind.SKIPPED
    assert [delta.get("content") for delta in reading.deltas] == ["", "a", "b"]
    assert reading.translator.last_skipped == dumps(event)


def test_optional_fields_that_are_absent() -> None:
    """B89: a block whose start never came, one without its text, a message without usage."""
    reading = Reading(
        {"type": "message_start", "message": {}},
        said("a", 5),
        opened({"type": "text"}, "x"),
        piece("x", type="text_delta"),
        piece("y", type="thinking_delta", thinking="t"),
        piece("z", type="signature_delta", signature="s"),
        {"type": "message_delta"},
        STOP,
    )
    assert reading.deltas[1] == {"content": "a"}
    assert reading.choices[-1]["finish_reason"] == "stop"


def test_half_of_a_character_does_no_harm() -> None:
    """B20: one cut in two by the provider passes in two halves, as on the other shapes."""
    halves = [
        b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}' % half
        for half in (b"\\ud83d", b"\\ude42")
    ]
    assert b"\\ud83d" in Reading(*halves).bytes
    whole = Reading(*halves, ended(), collect_bytes_max=10**6).translator.result()
    assert loads(whole)["choices"][0]["message"]["content"] == "\U0001f642"


def test_what_is_no_json() -> None:
    with pytest.raises(NotAChunk):
        Reading(b"{")
    assert Reading(START, said("a"), b"[DONE]").kinds[-1] is Kind.DONE


# --- whole replies --------------------------------------------------------------------------------


def message(*content: Any, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "output_tokens": 3}
    return {"id": "msg_9", "type": "message", "role": "assistant", "content": list(content),
            "stop_reason": "end_turn", "usage": usage} | more  # fmt: skip


def test_a_whole_reply() -> None:
    """M1.1: through the code of streams; details and annotations joined."""
    citation = {"type": "web_search_result_location", "url": "https://h", "title": "T"}
    reply = message(
        {"type": "thinking", "thinking": "Hm.", "signature": "sig"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Yes", "citations": [citation]},
        {"type": "text", "text": ", no.", "citations": [citation]},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": 1}},
        use("a", input={"n": 1}),
        use("b"),
        stop_reason="tool_use",
    )
    assert SHAPE.is_reply(reply)
    whole = SHAPE.whole(dumps(reply), reply, identity(), StreamWants(collect_bytes_max=10**6))
    body = loads(whole.body)
    (choice,) = body.pop("choices")
    notes = choice["message"].pop("annotations")
    assert [n["url_citation"]["end_index"] for n in notes] == [3, 8]
    assert body == {
        "id": "msg_9",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "provider": "p",
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    }
    format_ = {"format": "anthropic-claude-v1"}
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes, no.",
        "reasoning_content": "Hm.",
        "reasoning_details": [
            {"type": "reasoning.text", "text": "Hm.", "index": 0, "signature": "sig"} | format_,
            {"type": "reasoning.encrypted", "data": "x", "index": 1} | format_,
        ],
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"n":1}'}},
            {"type": "function", "id": "b", "function": {"name": "f", "arguments": "{}"}},
        ],
    }
    assert (choice["finish_reason"], choice["native_finish_reason"]) == ("tool_calls", "tool_use")
    assert whole.usage == TokenUsage(prompt_tokens=5, completion_tokens=3)
    assert whole.characters == len("Hm.Yes, no.") + len('{"n":1}{}')


@pytest.mark.parametrize("reply", [None, [], {}, {"content": "a"}, ERROR, {"choices": []}])
def test_what_is_no_reply(reply: object) -> None:
    assert not SHAPE.is_reply(reply)


def test_odd_replies_are_read_as_far_as_they_go() -> None:
    reply = message(None, 7, {}, {"type": "text"}, usage=None, stop_reason=None)
    whole = SHAPE.whole(dumps(reply), reply, identity(), StreamWants(collect_bytes_max=10**6))
    (choice,) = loads(whole.body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert whole.usage is None


def test_a_reply_has_a_bound() -> None:
    with pytest.raises(ReplyTooLarge):
        Reading(said("a" * 99), collect_bytes_max=50)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.whole.jsonl")), ids=lambda path: path.stem)
def test_recorded_replies(path: Path) -> None:
    """llama.cpp's own."""
    transcript = Transcript.parse(path.read_bytes(), str(path))
    data = b"".join(data for _, data in transcript.reads)
    reply = loads(data)
    whole = SHAPE.whole(data, reply, identity(), StreamWants(collect_bytes_max=10**6))
    (choice,) = loads(whole.body)["choices"]
    spoken = "".join(block.get("text", "") for block in reply["content"])
    assert (choice["message"]["content"] or "") == spoken
    calls = [
        json.loads(c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])
    ]
    assert calls == [b["input"] for b in reply["content"] if b["type"] == "tool_use"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == reply["usage"]["output_tokens"]


@pytest.mark.parametrize("name", [n for n, path in TRANSCRIPTS.items() if path.parent == FOLDER])
def test_a_collected_stream_says_what_the_stream_said(name: str) -> None:
    """M4.1: the same transcript, aggregated."""
    transcript = Transcript.parse(TRANSCRIPTS[name].read_bytes(), name)
    body = b"".join(data for _, data in transcript.reads)
    events = [
        line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")
    ]
    streamed = Reading(*events)
    if not streamed.translator.finished:
        return
    collected = Reading(*events, collect_bytes_max=10**6)
    assert collected.bytes == b""
    (choice,) = loads(collected.translator.result())["choices"]
    text = "".join(delta.get("content", "") for delta in streamed.deltas)
    thought = "".join(delta.get("reasoning_content", "") for delta in streamed.deltas)
    assert (choice["message"]["content"] or "") == text
    assert choice["message"].get("reasoning_content", "") == thought
    assert [c["function"] for c in choice["message"].get("tool_calls", [])] == [
        c["function"] for c in streamed.calls
    ]
    assert choice["finish_reason"] == streamed.choices[-1]["finish_reason"]


# --- properties -----------------------------------------------------------------------------------


@given(name=st.sampled_from(sorted(n for n, p in TRANSCRIPTS.items() if p.parent == FOLDER)),
       data=st.data())  # fmt: skip
def test_any_cut_of_any_transcript_gives_the_same_bytes(name: str, data: st.DataObject) -> None:
    """Issue 4: whatever the reads."""
    transcript = Transcript.parse(TRANSCRIPTS[name].read_bytes(), name)
    body = b"".join(part for _, part in transcript.reads)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=12)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    wants = StreamWants(include_usage=data.draw(st.booleans()))
    assert relayed(transcript, pieces, wants) == relayed(transcript, [body], wants)


texts = st.text(max_size=6)


@given(
    blocks=st.lists(
        st.tuples(st.sampled_from(["text", "thinking", "tool"]), st.lists(texts, max_size=4)),
        max_size=4,
    ),
    order=st.randoms(use_true_random=False),
)
def test_blocks_in_any_interleaving_keep_their_own(
    blocks: list[tuple[str, list[str]]], order: Any
) -> None:
    """M2.6: each call and each thought gets its own pieces in their order."""
    queues: list[list[dict[str, Any]]] = []
    for index, (kind, pieces) in enumerate(blocks):
        match kind:
            case "text":
                first, rest = {"type": "text", "text": ""}, [said(p, index) for p in pieces]
            case "thinking":
                first = {"type": "thinking", "thinking": ""}
                rest = [piece(index, type="thinking_delta", thinking=p) for p in pieces]
            case _:
                first = use(f"id{index}")
                rest = [part(dumps(p).decode(), index) for p in pieces]
        queues.append([opened(first, index), *rest, closed(index)])
    events: list[dict[str, Any]] = []
    while any(queues):
        events.append(order.choice([queue for queue in queues if queue]).pop(0))
    reading = Reading(START, *events, ended("tool_use", output_tokens=1), STOP)
    for call in reading.calls:
        kind, pieces = blocks[int(call["id"].removeprefix("id"))]
        assert kind == "tool"
        assert call["function"]["arguments"] == "".join(dumps(p).decode() for p in pieces) or "{}"
    assert len(reading.calls) == sum(kind == "tool" for kind, _ in blocks)
    details: dict[int, str] = {}
    for delta in reading.deltas:
        for entry in delta.get("reasoning_details", ()):
            details[entry["index"]] = details.get(entry["index"], "") + entry["text"]
    expected = sorted("".join(p) for kind, p in blocks if kind == "thinking" and "".join(p))
    assert sorted(details.values()) == expected
    assert [("role" in delta) for delta in reading.deltas] == [True] + [False] * (
        len(reading.deltas) - 1
    )


@given(
    events=st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["message_start", "content_block_start", "content_block_stop",
                                      "content_block_delta", "message_delta", "message_stop"])},
            optional={
                "index": st.integers(0, 2) | st.none() | texts,
                "message": st.dictionaries(st.sampled_from(["id", "usage"]), texts),
                "usage": st.dictionaries(texts, texts) | st.none() | texts,
                "content_block": st.fixed_dictionaries(
                    {"type": st.sampled_from(["text", "thinking", "tool_use",
                                              "redacted_thinking"])},
                    optional={k: st.none() | texts | st.integers() | st.lists(texts, max_size=2)
                              for k in ("text", "id", "name", "input", "thinking", "signature",
                                        "data", "citations")},
                ),
                "delta": st.fixed_dictionaries(
                    {"type": st.sampled_from(["text_delta", "input_json_delta", "thinking_delta",
                                              "signature_delta", "citations_delta"])},
                    optional={k: st.none() | texts | st.integers() | st.dictionaries(texts, texts)
                              for k in ("text", "partial_json", "thinking", "signature",
                                        "citation", "stop_reason")},
                ),
            },
        ),
        max_size=8,
    )
)  # fmt: skip
def test_odd_events_never_break_a_stream(events: list[dict[str, Any]]) -> None:
    """B89: whatever is missing or of another type."""
    reading = Reading(START, *events, include_usage=True)
    assert sum("role" in delta for delta in reading.deltas) <= 1
    assert Kind.FAILED not in reading.kinds


def test_a_text_is_encoded_once_and_framed_by_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path builds no chunk but the first of its kind."""
    built = 0
    plain = ShapeTranslator._chunk

    def counted(self: ShapeTranslator, *args: Any, **more: Any) -> bytes:
        nonlocal built
        built += 1
        return plain(self, *args, **more)

    monkeypatch.setattr(ShapeTranslator, "_chunk", counted)
    deltas = [said(f"a{n}") for n in range(50)]
    thoughts = [piece(1, type="thinking_delta", thinking=f"b{n}") for n in range(50)]
    fragments = [part(f"{n}", 2) for n in range(50)]
    reading = Reading(START, *deltas, *thoughts, opened(use(), 2), *fragments)
    assert built == 5, "primer, call and a frame for each of the three kinds of text"
    assert len(reading.chunks) == 152


def test_what_is_remembered_of_a_stream_is_bounded() -> None:
    """M3.5: blocks that are never closed, and citations that wait for the end of theirs."""
    target = MessagesTranslator(identity(), StreamWants(withheld_max=100_000))
    blocks = (dumps(opened({"type": "text", "text": "a"}, n)) for n in range(CALLS_MAX + 1))
    with pytest.raises(ReplyTooLarge):
        [target.rewrite(block, []) for block in blocks]
    target = MessagesTranslator(identity(), StreamWants(withheld_max=100_000))
    citation = {"url": "https://h", "cited_text": "x" * 1000}
    cited = [dumps(piece(type="citations_delta", citation=citation))] * 100
    with pytest.raises(ReplyTooLarge):
        [target.rewrite(data, []) for data in cited]
