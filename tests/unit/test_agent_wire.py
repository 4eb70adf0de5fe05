"""A run as OpenAI chunks: byte for byte, and wherever it is taken up (A1.2, A1.4, B11-B13)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.agent import AgentChunks, chunk_id, finish_reason, whole_reply
from encoders.json_text import dumps
from encoders.workflow import frame
from relay.runs.agent_wire import AgentWire
from relay.runs.groups import FrameItem, TextStream, TokenItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.runs.groups import Item

GOLDEN: Final = Path(__file__).resolve().parents[2] / "fixtures/golden/agents"
EXECUTION: Final = "0123456789abcdef0123456789abcdef"
AGENT: Final = "one-agent"
USAGE: Final = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE: Final = b"data: [DONE]\n\n"


def wire(*, usage_chunk: bool = False) -> AgentWire:
    chunks = AgentChunks(EXECUTION, created=1764500000, model="m/agent", usage_chunk=usage_chunk)
    return AgentWire(AGENT, chunks)


class Script:
    """The items of a run, as the hub makes them."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._position = 0
        self._stream = TextStream(AGENT, 0)

    def event(self, name: str, **data: Any) -> Script:
        self._position += 1
        payload = dumps({"type": name, "data": data})
        self.items.append(FrameItem(self._position, name, frame(name, payload)))
        return self

    def begin(self, model: str = "p/served") -> Script:
        self.event("task_dispatched", task_id=AGENT, kind="task", attempt=1)
        self.event("streaming_started", task_id=AGENT, model=model, provider="p")
        self._stream = TextStream(AGENT, self._position)
        return self

    def say(self, *pieces: str) -> Script:
        for piece in pieces:
            self.raw(dumps(piece)[1:-1], len(piece))
        return self

    def raw(self, raw: bytes, chars: int) -> Script:
        self.items.append(TokenItem(self._stream, raw, self._stream.chars))
        self._stream.add(raw, chars)
        return self

    def complete(self, reason: str = "stop", usage: dict[str, int] | None = USAGE) -> Script:
        self.event("streaming_completed", task_id=AGENT, chars=1, finish_reason=reason)
        told = {} if usage is None else {"usage": usage}
        self.event("task_completed", task_id=AGENT, kind="task", **told)
        self.event("output_delivered", task_id=AGENT)
        self.event("workflow_completed", final_task_id=AGENT)
        return self.event("workflow_result", status="completed")

    def fail(self, message: str = "task one-agent failed: upstream_error: it broke") -> Script:
        self.event("task_error", task_id=AGENT, will_retry=False)
        self.event("workflow_error", error={"code": "task_failed", "message": message})
        return self.event("workflow_result", status="failed")


def start() -> Script:
    script = Script().event("request_received", source="agent").event("workflow_loaded")
    return script.event("workflow_started", inputs={})


def interrupted(script: Script) -> Script:
    error = {"code": "interrupted", "message": "the process that ran it stopped"}
    return script.event("task_error", task_id=AGENT, error=error, will_retry=True)


SCRIPTS: Final = {
    "text": start().begin().say("Hel", "lo ", "🙂").complete(),
    "length": start().begin().say("Hel").complete("length"),
    "escapes": start().begin().raw(rb"a\n\"\u0000\ud83d\ude42\/", 6).say("\\ \u2028").complete(),
    "no-usage": start().begin().say("Hi").complete(usage=None),
    "no-token": start().begin().complete(),
    "tools": start()
    .begin()
    .say("Look: ")
    .event("task_dispatched", task_id=f"{AGENT}.tool.1", kind="tool", attempt=1)
    .event("heartbeat", running=[AGENT])
    .event("task_completed", task_id=f"{AGENT}.tool.1", kind="tool", usage={"total_tokens": 99})
    .say("sunny")
    .complete(),
    "error-first": start().event("task_dispatched", task_id=AGENT).fail("no such model"),
    "error-midway": start().begin().say("half").fail(),
    "begun-again": interrupted(start().begin().say("half")).begin("p/other").say("all").complete(),
    "begun-again-unseen": interrupted(start().begin()).begin("p/other").say("all").complete(),
}


def told(items: Sequence[Item], one: AgentWire | None = None) -> bytes:
    encode = (one or wire()).encode
    return b"".join(encode(item) for item in items)


