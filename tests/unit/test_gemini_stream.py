"""M2.3 to M2.6, M3.4: streams and whole replies of the Gemini API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.gemini_shape import GeminiShape
from encoders.gemini_stream import GeminiTranslator
from encoders.openai import ChunkIdentity
from encoders.sse import SseDecoder
from encoders.translator import Kind, NotAChunk, ReplyTooLarge, StreamWants
from encoders.usage import TokenUsage
from relay.upstreams.replay import Transcript
from tests.unit.test_golden import FIXTURES, TRANSCRIPTS, VARIANTS, relayed

SHAPE = GeminiShape()


def translator(**wants: Any) -> GeminiTranslator:
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    return GeminiTranslator(identity, StreamWants(**wants))


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(*parts: Any, finish: str | None = None, index: int | None = 0, **more: Any) -> Any:
    """A response with one candidate; `more` are fields of the response."""
    candidate: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}}
    if finish is not None:
        candidate["finishReason"] = finish
    if index is not None:
        candidate["index"] = index
    return {"candidates": [candidate], **more}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"text": words, **more}


def called(name: str, args: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name} if args is None else {"name": name, "args": args}
    return {"functionCall": function | more}


def run(*events: Any, **wants: Any) -> tuple[GeminiTranslator, list[dict[str, Any]]]:
    """Translate events (objects, or bytes as sent) to the end; return the client's chunks."""
    target = translator(**wants)
    out: list[bytes] = []
    for item in events:
        target.rewrite(item if isinstance(item, bytes) else compact(item), out)
    out += [target.flush(), target.closing()]
    return target, [json.loads(e.data) for e in SseDecoder().feed(b"".join(out))]


def choices(*events: Any, **wants: Any) -> list[dict[str, Any]]:
    return [choice for chunk in run(*events, **wants)[1] for choice in chunk["choices"]]


def deltas(*events: Any, **wants: Any) -> list[dict[str, Any]]:
    """The deltas behind the primer, before the end."""
    found = [choice["delta"] for choice in choices(*events, **wants)]
    assert found[0] == {"role": "assistant", "content": ""}
    return [delta for delta in found[1:] if delta]


def calls(*events: Any, **wants: Any) -> list[tuple[str, str, str]]:
    """Ids, names and arguments of the calls of choice 0, put together by index."""
    found: dict[int, list[str]] = {}
    for choice in choices(*events, **wants):
        for call in choice["delta"].get("tool_calls", ()) if choice["index"] == 0 else ():
            entry = found.setdefault(call["index"], ["", "", ""])
            entry[0] += call.get("id", "")
            entry[1] += call["function"].get("name", "")
            entry[2] += call["function"]["arguments"]
    assert list(found) == list(range(len(found)))
    return [(a, b, c) for a, b, c in found.values()]


def usage(**counts: int) -> dict[str, Any]:
    return {"usageMetadata": counts}


# --- text ---------------------------------------------------------------------------------------


