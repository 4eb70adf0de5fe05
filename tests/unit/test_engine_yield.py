"""W2.3: a run that waits for an answer, and goes on with it."""

from __future__ import annotations

from typing import Any

from relay.engines.base import Completed, Failed, Yielded
from tests.support.engines import play, task
from tests.support.runs import EXECUTION, HANG, fails


def ask(task_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "yield", "id": task_id, "prompt": f"{task_id}?", **fields}


RESUME = f"/v1/workflows/executions/{EXECUTION}/resume"


def test_a_yield_ends_the_leg_and_an_answer_is_its_output() -> None:
    schema = {"type": "object"}
    document = [
        task("x"),
        ask("y", prompt="ok: {{ tasks.x.output }}?", schema=schema),
        task("z", prompt="{{ tasks.y.output.n }}"),
    ]
    first = play(document)
    prompt = "ok: a says: do x?"
    assert first.ending == Yielded(
        task_id="y",
        prompt=prompt,
        schema=schema,
        summary={"tasks": 1, "completed": 1, "failed": 0, "skipped": 0},
        usage=first.ending.usage,
    )
    assert first.outlet.said[-1].name == "workflow_yielded"
    assert first.outlet.said[-1].data == {
        "task_id": "y",
        "prompt": prompt,
        "schema": schema,
        "resume_url": RESUME,
    }
    second = play(document, after=first, answers={"y": {"n": 5}})
    outlet = second.outlet
    assert outlet.names("y") == [
        *("task_dispatched", "workflow_yielded", "task_completed", "output_delivered")
    ]
    assert outlet.output("y") == {"n": 5}
    assert outlet.output("z") == "a says: 5"
    assert [second.agents.called(key) for key in "xz"] == [1, 1]
    assert outlet.names().count("workflow_started") == 1
    assert isinstance(second.ending, Completed)
    assert second.ending.usage.prompt_tokens == 2  # of both legs


def test_a_yield_without_schema_and_an_answer_that_is_null() -> None:
    first = play([ask("y")])
    assert first.outlet.said[-1].data == {"task_id": "y", "prompt": "y?", "resume_url": RESUME}
    second = play([ask("y")], after=first, answers={"y": None})
    assert isinstance(second.ending, Completed)
    assert second.outlet.output("y") is None


def test_a_leg_that_is_taken_over_while_it_waits_says_nothing_twice() -> None:
    first = play([ask("y")])
    before = len(first.outlet.said)
    again = play([ask("y")], after=first)
    assert again.ending == first.ending
    assert len(again.outlet.said) == before


def test_siblings_finish_before_a_parallel_yields_the_first_in_the_document() -> None:
    document = [
        {
            "type": "parallel",
            "id": "p",
            "max_concurrency": 2,
            "tasks": [
                task("x"),
                {"type": "sequential", "id": "s", "tasks": [task("s1"), ask("y1"), task("s2")]},
                ask("y2"),
                task("z"),
            ],
        }
    ]
    replies: dict[str, Any] = {"x": ["a", 9.0], "s1": ["b", 5.0]}
    first = play(document, replies)
    assert isinstance(first.ending, Yielded)
    assert first.ending.task_id == "y1"  # y2 was reached before it
    assert {key: first.outlet.status(key) for key in ("x", "z", "s1")} == dict.fromkeys(
        ("x", "z", "s1"), "completed"
    )
    assert len(first.outlet.data("workflow_yielded")) == 1
    second = play(document, after=first, answers={"y1": "1"})
    assert isinstance(second.ending, Yielded)
    assert second.ending.task_id == "y2"
    assert second.outlet.status("s2") == "completed"
    third = play(document, after=second, answers={"y1": "1", "y2": "2"})
    assert isinstance(third.ending, Completed)
    assert third.outlet.output("p") == {
        "x": "a",
        "s": ["b", "1", "a says: do s2"],
        "y2": "2",
        "z": "a says: do z",
    }
    assert third.outlet.data("task_error") == []
    assert len(third.outlet.data("task_dispatched", "p")) == 1


def test_items_of_a_batch_are_answered_one_after_the_other() -> None:
    inner = ask("y", prompt="{{ item }}?")
    document = [{"type": "batch", "id": "b", "items": ["p", "q", "r"], "task": inner}]
    answers: dict[str, Any] = {}
    played = None
    for at, item in enumerate("pqr"):
        played = play(document, after=played, answers=answers)
        assert isinstance(played.ending, Yielded)
        assert (played.ending.task_id, played.ending.prompt) == (f"y.{at}", f"{item}?")
        answers[f"y.{at}"] = at
    played = play(document, after=played, answers=answers)
    assert played.outlet.output("b") == [0, 1, 2]
    assert len(played.outlet.data("batch_item_start")) == 3
    assert played.outlet.data("batch_progress")[-1]["done"] == 3


def test_a_failure_ends_a_yield_that_waits() -> None:
    document = [{"type": "parallel", "id": "p", "tasks": [ask("y"), task("x")]}]
    played = play(document, {"x": ["a", 1.0, fails(retryable=False)]})
    assert isinstance(played.ending, Failed)
    codes = {data["task_id"]: data["error"]["code"] for data in played.outlet.data("task_error")}
    assert codes == {"x": "upstream_error", "y": "cancelled", "p": "task_failed"}
    assert "workflow_yielded" not in played.outlet.names()


def test_a_container_with_a_yield_may_be_retried() -> None:
    document = [{"type": "parallel", "id": "p", "retries": 1, "tasks": [ask("y"), task("x")]}]
    first = play(document, {"x/1": [1.0, fails()], "x/2": "well"})
    assert isinstance(first.ending, Yielded)
    second = play(document, after=first, answers={"y": 1})
    assert second.outlet.output("p") == {"y": 1, "x": "well"}
    assert [data["attempt"] for data in second.outlet.data("task_dispatched", "y")] == [1, 2]


def test_a_run_that_waits_takes_no_time() -> None:
    document = {
        "workflow": {"name": "w", "timeout_s": 10, "tasks": [task("x"), ask("y"), task("z")]}
    }
    first = play(document, {"x": ["a", 8.0], "z": ["a", 8.0]})
    second = play(document, after=first, answers={"y": 1})
    assert isinstance(second.ending, Completed)  # each leg has the whole time
    late = play(document, {"x": ["a", HANG]})
    assert isinstance(late.ending, Failed)
