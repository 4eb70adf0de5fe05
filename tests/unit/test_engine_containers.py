"""W3.1: sequential, parallel, condition; what `on_error` means for what stands beside a failure."""

from __future__ import annotations

from typing import Any

import pytest

from relay.engines.base import Completed, Failed
from tests.support.engines import play, task
from tests.support.runs import HANG, RecordingOutlet, fails

BROKEN: list[Any] = ["x", 1.0, fails(retryable=False)]


def sequential(task_id: str, *tasks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "sequential", "id": task_id, "tasks": list(tasks), **fields}


def parallel(task_id: str, *tasks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "parallel", "id": task_id, "tasks": list(tasks), **fields}


def condition(test: str, **fields: Any) -> dict[str, Any]:
    return {"type": "condition", "id": "c", "if": test, **fields}


def workflow(*tasks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"workflow": {"name": "w", "tasks": list(tasks), **fields}}


def errors(outlet: RecordingOutlet) -> dict[str, str]:
    return {data["task_id"]: data["error"]["code"] for data in outlet.data("task_error")}


# -- sequential ------------------------------------------------------------------------------------


def test_a_sequential_runs_in_order_and_lists_its_outputs() -> None:
    played = play(
        [sequential("s", task("x"), task("y", prompt="{{ tasks.x.output }}2")), task("z")],
        {"x": ["1", 5.0]},
    )
    outlet = played.outlet
    assert outlet.names("s") == [
        *("task_dispatched", "sequential_start", "sequential_complete"),
        *("task_completed", "output_delivered"),
    ]
    assert outlet.data("sequential_start") == [{"task_id": "s", "task_ids": ["x", "y"]}]
    assert outlet.data("sequential_complete") == [{"task_id": "s", "completed": 2, "failed": 0}]
    assert outlet.output("s") == ["1", "a says: 12"]
    assert outlet.data("task_dispatched", "s") == [
        {"task_id": "s", "kind": "sequential", "attempt": 1}
    ]
    assert isinstance(played.ending, Completed)
    assert played.ending.final_task_id == "z"
    assert "usage" not in outlet.data("task_completed", "s")[0]  # it called nobody itself


def test_a_failure_ends_a_sequential_and_what_it_is_in() -> None:
    played = play(
        [
            sequential("s", sequential("r", task("x"), task("never")), task("never2")),
            task("never3"),
        ],
        {"x": BROKEN},
    )
    assert isinstance(played.ending, Failed)
    assert (played.ending.code, played.ending.task_id) == ("task_failed", "x")
    assert errors(played.outlet) == {
        "x": "upstream_error",
        "r": "task_failed",
        "s": "task_failed",
    }
    assert played.outlet.data("task_error", "s")[0]["error"]["message"].startswith("x: ")
    assert played.outlet.data("sequential_complete", "r") == [
        {"task_id": "r", "completed": 0, "failed": 1}
    ]
    said = {said.task_id for said in played.outlet.said}
    assert not said & {"never", "never2", "never3"}
    assert played.ending.summary == {"tasks": 3, "completed": 0, "failed": 3, "skipped": 0}


@pytest.mark.parametrize(
    ("on_error", "status", "summary"),
    [
        ("skip", "skipped", {"tasks": 3, "completed": 2, "failed": 0, "skipped": 1}),
        ("continue", "failed", {"tasks": 3, "completed": 2, "failed": 1, "skipped": 0}),
    ],
)
def test_skip_and_continue_go_on_without_an_output(
    on_error: str, status: str, summary: dict[str, int]
) -> None:
    played = play(
        [
            sequential(
                "s",
                task("x", on_error=on_error),
                task("y", prompt="{{ tasks.x.status }} {{ tasks.x.output is none }}"),
            )
        ],
        {"x": BROKEN},
    )
    assert played.outlet.output("y") == f"a says: {status} true"
    assert played.outlet.output("s") == [None, f"a says: {status} true"]
    assert played.ending.summary == summary
    skipped = {"task_id": "x", "kind": "task", "reason": "on_error"}
    assert played.outlet.data("task_skipped") == ([skipped] if on_error == "skip" else [])
    if on_error == "skip":
        assert played.outlet.names("x")[-2:] == ["task_error", "task_skipped"]