def test_text() -> None:
    """M2.3: one primer, no other role; the id is the provider's."""
    target, chunks = run(
        event(text("Hé"), responseId="resp-1", modelVersion="gemini-x"),
        event(text("llo"), responseId="resp-2"),
        event(text("!"), finish="STOP"),
    )
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hé"},
        {"content": "llo"},
        {"content": "!"},
        {},
    ]
    assert {chunk["id"] for chunk in chunks} == {"resp-1"}
    assert {chunk["model"] for chunk in chunks} == {"test/model"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["native_finish_reason"] == "STOP"
    assert target.characters == 6
    assert target.finished
    assert target.all_finished


def test_thoughts_are_reasoning() -> None:
    """M2.6: under the name that the plane has for it."""
    events = [event(text("Hm.", thought=True)), event(text("Yes."), finish="STOP")]
    assert deltas(*events) == [{"reasoning_content": "Hm."}, {"content": "Yes."}]
    assert deltas(*events, reasoning_field="reasoning") == [
        {"reasoning": "Hm."},
        {"content": "Yes."},
    ]
    assert run(*events)[0].characters == 7


def test_several_candidates() -> None:
    """B86: each with its primer; one without an index is where it stands."""
    first = {"candidates": [{"content": {"parts": [text("a")]}}, {"content": {"parts": []}}]}
    second = {"candidates": [{"index": 1, "content": {"parts": [text("b")]}}]}
    target, chunks = run(
        first, second, event(finish="STOP"), event(finish="MAX_TOKENS", index=1), choices=2
    )
    assert target.all_finished
    said = [(c["index"], c["delta"], c["finish_reason"]) for k in chunks for c in k["choices"]]
    primer = {"role": "assistant", "content": ""}
    assert said == [
        (0, primer, None),
        (0, {"content": "a"}, None),
        (1, primer, None),
        (1, {"content": "b"}, None),
        (0, {}, "stop"),
        (1, {}, "length"),
    ]
    assert not run(first, event(finish="STOP"), choices=2)[0].all_finished


# --- function calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["one event", "three events"])
def test_parallel_calls_have_indexes_of_the_stream(together: bool) -> None:
    """B38, B42: distinct made ids, arguments as an object, `{}` for none."""
    parts = [called("f", {"city": "Zürich", "n": [1]}), called("f", {}), called("g")]
    events = [event(*parts)] if together else [event(part) for part in parts]
    assert calls(*events, event(finish="STOP", responseId="late")) == [
        ("call_chatcmpl-ours_0_0", "f", '{"city":"Zürich","n":[1]}'),
        ("call_chatcmpl-ours_0_1", "f", "{}"),
        ("call_chatcmpl-ours_0_2", "g", "{}"),
    ]


def test_ids_of_calls() -> None:
    """The provider's own; one that is made is short enough for everybody."""
    (first, *_), (second, *_) = calls(
        event(called("f", id="own"), called("g"), responseId="r" * 60, finish="STOP")
    )
    assert first == "own"
    assert second == f"call_{'r' * 24}_0_1"
    assert len(second) <= 40


def test_a_call_ends_in_tool_calls() -> None:
    """M2.5: whichever event has it; but a cut or blocked reply is one."""
    for events in (
        [event(called("f"), finish="STOP")],
        [event(called("f")), event(finish="STOP")],
        [event(called("f")), event(text(""), finish="OTHER")],
    ):
        assert choices(*events)[-1]["finish_reason"] == "tool_calls"
    assert choices(event(called("f"), finish="MAX_TOKENS"))[-1]["finish_reason"] == "length"
    assert choices(event(called("f"), finish="SAFETY"))[-1]["finish_reason"] == "content_filter"


def test_a_signature_of_a_call() -> None:
    """M2.6: in the form of Google's OpenAI compatibility layer, on its first delta."""
    part = called("f", {"a": 1}) | {"thoughtSignature": "SIG"}
    signed = {"extra_content": {"google": {"thought_signature": "SIG"}}}
    first, *rest = deltas(event(part, finish="STOP"))
    assert first["tool_calls"][0] == {
        "index": 0,
        "id": "call_chatcmpl-ours_0_0",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
        **signed,
    }
    assert "reasoning_details" not in str(rest)
    *_, details = deltas(event(part, finish="STOP"), reasoning_field="reasoning")
    assert details["reasoning_details"] == [
        {
            "type": "reasoning.encrypted",
            "data": "SIG",
            "format": "google-gemini-v1",
            "index": 0,
            "id": "call_chatcmpl-ours_0_0",
        }
    ]


def test_signatures_of_texts() -> None:
    """Also one that comes alone with an empty text."""
    found = deltas(
        event(text("Hm", thought=True, thoughtSignature="A")),
        event(text("Yes")),
        event(text("", thoughtSignature="B"), finish="STOP"),
    )
    details = [d for delta in found for d in delta.get("reasoning_details", ())]
    assert [(d["data"], d["index"], d["format"]) for d in details] == [
        ("A", 0, "google-gemini-v1"),
        ("B", 1, "google-gemini-v1"),
    ]


def piece(path: str, **value: Any) -> dict[str, Any]:
    return {"jsonPath": path, **value}


def test_arguments_in_pieces() -> None:
    """Vertex AI's `partialArgs`: told once they are complete."""
    events = [
        event({"functionCall": {"name": "f", "willContinue": True}, "thoughtSignature": "S"}),
        event(
            {
                "functionCall": {
                    "partialArgs": [
                        piece("$.city", stringValue="New ", willContinue=True),
                        piece("$.days[0].n", numberValue=1),
                        piece("$.days[1]['n']", boolValue=False),
                    ],
                    "willContinue": True,
                }
            }
        ),
        event(
            {
                "functionCall": {
                    "partialArgs": [
                        piece("$.city", stringValue="Delhi"),
                        piece("$.none", nullValue="NULL_VALUE"),
                        piece("city", stringValue="!"),
                        piece("$..bad", stringValue="?"),
                        "odd",
                    ],
                    "willContinue": True,
                }
            }
        ),
    ]
    assert calls(*events) == []
    ((_, name, arguments),) = calls(*events, event({"functionCall": {}}), event(finish="STOP"))
    assert name == "f"
    assert json.loads(arguments) == {
        "city": "!",
        "days": [{"n": 1}, {"n": False}],
        "none": None,
    }
    # a text or a whole call follows; the end of the answer closes one too, but not a cut
    assert [n for _, n, _ in calls(*events, event(called("g")), event(finish="STOP"))] == ["f", "g"]
    assert len(calls(*events, event(finish="STOP"))) == 1
    said = deltas(*events, event(text("Done.")), event(finish="STOP"))
    assert [sorted(delta) for delta in said] == [["tool_calls"], ["tool_calls"], ["content"]]
    assert calls(*events, event(finish="MAX_TOKENS")) == []
    assert len(calls(*events, event({"functionCall": {}}), event(finish="MAX_TOKENS"))) == 1


def test_pieces_of_two_calls() -> None:
    """Told apart by their names; an id that is repeated continues its call."""
    first = [piece("$.a", stringValue="x", willContinue=True)]
    more = [piece("$.a", stringValue="y")]
    events = [
        event({"functionCall": {"name": "f", "id": "i", "partialArgs": first}}),
        event({"functionCall": {"name": "f", "id": "i", "partialArgs": more}}),
        event({"functionCall": {"name": "f", "partialArgs": more, "willContinue": True}}),
        event({"functionCall": {"partialArgs": more}, "thoughtSignature": "S"}),
        event({"functionCall": {"partialArgs": [piece("$.n", nullValue=None)]}}),
    ]
    (one, _, args), (two, _, others) = calls(*events, event(finish="STOP"))
    assert (one, args) == ("i", '{"a":"xy"}')
    assert (two, others) == ("call_chatcmpl-ours_0_1", '{"a":"yy","n":null}')
    assert '"thought_signature": "S"' in json.dumps(deltas(*events, event(finish="STOP")))


# --- ends -----------------------------------------------------------------------------------------

FILTERED = [
    "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "IMAGE_SAFETY",
    "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION", "MODEL_ARMOR", "ESCALATION",
    "PUP_LIMITED_DISABLED",
]  # fmt: skip
STOPPED = [
    "STOP", "OTHER", "MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS",
    "NO_IMAGE", "IMAGE_OTHER", "MISSING_THOUGHT_SIGNATURE", "MALFORMED_RESPONSE", "SOMETHING_NEW",
]  # fmt: skip
LENGTH = ["MAX_TOKENS", "CONTINUATION"]


@pytest.mark.parametrize(
    ("native", "reason"),
    [(native, "content_filter") for native in FILTERED]
    + [(native, "stop") for native in STOPPED]
    + [(native, "length") for native in LENGTH],
)
def test_every_reason_to_finish_has_a_word(native: str, reason: str) -> None:
    """M2.5, B63: the native one is kept beside it."""
    end = choices(event(text("x")), event(finish=native))[-1]
    assert (end["finish_reason"], end["native_finish_reason"]) == (reason, native)
    alone = choices({"candidates": [{"finishReason": native, "index": 0}]})
    assert [choice["finish_reason"] for choice in alone] == [None, reason]


def test_an_unspecified_reason_is_no_end() -> None:
    target, chunks = run(event(text("x"), finish="FINISH_REASON_UNSPECIFIED"))
    assert not target.finished
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None]


