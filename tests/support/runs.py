"""Engines under test: an outlet that records and holds the rules of order, and scripted agents."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from relay.agents.base import AgentError, AgentReply
from relay.engines.base import Completed, Envelope, Failed, Past, Payer, Usage, Yielded
from relay.engines.past import STRUCTURAL, past_of, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.agents.base import AgentCall, AgentSink
    from relay.engines.base import Ending

EXECUTION: Final = "0123456789abcdef" * 2

# cnl.md: what `data` has; after the bar what it may have.
FIELDS: Final = {
    name: tuple(set(part.split()) for part in (fields + "|").split("|")[:2])
    for name, fields in {
        "request_received": "source",
        "workflow_loaded": "name task_count",
        "workflow_started": "inputs",
        "task_dispatched": "task_id kind attempt | agent model",
        "task_completed": "task_id kind duration_ms output_preview | usage",
        "task_error": "task_id kind error attempt will_retry",
        "task_skipped": "task_id kind reason",
        "streaming_started": "task_id model provider",
        "streaming_completed": "task_id chars finish_reason",
        "output_delivered": "task_id bytes result_url",
        "sequential_start": "task_id task_ids",
        "sequential_complete": "task_id completed failed",
        "parallel_start": "task_id task_ids max_concurrency",
        "parallel_complete": "task_id completed failed",
        "condition_evaluated": "task_id expression value branch",
        "batch_start": "task_id total",
        "batch_item_start": "task_id index",
        "batch_item_complete": "task_id index status",
        "batch_progress": "task_id done failed total",
        "batch_complete": "task_id completed failed",
        "dynamic_start": "task_id planner",
        "dynamic_generated": "task_id task_ids",
        "dynamic_complete": "task_id completed failed",
        "debate_start": "task_id debaters rounds",
        "debate_round_complete": "task_id round",
        "debate_judgment": "task_id judge output_preview",
        "debate_complete": "task_id rounds",
        "workflow_yielded": "task_id prompt resume_url | schema",
        "heartbeat": "running",
    }.items()
}


def envelope(
    document: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    past: Past | None = None,
) -> Envelope:
    """A run of a document; a list is the tasks of one."""
    if isinstance(document, list):
        document = {"workflow": {"name": "w", "tasks": document}}
    return Envelope(
        execution_id=EXECUTION,
        workflow_id="wf_1",
        document=document,
        inputs=inputs or {},
        source="inline",
        payer=Payer(org="org", key_id="key"),
        created_at=0.0,
        past=past or Past(),
    )


class OrderError(AssertionError):
    """An engine said something at the wrong time, or in the wrong form."""


@dataclass
class Said:
    """One event, or a token (name "token", data task_id and raw)."""

    name: str
    data: dict[str, Any]

    @property
    def task_id(self) -> str:
        return str(self.data.get("task_id", ""))


class RecordingOutlet:
    """Records what an engine says and holds it to W2.2 and cnl.md, over all legs of a run.

    Args:
        cut_at: the event at which the run loses its lease: it and all after it are not recorded.
        on_cut: called then. full_every: every so many tokens the journal is behind.
    """

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        on_cut: Callable[[], object] | None = None,
        full_every: int = 0,
    ) -> None:
        self.said: list[Said] = []
        self.steps: dict[str, Any] = {}
        self.cut_at = cut_at
        self.on_cut = on_cut
        self.dead = False
        self.waits = 0
        self._full_every = full_every
        self._tokens = 0
        self._events = 0
        self._order = _Order()

    # -- the outlet -----------------------------------------------------------------------------

    def emit(
        self, name: str, data: Mapping[str, Any], *, steps: Mapping[str, Any] | None = None
    ) -> None:
        if self.dead:
            return
        if self._events == self.cut_at:
            self.dead = True
            if self.on_cut is not None:
                self.on_cut()
            return
        self._events += 1
        copied = json.loads(dumps(data))
        self.said.append(Said(name, copied))
        self._order.event(name, copied)
        for key, step in (steps or {}).items():
            stored = json.loads(dumps(step))
            if key.startswith("task/") and stored["status"] == "completed":
                self._order.output(key.removeprefix("task/"), stored["output"])
            self.steps.setdefault(key, stored)

    def frame(
        self, name: str, frame: bytes, task_id: str = "", *, steps: Mapping[str, Any] | None = None
    ) -> None:
        raise OrderError("an embedded engine makes no frames")

    def token(self, task_id: str, raw: bytes) -> bool:
        if self.dead:
            return True
        self.said.append(Said("token", {"task_id": task_id, "raw": raw}))
        self._order.token(task_id, raw)
        self._tokens += 1
        return not self._full_every or self._tokens % self._full_every != 0

    async def ready(self) -> None:
        self.waits += 1
        await asyncio.sleep(0)

    def came_to(self, summary: Mapping[str, Any], usage: Usage, *, unsaid: Usage) -> None:
        self.left = (summary, usage)

    async def settled(self) -> None:
        await asyncio.sleep(0)

    # -- for tests ------------------------------------------------------------------------------

    def cut_after(self, events: int) -> None:
        """Cut the next leg after so many events."""
        self.cut_at = self._events + events

    def revive(self) -> None:
        """Let the next owner of the run speak; the rules go on holding."""
        self.dead = False
        self.cut_at = None

    def past(self, answers: Mapping[str, Any] | None = None) -> Past:
        """What the next owner knows."""
        return past_of(
            ((said.name, said.data) for said in self.said if said.name != "token"),
            steps=dict(self.steps),
            answers=answers or {},
        )

    def ended(self, ending: Ending) -> None:
        """Check the end of a leg."""
        self._order.end(ending)

    def names(self, task_id: str | None = None) -> list[str]:
        """The names of all events, or of a task's; one "token" for tokens in a row."""
        found: list[str] = []
        for said in self.said:
            if task_id not in (None, said.task_id):
                continue
            if said.name != "token" or found[-1:] != ["token"]:
                found.append(said.name)
        return found

    def data(self, name: str, task_id: str | None = None) -> list[dict[str, Any]]:
        """The `data` of the events of a name, or of those of a task."""
        return [
            said.data for said in self.said if said.name == name and task_id in (None, said.task_id)
        ]

    def output(self, task_id: str) -> Any:
        """A task's stored output."""
        return self.steps[f"task/{task_id}"]["output"]

    def status(self, task_id: str) -> str | None:
        """How a task ended."""
        if f"task/{task_id}" in self.steps:
            return str(self.steps[f"task/{task_id}"]["status"])
        failed = any(key.startswith(f"failed/{task_id}/") for key in self.steps)
        return "failed" if failed else None


