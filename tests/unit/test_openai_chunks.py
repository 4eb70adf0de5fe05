"""M2.2 to M2.4: chunks of an openai-shape upstream, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkCollector, ChunkRewriter
from encoders.sse import SseDecoder
from encoders.translator import Kind, NotAChunk, ReplyTooLarge
from encoders.usage import TokenUsage


def identity() -> ChunkIdentity:
    return ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)


def rewriter(**options: Any) -> ChunkRewriter:
    return ChunkRewriter(identity(), **options)


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 9, "model": "up-1"}
    return {**head, "choices": choices, **more}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def run(chunks: list[Any], **options: Any) -> tuple[ChunkRewriter, list[bytes]]:
    """Rewrite chunks (dicts, or bytes as sent); return the data of the client's events."""
    target = rewriter(**options)
    out: list[bytes] = []
    for item in chunks:
        target.rewrite(item if isinstance(item, bytes) else compact(item), out)
    out.append(target.closing())
    return target, [event.data for event in SseDecoder().feed(b"".join(out))]


def parsed(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events]


FIRST = chunk({"role": "assistant", "content": ""})
LAST = chunk({}, "stop")


# --- M2.2: bytes ------------------------------------------------------------------------------

SPELLINGS = [
    b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"up","choices":[%s]}',
    b'{"choices":[%s],"created":1,"id":"c","model":"up","object":"chat.completion.chunk"}',
    b'{"id": "c", "model": "up", "choices": [%s], "system_fingerprint": null}',
    b'{ "choices" : [%s] , "model" : "up" }',
    b'{"model":"up","choices":[%s],"service_tier":"default","obfuscation":"a1B2"}',
    b'{"provider":"Azure","model":"up","choices":[%s],"x":{"model":"nested","choices":[1]}}',
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_but_model_and_provider_is_byte_identical(spelling: bytes) -> None:
    """M2.2 in every key order and spacing; the second chunk and on go by the learned frame."""
    inside = [
        b'{"index":0,"delta":{"role":"assistant"},"finish_reason":null}',
        b'{"index":0,"delta":{"content":"\xe4\xbd\xa0 \\u00fc\\/ \\"model\\":\\"up\\""},"n":1e+7}',
        b'{"index":0,"delta":{"content":"]}"},"logprobs":{"content":[{"token":"]}","x":-0.0}]}}',
        b'{"index":0,"delta":{"reasoning_content":"hm","\\u0061":null},"finish_reason":null}',
    ]
    sent = [spelling % choice for choice in inside]
    _, events = run(sent)
    assert len(events) == len(sent)
    for before, after in zip(sent, events, strict=True):
        expected = before.replace(b'"up"', b'"test/model"', 1)
        if b'"provider"' in before:
            expected = expected.replace(b'"Azure"', b'"fake"', 1)
            assert after == expected
        else:
            assert after.count(b',"provider":"fake"') == 1
            assert after.replace(b',"provider":"fake"', b"") == expected
            assert after.index(b'"provider":"fake"') > after.index(b'"test/model"')


def test_a_chunk_without_a_model_gets_one() -> None:
    _, events = run([b'{"choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}'])
    assert parsed(events)[0]["model"] == "test/model"
    assert parsed(events)[0]["provider"] == "fake"


def test_content_that_looks_like_the_frame_is_content() -> None:
    tail = '],"model":"up"}'
    texts = ["a", 'x"}}' + tail, '"choices":[', tail, '{"error":{"message":"no"}}', '"role":']
    chunks = [FIRST, *(chunk({"content": text}) for text in texts)]
    _, events = run(chunks)
    assert [c["choices"][0]["delta"].get("content") for c in parsed(events)] == ["", *texts]
    assert all(c["model"] == "test/model" for c in parsed(events))


def test_obfuscation_that_changes_with_every_chunk_is_kept() -> None:
    """OpenAI pads chunks with a last member of varying length."""
    pads = ["aB3", "", "x" * 40, 'quo"te', "back\\slash", "q"]
    chunks = [chunk({"role": "assistant"}, obfuscation="first")]
    chunks += [chunk({"content": str(i)}, obfuscation=pad) for i, pad in enumerate(pads)]
    _, events = run(chunks)
    assert [c["obfuscation"] for c in parsed(events)] == ["first", *pads]
    assert [c["choices"][0]["delta"].get("content") for c in parsed(events)][1:] == list("012345")
    assert all(c["model"] == "test/model" and c["provider"] == "fake" for c in parsed(events))


