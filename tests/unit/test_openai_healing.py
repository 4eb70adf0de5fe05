"""M2.6: what openai-shape providers get wrong in a chunk, and what stays as it was sent."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_shape import OpenAIShape
from encoders.sse import SseDecoder
from encoders.text_counter import TextCounter
from encoders.translator import CALLS_MAX, CHOICES_MAX, Kind, ReplyTooLarge, StreamWants
from tests.support.assembled import AssembledChoice, assembled

SHAPE = OpenAIShape()


def identity() -> ChunkIdentity:
    return ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)


def chunk(delta: Any, finish: Any = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "created": 9, "model": "up", "choices": [choice], **more}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def told(chunks: list[Any], **wants: Any) -> list[bytes]:
    """The data of the client's events."""
    translator = SHAPE.translator(identity(), StreamWants(**wants))
    out: list[bytes] = []
    for item in chunks:
        translator.rewrite(item if isinstance(item, bytes) else compact(item), out)
    out.append(translator.flush())
    return [event.data for event in SseDecoder().feed(b"".join(out))]


def client(chunks: list[Any], **wants: Any) -> AssembledChoice:
    """What a client makes of a stream with one choice."""
    (choice,) = assembled(map(json.loads, told(chunks, **wants))).values()
    return choice


def call(index: Any = ..., id: Any = ..., name: Any = ..., args: Any = ..., **more: Any) -> Any:
    """A tool-call delta; what is left out is not there."""
    function = {k: v for k, v in (("name", name), ("arguments", args)) if v is not ...}
    out = {k: v for k, v in (("index", index), ("id", id)) if v is not ...}
    return out | ({"function": function} if function else {}) | more


def whole(index: Any, id: Any, name: Any, args: Any, **more: Any) -> Any:
    """A delta with all of a call."""
    return call(index, id, name, args, type="function", **more)


FIRST: Final = chunk({"role": "assistant", "content": None})
END: Final = chunk({}, "tool_calls")
A: Final = ("a", "f", '{"x":1}')
B: Final = ("b", "g", '{"y":2}')