def test_a_reason_on_each_event() -> None:
    """Older models say STOP each time: the last one counts, and nothing follows it."""
    target, chunks = run(
        *(event(text(word), finish="STOP") for word in "abc"), event(finish="MAX_TOKENS")
    )
    said = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert said[1:] == [
        ({"content": "a"}, None),
        ({"content": "b"}, None),
        ({"content": "c"}, None),
        ({}, "length"),
    ]
    assert target.finished
    assert not target.all_finished  # only the end of the stream is sure


def test_a_text_behind_a_reason_needs_an_end_again() -> None:
    target = translator()
    target.rewrite(compact(event(text("a"), finish="STOP")), [])
    assert target.finished
    target.rewrite(compact(event(text("b"))), [])
    assert not target.finished
    assert target.flush() == b""


def test_an_empty_event_behind_a_reason_changes_nothing() -> None:
    target, chunks = run(event(text("a"), finish="STOP"), event(), event(text("")), {"x": 1})
    assert target.all_finished
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("reason", ["SAFETY", "OTHER", "JAILBREAK", "PROHIBITED_CONTENT"])
def test_a_blocked_prompt(reason: str) -> None:
    """There are no candidates: an answer that was filtered."""
    blocked = {"promptFeedback": {"blockReason": reason}, **usage(promptTokenCount=4)}
    target, chunks = run(blocked)
    end = chunks[-1]["choices"][0]
    assert (end["finish_reason"], end["native_finish_reason"]) == ("content_filter", reason)
    assert target.finished
    assert target.usage == TokenUsage(prompt_tokens=4)


