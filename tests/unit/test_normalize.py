"""M2.7: streams of providers whose descriptor has a flag, from event to event."""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_shape import OpenAIShape
from encoders.sse import SseDecoder
from encoders.translator import Kind, StreamWants, Translator
from encoders.usage import TokenUsage
from tests.support.assembled import AssembledChoice, assembled

if TYPE_CHECKING:
    from encoders.shape import WholeReply

SHAPE: Final = OpenAIShape()
CALL: Final = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
F: Final = ("f", {"a": 1})
XML: Final = "<tool_call><function=w><parameter=content>\nabc\n</parameter></function></tool_call>"
USAGE: Final = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
TOOLS: Final = [
    {"function": {"name": "w", "parameters": {"properties": {"n": {"type": "integer"}}}}}
]


def translator(**wants: Any) -> Translator:
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    return SHAPE.translator(identity, StreamWants(**wants))


def chunk(delta: Any, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "created": 9, "model": "up", "choices": [choice], **more}


def run(
    chunks: list[dict[str, Any]], *, flush: bool = True, **wants: Any
) -> tuple[Translator, list[dict[str, Any]]]:
    """Translate chunks; return the client's chunks."""
    target = translator(**wants)
    out: list[bytes] = []
    for item in chunks:
        target.rewrite(json.dumps(item).encode(), out)
    if flush:
        out += [target.flush(), target.closing()]
    return target, [json.loads(event.data) for event in SseDecoder().feed(b"".join(out))]


def texts(*pieces: str, field: str = "content", end: str | None = "stop") -> list[dict[str, Any]]:
    """A stream of these texts, and its end."""
    chunks = [chunk({field: piece}) for piece in pieces]
    return [*chunks, chunk({}, end)] if end else chunks


def one(chunks: list[dict[str, Any]], **wants: Any) -> AssembledChoice:
    """What a client makes of a stream with one choice."""
    (choice,) = assembled(run(chunks, **wants)[1]).values()
    return choice


# --- cumulative_deltas --------------------------------------------------------------------------


def test_only_the_unseen_tail_of_each_field_is_told() -> None:
    sent = [
        chunk({"role": "assistant", "content": "", "reasoning_content": "Hm"}),
        chunk({"role": "assistant", "content": "", "reasoning_content": "Hm, so"}),
        chunk({"role": "assistant", "content": "Hel", "reasoning_content": "Hm, so"}),
        chunk({"role": "assistant", "content": "Hello", "reasoning_content": "Hm, so"}),
        chunk({"role": "assistant", "content": "Hello", "reasoning_content": "Hm, so"}, "stop"),
    ]
    target, told = run(sent, cumulative_deltas=True)
    deltas = [c["choices"][0]["delta"] for c in told]
    assert deltas == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        {"content": "", "reasoning_content": ", so"},
        {"content": "Hel", "reasoning_content": ""},
        {"content": "lo", "reasoning_content": ""},
        {},
    ]
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    assert target.characters == len("Hm, soHello")
    assert target.finished


def test_a_chunk_that_says_nothing_new_is_not_told() -> None:
    target = translator(cumulative_deltas=True)
    out: list[bytes] = []
    sent = json.dumps(chunk({"role": "assistant", "content": "a"})).encode()
    assert target.rewrite(sent, out) is Kind.CHUNK
    assert target.rewrite(sent, out) is Kind.SKIPPED
    assert len(out) == 1


def test_cumulative_arguments() -> None:
    def call(index: int, arguments: str) -> dict[str, Any]:
        function = {"name": f"f{index}", "arguments": arguments}
        return {"index": index, "id": f"c{index}", "type": "function", "function": function}

    sent = [
        chunk({"tool_calls": [call(0, "")]}),
        chunk({"tool_calls": [call(0, '{"a":')]}),
        chunk({"tool_calls": [call(0, '{"a":1}'), call(1, '{"b')]}),
        chunk({"tool_calls": [call(0, '{"a":1}'), call(1, '{"b":2}')]}, "tool_calls"),
    ]
    target, told = run(sent, cumulative_deltas=True)
    assert assembled(told)[0].parsed == [("f0", {"a": 1}), ("f1", {"b": 2})]
    assert target.characters == len('{"a":1}{"b":2}')