@pytest.mark.parametrize(
    "first", [b'{"model":"up","choices":[%s]}', b'{"choices":[%s],"model":"up","usage":null}']
)
def test_a_member_behind_choices_that_ends_like_the_tail_is_no_part_of_choices(
    first: bytes,
) -> None:
    """The frame alone cannot tell which bracket closed `choices`."""
    choice = b'{"index":0,"delta":{"role":"assistant","content":"ab"}}'
    content = choice.replace(b'"role":"assistant",', b"")
    tail = first.partition(b"%s")[2]
    odd = [
        first.replace(tail, b'] , "model":"secret","citations":["a"' + tail) % content,
        first.replace(tail, b'],"model":"secret","x":[{"y":1}' + tail) % content,
    ]
    target, events = run([first % choice, first % content, *odd, first % content])
    assert [c["model"] for c in parsed(events)] == ["test/model"] * 5
    assert all(c["provider"] == "fake" for c in parsed(events))
    assert target.characters == 10


def test_a_varying_last_member_that_stands_before_ours() -> None:
    """A chunk without a model gets ours behind its last member."""
    frames = [
        b'{"choices":[{"index":0,"delta":{%s"content":"a"}}],"obfuscation":"%s"}' % parts
        for parts in ((b'"role":"assistant",', b"x"), (b"", b"x"), (b"", b"yy"), (b"", b"zzz"))
    ]
    _, events = run(frames)
    got = parsed(events)
    assert [(c["model"], c["provider"]) for c in got] == [("test/model", "fake")] * 4
    assert [c["obfuscation"] for c in got] == ["x", "x", "yy", "zzz"]


members_of_chunks = st.fixed_dictionaries(
    {"choices": st.just(None)},
    optional={
        "id": st.sampled_from(["c1", "c2"]),
        "model": st.sampled_from(["up-1", "up-2"]),
        "created": st.integers(1, 3),
        "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 5}]),
        "x_groq": st.sampled_from([{"id": "r"}, {"usage": {"prompt_tokens": 1}}]),
        "provider": st.just("Other"),
        "error": st.just(None),
        "obfuscation": st.text(max_size=4),
    },
)


@given(st.data())
def test_rewritten_chunks_mean_what_was_sent(data: st.DataObject) -> None:
    """Whatever a stream mixes, every chunk means what it meant, but for model, provider, usage."""
    include_usage = data.draw(st.booleans())
    spaced = data.draw(st.booleans())
    separators = (", ", ": ") if spaced else (",", ":")
    target = rewriter(include_usage=include_usage)
    first = True
    for members in data.draw(st.lists(members_of_chunks, min_size=1, max_size=8)):
        order = data.draw(st.permutations(list(members)))
        delta: dict[str, Any] = {"content": data.draw(st.text(max_size=5))}
        if first:
            delta["role"] = "assistant"
            first = False
        finish = data.draw(st.sampled_from([None, None, "stop"]))
        sent = {key: members[key] for key in order}
        sent["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
        out: list[bytes] = []
        assert target.rewrite(json.dumps(sent, separators=separators).encode(), out) is Kind.CHUNK
        (event,) = SseDecoder().feed(b"".join(out))
        got = json.loads(event.data)
        assert got.pop("model") == "test/model"
        assert got.pop("provider") == "fake"
        usage = got.pop("usage", None)
        assert usage is None  # told once, at the end
        groq = got.get("x_groq")
        if groq is not None and not include_usage:
            assert "usage" not in groq
            got["x_groq"] = sent["x_groq"]
        expected = {k: v for k, v in sent.items() if k not in ("model", "provider", "usage")}
        assert got == expected
        assert [k for k in got if k in order] == [k for k in order if k in expected]


# --- M2.3: roles ------------------------------------------------------------------------------


def test_the_upstreams_own_first_chunk_passes_as_sent() -> None:
    _, events = run([FIRST, chunk({"content": "a"}), LAST])
    deltas = [c["choices"][0]["delta"] for c in parsed(events)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]


def test_a_primer_is_made_for_each_choice_that_starts_without_a_role() -> None:
    """B86, with n=2 and choices that interleave."""

    def of(index: int, text: str) -> dict[str, Any]:
        return chunk(None) | {"choices": [{"index": index, "delta": {"content": text}}]}

    _, events = run([of(0, "a"), of(0, "b"), of(1, "c"), of(0, "d"), of(1, "e")], choices=2)
    told = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in parsed(events)]
    primer = {"role": "assistant", "content": ""}
    assert told == [
        (0, primer), (0, {"content": "a"}), (0, {"content": "b"}), (1, primer),
        (1, {"content": "c"}), (0, {"content": "d"}), (1, {"content": "e"}),
    ]  # fmt: skip
    assert all(c["id"] == "c1" and c["created"] == 9 for c in parsed(events))


