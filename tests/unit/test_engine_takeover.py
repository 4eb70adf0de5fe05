"""A run that is cut at any event and taken over ends as if it had not been (W2.5, J1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from relay.engines.base import Completed, Failed
from tests.support.engines import play_cut, task
from tests.support.runs import RecordingOutlet, ScriptedAgents, by_task, fails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.agents.base import AgentCall
    from relay.engines.base import Ending
    from tests.support.runs import Step

PLAN = (
    '{"tasks": [{"id": "u", "agent": "a", "prompt": "1"},'
    ' {"id": "0", "agent": "b", "prompt": "2"}]}'
)
TOOL = {"task_id": "tool.1", "kind": "tool"}

DOCUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "task": ([task("t")], {"t": ["one ", 1.0, "two"]}),
    "retried": (
        [task("t", retries=3), task("u", prompt="{{ tasks.t.output }}")],
        {"t": ["broken", fails(tokens=5)], "t!2": "well"},
    ),
    "json": (
        [task("t", retries=1, json={"type": "object"})],
        {"t": "no json", "t!1": '{"n": 1}'},
    ),
    "tool": (
        [task("t")],
        {"t": [("task_dispatched", {**TOOL, "attempt": 1}), 1.0, ("task_completed", {
            **TOOL, "duration_ms": 1, "output_preview": ""}), "done"]},
    ),
    "sequential": (
        [{"type": "sequential", "id": "s", "tasks": [task("a1"), task("a2", when="false")]},
         task("z", prompt="{{ tasks.s.output }} {{ tasks.a1.output }} {{ tasks.a2.status }}")],
        {},
    ),
    "parallel": (
        [{"type": "parallel", "id": "p", "max_concurrency": 2, "tasks": [
            task("x"), task("y", "b"), task("z", "c")]}],
        {"x": ["a", 3.0, "b"], "y": [1.0, "c"]},
    ),
    "failing parallel": (
        {"workflow": {"name": "w", "on_error": "continue", "tasks": [
            {"type": "parallel", "id": "p", "tasks": [
                task("x"), task("y", "b", on_error="fail"),
                {"type": "sequential", "id": "s", "tasks": [task("s1"), task("s2")]}]},
            task("last", prompt="{{ tasks.p.status }}")]}},
        {"x": ["a", 3.0, "b"], "y": ["c", 1.0, fails(retryable=False)], "s2": ["d", 9.0]},
    ),
    "retried parallel": (
        [{"type": "parallel", "id": "p", "retries": 2, "tasks": [
            task("x"), task("y", "b", retries=1), task("z")]}],
        {"x": ["a", 3.0, "b"], "y": ["c", 1.0, fails()], "y!3": "well", "z": "quick"},
    ),
    "late container": (
        [{"type": "sequential", "id": "s", "timeout_s": 5, "retries": 1, "tasks": [
            task("x"), task("y")]}],
        {"x": ["a", 3.0], "y": ["b", 3.0, "c"]},
    ),
    "condition": (
        [{"type": "condition", "id": "c", "if": "1 > 2", "then": [
            task("x"), {"type": "sequential", "id": "s", "tasks": [task("s1")]}],
          "else": [task("y"), task("z", on_error="skip")]},
         task("last", prompt="{{ tasks.s1.status }} {{ tasks.c.output }} {{ tasks.z.status }}")],
        {"z": [fails(retryable=False)]},
    ),
    "batch": (
        [{"type": "batch", "id": "b", "items": ["p", "q", "r", "s"], "concurrency": 2,
          "on_error": "continue", "task": task("i", prompt="{{ item }}")}],
        {"i.1": ["c", 1.0, fails(retryable=False)], "i.0": [2.0, "a"]},
    ),
    "nested batch": (
        [{"type": "batch", "id": "b", "items": [1, 2], "as": "n", "task": {
            "type": "batch", "id": "c", "items": ["x", "y"], "task": {
                "type": "sequential", "id": "s", "tasks": [
                    task("i", prompt="{{ n }}{{ item }}"),
                    task("j", prompt="{{ tasks.i.output }}")]}}}],
        {},
    ),
    "failing batch": (
        [{"type": "batch", "id": "b", "items": [1, 2, 3], "retries": 1, "on_error": "skip",
          "task": task("i", on_error="fail")}],
        {"i.1": ["c", 1.0, fails()], "i.0": [2.0, "a"]},
    ),
    "dynamic": (
        [{"type": "dynamic", "id": "d", "planner": "planner", "prompt": "p", "retries": 1,
          "agents": ["a", "b"]}],
        {"d": "no plan", "d!1": PLAN, "d.u": ["a", 1.0, "b"]},
    ),
    "dynamic in a batch": (
        [{"type": "batch", "id": "b", "items": [1, 2], "task": {
            "type": "dynamic", "id": "d", "planner": "planner", "prompt": "p",
            "agents": ["a", "b"]}}],
        {"d.0": PLAN, "d.1": PLAN},
    ),
    "debate": (
        [{"type": "debate", "id": "d", "debaters": ["a", "b"], "judge": "judge", "rounds": 2,
          "prompt": "topic", "retries": 1}],
        {"d.1.2": [fails(tokens=1)], "d.1.2!1": "well", "d": ["x", fails()], "d!1": "so be it"},
    ),
    "failed": ([task("x"), task("y", retries=1)], {"y": ["c", fails()]}),
}  # fmt: skip


class Script:
    """Replies by task; `<task>!<n>` after n failures, which are those of a whole run."""

    def __init__(self, replies: dict[str, Any], outlet: RecordingOutlet) -> None:
        self._replies = replies
        self._plain = by_task({key: value for key, value in replies.items() if "!" not in key})
        self._outlet = outlet

    def __call__(self, call: AgentCall) -> Sequence[Step] | str:
        task_id = call.call_id.split("/")[1]
        assert self._outlet.status(task_id) in (None, "failed"), f"{task_id} is called again"
        failures = sum(
            said.name == "task_error"
            and said.task_id == task_id
            and said.data["error"]["code"] not in ("interrupted", "cancelled")
            for said in self._outlet.said
        )
        reply: Sequence[Step] | str = self._replies.get(f"{task_id}!{failures}") or self._plain(
            call
        )
        return reply


def legs(name: str, cuts: Sequence[int]) -> tuple[RecordingOutlet, Ending]:
    """Run a document; each leg but the last is cut after so many events."""
    document, replies = DOCUMENTS[name]
    outlet = RecordingOutlet()
    agents = ScriptedAgents(Script(replies, outlet))
    ending: Ending | None = None
    for cut in cuts:
        outlet.cut_after(cut)
        ending = play_cut(document, agents, outlet)
        if ending is not None:
            break
        outlet.revive()
    if ending is None:
        ending = play_cut(document, agents, outlet)
    assert ending is not None
    outlet.ended(ending)
    return outlet, ending


def told(outlet: RecordingOutlet, ending: Ending) -> Any:
    """What must not depend on where a run was cut."""
    outputs = {
        key: (step["status"], step.get("output"))
        for key, step in outlet.steps.items()
        if key.startswith("task/")
    }
    match ending:
        case Completed():
            return outputs, ending.final_task_id, ending.summary
        case Failed():
            return outputs, ending.code, ending.task_id, ending.summary
        case _:
            raise AssertionError(ending)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_run_that_is_cut_anywhere_ends_as_if_it_was_not(name: str) -> None:
    whole, ending = legs(name, [])
    events = sum(said.name != "token" for said in whole.said)
    assert events > 5
    for cut in range(events):
        outlet, cut_ending = legs(name, [cut])
        assert told(outlet, cut_ending) == told(whole, ending), f"cut at {cut}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_run_may_be_cut_again_and_again(name: str) -> None:
    whole, ending = legs(name, [])
    for step in (1, 2, 3, 5, 7):
        outlet, cut_ending = legs(name, [step] * 60)
        assert told(outlet, cut_ending) == told(whole, ending), f"a cut every {step} events"


@pytest.mark.parametrize(
    ("name", "failed", "called"),
    [("failing parallel", "y", ["last"]), ("failing batch", "i.1", ["i.0", "i.1"])],
)
def test_nothing_is_called_in_a_container_that_had_failed(
    name: str, failed: str, called: list[str]
) -> None:
    """The batch has a retry left: then, and not before, the failed and stopped items are called."""
    document, replies = DOCUMENTS[name]
    whole, _ = legs(name, [])
    events = [(said.name, said.task_id) for said in whole.said if said.name != "token"]
    outlet = RecordingOutlet()
    agents = ScriptedAgents(Script(replies, outlet))
    outlet.cut_after(events.index(("task_error", failed)) + 1)
    assert play_cut(document, agents, outlet) is None
    outlet.revive()
    before = len(agents.calls)
    ending = play_cut(document, agents, outlet)
    assert ending is not None
    outlet.ended(ending)
    assert [call.call_id.split("/")[1] for call in agents.calls[before:]] == called