# name → the tool_calls of each chunk, and what a client makes of them.
CALLS: Final[dict[str, tuple[list[list[Any]], list[tuple[str, str, str]]]]] = {
    "as OpenAI does": (
        [
            [whole(0, "a", "f", "")], [call(0, args='{"x"')], [call(0, args=":1}")],
            [whole(1, "b", "g", "")], [call(1, args='{"y":2}')],
        ],
        [A, B],
    ),
    "fragments that interleave": (
        [
            [whole(0, "a", "f", ""), whole(1, "b", "g", "")],
            [call(1, args='{"y"'), call(0, args='{"x"')],
            [call(0, args=":1}"), call(1, args=":2}")],
        ],
        [A, B],
    ),
    "no index (B37)": (
        [[whole(..., "a", "f", '{"x":1}')], [whole(..., "b", "g", '{"y"')], [call(args=":2}")]],
        [A, B],
    ),
    "null index": ([[whole(None, "a", "f", '{"x"')], [call(None, args=":1}")]], [A]),
    "index as text": ([[whole("0", "a", "f", '{"x"')], [call("0", args=":1}")]], [A]),
    "no index, two in one chunk": (
        [[whole(..., "a", "f", '{"x":1}'), whole(..., "b", "g", '{"y":2}')]],
        [A, B],
    ),
    "indexed and not, mixed (B37)": (
        [
            [whole(..., "a", "f", "")], [whole(1, "b", "g", '{"y"')], [call(0, args='{"x":1}')],
            [call(1, args=":")], [call(args="2}")],
        ],
        [A, B],
    ),
    "an index that comes late": ([[whole(..., "a", "f", '{"x"')], [call(0, args=":1}")]], [A]),
    "whole calls, all of index 0 (B38)": (
        [[whole(0, "a", "f", '{"x":1}')], [whole(0, "b", "g", '{"y":2}')]],
        [A, B],
    ),
    "whole calls of index 0 in one chunk": (
        [[whole(0, "a", "f", '{"x":1}'), whole(0, "b", "g", '{"y":2}')]],
        [A, B],
    ),
    "index 0 again, in fragments": (
        [
            [whole(0, "a", "f", '{"x"')], [call(0, args=":1}")],
            [whole(0, "b", "g", '{"y"')], [call(0, args=":2}")],
        ],
        [A, B],
    ),
    "one id under two indexes (B40)": (
        [[whole(0, "a", "f", '{"x"')], [call(1, "a", args=":1}")]],
        [A],
    ),
    "indexes from 1": (
        [[whole(1, "a", "f", '{"x"')], [call(1, args=":1}")], [whole(2, "b", "g", '{"y":2}')]],
        [A, B],
    ),
    "sparse indexes": (
        [[whole(3, "a", "f", '{"x"')], [whole(9, "b", "g", '{"y":2}')], [call(3, args=":1}")]],
        [A, B],
    ),
    "an index that counts chunks": (
        [[whole(0, "a", "f", "")], [call(1, args='{"x"')], [call(2, args=":1}")]],
        [A],
    ),
    "identity on every fragment (B40)": (
        [[whole(0, "a", "f", part)] for part in ("", '{"x"', ":1}")],
        [A],
    ),
    "identity on every fragment, no index": (
        [[whole(..., "a", "f", part)] for part in ("", '{"x"', ":1}")],
        [A],
    ),
    "name and type on every fragment, id once": (
        [
            [whole(0, "a", "f", '{"x"')],
            [call(0, ..., "f", ":", type="function")],
            [call(0, "", "f", "1}", type="function")],
        ],
        [A],
    ),
    "empty id and name later": (
        [[whole(0, "a", "f", '{"x"')], [call(0, "", "", ":1}", type="")]],
        [A],
    ),
    "null id and name later": (
        [[whole(0, "a", "f", '{"x"')], [call(0, None, None, ":1}", type=None)]],
        [A],
    ),
    "identity only at the end": (
        [[call(0, args='{"x"')], [call(0, args=":1}")], [whole(0, "a", "f", "")]],
        [A],
    ),
    "identity only at the end, twice": (
        [
            [call(0, args='{"x"'), call(1, args='{"y"')], [call(0, args=":1}")],
            [call(1, "b", "g", args=":2}")], [call(0, "a", "f")],
        ],
        [B, A],
    ),
    "id first, name later": ([[call(0, "a", args='{"x"')], [call(0, ..., "f", ":1}")]], [A]),
    "name first, id later": ([[call(0, ..., "f", '{"x"')], [call(0, "a", ..., ":1}")]], [A]),
    "name in pieces, id later": (
        [[call(0, ..., "get_")], [call(0, ..., "it")], [call(0, "a", args="{}")]],
        [("a", "get_it", "{}")],
    ),
    "no type": ([[call(0, "a", "f", '{"x":1}')]], [A]),
    "arguments as an object": ([[whole(0, "a", "f", {"x": 1})]], [A]),
    "arguments as an object that holds nothing": ([[whole(0, "a", "f", {})]], [("a", "f", "{}")]),
    "empty arguments (B42)": ([[whole(0, "a", "f", "")]], [("a", "f", "{}")]),
    "null arguments": ([[whole(0, "a", "f", None)]], [("a", "f", "{}")]),
    "no arguments": ([[whole(0, "a", "f", ...)]], [("a", "f", "{}")]),
    "only empty fragments": (
        [[whole(0, "a", "f", "")], [call(0, args="")], [whole(1, "b", "g", '{"y":2}')]],
        [("a", "f", "{}"), B],
    ),
    "a null function later": ([[whole(0, "a", "f", '{"x":1}')], [call(0, function=None)]], [A]),
    "no function later": ([[whole(0, "a", "f", '{"x":1}')], [call(0)]], [A]),
    "what is no call": ([[None, 5, whole(0, "a", "f", '{"x":1}')], ["x"]], [A]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_spelling_of_calls_becomes_the_same_deltas(name: str) -> None:
    """B37, B38, B40, B42: `AssembledChoice` refuses repeated identity and skipped indexes."""
    sent, expected = CALLS[name]
    chunks = [FIRST, *(chunk({"tool_calls": calls}) for calls in sent), END]
    got = client(chunks)
    assert got.calls == expected
    assert got.reasons == ["tool_calls"]
    assert got.roles == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_reply_put_together_from_it_has_the_same_calls(name: str) -> None:
    """M4.1 with `aggregate: true`."""
    sent, expected = CALLS[name]
    translator = SHAPE.translator(identity(), StreamWants(collect_bytes_max=100_000))
    for item in [FIRST, *(chunk({"tool_calls": calls}) for calls in sent), END]:
        translator.rewrite(compact(item), [])
    assert translator.flush() == b""
    (choice,) = json.loads(translator.result())["choices"]
    calls = choice["message"]["tool_calls"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == expected
    assert {c["type"] for c in calls} == {"function"}


def test_calls_without_any_id_get_one_each() -> None:
    """The same ones each time; short enough for providers that bound them (40 characters)."""
    sent = [
        FIRST,
        chunk({"tool_calls": [call(0, ..., "f", '{"x":1}')]}),
        chunk({"tool_calls": [call(0, ..., "f", '{"x":2}'), call(0, ..., "g", "")]}),
        END,
    ]
    got = client(sent)
    assert [(name, arguments) for _, name, arguments in got.calls] == [
        ("f", '{"x":1}'),
        ("f", '{"x":2}'),
        ("g", "{}"),
    ]
    ids = [call_id for call_id, _, _ in got.calls]
    assert len(set(ids)) == 3
    assert all(each.startswith("call_") and len(each) <= 40 for each in ids)
    assert client(sent).calls == got.calls
    other = SHAPE.translator(
        ChunkIdentity(model="m", provider="p", id="another", created=1), StreamWants()
    )
    out: list[bytes] = []
    for item in sent:
        other.rewrite(compact(item), out)
    (choice,) = assembled(json.loads(e.data) for e in SseDecoder().feed(b"".join(out))).values()
    assert {call_id for call_id, _, _ in choice.calls}.isdisjoint(ids)


def test_a_repeated_name_without_ids_is_one_call_until_its_arguments_are_whole() -> None:
    parts = ['{"x":"}{', '\\"', '{"', ',"y":[', "1]}", '{"z":3}']
    got = client([FIRST, *(chunk({"tool_calls": [call(0, ..., "f", p)]}) for p in parts), END])
    assert [arguments for _, _, arguments in got.calls] == ['{"x":"}{\\"{","y":[1]}', '{"z":3}']


@pytest.mark.parametrize("reason", ["length", "content_filter", "error"])
def test_a_reply_that_was_cut_completes_no_call(reason: str) -> None:
    """M2.7: what may have been cut must not become dispatchable."""
    got = client([FIRST, chunk({"tool_calls": [whole(0, "a", "f", "")]}), chunk({}, reason)])
    assert got.calls == [("a", "f", "")]
    assert got.reasons == [reason]


def test_a_stream_that_breaks_off_gives_back_what_waited() -> None:
    got = client([FIRST, chunk({"tool_calls": [call(0, ..., "f", '{"x"')]})])
    ((_, name, arguments),) = got.calls
    assert (name, arguments) == ("f", '{"x"')


def test_identity_is_waited_for_up_to_a_bound() -> None:
    parts = ['{"x":"', "y" * 50, "z" * 60, '"}']
    sent = [chunk({"tool_calls": [call(0, ..., "f", part)]}) for part in parts]
    events = told([FIRST, *sent[:3]], withheld_max=100)
    before_flush = [json.loads(data) for data in events]
    assert before_flush[-1]["choices"][0]["delta"]["tool_calls"][0]["id"].startswith("call_")
    got = client([FIRST, *sent, END], withheld_max=100)
    assert [arguments for _, _, arguments in got.calls] == ["".join(parts)]


@pytest.mark.parametrize("collected", [True, False])
def test_an_empty_call_is_completed_by_done_too(collected: bool) -> None:
    """`[DONE]` without a finish_reason is a normal end; one that broke off has no `closing`."""
    bound = 100_000 if collected else None
    translator = SHAPE.translator(identity(), StreamWants(collect_bytes_max=bound))
    out: list[bytes] = []
    for item in [FIRST, chunk({"tool_calls": [whole(0, "a", "f", "")]})]:
        translator.rewrite(compact(item), out)
    out += [translator.flush(), translator.closing()]
    if collected:
        (choice,) = json.loads(translator.result())["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    else:
        parts = [json.loads(e.data) for e in SseDecoder().feed(b"".join(out))]
        assert assembled(parts)[0].calls == [("a", "f", "{}")]


def test_an_empty_call_in_the_finish_chunk_is_completed_there() -> None:
    events = told([FIRST, chunk({"tool_calls": [whole(0, "a", "f", "")]}, "tool_calls")])
    assert len(events) == 2
    assert client([FIRST, chunk({"tool_calls": [whole(0, "a", "f", ...)]}, "stop")]).calls == [
        ("a", "f", "{}")
    ]


def test_an_empty_call_is_completed_before_the_finish_chunk_which_keeps_its_bytes() -> None:
    last = b'{"model":"up","choices":[{"delta":{},"index":0,"finish_reason":"tool_calls","n":1.0}]}'
    events = told([FIRST, chunk({"tool_calls": [whole(0, "a", "f", "")]}), last])
    assert events[-1] == last.replace(b'"up"', b'"test/model","provider":"fake"')
    made = json.loads(events[-2])["choices"]
    fragment = {"index": 0, "function": {"arguments": "{}"}}
    assert made == [{"index": 0, "delta": {"tool_calls": [fragment]}, "finish_reason": None}]


def test_calls_of_several_choices_are_numbered_by_choice() -> None:
    sent = [
        chunk({"role": "assistant", "tool_calls": [whole(5, "a", "f", "{}")]}, index=1),
        chunk({"role": "assistant", "tool_calls": [whole(5, "b", "g", "{}")]}, index=0),
        chunk({"tool_calls": [whole(6, "c", "h", "{}")]}, index=1),
    ]
    choices = assembled(map(json.loads, told(sent, choices=2)))
    assert choices[1].calls == [("a", "f", "{}"), ("c", "h", "{}")]
    assert choices[0].calls == [("b", "g", "{}")]


def test_members_of_a_call_that_waited_are_kept() -> None:
    """As Gemini's thought signatures on its openai wire."""
    extra = {"google": {"thought_signature": "s"}}
    events = told(
        [
            FIRST,
            chunk({"tool_calls": [call(args="{}", extra_content=extra)]}),
            chunk({"tool_calls": [call(id="a", name="f")]}),
        ]
    )
    (told_call,) = json.loads(events[-1])["choices"][0]["delta"]["tool_calls"]
    assert told_call["extra_content"] == extra


# --- what is right stays, to the byte -----------------------------------------------------------

RIGHT: Final[list[bytes]] = [
    b'"role":"assistant","tool_calls":[{"index":0,"id":"a","type":"function",'
    b'"function":{"name":"f","arguments":""}}]',
    b'"tool_calls": [ {"function":{"arguments":"{\\"\\u00fc\\":\\/"},"index":0}]',
    b'"tool_calls":[{"index":0,"function":{"arguments":"1}"},"n":1.0}],"content":null',
    b'"tool_calls":[{"index":0,"id":null,"type":null,"function":{"name":null,"arguments":""}}]',
    b'"tool_calls":[{"id":"b","index":1,"type":"function","function":{"name":"g","arguments":""}},'
    b'{"index":2,"id":"c","function":{"name":"h"},"type":"function"}]',
    b'"tool_calls":[{"index":1,"function":{"arguments":"{}"}},'
    b'{"index":2,"function":{"arguments":"{}"}}]',
    b'"tool_calls":[{"index":3,"id":"d","type":"custom","custom":{"name":"k","input":""}}]',
    b'"tool_calls":[{"index":3,"custom":{"input":"free text"}}]',
    b'"tool_calls":null,"role":null,"content":"x"',
    b'"tool_calls":[],"content":"x"',
    b'"function_call":{"name":"f","arguments":"{"},"content":null',
]


def test_right_tool_deltas_keep_their_bytes() -> None:
    """M2.2: only model and provider are ours."""
    frame = b'{"id":"c","model":"up","choices":[{"index":0,"delta":{%s},"finish_reason":null}]}'
    sent = [frame % delta for delta in RIGHT]
    sent.append(b'{"model":"up","choices":[{"delta":{},"finish_reason":"tool_calls","index":0}]}')
    expected = [item.replace(b'"up"', b'"test/model","provider":"fake"') for item in sent]
    assert told(sent) == expected


# What a healed chunk must keep: spelling, spaces, order, members nobody knows.
REST: Final = (
    rb'"content" : "\u00fc\/\ud83d","logprobs":{"content":[{"logprob":-1.0E-05}, {}]},"n":1e400 ,'
    rb'"k":12345678901234567890123'
)
HEALED: Final[dict[str, tuple[bytes, bytes]]] = {
    "a repeated role": (b'"role":"assistant", ', b""),
    "an index that is wrong": (
        b'"tool_calls":[ {"index": 7, "function": {"arguments":"\\u00fc"}, "x":1.0} ],',
        b'"tool_calls":[ {"index": 0, "function": {"arguments":"\\u00fc"}, "x":1.0} ],',
    ),
    "an index that is missing": (
        b'"tool_calls":[{"function":{"arguments":"\\/"}}],',
        b'"tool_calls":[{"function":{"arguments":"\\/"},"index":0}],',
    ),
    "identity again": (
        b'"tool_calls":[{"id":"a","index":7,"x":[1.0,2],"type":"function",'
        b'"function":{"name":"f","arguments":"\\u0041"}}],',
        b'"tool_calls":[{"index":0,"x":[1.0,2],"function":{"arguments":"\\u0041"}}],',
    ),
}


@pytest.mark.parametrize("name", HEALED)
@pytest.mark.parametrize("behind", [b"", b', {"index":1,"delta":{"content":"\\u00e4"},"z":-0.0} '])
def test_a_healed_chunk_keeps_all_other_bytes(name: str, behind: bytes) -> None:
    """M2.2: only what was wrong is spelled anew."""
    wrong, right = HEALED[name]
    frame = b'{"z":1.0,"model":"up","choices":[ {"delta":{%s%s},"index":0,"n":1.50}%s]}'
    start = [
        chunk({"role": "assistant", "tool_calls": [whole(7, "a", "f", "")]}),
        chunk({"role": "assistant"}, index=1),
    ]
    events = told([*start, frame % (wrong, REST, behind)], choices=2)
    served = frame.replace(b'"up"', b'"test/model","provider":"fake"')
    assert events[-1] == served % (right, REST, behind)


def test_a_wrong_finish_reason_is_all_that_changes() -> None:
    frame = (
        b'{"model":"up","choices":[{"delta":{"content":"\\u00fc"},"finish_reason": %s, "n":1.0}]}'
    )
    events = told([FIRST, frame % b'""'])
    served = frame.replace(b'"up"', b'"test/model","provider":"fake"')
    assert events[-1] == served % b"null"


arguments = st.text(alphabet='{}[]":,\\ax1 ', max_size=12)
deltas = st.fixed_dictionaries(
    {},
    optional={
        "index": st.sampled_from([0, 1, 2, 7, None, "0", True]),
        "id": st.sampled_from(["a", "b", "", None, 5]),
        "type": st.sampled_from(["function", None, ""]),
        "function": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {},
                optional={
                    "name": st.sampled_from(["f", "g", "", None]),
                    "arguments": st.one_of(arguments, st.none(), st.just({"x": 1})),
                },
            ),
        ),
    },
)


def sent_text(call: dict[str, Any]) -> str:
    """The arguments that a delta bears, as text."""
    value = (call.get("function") or {}).get("arguments")
    return compact(value).decode() if isinstance(value, dict) else value or ""


@given(st.lists(st.lists(deltas, max_size=3), max_size=6), st.sampled_from([None, "stop"]))
def test_whatever_providers_send_calls_are_told_once_and_no_argument_is_lost(
    sent: list[list[Any]], finish: str | None
) -> None:
    chunks = [FIRST, *(chunk({"tool_calls": calls}) for calls in sent)]
    if finish:
        chunks.append(chunk({}, finish))
    numbers: list[int] = []
    fragments: list[str] = []
    for event in map(json.loads, told(chunks)):
        for each in event["choices"][0]["delta"].get("tool_calls") or ():
            fragments.append(each["function"].get("arguments") or "")
            assert (each["index"] in numbers) is not ("id" in each and each["id"] is not None)
            if each["index"] not in numbers:
                numbers.append(each["index"])
    assert numbers == list(range(len(numbers)))
    if finish is None:  # calls that waited come later, so only what came in all is sure
        expected = "".join(sent_text(each) for calls in sent for each in calls)
        assert sorted("".join(fragments)) == sorted(expected)


# --- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["", "null"])
def test_a_finish_reason_that_is_none_is_null(reason: str) -> None:
    translator = SHAPE.translator(identity(), StreamWants())
    out: list[bytes] = []
    for item in [
        chunk({"role": "assistant", "content": "a"}, reason),
        chunk({"content": "b"}, reason),
    ]:
        assert translator.rewrite(compact(item), out) is Kind.CHUNK
    assert not translator.finished
    got = [json.loads(e.data)["choices"][0] for e in SseDecoder().feed(b"".join(out))]
    assert [choice["finish_reason"] for choice in got] == [None, None]
    assert [choice["delta"]["content"] for choice in got] == ["a", "b"]


def test_an_empty_role_is_no_role() -> None:
    got = [json.loads(data) for data in told([chunk({"role": "", "content": t}) for t in "ab"])]
    assert [c["choices"][0]["delta"] for c in got] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
    ]


@pytest.mark.parametrize("choices", [1, 2, 3, 12, 200])
def test_a_choice_that_was_not_asked_for_gets_its_role(choices: int) -> None:
    """M2.3 in mid-stream, where chunks are not parsed, for every `n`."""
    sent = [chunk({"role": "assistant"}, index=index) for index in range(choices)]
    sent += [chunk({"content": "x"}, index=index) for index in (0, choices - 1, 0)]
    events = told(sent, choices=choices)
    assert len(events) == choices + 3
    stray = chunk({"content": "y"}, index=choices)
    events = told([*sent, stray, stray], choices=choices)
    got = [json.loads(data)["choices"][0] for data in events[choices + 3 :]]
    primer = {"role": "assistant", "content": ""}
    assert [c["delta"] for c in got] == [primer, {"content": "y"}, {"content": "y"}]
    assert {c["index"] for c in got} == {choices}


# --- Azure's empty first chunk ------------------------------------------------------------------

AZURE: Final = {
    "id": "", "object": "", "created": 0, "model": "", "choices": [],
    "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": {"x": 1.0}}],
}  # fmt: skip