def test_feedback_that_blocks_nothing() -> None:
    target, chunks = run({"promptFeedback": {"safetyRatings": []}})
    assert (target.has_choice, chunks) == (False, [])


# --- usage ----------------------------------------------------------------------------------------


def test_usage_is_cumulative() -> None:
    """B28: the last report wins, nothing is summed."""
    counts = [usage(promptTokenCount=9, candidatesTokenCount=n) for n in range(1, 101)]
    target, chunks = run(*(event(text("x"), **c) for c in counts), include_usage=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 100,
        "total_tokens": 109,
    }
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert "usage" not in str(run(*(event(text("x"), **c) for c in counts))[1])
    assert target.usage == TokenUsage(prompt_tokens=9, completion_tokens=100)


def test_usage_in_all_its_details() -> None:
    """Fields that a later event leaves out stay; what tools brought is input, thoughts output."""
    _, chunks = run(
        event(
            text("x"),
            **usage(
                promptTokenCount=10,
                toolUsePromptTokenCount=5,
                cachedContentTokenCount=4,
                thoughtsTokenCount=30,
                totalTokenCount=45,
            ),
        ),
        event(finish="STOP", **usage(candidatesTokenCount=7, totalTokenCount=52)),
        include_usage=True,
    )
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 37,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 30},
    }


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"promptTokenCount": 8}, TokenUsage(prompt_tokens=8)),
        (
            {"promptTokenCount": 0, "candidatesTokenCount": 0},
            TokenUsage(prompt_tokens=0, completion_tokens=0),
        ),
        (
            {"promptTokenCount": 8, "thoughtsTokenCount": 3},
            TokenUsage(prompt_tokens=8, completion_tokens=3, reasoning_tokens=3),
        ),
        (  # thoughts counted among the candidates' tokens, as the total tells
            {
                "promptTokenCount": 8,
                "candidatesTokenCount": 10,
                "thoughtsTokenCount": 3,
                "totalTokenCount": 18,
            },
            TokenUsage(prompt_tokens=8, completion_tokens=10, reasoning_tokens=3),
        ),
        ({"promptTokenCount": -1, "candidatesTokenCount": True}, None),
        ({"promptTokenCount": "8"}, None),
        ({}, None),
    ],
)
def test_absent_and_zero_are_different(counts: dict[str, Any], expected: Any) -> None:
    """B27."""
    assert run({"usageMetadata": counts})[0].usage == expected


