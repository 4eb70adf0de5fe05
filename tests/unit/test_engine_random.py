"""Random documents with random failures, limits, cancellations and takeovers: the order holds."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.engines.base import Completed, Failed, Yielded
from relay.engines.embedded.engine import EmbeddedEngine
from tests.support.clock import run_virtually
from tests.support.engines import play_cut
from tests.support.runs import HANG, RecordingOutlet, ScriptedAgents, envelope, fails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.agents.base import AgentCall
    from relay.engines.base import Ending
    from tests.support.runs import Step

AGENTS = ["a", "b", "c"]
KINDS = ["task", "sequential", "parallel", "condition", "batch", "dynamic", "debate", "yield"]


class Documents:
    """Draws documents; ids count up."""

    def __init__(self, draw: Any, kinds: Sequence[str]) -> None:
        self._draw = draw
        self._kinds = kinds
        self._count = 0

    def document(self) -> dict[str, Any]:
        return {
            "workflow": {
                "name": "w",
                "timeout_s": self._draw(st.sampled_from([5, 60, 600])),
                "on_error": self._draw(st.sampled_from(["fail", "continue"])),
                "tasks": self._tasks(0, 3),
            }
        }

    def _tasks(self, depth: int, most: int) -> list[dict[str, Any]]:
        return [self._task(depth) for _ in range(self._draw(st.integers(1, most)))]

    def _task(self, depth: int) -> dict[str, Any]:
        draw = self._draw
        kinds = self._kinds if depth < 3 else [kind for kind in self._kinds if kind in SIMPLE]
        kind = draw(st.sampled_from(kinds))
        self._count += 1
        made: dict[str, Any] = {"type": kind, "id": f"t{self._count}"}
        if draw(st.integers(0, 3)) == 0:
            made["retries"] = draw(st.integers(1, 2))
        if draw(st.integers(0, 3)) == 0:
            made["timeout_s"] = draw(st.sampled_from([1, 3, 10]))
        if draw(st.integers(0, 3)) == 0:
            made["on_error"] = draw(st.sampled_from(["fail", "skip", "continue"]))
        if draw(st.integers(0, 7)) == 0:
            made["when"] = "false"
        return made | self._fields(kind, depth)

    def _fields(self, kind: str, depth: int) -> dict[str, Any]:
        match kind:
            case "task":
                return {"agent": self._draw(st.sampled_from(AGENTS)), "prompt": "p"}
            case "sequential":
                return {"tasks": self._tasks(depth + 1, 3)}
            case "parallel":
                limit = self._draw(st.integers(1, 3))
                return {"tasks": self._tasks(depth + 1, 4), "max_concurrency": limit}
            case "condition":
                test = self._draw(st.sampled_from(["true", "false", "1 / 0"]))
                then, other = self._tasks(depth + 1, 2), self._tasks(depth + 1, 2)
                return {"if": test, "then": then, "else": other}
            case "batch":
                items = list(range(self._draw(st.integers(0, 4))))
                return {"items": items, "task": self._task(depth + 1), "concurrency": 2}
            case "dynamic":
                return {"planner": "planner", "prompt": "p", "agents": AGENTS}
            case "debate":
                rounds = self._draw(st.integers(1, 2))
                fields = {"debaters": ["a", "b"], "judge": "judge", "prompt": "p"}
                return {**fields, "rounds": rounds}
            case _:
                return {"prompt": "?"}


class Chaos:
    """Replies that wait, fail, hang or are well, by seed and call."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, call: AgentCall) -> Sequence[Step] | str:
        _, task_id, attempt, _ = call.call_id.split("/")
        dice = random.Random(f"{self._seed}/{task_id}/{attempt}")
        steps: list[Step] = []
        if dice.random() < 0.3:
            steps.append(dice.choice([0.3, 2.0, 8.0]))
        if call.agent == "planner" and dice.random() < 0.8:
            return [*steps, some_plan(dice)]
        tool = {"task_id": "tool.1", "kind": "tool"}
        tool_is_open = dice.random() < 0.15
        if tool_is_open:
            steps.append(("task_dispatched", {**tool, "attempt": 1}))
        if tool_is_open and dice.random() < 0.5:
            steps.append(("task_completed", {**tool, "duration_ms": 0, "output_preview": ""}))
            tool_is_open = False
        if dice.random() < 0.8:
            steps.append(dice.choice(["x", 'é\n"', "long " * 9]))
        steps.append("y" if dice.random() < 0.3 else dice.choice([0.2, 4.0]))
        ends: list[Step] = [fails(tokens=2), fails(retryable=False), HANG]
        if dice.random() < 0.25:
            steps.append(dice.choice(ends))
        if tool_is_open:  # a call ends its tool steps before it gives its reply
            steps.append(fails())
        return steps


