"""W3.1: dynamic: the plan, its bounds, the planned tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relay.engines.base import Failed, Usage
from relay.engines.embedded.answers import PLAN_CHARS, Unreadable, plan
from tests.support.engines import play, task
from tests.support.runs import HANG, fails, prompt_of

PLANNED = [
    {"id": "u", "agent": "a", "prompt": "{{ inputs }} is plain text"},
    {"id": "v", "agent": "b", "prompt": "2"},
]
PLAN = json.dumps({"tasks": PLANNED})


def dynamic(**fields: Any) -> dict[str, Any]:
    return {
        "type": "dynamic",
        "id": "d",
        "planner": "planner",
        "prompt": "split {{ 1 + 1 }}",
        "agents": ["a", "b"],
        **fields,
    }


def test_a_dynamic_plans_then_runs_the_plan() -> None:
    played = play([dynamic(), task("z", prompt="{{ tasks.d.output | length }}")], {"d": PLAN})
    outlet = played.outlet
    assert outlet.names("d") == [
        *("task_dispatched", "dynamic_start", "dynamic_generated", "dynamic_complete"),
        *("task_completed", "output_delivered"),
    ]
    assert outlet.data("task_dispatched", "d")[0]["agent"] == "planner"
    assert outlet.data("dynamic_start") == [{"task_id": "d", "planner": "planner"}]
    assert outlet.data("dynamic_generated") == [{"task_id": "d", "task_ids": ["d.u", "d.v"]}]
    assert outlet.data("dynamic_complete") == [{"task_id": "d", "completed": 2, "failed": 0}]
    assert outlet.output("d") == ["a says: {{ inputs }} is plain text", "b says: 2"]
    assert outlet.output("z") == "a says: 2"
    assert outlet.names("d.u") == [
        *("task_dispatched", "streaming_started", "token", "streaming_completed"),
        *("task_completed", "output_delivered"),
    ]
    assert outlet.data("task_dispatched", "d.u")[0]["kind"] == "task"


def test_the_planner_is_told_what_it_may_propose() -> None:
    played = play([dynamic(max_tasks=3)], {"d": PLAN})
    prompt = prompt_of(played.agents.calls[0])
    assert prompt.startswith("split 2\n")
    assert "at most 3 tasks" in prompt
    assert '"a", "b"' in prompt


def test_the_usage_of_the_planner_is_that_of_the_dynamic() -> None:
    played = play([dynamic(retries=1)], {"d/1": "none", "d/2": PLAN})
    used = Usage(prompt_tokens=2, completion_tokens=4 + len(PLAN), cost_micro_usd=4)
    assert played.outlet.data("task_completed", "d")[0]["usage"] == used.document()
    called = sum(call["completion_tokens"] for call in (
        data["usage"] for data in played.outlet.data("task_completed")))  # fmt: skip
    assert played.ending.usage.completion_tokens == called


def test_planned_tasks_run_at_once_up_to_four() -> None:
    tasks = [{"id": f"t{at}", "agent": "a", "prompt": "x"} for at in range(7)]
    replies: dict[str, Any] = {f"d.t{at}": [f"{at}", float(9 - at)] for at in range(7)}
    played = play([dynamic()], {"d": json.dumps({"tasks": tasks}), **replies})
    assert played.agents.most_active == 4
    assert played.outlet.output("d") == [str(at) for at in range(7)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("I would rather not", "no JSON object"),
        ("[]", "no JSON object"),
        (PLAN + "\nor else\n" + PLAN, "more than one JSON object"),
        ('{"tasks": []}', "at least one"),
        ('{"tasks": "u"}', "must be a list"),
        ('{"tasks": ["u"]}', "tasks[0] of the plan is no object"),
        (json.dumps({"tasks": PLANNED * 2}), "more than once"),
        (
            json.dumps({"tasks": [{**PLANNED[0], "id": f"t{at}"} for at in range(9)]}),
            "max_tasks is 8",
        ),
        (json.dumps({"tasks": [{**PLANNED[0], "agent": "c"}]}), "must be one of a, b"),
        (json.dumps({"tasks": [{**PLANNED[0], "agent": ["a"]}]}), "must be one of a, b"),
        (json.dumps({"tasks": [{**PLANNED[0], "id": "a.b"}]}), "`id` must be"),
        (json.dumps({"tasks": [{**PLANNED[0], "id": "x\n"}]}), "`id` must be"),
        (json.dumps({"tasks": [{**PLANNED[0], "prompt": ""}]}), "`prompt` must be"),
        (json.dumps({"tasks": [{**PLANNED[0], "prompt": 1}]}), "`prompt` must be"),
        (PLAN + " " * PLAN_CHARS, f"it may have {PLAN_CHARS:,}"),
        ('{"tasks": ' * 5000, "no JSON object"),
    ],
)
def test_a_plan_that_breaks_a_bound_is_refused(reply: str, message: str) -> None:
    played = play([dynamic()], {"d": reply})
    assert isinstance(played.ending, Failed)
    (error,) = played.outlet.data("task_error")
    assert (error["task_id"], error["error"]["code"]) == ("d", "invalid_plan")
    assert message in error["error"]["message"]
    assert len(played.agents.calls) == 1
    assert played.outlet.names("d")[-2:] == ["dynamic_complete", "task_error"]


@pytest.mark.parametrize(
    "text",
    [
        PLAN,
        f"```json\n{PLAN}\n```",
        f"Here is my plan:\n{PLAN}\nI hope that it helps {{really}}.",
        f'First {{"a": 1}}, then {PLAN}',
        json.dumps({"tasks": PLANNED, "why": {"tasks": 1}}),
        json.dumps({"tasks": [{**entry, "type": "task"} for entry in PLANNED]}),
    ],
)
def test_small_models_wrap_their_plans(text: str) -> None:
    assert plan(text, agents=("a", "b"), max_tasks=2) == PLANNED


def test_many_braces_take_little_time() -> None:
    with pytest.raises(Unreadable):
        plan('{"a":' * (PLAN_CHARS // 5), agents=("a",), max_tasks=2)


def test_a_planned_task_that_fails_ends_the_dynamic_after_its_own_retries() -> None:
    played = play([dynamic(retries=1)], {"d": PLAN, "d.u": ["x", HANG], "d.v": [fails()]})
    assert isinstance(played.ending, Failed)
    assert played.ending.task_id == "d.v"
    assert played.agents.called("d.v") == 2
    assert played.agents.called("d") == 1
    codes = [(data["task_id"], data["error"]["code"]) for data in played.outlet.data("task_error")]
    assert codes == [
        *(("d.v", "upstream_error"), ("d.v", "upstream_error")),
        *(("d.u", "cancelled"), ("d", "task_failed")),
    ]


@pytest.mark.parametrize(("on_error", "entry"), [("skip", None), ("continue", {"error": {
    "code": "upstream_error", "message": "upstream_error of the script"}})])  # fmt: skip
def test_on_error_of_a_dynamic_is_that_of_its_tasks(on_error: str, entry: Any) -> None:
    played = play([dynamic(on_error=on_error)], {"d": PLAN, "d.v": [fails()]})
    assert played.outlet.output("d") == ["a says: {{ inputs }} is plain text", entry]


def test_the_time_limit_of_a_dynamic_keeps_its_plan() -> None:
    played = play(
        [dynamic(timeout_s=5, retries=1)], {"d": PLAN, "d.u/1": ["x", 9.0], "d.u/2": "well"}
    )
    assert played.agents.called("d") == 1
    assert played.agents.called("d.v") == 1
    assert played.outlet.output("d") == ["well", "b says: 2"]