# --- extensions -----------------------------------------------------------------------------------


def test_pictures() -> None:
    """In OpenRouter's form."""
    blob = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    assert deltas(event(text("Here:"), blob), event(blob, finish="STOP")) == [
        {"content": "Here:"},
        *(
            {
                "images": [
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,AAAA"},
                        "index": index,
                    }
                ]
            }
            for index in range(2)
        ),
    ]


def test_parts_without_a_word() -> None:
    """B89: kept as they are, for the next turn; the stream goes on."""
    parts = [
        {"executableCode": {"language": "PYTHON", "code": "print(1)"}, "thoughtSignature": "S"},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1\n"}},
        {"toolCall": {"id": "t"}},
        {"inlineData": {"mimeType": "audio/pcm", "data": "AA=="}},
        {"brandNew": {}},
    ]
    assert deltas(event(*parts, text("1")), event(finish="STOP")) == [
        *({"google_parts": [part]} for part in parts),
        {"content": "1"},
    ]


def test_grounding() -> None:
    """Pages as annotations, each told once; the metadata as it came."""
    page = {"web": {"uri": "https://a", "title": "A"}}
    maps = {"maps": {"uri": "https://m"}}
    first = event(text("x"))
    first["candidates"][0]["groundingMetadata"] = {"groundingChunks": [page, maps, 7]}
    second = event(finish="STOP")
    metadata = {"groundingChunks": [page, {"web": {"uri": "https://b"}}], "webSearchQueries": ["q"]}
    second["candidates"][0] |= {
        "groundingMetadata": metadata,
        "citationMetadata": {"citationSources": []},
    }
    said = choices(first, second)
    cited = [c["delta"].get("annotations") for c in said if "grounding_metadata" in c]
    assert cited == [
        [{"type": "url_citation", "url_citation": {"url": "https://a", "title": "A"}}],
        [{"type": "url_citation", "url_citation": {"url": "https://b", "title": "https://b"}}],
    ]
    assert said[-2]["grounding_metadata"] == metadata
    assert said[-2]["citation_metadata"] == {"citationSources": []}


def test_logprobs() -> None:
    """In OpenAI's form, behind the text of their event."""
    answer = event(text("é!"), finish="STOP")
    answer["candidates"][0]["logprobsResult"] = {
        "chosenCandidates": [
            {"token": "é", "tokenId": 1, "logProbability": -0.5},
            {"token": "!", "logProbability": -1},
        ],
        "topCandidates": [{"candidates": [{"token": "e", "logProbability": -2.5}]}],
    }
    told = [c["logprobs"] for c in choices(answer) if "logprobs" in c]
    assert told == [
        {
            "content": [
                {
                    "token": "é",
                    "logprob": -0.5,
                    "bytes": [195, 169],
                    "top_logprobs": [{"token": "e", "logprob": -2.5, "bytes": [101]}],
                },
                {"token": "!", "logprob": -1, "bytes": [33], "top_logprobs": []},
            ]
        }
    ]