def events_of(body: bytes) -> list[str]:
    """What stands in the events; there is nothing but one `data:` line in each."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [block[6:].decode() for block in blocks]


@pytest.mark.parametrize("usage_chunk", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_golden(name: str, usage_chunk: bool) -> None:
    golden = GOLDEN / f"{name}{'.usage' if usage_chunk else ''}.sse"
    body = told(SCRIPTS[name].items, wire(usage_chunk=usage_chunk))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_bytes(body)
    assert body == golden.read_bytes()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a1_2_one_id_one_model_one_primer_one_end(name: str) -> None:
    body = told(SCRIPTS[name].items)
    events = events_of(body)
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [chunk for chunk in chunks if "error" in chunk]
    good = [chunk for chunk in chunks if "error" not in chunk]
    assert {chunk["id"] for chunk in good} <= {f"chatcmpl-{EXECUTION[:24]}"}
    assert len({chunk["model"] for chunk in good}) <= 1
    deltas = [chunk["choices"][0]["delta"] for chunk in good]
    assert deltas.count({"role": "assistant"}) == (1 if any("content" in d for d in deltas) else 0)
    assert "content" not in deltas[0] if deltas else True
    assert len(errors) + events.count("[DONE]") == 1
    last = events[-1]
    assert last == "[DONE]" or json.loads(last) == errors[0]
    if errors:
        assert errors[0]["error"]["type"] == "server_error"
        assert errors[0]["error"]["code"] == "engine_error"
        assert list(errors[0]) == ["error"]


def test_a1_2_what_was_served_is_named_never_the_agent() -> None:
    body = told(SCRIPTS["begun-again-unseen"].items)
    assert b'"model":"p/other"' in body
    assert b"p/served" not in body
    assert AGENT.encode() not in body
    assert b"[DONE]" in body


def test_a_text_that_begins_again_is_an_error_once_some_of_it_was_told() -> None:
    """What was sent cannot be taken back, and no client of this wire would drop it."""
    events = events_of(told(SCRIPTS["begun-again"].items))
    assert len(events) == 3
    assert "half" in events[1]
    assert json.loads(events[-1])["error"]["code"] == "engine_error"


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_with_its_end(name: str) -> None:
    """Nothing follows: no comment can, since whoever writes it is told."""
    one = wire()
    bodies = []
    for item in SCRIPTS[name].items:
        position = item.position if isinstance(item, FrameItem) else item.stream.start
        over = one.ends(position)
        bodies.append((over, one.encode(item)))
    assert not bodies[0][0]
    assert bodies[-1][0]
    assert all(body == b"" for over, body in bodies if over)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_encoded_again_from_anywhere_has_the_same_bytes(name: str) -> None:
    """A follower that fell behind drops what waited, and reads it again from the journal."""
    items = SCRIPTS[name].items
    one = wire()
    fresh = [one.encode(item) for item in items]
    for first in range(len(items)):
        assert [one.encode(item) for item in items[first:]] == fresh[first:]


pieces = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(pieces, st.data())
def test_the_text_is_whole_wherever_a_follower_takes_it_up_again(
    said: list[str], data: st.DataObject
) -> None:
    """Some of it as pieces, the rest as one: one primer, no character twice."""
    text = "".join(said)
    had = data.draw(st.integers(0, len(text)))
    stream = TextStream(AGENT, 5)
    items: list[Item] = [*start().begin().items]
    at = 0
    for piece in said:
        if at + len(piece) > had:
            break
        items.append(TokenItem(stream, dumps(piece)[1:-1], at))
        at += len(piece)
    if text[at:]:
        items.append(TokenItem(stream, dumps(text[at:])[1:-1], at))
    deltas = [json.loads(e)["choices"][0]["delta"] for e in events_of(told(items))]
    assert deltas[0] == {"role": "assistant"}
    assert "".join(delta["content"] for delta in deltas[1:]) == text


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_text_and_no_message_breaks_the_framing(text: str, message: str) -> None:
    script = start().begin()
    if text:
        script.say(text)
    events = events_of(told(script.fail(message).items))
    said = [json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]]
    assert "".join(said) == text
    assert json.loads(events[-1])["error"]["message"] == (message or "the run failed")


def test_the_usage_chunk_stands_instead_of_the_usage() -> None:
    events = events_of(told(SCRIPTS["text"].items, wire(usage_chunk=True)))
    final, usage = (json.loads(event) for event in events[-3:-1])
    assert final["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in final
    assert (usage["choices"], usage["usage"]) == ([], USAGE)


@pytest.mark.parametrize("usage_chunk", [False, True])
def test_usage_that_cannot_be_read_is_not_told(usage_chunk: bool) -> None:
    assert b"usage" not in told(SCRIPTS["no-usage"].items, wire(usage_chunk=usage_chunk))


def test_what_others_than_the_agents_task_say_is_nothing() -> None:
    other = TextStream(f"{AGENT}.tool.1", 3)
    assert wire().encode(TokenItem(other, b"secret", 0)) == b""
    assert wire().reset(EXECUTION, 3).startswith(b'data: {"error":')


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "stop"), (None, "stop")],
)
def test_finish_reasons(reason: str | None, expected: str) -> None:
    assert finish_reason(reason) == expected


@pytest.mark.parametrize("usage", [USAGE, None])
def test_a_whole_reply(usage: dict[str, int] | None) -> None:
    reply = whole_reply(EXECUTION, created=1, model="p/m", text="Hi", finish="length", usage=usage)
    assert reply["id"] == chunk_id(EXECUTION) == "chatcmpl-0123456789abcdef01234567"
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply.get("usage") == usage