def test_on_error_of_the_run_is_that_of_tasks_that_do_not_say_it() -> None:
    played = play(
        workflow(
            sequential("s", task("x"), task("y", on_error="fail")), task("z"), on_error="continue"
        ),
        {"x": BROKEN, "y": BROKEN},
    )
    assert isinstance(played.ending, Completed)
    assert played.ending.final_task_id == "z"
    assert played.outlet.status("s") == "failed"
    assert played.ending.summary == {"tasks": 4, "completed": 1, "failed": 3, "skipped": 0}


@pytest.mark.parametrize(("output", "final"), [("x", "x"), ("y", None), ("s", "s")])
def test_the_output_of_a_run_is_that_of_the_task_it_names(output: str, final: str | None) -> None:
    played = play(
        workflow(sequential("s", task("x"), task("y", when="false")), task("z"), output=output)
    )
    assert isinstance(played.ending, Completed)
    assert played.ending.final_task_id == final


def test_a_run_of_skipped_tasks_has_no_output() -> None:
    played = play([task("x", when="false")])
    assert isinstance(played.ending, Completed)
    assert played.ending.final_task_id is None


def test_nothing_is_said_of_what_a_skipped_container_holds_but_templates_see_it() -> None:
    played = play(
        [
            sequential("s", task("x"), sequential("r", task("y")), when="false"),
            task("z", prompt="{{ tasks.x.status }} {{ tasks.y.status }}"),
        ]
    )
    assert [
        said.task_id for said in played.outlet.said if said.task_id in "sxyr" and said.task_id
    ] == ["s"]
    assert played.outlet.output("z") == "a says: skipped skipped"


def test_a_container_that_is_retried_runs_only_what_failed_again() -> None:
    played = play(
        [sequential("s", task("x"), task("y", retries=1), retries=1)],
        {"y/1": [fails()], "y/2": [fails()], "y/3": "well"},
    )
    assert played.agents.called("x") == 1
    assert played.agents.called("y") == 3
    told = [(data["task_id"], data["will_retry"]) for data in played.outlet.data("task_error")]
    assert told == [("y", True), ("y", False), ("s", True)]
    attempts = [data["attempt"] for data in played.outlet.data("task_dispatched", "s")]
    assert attempts == [1, 2]
    assert len(played.outlet.data("sequential_start")) == 1
    assert played.outlet.data("sequential_complete") == [
        {"task_id": "s", "completed": 2, "failed": 0}
    ]
    assert played.ending.summary == {"tasks": 3, "completed": 3, "failed": 0, "skipped": 0}


def test_retries_of_what_is_in_a_retried_container_begin_anew() -> None:
    played = play([sequential("s", task("y", retries=2), retries=1)], {"y": [fails()]})
    assert played.agents.called("y") == 6


def test_a_container_is_not_retried_for_what_would_fail_again() -> None:
    played = play([sequential("s", task("y"), retries=3)], {"y": BROKEN})
    assert played.agents.called("y") == 1


def test_the_limit_of_a_container_ends_what_it_holds() -> None:
    played = play(
        [sequential("s", task("x"), task("y"), timeout_s=4, on_error="continue"), task("z")],
        {"x": ["a", 3.0], "y": ["b", 3.0]},
    )
    assert errors(played.outlet) == {"y": "timeout", "s": "timeout"}
    names = [(said.name, said.task_id) for said in played.outlet.said]
    assert names.index(("task_error", "y")) < names.index(("task_error", "s"))
    assert isinstance(played.ending, Completed)


# -- parallel --------------------------------------------------------------------------------------


def test_a_parallel_runs_at_once_up_to_its_concurrency() -> None:
    held = [task(name) for name in "uvwxyz"]
    played = play(
        [parallel("p", *held, max_concurrency=3)],
        {name: ["a", float(seconds)] for seconds, name in enumerate("zyxwvu", 1)},
    )
    outlet = played.outlet
    assert played.agents.most_active == 3
    assert outlet.data("parallel_start") == [
        {"task_id": "p", "task_ids": list("uvwxyz"), "max_concurrency": 3}
    ]
    assert [data["task_id"] for data in outlet.data("task_dispatched")] == ["p", *"uvwxyz"]
    assert outlet.data("parallel_complete") == [{"task_id": "p", "completed": 6, "failed": 0}]
    assert list(outlet.output("p")) == list("uvwxyz")
    assert outlet.output("p") == dict.fromkeys("uvwxyz", "a")


def test_the_default_concurrency_is_four() -> None:
    held = [task(name) for name in "uvwxyz"]
    played = play([parallel("p", *held)], {name: ["a", 1.0] for name in "uvwxyz"})
    assert played.agents.most_active == 4