# --- oddities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        {},
        [],
        7,
        None,
        "x",
        {"candidates": None},
        {"candidates": [None, 7]},
        {"candidates": [{"content": None, "index": -1}]},
        {"candidates": [{"content": {"parts": [None, {}, {"text": 7}, {"functionCall": 7}]}}]},
        {"candidates": [{"content": {"parts": [{"functionCall": {"args": {}}}]}}]},
        {"candidates": [{"finishReason": None}, {"finishReason": 7}]},
        {"usageMetadata": 7, "responseId": 7, "error": None, "promptFeedback": 7},
    ],
)
def test_what_says_nothing_is_tolerated(odd: Any) -> None:
    """B89: in front of and behind what does."""
    target, chunks = run(odd, event(text("x")), odd, event(finish="STOP"), odd)
    said = [
        c["choices"][0]["delta"].get("content") for c in chunks if c["choices"][0]["index"] == 0
    ]
    assert [word for word in said if word] == ["x"]
    assert target.finished


def test_kinds_of_events() -> None:
    target = translator()
    assert target.rewrite(compact(event(text("x"))), []) is Kind.CHUNK
    assert target.rewrite(compact(usage(promptTokenCount=1)), []) is Kind.CHUNK
    assert target.rewrite(b'{"modelVersion":"m"}', []) is Kind.SKIPPED
    assert target.last_skipped == b'{"modelVersion":"m"}'
    assert target.rewrite(b"[DONE]", []) is Kind.DONE
    with pytest.raises(NotAChunk):
        target.rewrite(b"{broken", [])


ERROR = {"error": {"code": 503, "message": "Overloaded", "status": "UNAVAILABLE"}}


@pytest.mark.parametrize("sent", [ERROR, [ERROR], [event(text("x")), ERROR]])
def test_an_error_event_fails_the_stream(sent: Any) -> None:
    """M3.4: also in a list, as Google sends it without `alt=sse`."""
    assert translator().rewrite(compact(sent), []) is Kind.FAILED


def test_an_event_that_is_a_list() -> None:
    assert deltas(compact([event(text("a")), 7, event(text("b"), finish="STOP")])) == [
        {"content": "a"},
        {"content": "b"},
    ]


def test_stray_bytes_become_replacement_characters() -> None:
    data = compact(event(text("a@b"), finish="STOP")).replace(b"@", b"\xff")
    assert deltas(data) == [{"content": "a�b"}]
    assert deltas(b"[" + data + b"]") == [{"content": "a�b"}]


def test_half_an_emoji() -> None:
    """A lone surrogate in a text and in arguments."""
    data = b'{"candidates":[{"content":{"parts":[{"text":"\\ud83d"},{"functionCall":'
    data += b'{"name":"f","args":{"a":"\\ud83d"}}}]},"finishReason":"STOP"}]}'
    first, _, last = deltas(data)
    assert first["content"] == "\ud83d"
    assert json.loads(last["tool_calls"][0]["function"]["arguments"]) == {"a": "\ud83d"}


# --- whole replies --------------------------------------------------------------------------------


def whole(reply: Any, **wants: Any) -> dict[str, Any]:
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    wants = {"collect_bytes_max": 1 << 20, **wants}
    assert SHAPE.is_reply(reply)
    found: dict[str, Any] = json.loads(
        SHAPE.whole(compact(reply), reply, identity, StreamWants(**wants)).body
    )
    return found


