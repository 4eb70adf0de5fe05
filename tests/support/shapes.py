"""One answer as each provider shape says it on its wire: the same words, the same tool calls.

    up.script(*script_for("anthropic", words=["Hel", "lo"], calls=[ToolCall("c1", "f", {"a": 1})]))

Tests of what a client gets take the shape as a parameter, `@EVERY_SHAPE`: it must not matter.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.gateway import UPSTREAM_KEY
from tests.support.script import DONE, Rst, Send, chunk, compact, sse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.fake_upstream import FakeUpstream
    from tests.support.script import Step

# Those that the gateway serves.
SERVED: Final = ("openai", "anthropic", "gemini")
EVERY_SHAPE: Final = pytest.mark.parametrize("shape", SERVED)

PROMPT_TOKENS: Final = 7


@dataclass(frozen=True)
class ToolCall:
    """A call that a model makes.

    Attributes:
        id: the provider's; gemini has none on its wire.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def fragments(self) -> list[str]:
        """The arguments as JSON, in the pieces in which a stream brings them."""
        text = json.dumps(dict(self.arguments))
        return [text[at : at + 5] for at in range(0, len(text), 5)]


def provider_of(shape: str, up: FakeUpstream) -> dict[str, Any]:
    """The configuration of a fake provider of that shape."""
    base_url = up.base_url if shape == "openai" else up.origin
    return {"shape": shape, "base_url": base_url, "api_key": UPSTREAM_KEY}


def script_for(
    shape: str, *, words: Sequence[str] = (), calls: Sequence[ToolCall] = ()
) -> list[Step]:
    """A whole streamed answer: text, then tool calls in parallel, usage, the end.

    Each event is a packet of its own. Output tokens are one for each word and each call.
    """
    makers = {"openai": _openai, "anthropic": _anthropic, "gemini": _gemini}
    return [Send(event) for event in makers[shape](words, calls)]


def broken_script_for(shape: str, *, words: Sequence[str]) -> list[Step]:
    """The answer up to these words, whose next one never comes."""
    unsaid = "unsaid"
    whole = script_for(shape, words=[*words, unsaid])
    said = itertools.takewhile(
        lambda step: isinstance(step, Send) and unsaid.encode() not in step.data, whole
    )
    return [*said, Rst()]


def _openai(words: Sequence[str], calls: Sequence[ToolCall]) -> list[bytes]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in words]
    for index, call in enumerate(calls):
        function = {"name": call.name, "arguments": ""}
        head = {"index": index, "id": call.id, "type": "function", "function": function}
        deltas.append({"tool_calls": [head]})
        for part in call.fragments:
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    output = len(words) + len(calls)
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": output,
        "total_tokens": PROMPT_TOKENS + output,
    }
    chunks = [chunk(None, delta=delta) for delta in deltas]
    chunks.append(chunk(None, finish_reason="tool_calls" if calls else "stop"))
    chunks.append(chunk(None, choices=[], usage=usage))
    return [*(sse(data) for data in chunks), DONE]


def _anthropic(words: Sequence[str], calls: Sequence[ToolCall]) -> list[bytes]:
    message: dict[str, Any] = {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "model": "upstream-model",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": 1},
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if words:
        parts = [{"type": "text_delta", "text": word} for word in words]
        blocks.append(({"type": "text", "text": ""}, parts))
    for call in calls:
        begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        # Real streams begin with an empty fragment.
        fragments = ["", *call.fragments]
        blocks.append(
            (begun, [{"type": "input_json_delta", "partial_json": text} for text in fragments])
        )
    for index, (begun, parts) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        if not index:
            events.append({"type": "ping"})
        events += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    usage = {"output_tokens": len(words) + len(calls)}
    events.append({"type": "message_delta", "delta": end, "usage": usage})
    events.append({"type": "message_stop"})
    return [
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), compact(event)) for event in events
    ]


def _gemini(words: Sequence[str], calls: Sequence[ToolCall]) -> list[bytes]:
    parts: list[dict[str, Any]] = [{"text": word} for word in words]
    parts += [{"functionCall": {"name": call.name, "args": dict(call.arguments)}} for call in calls]
    out = []
    for number, part in enumerate(parts, 1):
        candidate: dict[str, Any] = {"content": {"parts": [part], "role": "model"}, "index": 0}
        if number == len(parts):
            candidate["finishReason"] = "STOP"  # also of an answer that is a call
        usage = {
            "promptTokenCount": PROMPT_TOKENS,
            "candidatesTokenCount": number,
            "totalTokenCount": PROMPT_TOKENS + number,
        }
        answer = {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": "upstream-model",
            "responseId": "fake",
        }
        # Its lines end with CR LF, and nothing follows the last event.
        out.append(b"data: " + compact(answer) + b"\r\n\r\n")
    return out