def test_a_failure_stops_its_siblings_and_waits_for_them() -> None:
    played = play(
        [
            parallel(
                "p", task("x"), task("y"), sequential("s", task("s1")), task("z"), max_concurrency=3
            )
        ],
        {"x": ["a", HANG], "y": BROKEN, "s1": ["b", HANG]},
    )
    assert isinstance(played.ending, Failed)
    assert played.ending.task_id == "y"
    assert errors(played.outlet) == {
        "y": "upstream_error",
        "x": "cancelled",
        "s1": "cancelled",
        "s": "cancelled",
        "p": "task_failed",
    }
    message = played.outlet.data("task_error", "x")[0]["error"]["message"]
    assert message.startswith("stopped, because y failed")
    assert played.outlet.said[-1].task_id == "p"
    assert "z" not in {said.task_id for said in played.outlet.said}  # it had not begun


def test_siblings_go_on_when_a_failure_is_not_for_all() -> None:
    played = play(
        [parallel("p", task("x"), task("y", on_error="skip"), task("z", on_error="continue"))],
        {"x": ["a", 5.0], "y": BROKEN, "z": BROKEN},
    )
    assert played.outlet.output("p") == {"x": "a", "y": None, "z": None}
    assert played.outlet.data("parallel_complete") == [
        {"task_id": "p", "completed": 1, "failed": 1}
    ]


def test_a_retry_that_waits_is_stopped_too() -> None:
    played = play(
        [parallel("p", task("x", retries=5), task("y"))],
        {"x": [0.9, fails()], "y": BROKEN},
    )
    assert [data["will_retry"] for data in played.outlet.data("task_error", "x")] == [True]
    assert played.agents.called("x") == 1


# -- condition -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "value", "branch", "skipped", "output"),
    [
        ("inputs.n > 1", True, "then", ["z"], "a says: do y"),
        ("{{ inputs.n > 2 }}", False, "else", ["x", "y"], "a says: do z"),
        ("inputs.n", True, "then", ["z"], "a says: do y"),
    ],
)
def test_a_condition_takes_a_branch_and_skips_the_other(
    test: str, value: bool, branch: str, skipped: list[str], output: str
) -> None:
    tasks = condition(test, then=[task("x"), task("y")], **{"else": [task("z")]})
    played = play(workflow(tasks, inputs={"n": 2}))
    assert played.outlet.data("condition_evaluated") == [
        {"task_id": "c", "expression": test, "value": value, "branch": branch}
    ]
    assert played.outlet.data("task_skipped") == [
        {"task_id": name, "kind": "task", "reason": "branch"} for name in skipped
    ]
    assert played.outlet.output("c") == output
    assert played.outlet.names("c") == [
        *("task_dispatched", "condition_evaluated", "task_completed", "output_delivered")
    ]


def test_a_branch_is_chosen_once_whatever_is_retried() -> None:
    chosen = condition("tasks.x.status == 'failed'", then=[task("y")], **{"else": [task("z")]})
    played = play(
        [sequential("s", task("x", on_error="continue"), chosen, retries=1)],
        {"x/1": BROKEN, "x/2": "well", "y/1": [fails()], "y/2": "well"},
    )
    assert played.outlet.output("x") == "well"
    assert played.outlet.output("c") == "well"
    assert played.agents.called("z") == 0


def test_a_condition_without_else_has_no_output_if_it_is_false() -> None:
    played = play([condition("false", then=[task("x")])])
    assert played.outlet.data("condition_evaluated")[0]["branch"] is None
    assert played.outlet.output("c") is None
    assert not played.agents.calls


def test_a_condition_that_cannot_be_evaluated_fails() -> None:
    played = play([task("x"), condition("tasks.x.output > 1", then=[task("y")])])
    assert errors(played.outlet) == {"c": "template_error"}
    assert "condition_evaluated" not in played.outlet.names()


def test_a_failed_task_of_a_branch() -> None:
    branch = [task("x"), task("y", on_error="continue"), task("z", on_error="skip")]
    played = play([condition("true", then=branch)], {"y": BROKEN, "z": BROKEN})
    assert played.outlet.output("c") == "a says: do x"  # of the last one that completed
    played = play([condition("true", then=[task("x"), task("y")])], {"x": BROKEN})
    assert errors(played.outlet) == {"x": "upstream_error", "c": "task_failed"}