@pytest.mark.parametrize("spaced", [True, False])
def test_a_choice_that_was_not_asked_for_gets_its_role_too(spaced: bool) -> None:
    """Also in mid-stream, where chunks are not parsed, and if it is the first to come."""

    def of(index: int, text: str, **delta: Any) -> bytes:
        choice = {"index": index, "delta": {"content": text, **delta}, "finish_reason": None}
        separators = (", ", ": ") if spaced else (",", ":")
        return json.dumps({**chunk(None), "choices": [choice]}, separators=separators).encode()

    for order in ([0, 0, 0, 1, 0, 1], [1, 0, 0, 1]):
        _, events = run([of(index, "x") for index in order])
        seen: set[int] = set()
        for told in parsed(events):
            (choice,) = told["choices"]
            assert ("role" in choice["delta"]) is (choice["index"] not in seen)
            seen.add(choice["index"])
        assert sum(c["choices"][0]["delta"]["content"] == "x" for c in parsed(events)) == len(order)


def test_a_repeated_role_is_told_once() -> None:
    """B85."""
    _, events = run([FIRST, *[chunk({"role": "assistant", "content": t}) for t in "ab"]])
    assert [c["choices"][0]["delta"] for c in parsed(events)] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
    ]


# --- M2.4: usage ------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
USAGE_CHUNK = chunk(None, usage=USAGE)
GROQ_LAST = chunk({}, "stop", x_groq={"id": "r", "usage": USAGE})

USAGE_SHAPES = {
    "usage chunk": [FIRST, LAST, USAGE_CHUNK],
    "on the finish chunk": [FIRST, chunk({}, "stop", usage=USAGE)],
    "x_groq only": [FIRST, GROQ_LAST],
    "x_groq and usage chunk": [FIRST, GROQ_LAST, USAGE_CHUNK],
    "on every chunk, cumulative": [
        chunk({"role": "assistant"}, usage={**USAGE, "completion_tokens": 0}),
        chunk({"content": "a"}, usage={**USAGE, "completion_tokens": 1}),
        chunk({}, "stop", usage=USAGE),
    ],
    "without choices": [FIRST, LAST, {"id": "c1", "usage": USAGE}],
    "null until the end": [{**FIRST, "usage": None}, {**LAST, "usage": None}, USAGE_CHUNK],
    "before the finish": [FIRST, USAGE_CHUNK, LAST],
}


@pytest.mark.parametrize("name", USAGE_SHAPES)
def test_usage_is_read_everywhere_and_told_once_if_asked(name: str) -> None:
    target, events = run(USAGE_SHAPES[name], include_usage=True)
    assert target.usage == TokenUsage(prompt_tokens=5, completion_tokens=3)
    told = parsed(events)
    assert told[-1]["choices"] == []
    assert told[-1]["usage"] == USAGE
    assert (told[-1]["model"], told[-1]["provider"]) == ("test/model", "fake")
    assert [c for c in told[:-1] if c.get("usage")] == []
    assert sum(c["choices"] == [] for c in told) == 1


@pytest.mark.parametrize("name", USAGE_SHAPES)
def test_usage_is_withheld_whole_if_not_asked(name: str) -> None:
    """B24: no usage chunk, no null, nothing in x_groq."""
    target, events = run(USAGE_SHAPES[name], include_usage=False)
    assert target.usage == TokenUsage(prompt_tokens=5, completion_tokens=3)
    assert b"usage" not in b"".join(events)
    assert all(c["choices"] for c in parsed(events))