class _Order:
    """The rules."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._attempts: dict[str, int] = {}
        self._streams: dict[str, list[bytes]] = {}
        self._texts: dict[str, str] = {}
        self._completed: set[str] = set()
        self._once: set[tuple[str, str, int]] = set()

    def _must(self, holds: bool, message: str) -> None:
        if not holds:
            raise OrderError(message)

    def event(self, name: str, data: dict[str, Any]) -> None:
        self._must(name in FIELDS, f"{name} is not an engine's to say")
        required, optional = FIELDS[name]
        self._must(
            required <= data.keys() <= required | optional, f"{name} has the data {sorted(data)}"
        )
        if name in STRUCTURAL:
            key = place(name, data)
            self._must(key not in self._once, f"{key} is said twice")
            self._once.add(key)
        check = getattr(self, f"_on_{name}", None)
        if check is not None:
            check(data["task_id"], data)

    def _on_task_dispatched(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id not in self._open, f"{task_id} is dispatched twice")
        if data["kind"] == "tool":  # of another attempt of its task
            self._completed.discard(task_id)
        self._must(task_id not in self._completed, f"{task_id} runs again")
        attempt = data["attempt"]
        self._must(attempt > self._attempts.get(task_id, 0), f"{task_id}: attempt {attempt} again")
        self._open[task_id] = self._attempts[task_id] = attempt

    def _on_streaming_started(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id in self._open, f"{task_id} streams and is not open")
        self._must(task_id not in self._streams, f"{task_id} streams twice")
        self._streams[task_id] = []

    def token(self, task_id: str, raw: bytes) -> None:
        self._must(raw != b"", "an empty token")
        self._must(task_id in self._streams, f"a token of {task_id} outside its stream")
        self._streams[task_id].append(raw)

    def _on_streaming_completed(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id in self._streams, f"{task_id} has no stream to complete")
        text = json.loads(b'"%b"' % b"".join(self._streams.pop(task_id)))
        self._must(len(text) == data["chars"], f"{task_id} said {len(text)} characters")
        self._texts[task_id] = text

    def _on_task_completed(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id in self._open, f"{task_id} completes and is not open")
        self._must(task_id not in self._streams, f"{task_id} completes, its stream is open")
        del self._open[task_id]
        self._completed.add(task_id)

    def _on_task_error(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id in self._open, f"{task_id} fails and is not open")
        self._must(data["attempt"] == self._open.pop(task_id), f"{task_id}: another attempt")
        self._must(set(data["error"]) == {"code", "message"}, f"{task_id}: {data['error']}")
        self._streams.pop(task_id, None)
        self._texts.pop(task_id, None)

    def _on_task_skipped(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id not in self._open, f"{task_id} is skipped and open")
        self._must(task_id not in self._completed, f"{task_id} is skipped and complete")
        self._must(data["reason"] in ("when", "branch", "on_error"), data["reason"])

    def _on_output_delivered(self, task_id: str, data: dict[str, Any]) -> None:
        self._must(task_id in self._completed, f"{task_id} is delivered and not complete")

    def output(self, task_id: str, output: Any) -> None:
        if isinstance(output, str) and task_id in self._texts:
            self._must(self._texts[task_id] == output, f"{task_id}: the deltas are not its output")

    def end(self, ending: Ending) -> None:
        self._must(isinstance(ending, Completed | Failed | Yielded), f"{ending!r} is no ending")
        self._must(not self._streams, f"streams left open: {list(self._streams)}")
        if not isinstance(ending, Yielded):
            self._must(not self._open, f"tasks left open: {list(self._open)}")


HANG: Final = "<hang>"
Step = str | float | AgentError | BaseException | tuple[str, dict[str, Any]]


def fails(
    code: str = "upstream_error",
    *,
    retryable: bool = True,
    tokens: int = 0,
    retry_after_s: int | None = None,
) -> AgentError:
    """A failure of a call."""
    return AgentError(
        code,
        f"{code} of the script",
        retryable=retryable,
        usage=Usage(prompt_tokens=tokens),
        retry_after_s=retry_after_s,
    )


@dataclass
class ScriptedAgents:
    """An agent caller whose replies are given.

    A reply is a list of steps: text pieces, seconds to wait, `HANG`, an error, a tool step
    (`(name, data)`). It is looked up by the call; text alone is one piece.

    Attributes:
        reply: the steps for a call. started: what is said before the text, None for nothing.
        calls: all calls, in order. ended: those that gave their reply. active, most_active: now,
        and at most.
    """

    reply: Callable[[AgentCall], Sequence[Step] | str]
    names: Sequence[str] = ("a", "b", "c", "planner", "judge")
    started_after: float = 0.0
    calls: list[AgentCall] = field(default_factory=list)
    ended: list[AgentCall] = field(default_factory=list)
    active: int = 0
    most_active: int = 0

    def agents(self) -> Mapping[str, str]:
        return {name: f"fake/{name}" for name in self.names}

    def called(self, task_id: str) -> int:
        """How often a task was called."""
        return sum(call.call_id.split("/")[1] == task_id for call in self.calls)

    async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
        assert call.call_id not in [earlier.call_id for earlier in self.calls], call.call_id
        self.calls.append(call)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._play(call, sink)
        finally:
            self.active -= 1

    async def _play(self, call: AgentCall, sink: AgentSink) -> AgentReply:
        steps = self.reply(call)
        text = ""
        started = False
        for step in [steps] if isinstance(steps, str) else steps:
            if isinstance(step, float | int):
                await asyncio.sleep(step)
            elif isinstance(step, BaseException):
                raise step
            elif step == HANG:
                await asyncio.Event().wait()
            else:
                if not started:
                    sink.started(f"fake/{call.agent}", "fake")
                    started = True
                if isinstance(step, tuple):
                    sink.step(*step)
                    continue
                text += step
                if step and not sink.text(dumps(step)[1:-1]):
                    await sink.ready()
                await asyncio.sleep(0)
        if not started:
            sink.started(f"fake/{call.agent}", "fake")
        self.ended.append(call)
        return AgentReply(
            text=text,
            finish_reason="stop",
            usage=Usage(prompt_tokens=1, completion_tokens=len(text), cost_micro_usd=2),
            model=f"fake/{call.agent}",
            provider="fake",
        )


def prompt_of(call: AgentCall) -> str:
    """What was asked."""
    return str(call.messages[-1]["content"])


def by_task(replies: Mapping[str, Sequence[Step] | str]) -> Callable[[AgentCall], Any]:
    """Replies by task id, or by `<task id>/<attempt>`; else `<agent> says: <prompt>`."""

    def reply(call: AgentCall) -> Sequence[Step] | str:
        _, task_id, attempt, _leg = call.call_id.split("/")
        for key in (f"{task_id}/{attempt}", task_id):
            if key in replies:
                return replies[key]
        return f"{call.agent} says: {prompt_of(call)}"

    return reply