def test_choices_are_told_apart() -> None:
    sent = [chunk({"content": t}, index=i) for i, t in [(0, "a"), (1, "x"), (0, "ab"), (1, "xy")]]
    choices = assembled(run(sent, cumulative_deltas=True, choices=2)[1])
    assert [choices[i].content for i in (0, 1)] == ["ab", "xy"]


def test_half_a_character_waits_and_comes_at_the_end_at_the_latest() -> None:
    """B20; also where a server shows U+FFFD for bytes that are no character yet."""
    assert one(texts("a\ufffd", "a\u4f60"), cumulative_deltas=True).content == "a\u4f60"
    assert one(texts("a\ufffd"), cumulative_deltas=True).content == "a\ufffd"
    assert one(texts("a\ufffd", end=None), cumulative_deltas=True).content == "a\ufffd"
    assert one(texts("a\ud83d", "a\U0001f600"), cumulative_deltas=True).content == "a\U0001f600"
    assert one(texts("a\ud83d", "\ude00"), inline_tool_calls=True).content == "a\U0001f600"
    assert one(texts("a\ud83d"), inline_tool_calls=True).content == "a\ufffd"


def test_usage_is_read_and_told_as_ever() -> None:
    sent = [
        chunk({"content": "a"}, usage={**USAGE, "completion_tokens": 1}),
        chunk({"content": "a"}, usage=USAGE),
        chunk({"content": "ab"}, "stop"),
    ]
    target, told = run(sent, cumulative_deltas=True, include_usage=True)
    assert target.usage == TokenUsage(prompt_tokens=5, completion_tokens=3)
    assert [c.get("usage") for c in told if c.get("usage")] == [USAGE]
    assert told[-1]["choices"] == []
    assert assembled(told)[0].content == "ab"


def test_members_of_chunks_are_kept() -> None:
    sent = [chunk({"content": "a", "x": 1}, service_tier="t"), chunk({"content": "ab"}, z=[1])]
    _, told = run(sent, cumulative_deltas=True)
    assert told[1]["choices"][0]["delta"] == {"content": "a", "x": 1}
    assert (told[1]["service_tier"], told[2]["z"]) == ("t", [1])
    assert all((c["model"], c["provider"]) == ("test/model", "fake") for c in told)


# --- inline_tool_calls --------------------------------------------------------------------------


def test_calls_leave_the_text_and_stop_becomes_tool_calls() -> None:
    pieces = [f"Let me see.\n{CALL}\n{XML}"[at : at + 3] for at in range(0, 200, 3)]
    target, told = run(texts(*pieces), inline_tool_calls=True)
    (choice,) = assembled(told).values()
    assert choice.content == "Let me see."
    assert choice.parsed == [F, ("w", {"content": "abc"})]
    assert choice.reasons == ["tool_calls"]
    assert choice.roles == 1
    assert target.characters == len(f"Let me see.\n{CALL}\n{XML}")  # as the provider sent it
    assert b"tool_call>" not in json.dumps(told).encode()


@pytest.mark.parametrize("reason", ["length", "content_filter", "tool_calls"])
def test_another_finish_reason_stays(reason: str) -> None:
    assert one(texts(CALL, end=reason), inline_tool_calls=True).reasons == [reason]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("sent", [CALL[:-5], XML[:-5], XML[:60], CALL + XML[:60]])
def test_an_unclosed_call_is_never_dispatchable(sent: str, reason: str) -> None:
    choice = one(texts(*sent, end=reason), inline_tool_calls=True)
    whole = CALL in sent
    assert len(choice.calls) == whole + ("<function" in sent)
    for number, (_, _, arguments) in enumerate(choice.calls):
        if not (whole and number == 0):
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
    assert choice.reasons == [reason]
    if sent == CALL[:-5]:
        assert choice.content == sent