def test_an_empty_first_chunk_is_told_with_the_next() -> None:
    """M2.6: a client that indexes `choices[0]` finds a choice in every chunk."""
    events = [json.loads(data) for data in told([AZURE, chunk({"content": "a"}), END])]
    assert [len(event["choices"]) for event in events] == [1, 1, 1]
    assert "prompt_filter_results" not in events[0]  # the primer is ours
    assert events[1]["prompt_filter_results"] == AZURE["prompt_filter_results"]
    assert events[1]["id"] == "c1"
    assert "prompt_filter_results" not in events[2]


def test_an_empty_first_chunk_without_more_is_nothing() -> None:
    empty = {"id": "c", "object": "chat.completion.chunk", "choices": [], "model": "up"}
    assert len(told([empty, FIRST])) == 1
    assert len(told([{**empty, "choices": None}, FIRST])) == 1


def test_an_empty_chunk_in_mid_stream_passes() -> None:
    events = told([FIRST, AZURE, chunk({"content": "b"})])
    assert json.loads(events[1])["choices"] == []


def test_an_empty_first_chunk_does_not_keep_frames_from_being_learned() -> None:
    odd = b'{"id":"c1","created":9,"model":"up","choices":[%s]}'
    raw = odd % b'{"index":0,"delta":{"content":"\\u00fc"},"n":1e400}'
    events = told([AZURE, FIRST, chunk({"content": "a"}), raw])
    assert events[-1] == raw.replace(b'"up"', b'"test/model","provider":"fake"')