def some_plan(dice: random.Random) -> str:
    names = dice.sample(["u", "v", "0", "1", "tool"], dice.randint(1, 3))
    tasks = [{"id": name, "agent": dice.choice(AGENTS), "prompt": "p"} for name in names]
    return json.dumps({"tasks": tasks})


SIMPLE = {"task", "dynamic", "debate", "yield"}
MANY = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def documents(draw: Any, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    return Documents(draw, kinds).document()


def all_answers(outlet: RecordingOutlet) -> dict[str, Any]:
    return {data["task_id"]: "answer" for data in outlet.data("workflow_yielded")}


def leg(document: Any, agents: ScriptedAgents, outlet: RecordingOutlet) -> Ending:
    engine = EmbeddedEngine(agents, jitter=lambda: 0.5)
    past = outlet.past(all_answers(outlet))
    ending = run_virtually(engine.run(envelope(document, past=past), outlet))
    assert agents.active == 0
    outlet.ended(ending)
    return ending


@MANY
@given(documents(), st.integers(0, 2**32))
def test_whatever_happens_the_order_holds_and_every_attempt_has_one_end(
    document: dict[str, Any], seed: int
) -> None:
    outlet = RecordingOutlet(full_every=3)
    agents = ScriptedAgents(Chaos(seed))
    ending = leg(document, agents, outlet)
    for _ in range(40):
        if not isinstance(ending, Yielded):
            break
        ending = leg(document, agents, outlet)
    assert isinstance(ending, Completed | Failed | Yielded)
    if isinstance(ending, Failed):
        assert ending.code in ("task_failed", "timeout"), ending
    if not isinstance(ending, Yielded):
        assert outlet.past().open == {}
        counted = sum(ending.summary[key] for key in ("completed", "failed", "skipped"))
        assert counted == ending.summary["tasks"]


@MANY
@given(documents(), st.integers(0, 2**32), st.integers(0, 300))
def test_a_cancellation_at_any_time_leaves_nothing_behind(
    document: dict[str, Any], seed: int, tenths: int
) -> None:
    outlet = RecordingOutlet()
    agents = ScriptedAgents(Chaos(seed))

    async def main() -> None:
        engine = EmbeddedEngine(agents, jitter=lambda: 0.5)
        run = asyncio.create_task(engine.run(envelope(document), outlet))
        await asyncio.sleep(tenths / 10 + 0.0137)  # a time at which nothing else happens
        before, done = len(outlet.said), run.done()
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled() is not done
        assert agents.active == 0
        assert len(outlet.said) == before

    run_virtually(main())  # looks for tasks that are left


@MANY
@given(documents([*KINDS[:7]]), st.integers(0, 2**32), st.lists(st.integers(0, 12), max_size=8))
def test_takeovers_at_any_event_keep_the_order(
    document: dict[str, Any], seed: int, cuts: list[int]
) -> None:
    outlet = RecordingOutlet()
    agents = ScriptedAgents(Chaos(seed))
    for cut in cuts:
        outlet.cut_after(cut)
        ending = play_cut(document, agents, outlet)
        if ending is not None:
            outlet.ended(ending)
            return
        outlet.revive()
    leg(document, agents, outlet)