def test_a_stream_that_breaks_off_gives_back_what_is_withheld() -> None:
    target, told = run(texts("a ", "<tool_", end=None), inline_tool_calls=True, flush=False)
    assert assembled(told)[0].content == "a"
    (event,) = SseDecoder().feed(target.flush())
    assert json.loads(event.data)["choices"][0]["delta"] == {"content": " <tool_"}
    assert target.flush() == b""


def test_a_stream_of_which_all_is_withheld_has_a_choice() -> None:
    """M3.4: it is not empty; its primer comes with what is given back."""
    target, told = run(texts("<tool_call>{", end=None), inline_tool_calls=True, flush=False)
    assert told == []
    assert target.has_choice
    assert not target.finished
    (choice,) = assembled(
        json.loads(event.data) for event in SseDecoder().feed(target.flush())
    ).values()
    assert (choice.roles, choice.content) == (1, "<tool_call>{")


def test_content_and_reasoning_are_cut_separately() -> None:
    """M2.7: markers of the two do not join, calls of both are numbered together."""
    sent = [
        chunk({"reasoning_content": "hm <tool_call>"}),
        chunk({"content": '{"name":"no"}</tool_call> ok '}),
        chunk({"reasoning_content": '{"name":"f","arguments":{"a":1}}</tool'}),
        chunk({"content": CALL[:9]}),
        chunk({"reasoning_content": "_call>"}),
        chunk({"content": CALL[9:]}),
        chunk({}, "stop"),
    ]
    choice = one(sent, inline_tool_calls=True)
    assert choice.parsed == [F, F]
    assert choice.texts == {
        "reasoning_content": "hm",
        "content": '{"name":"no"}</tool_call> ok',
    }


def test_mirrored_reasoning_is_one_text() -> None:
    """B90: a call in it is told once."""
    sent = [chunk({"reasoning": t, "reasoning_content": t}) for t in ("so ", CALL, " then <")]
    choice = one([*sent, chunk({}, "stop")], inline_tool_calls=True)
    assert choice.parsed == [F]
    assert choice.texts == {"reasoning": "so then <", "reasoning_content": "so then <"}


def test_calls_of_several_choices_have_ids_and_numbers_of_their_own() -> None:
    sent = [chunk({"content": CALL + CALL}, index=i) for i in (0, 1)]
    choices = assembled(run(sent, inline_tool_calls=True, choices=2)[1])
    ids = [call_id for choice in choices.values() for call_id, _, _ in choice.calls]
    assert len(set(ids)) == 4
    assert [choice.parsed for choice in choices.values()] == [[F, F], [F, F]]


def test_calls_of_the_wire_and_of_the_text_are_numbered_together() -> None:
    function = {"name": "g", "arguments": "{}"}
    native = {"index": 0, "id": "n", "type": "function", "function": function}
    sent = [chunk({"content": CALL}), chunk({"tool_calls": [native]}), chunk({}, "stop")]
    assert one(sent, inline_tool_calls=True).parsed == [F, ("g", {})]


def test_values_have_the_types_of_the_requests_tools() -> None:
    sent = "<tool_call><function=w><parameter=n>5</parameter></function></tool_call>"
    assert one(texts(sent), inline_tool_calls=True, tools=TOOLS).parsed == [("w", {"n": 5})]
    assert one(texts(sent), inline_tool_calls=True).parsed == [("w", {"n": "5"})]


@pytest.mark.parametrize("tools", [None, 5, [None, {"function": 1}, {"function": {"name": []}}]])
def test_tools_that_are_none_harm_nothing(tools: object) -> None:
    assert one(texts(CALL), inline_tool_calls=True, tools=tools).parsed == [F]


def test_withheld_log_probabilities_are_kept() -> None:
    sent = chunk({"content": "<tool_call>"})
    sent["choices"][0]["logprobs"] = {"content": [{"token": "x"}]}
    _, told = run([sent], inline_tool_calls=True, flush=False)
    assert told[-1]["choices"][0]["logprobs"] == {"content": [{"token": "x"}]}


# --- both flags, any chunking -------------------------------------------------------------------