# --- lone surrogates ----------------------------------------------------------------------------


def test_a_pair_of_escapes_that_was_cut_passes_as_sent() -> None:
    """B20: the stream lives; M2.2 keeps the bytes, and a client that joins them has the pair."""
    frame = b'{"model":"up","choices":[{"index":0,"delta":{%s}}]}'
    halves = [b'"role":"assistant","content":"\\ud83d"', b'"content":"\\ude00"']
    events = told([frame % half for half in halves])
    assert [half in event for half, event in zip(halves, events, strict=True)] == [True, True]


def test_a_pair_that_was_cut_is_whole_in_a_plain_reply() -> None:
    translator = SHAPE.translator(identity(), StreamWants(collect_bytes_max=100_000))
    for half in (b'"\\ud83d"', b'"\\ude00"'):
        translator.rewrite(b'{"choices":[{"index":0,"delta":{"content":' + half + b"}}]}", [])
    reply = json.loads(translator.result())
    assert reply["choices"][0]["message"]["content"] == "\N{GRINNING FACE}"


# --- whole replies ------------------------------------------------------------------------------


def whole_reply(calls: list[Any]) -> bytes:
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return compact({"id": "c", "model": "up", "choices": [choice], "z": 1.0})


def test_calls_of_a_whole_reply_are_healed() -> None:
    data = whole_reply(
        [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"function": {"name": "g", "arguments": ""}},
            {"id": "c", "type": "function", "function": {"name": "h"}},
        ]
    )
    body = json.loads(SHAPE.whole(data, json.loads(data), identity(), StreamWants()).body)
    calls = body["choices"][0]["message"]["tool_calls"]
    assert [each["function"]["arguments"] for each in calls] == ['{"x":1}', "{}", "{}"]
    assert [each["type"] for each in calls] == ["function"] * 3
    assert calls[0]["id"] == "a"
    assert calls[1]["id"].startswith("call_")
    assert body["z"] == 1.0


