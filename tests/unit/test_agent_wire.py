"""A run as OpenAI chunks: pure, the same from the journal as live (A1.2, A1.4)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from encoders.agent import AgentChunks, finish_reason
from encoders.workflow import frame, payload
from relay.runs.agent_wire import AgentWire
from relay.runs.groups import FrameItem, TextStream, TokenItem

if TYPE_CHECKING:
    from relay.runs.groups import Item

RUN = "0123456789abcdef" * 2


def said(name: str, **data: Any) -> FrameItem:
    told = payload(
        name,
        data,
        workflow_id="w",
        execution_id=RUN,
        timestamp="2026-01-01T00:00:00Z",
        elapsed_ms=1,
    )
    return FrameItem(1, name, frame(name, told))


def wire(*, usage_chunk: bool = False) -> AgentWire:
    chunks = AgentChunks(RUN, created=1, model="configured", usage_chunk=usage_chunk)
    return AgentWire("helper", chunks)


def items(*words: str, reason: str = "stop") -> list[Item]:
    text, at, out = TextStream("helper", 3), 0, list[Any]()
    out += [said("request_received", source="agent"), said("task_dispatched", task_id="helper")]
    if words:
        out.append(said("streaming_started", task_id="helper", model="m/x", provider="p"))
    for word in words:
        out.append(TokenItem(text, json.dumps(word)[1:-1].encode(), at))
        at += len(word)
    out.append(said("streaming_completed", task_id="helper", chars=at, finish_reason=reason))
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    out.append(said("heartbeat", running=["helper"]))
    out.append(said("task_completed", task_id="helper.tool.1", usage={"total_tokens": 99}))
    out.append(said("task_completed", task_id="helper", usage=usage))
    out += [said("workflow_completed", final_task_id="helper"), said("workflow_result")]
    return out


def parsed(data: bytes) -> list[Any]:
    assert data.count(b"event:") == data.count(b"\nid:") == 0
    lines = [line for line in data.split(b"\n\n") if line]
    return [
        line if b"[DONE]" in line else json.loads(line.removeprefix(b"data: ")) for line in lines
    ]


def test_primer_content_final_usage_done() -> None:
    made = wire()
    chunks = parsed(b"".join(made.encode(item) for item in items("Hé", ' "x"\n')))
    assert chunks.pop() == b"data: [DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant"}, {"content": "Hé"}, {"content": ' "x"\n'}, {},
    ]  # fmt: skip
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{RUN[:24]}"}
    assert {chunk["model"] for chunk in chunks} == {"m/x"}
    assert chunks[-1]["usage"]["total_tokens"] == 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_without_a_token_there_is_no_primer() -> None:
    made = wire()
    final, done = parsed(b"".join(made.encode(item) for item in items()))
    assert final["choices"][0]["delta"] == {}
    assert final["model"] == "configured"
    assert done == b"data: [DONE]"


def test_usage_in_a_chunk_of_its_own() -> None:
    made = wire(usage_chunk=True)
    *_, final, usage, _ = parsed(b"".join(made.encode(item) for item in items("a")))
    assert "usage" not in final
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 3)


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "length"), ("content_filter", "stop"), (None, "stop")]
)
def test_reasons(reason: str | None, told: str) -> None:
    assert finish_reason(reason) == told


def test_what_is_encoded_again_is_the_same() -> None:
    """A follower that fell behind is served from the journal by the same wire."""
    made = wire()
    once = [made.encode(item) for item in items("a", "b", reason="length")]
    assert [made.encode(item) for item in items("a", "b", reason="length")] == once


@pytest.mark.parametrize("text", ["\x00text\x01", "data: x\n\n", "\u2028", '"}}]}'])
def test_texts_that_look_like_frames(text: str) -> None:
    made = wire()
    chunks = parsed(b"".join(made.encode(item) for item in items(text)))
    assert chunks[1]["choices"][0]["delta"] == {"content": text}


def test_errors_have_no_done() -> None:
    made = wire()
    failed = said("workflow_error", error={"code": "upstream_error", "message": "it broke"})
    (error,) = parsed(made.encode(failed))
    assert error == {
        "error": {"message": "it broke", "type": "server_error", "code": "engine_error"}
    }
    (reset,) = parsed(made.reset(RUN, 3))
    assert reset["error"]["code"] == "engine_error"
    other = TokenItem(TextStream("helper.tool.1", 4), b"x", 0)
    assert made.encode(other) == b""