def test_a_null_that_is_not_our_doing_stays() -> None:
    _, events = run([{**FIRST, "usage": None}], include_usage=False, usage_is_ours=False)
    assert b'"usage":null' in events[0]


def test_zero_is_a_report_and_details_are_read() -> None:
    """B27."""
    zero = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert run([chunk(None, usage=zero)])[0].usage == TokenUsage(
        prompt_tokens=0, completion_tokens=0
    )
    details = {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert run([chunk(None, usage=details)])[0].usage == TokenUsage(
        prompt_tokens=5, completion_tokens=3, cached_tokens=4, reasoning_tokens=2
    )


# --- what is not a chunk ----------------------------------------------------------------------


def test_kinds() -> None:
    target = rewriter()
    out: list[bytes] = []
    assert target.rewrite(b" [DONE] ", out) is Kind.DONE
    assert target.rewrite(b'{"type":"ping"}', out) is Kind.SKIPPED
    assert target.rewrite(b'"text"', out) is Kind.SKIPPED
    assert target.rewrite(b'{"error":{"message":"no"}}', out) is Kind.ERROR
    assert out == []
    assert target.error_payload == b'{"error":{"message":"no"}}'
    with pytest.raises(NotAChunk):
        target.rewrite(b'{"choices":[', out)
    assert target.rewrite(compact({**FIRST, "error": None}), out) is Kind.CHUNK


def test_json_over_several_data_lines_leaves_as_one() -> None:
    _, events = run([b'{"choices":[{"index":0,\n"delta":{"role":"assistant",\n"content":"a"}}]}'])
    assert b"\n" not in events[0]
    assert parsed(events)[0]["choices"][0]["delta"]["content"] == "a"


def test_finished_means_every_choice() -> None:
    target = rewriter(choices=2)
    out: list[bytes] = []
    for index, finish in [(0, None), (1, None), (0, "stop")]:
        choice = {"index": index, "delta": {"role": "assistant"}, "finish_reason": finish}
        target.rewrite(compact({**chunk(None), "choices": [choice]}), out)
    assert not target.finished
    last = {"index": 1, "delta": {}, "finish_reason": "length"}
    target.rewrite(compact({**chunk(None), "choices": [last]}), out)
    assert target.finished
    assert target.all_finished


# --- a stream collected to a whole reply ------------------------------------------------------


def test_chunks_are_collected_to_one_reply() -> None:
    collector = ChunkCollector(identity(), choices=1, max_bytes=100_000)

    def call(index: int, **fields: Any) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index, **fields}]})

    for item in [
        chunk({"role": "assistant", "content": None}, system_fingerprint="fp"),
        chunk({"content": "a", "reasoning_content": "x"}),
        chunk({"content": "b", "reasoning_content": "y"}),
        call(0, id="t0", type="function", function={"name": "f", "arguments": ""}),
        call(1, id="t1", type="function", function={"name": "g", "arguments": "{}"}),
        call(0, function={"arguments": '{"a":'}),
        call(0, function={"arguments": "1}"}),
        chunk({}, "tool_calls"),
        USAGE_CHUNK,
    ]:
        collector.rewrite(compact(item), [])
    reply = json.loads(collector.result())
    function = {"name": "f", "arguments": '{"a":1}'}
    assert reply == {
        "id": "c1",
        "object": "chat.completion",
        "created": 9,
        "model": "test/model",
        "provider": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "ab",
                    "reasoning_content": "xy",
                    "tool_calls": [
                        {"type": "function", "id": "t0", "function": function},
                        {
                            "type": "function",
                            "id": "t1",
                            "function": {"name": "g", "arguments": "{}"},
                        },
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "system_fingerprint": "fp",
        "usage": USAGE,
    }


def test_a_reply_without_end_is_refused() -> None:
    collector = ChunkCollector(identity(), choices=1, max_bytes=1000)
    piece = compact(chunk({"content": "x" * 400}))
    collector.rewrite(piece, [])
    with pytest.raises(ReplyTooLarge):
        collector.rewrite(piece, [])