def test_a_right_whole_reply_keeps_its_bytes() -> None:
    right = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{ }"}}
    data = whole_reply([right])
    told_reply = SHAPE.whole(data, json.loads(data), identity(), StreamWants())
    assert told_reply.body == data.replace(b'"up"', b'"test/model","provider":"fake"')


def test_arguments_that_are_an_object_are_counted() -> None:
    counter = TextCounter()
    counter.add_choices([{"delta": {"tool_calls": [whole(0, "a", "f", {"x": 1})]}}])
    assert counter.characters == len('{"x":1}')


@pytest.mark.parametrize("reason", [["stop"], {"a": 1}, True, 7, 0])
def test_a_finish_reason_that_is_no_text_is_none(reason: Any) -> None:
    calls = [call(0, "a", "f", "{}")]
    last = chunk({}, reason, note='"finish_reason":"x"')
    got = told([chunk({"role": "assistant", "tool_calls": calls}), last])
    assert [json.loads(data)["choices"][0]["finish_reason"] for data in got] == [None, None]


def test_an_index_of_a_thousand_digits_is_none() -> None:
    one = call("9" * 5000, "a", "f", "{}")
    (got,) = told([chunk({"role": "assistant", "tool_calls": [one]})])
    assert json.loads(got)["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


@pytest.mark.parametrize("wants", [{}, {"cumulative_deltas": True}, {"inline_tool_calls": True}])
def test_what_is_remembered_of_a_stream_is_bounded(wants: dict[str, Any]) -> None:
    """M3.5: a provider that never ends may open calls, or choices, without end."""
    translator = SHAPE.translator(identity(), StreamWants(**wants))
    many = [call(n, f"c{n}", "f", "{}") for n in range(CALLS_MAX)]
    translator.rewrite(compact(chunk({"role": "assistant", "tool_calls": many})), [])
    with pytest.raises(ReplyTooLarge):
        translator.rewrite(compact(chunk({"tool_calls": [call(-1, "x", "f", "{}")]})), [])
    translator = SHAPE.translator(identity(), StreamWants(**wants))
    for index in range(CHOICES_MAX):
        translator.rewrite(compact(chunk({"role": "assistant", "content": "a"}, index=index)), [])
    with pytest.raises(ReplyTooLarge):
        translator.rewrite(compact(chunk({"content": "a"}, index=CHOICES_MAX)), [])


def test_as_many_choices_as_were_asked_for_are_remembered() -> None:
    translator = SHAPE.translator(identity(), StreamWants(choices=CHOICES_MAX + 1))
    for index in range(CHOICES_MAX + 1):
        translator.rewrite(compact(chunk({"role": "assistant", "content": "a"}, index=index)), [])
    assert translator.has_choice


@pytest.mark.parametrize("what", ["name", "member", "inner"])
def test_whatever_waits_for_an_identity_is_bounded(what: str) -> None:
    """M3.5: fragments of a name, and members that nobody knows, wait as arguments do."""
    translator = SHAPE.translator(identity(), StreamWants(withheld_max=10_000))
    translator.rewrite(compact(chunk({"role": "assistant", "content": ""})), [])
    out: list[bytes] = []
    for number in range(200):
        member = {f"k{number}": "x" * 100}
        inner = {"name": f"{number}{'x' * 100}"} if what == "name" else {}
        inner |= member if what == "inner" else {}
        one: dict[str, Any] = {"index": 0, "function": inner}
        one |= member if what == "member" else {}
        translator.rewrite(compact(chunk({"tool_calls": [one]})), out)
    assert b'"tool_calls"' in b"".join(out)