@given(st.lists(st.sampled_from([CALL, XML, "text ", "<", "\n", "é"]), max_size=6), st.data())
def test_both_flags_and_any_chunking_come_to_the_same(
    parts: list[str], data: st.DataObject
) -> None:
    answer = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in itertools.pairwise([0, *cuts, len(answer)])]
    expected = one(texts(answer), inline_tool_calls=True)
    deltas = one(texts(*pieces), inline_tool_calls=True)
    target, told = run(
        texts(*itertools.accumulate(pieces)), inline_tool_calls=True, cumulative_deltas=True
    )
    (both,) = assembled(told).values()
    assert target.characters == len(answer)
    for got in (deltas, both):
        assert (got.texts, got.parsed, got.reasons) == (
            expected.texts,
            expected.parsed,
            expected.reasons,
        )
    assert [name for name, _ in expected.parsed] == [
        {CALL: "f", XML: "w"}[part] for part in parts if part in (CALL, XML)
    ]


# --- plain replies ------------------------------------------------------------------------------


def whole_of(content: str, **wants: Any) -> WholeReply:
    message = {"role": "assistant", "content": content, "reasoning_content": "r"}
    reply = {
        "id": "w", "object": "chat.completion", "created": 5, "model": "up", "usage": USAGE,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "system_fingerprint": "fp",
    }  # fmt: skip
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    data = json.dumps(reply).encode()
    wanted = StreamWants(collect_bytes_max=1 << 20, **wants)
    return SHAPE.whole(data, json.loads(data), identity, wanted)


def test_a_whole_reply_is_corrected_by_the_same_code() -> None:
    told = whole_of(f"a {CALL}", inline_tool_calls=True, cumulative_deltas=True)
    body = json.loads(told.body)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "a"
    assert choice["message"]["reasoning_content"] == "r"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a":1}'})
    assert (body["id"], body["model"], body["provider"]) == ("w", "test/model", "fake")
    assert (body["usage"], body["system_fingerprint"]) == (USAGE, "fp")
    assert told.usage == TokenUsage(prompt_tokens=5, completion_tokens=3)
    assert told.characters == len(f"a {CALL}r")


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_is_collected_by_the_same_code(cumulative: bool) -> None:
    """M4.1, `aggregate: true`; the bound counts what is collected, not what was repeated."""
    pieces = [*(f"{n} " for n in range(400)), CALL[:20], CALL[20:]]
    sent = texts(*(itertools.accumulate(pieces) if cumulative else pieces))
    target = translator(
        inline_tool_calls=True, cumulative_deltas=cumulative, collect_bytes_max=60_000
    )
    for item in sent:
        target.rewrite(json.dumps(item).encode(), [])
    assert target.flush() == b""
    (choice,) = json.loads(target.result())["choices"]
    assert choice["message"]["content"] == " ".join(map(str, range(400)))
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert choice["finish_reason"] == "tool_calls"


# --- linear -------------------------------------------------------------------------------------


def seconds_for(size: int) -> float:
    """How long an artifact of so many characters takes in 3-byte pieces."""
    source = '<p class="x">\n</para\n' * (size // 21)
    sent = (
        f"<tool_call><function=w><parameter=content>\n{source}\n</parameter></function></tool_call>"
    )
    datas = [
        json.dumps(item).encode()
        for item in texts(*(sent[at : at + 3] for at in range(0, len(sent), 3)))
    ]
    target = translator(inline_tool_calls=True)
    out: list[bytes] = []
    started = time.process_time()
    for data in datas:
        target.rewrite(data, out)
    took = time.process_time() - started
    chunks = [json.loads(event.data) for event in SseDecoder().feed(b"".join(out))]
    (choice,) = assembled(chunks).values()
    assert choice.parsed == [("w", {"content": source})]
    return took


def test_a_400_kb_artifact_in_3_byte_pieces_takes_linear_time() -> None:
    """Eight times the text: eight times the time, where quadratic work would take 64."""
    assert seconds_for(400_000) < 24 * seconds_for(50_000)