def test_a_whole_reply() -> None:
    """Through the code of the streams."""
    reply = event(
        text("Hm", thought=True, thoughtSignature="T"),
        text("Let me "),
        text("see."),
        called("f", {"a": 1}) | {"thoughtSignature": "SIG"},
        {"inlineData": {"mimeType": "image/png", "data": "AA=="}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK"}},
        finish="STOP",
        responseId="r1",
        **usage(promptTokenCount=3, candidatesTokenCount=4),
    )
    reply["candidates"][0]["groundingMetadata"] = {
        "groundingChunks": [{"web": {"uri": "https://a"}}]
    }
    got = whole(reply)
    assert got == {
        "id": "r1",
        "object": "chat.completion",
        "created": 7,
        "model": "test/model",
        "provider": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Let me see.",
                    "reasoning_content": "Hm",
                    "images": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "data:image/png;base64,AA=="},
                            "index": 0,
                        }
                    ],
                    "google_parts": [{"codeExecutionResult": {"outcome": "OUTCOME_OK"}}],
                    "annotations": [
                        {
                            "type": "url_citation",
                            "url_citation": {"url": "https://a", "title": "https://a"},
                        }
                    ],
                    "reasoning_details": [
                        {
                            "type": "reasoning.encrypted",
                            "data": "T",
                            "format": "google-gemini-v1",
                            "index": 0,
                        }
                    ],
                    "tool_calls": [
                        {
                            "id": "call_r1_0_0",
                            "type": "function",
                            "extra_content": {"google": {"thought_signature": "SIG"}},
                            "function": {"name": "f", "arguments": '{"a":1}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
                "grounding_metadata": {"groundingChunks": [{"web": {"uri": "https://a"}}]},
                "native_finish_reason": "STOP",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_message_comes_back_as_the_turn_that_it_was() -> None:
    """M2.6, M5: what a client keeps of a reply is what the provider gets again."""
    parts = [
        {"executableCode": {"language": "PYTHON", "code": "1"}},
        text("See.", thoughtSignature="T"),
        {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}, "thoughtSignature": "SIG"},
        {"functionCall": {"id": "d", "name": "f", "args": {}}},
    ]
    for field in ("reasoning_content", "reasoning"):
        message = whole(event(*parts, finish="STOP"), reasoning_field=field)["choices"][0][
            "message"
        ]
        if field == "reasoning":  # OpenRouter's clients know nothing of extra_content
            for call in message["tool_calls"]:
                call.pop("extra_content", None)
        body = {"messages": [message]}
        request = SHAPE.request(body, model="gemini-3-pro", stream=True, stream_options=True)
        assert request["contents"] == [{"role": "model", "parts": parts}]


def test_a_whole_reply_without_a_reason_has_an_end_all_the_same() -> None:
    """The document is complete."""
    got = whole(event(text("x")))
    assert got["choices"][0]["finish_reason"] == "stop"


def test_a_blocked_prompt_as_a_whole_reply() -> None:
    got = whole({"promptFeedback": {"blockReason": "SAFETY"}})
    assert got["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert got["choices"][0]["finish_reason"] == "content_filter"


def test_a_stream_that_came_as_a_list() -> None:
    """A proxy lost `alt=sse`."""
    reply = [event(text("a")), event(text("b"), finish="MAX_TOKENS")]
    got = whole(reply)["choices"][0]
    assert (got["message"]["content"], got["finish_reason"]) == ("ab", "length")
    assert SHAPE.events_of(reply) == [compact(item) for item in reply]


@pytest.mark.parametrize(
    "reply",
    [None, 7, "x", [], {}, [7], {"candidates": []}, {"candidates": [7]}, {"choices": []}, ERROR],
)
def test_what_is_no_reply(reply: Any) -> None:
    assert not SHAPE.is_reply(reply)


def test_a_collected_reply_is_bounded() -> None:
    target = translator(collect_bytes_max=2000)
    target.rewrite(compact(event(text("x" * 1000), finish="STOP")), [])
    with pytest.raises(ReplyTooLarge):
        target.rewrite(compact(event(text("x" * 1000), finish="STOP")), [])
    assert target.flush() == b""  # the end that was told needs no room


# --- properties -----------------------------------------------------------------------------------

FOLDER = FIXTURES / "gemini"


@given(
    name=st.sampled_from(sorted(n for n, p in TRANSCRIPTS.items() if p.parent == FOLDER)),
    wants=st.sampled_from(sorted(VARIANTS)),
    data=st.data(),
)
def test_any_cut_of_any_transcript_gives_the_same_bytes(
    name: str, wants: str, data: st.DataObject
) -> None:
    """Issue 4: whatever the reads."""
    transcript = Transcript.parse(TRANSCRIPTS[name].read_bytes(), name)
    body = b"".join(part for _, part in transcript.reads)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=12)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    whole = relayed(transcript, [body], VARIANTS[wants])
    assert relayed(transcript, pieces, VARIANTS[wants]) == whole


PARTS = st.sampled_from(
    [
        text("Hé"),
        text(""),
        text("hm", thought=True),
        text("", thoughtSignature="S"),
        called("f", {"a": 1}),
        called("g"),
        {"functionCall": {"name": "h", "willContinue": True}},
        {"functionCall": {"partialArgs": [piece("$.a[3].b", stringValue="x")]}},
        {"inlineData": {"mimeType": "image/png", "data": "AA=="}},
        {"executableCode": {"code": "1"}},
        {},
    ]
)
EVENTS = st.builds(
    event,
    PARTS,
    PARTS,
    finish=st.sampled_from([None, None, "STOP", "MAX_TOKENS", "SAFETY", "NEW"]),
    index=st.sampled_from([None, 0, 1]),
)


@given(st.lists(EVENTS, max_size=8))
def test_any_stream_is_well_formed(events: list[Any]) -> None:
    """One primer first, calls opened in order and once, distinct ids, one end and nothing after."""
    target, chunks = run(*events)
    primed: set[int] = set()
    ended: set[int] = set()
    ids: list[str] = []
    opened: dict[int, int] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index, delta = choice["index"], choice["delta"]
        assert ("role" in delta) is (index not in primed)
        assert index not in ended
        primed.add(index)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                ids.append(call["id"])
                assert call["index"] == opened.get(index, 0)
                opened[index] = opened.get(index, 0) + 1
            else:
                assert call["index"] == opened[index] - 1
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        if choice["finish_reason"]:
            ended.add(index)
    assert len(set(ids)) == len(ids)
    assert target.finished is (bool(primed) and primed == ended)


@given(st.lists(EVENTS, min_size=1, max_size=6))
def test_a_whole_reply_says_what_the_stream_says(events: list[Any]) -> None:
    said: dict[int, str] = {}
    for choice in choices(*events):
        index = choice["index"]
        said[index] = said.get(index, "") + (choice["delta"].get("content") or "")
    collecting = translator(collect_bytes_max=1 << 20)
    for item in events:
        collecting.rewrite(compact(item), [])
    collecting.flush()
    got = json.loads(collecting.result())["choices"]
    assert {c["index"]: c["message"]["content"] or "" for c in got} == said


def test_a_piece_of_arguments_that_is_no_value_of_its_type() -> None:
    """A list where a number belongs is passed on; it is no list of texts."""
    pieces = [
        piece("$.a", numberValue=[{"b": 1}]),
        piece("$.c", stringValue="x"),
        piece("$.c", numberValue=[]),
        piece("$.d[" + "9" * 5000 + "]", numberValue=1),
    ]
    events = [event({"functionCall": {"name": "f", "partialArgs": pieces}}), event(finish="STOP")]
    ((_, _, arguments),) = calls(*events)
    assert json.loads(arguments) == {"a": [{"b": 1}], "c": []}


def test_arguments_that_never_end_are_bounded() -> None:
    """M3.5: all pieces of a call wait for its last one."""
    target = translator(withheld_max=100_000)
    part = {"partialArgs": [piece("$.a", stringValue="x" * 1000)], "willContinue": True}
    target.rewrite(compact(event({"functionCall": {"name": "f", **part}})), [])
    more = compact(event({"functionCall": part}))
    kinds = (target.rewrite(more, []) for _ in range(100))
    with pytest.raises(ReplyTooLarge):
        list(kinds)
