"""W3.1: batch: order, ids of instances, concurrency, progress, failed items, memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest

from encoders.json_text import dumps
from relay.engines.base import Failed
from relay.engines.embedded import limits
from relay.engines.embedded.engine import EmbeddedEngine
from tests.support.clock import run_virtually
from tests.support.engines import play, task
from tests.support.runs import HANG, RecordingOutlet, ScriptedAgents, envelope, fails, prompt_of

BROKEN: list[Any] = ["x", 1.0, fails(retryable=False)]


def batch(items: Any, inner: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    inner = inner or task("i", prompt="{{ item }}")
    return {"type": "batch", "id": "b", "items": items, "task": inner, **fields}


def test_a_batch_runs_its_task_for_each_item() -> None:
    played = play([batch(["p", "q"], concurrency=1)])
    outlet = played.outlet
    assert outlet.output("b") == ["a says: p", "a says: q"]
    assert outlet.names("b") == [
        *("task_dispatched", "batch_start"),
        *("batch_item_start", "batch_item_complete", "batch_progress"),
        *("batch_item_start", "batch_item_complete"),
        *("batch_progress", "batch_complete", "task_completed", "output_delivered"),
    ]
    assert outlet.data("batch_start") == [{"task_id": "b", "total": 2}]
    assert outlet.data("batch_item_start") == [{"task_id": "b", "index": at} for at in range(2)]
    assert outlet.data("batch_item_complete") == [
        {"task_id": "b", "index": at, "status": "completed"} for at in range(2)
    ]
    assert outlet.data("batch_complete") == [{"task_id": "b", "completed": 2, "failed": 0}]
    assert [data["task_id"] for data in outlet.data("task_dispatched")] == ["b", "i.0", "i.1"]


def test_the_list_is_in_the_order_of_the_items_whatever_ends_first() -> None:
    replies: dict[str, Any] = {f"i.{at}": [f"r{at}", float(9 - at)] for at in range(6)}
    played = play([batch(list("abcdef"), concurrency=3)], replies)
    assert played.outlet.output("b") == [f"r{at}" for at in range(6)]
    assert played.agents.most_active == 3


def test_no_items() -> None:
    played = play([batch([])])
    assert played.outlet.output("b") == []
    assert played.outlet.names("b")[2:4] == ["batch_progress", "batch_complete"]


def test_items_of_an_expression_and_another_variable() -> None:
    inner = task("i", prompt="{{ n.x }}{{ tasks.t.output }}")
    document = {
        "workflow": {
            "name": "w",
            "inputs": {"list": [{"x": 1}, {"x": 2}]},
            "tasks": [task("t"), batch("inputs.list", inner, **{"as": "n"})],
        }
    }
    played = play(document, {"t": "!"})
    assert played.outlet.output("b") == ["a says: 1!", "a says: 2!"]


@pytest.mark.parametrize("items", [3, "x" * 20])
def test_what_is_no_list_fails_the_batch(items: Any) -> None:
    document = {"workflow": {"name": "w", "inputs": {"n": items}, "tasks": [batch("inputs.n")]}}
    played = play(document)
    (error,) = played.outlet.data("task_error")
    assert (error["task_id"], error["error"]["code"]) == ("b", "template_error")
    assert "batch_start" not in played.outlet.names()


def test_nested_batches_have_an_index_for_each() -> None:
    inner = {
        **batch("[item, 9]", task("i", prompt="{{ item }} {{ m }}"), **{"as": "m"}),
        "id": "c",
    }
    played = play([batch([1, 2], inner)])
    assert played.outlet.output("b") == [
        ["a says: 1 1", "a says: 1 9"],
        ["a says: 2 2", "a says: 2 9"],
    ]
    ids = {data["task_id"] for data in played.outlet.data("task_dispatched")}
    assert ids == {"b", "c.0", "c.1", "i.0.0", "i.0.1", "i.1.0", "i.1.1"}


def test_tasks_of_an_item_see_those_of_the_same_item() -> None:
    inner = {
        "type": "sequential",
        "id": "s",
        "tasks": [task("x", prompt="{{ item }}"), task("y", prompt="{{ tasks.x.output }}")],
    }
    played = play([batch([1, 2, 3], inner, concurrency=3)], {"x.0": ["first", 5.0]})
    assert played.outlet.output("b") == [
        ["first", "a says: first"],
        ["a says: 2", "a says: a says: 2"],
        ["a says: 3", "a says: a says: 3"],
    ]


@pytest.mark.parametrize("place", ["task", "batch", "run"])
def test_a_failed_item_is_an_error_under_continue(place: str) -> None:
    fields = {"on_error": "continue"}
    inner = task("i", prompt="{{ item }}", **(fields if place == "task" else {}))
    document = {
        "workflow": {
            "name": "w",
            "tasks": [batch(["p", "q", "r"], inner, **(fields if place == "batch" else {}))],
            **(fields if place == "run" else {}),
        }
    }
    played = play(document, {"i.1": BROKEN})
    error = {"code": "upstream_error", "message": "upstream_error of the script"}
    assert played.outlet.output("b") == ["a says: p", {"error": error}, "a says: r"]
    assert played.outlet.data("batch_complete") == [{"task_id": "b", "completed": 2, "failed": 1}]
    assert played.outlet.data("batch_progress")[-1] == {
        "task_id": "b",
        "done": 3,
        "failed": 1,
        "total": 3,
    }


def test_a_skipped_item_is_null() -> None:
    inner = task("i", prompt="{{ item }}", when="item != 'q'", on_error="skip")
    played = play([batch(["p", "q", "r"], inner)], {"i.2": BROKEN})
    assert played.outlet.output("b") == ["a says: p", None, None]
    statuses = {data["index"]: data["status"] for data in played.outlet.data("batch_item_complete")}
    assert statuses == {0: "completed", 1: "skipped", 2: "skipped"}
    reasons = {data["task_id"]: data["reason"] for data in played.outlet.data("task_skipped")}
    assert reasons == {"i.1": "when", "i.2": "on_error"}


def test_a_failed_item_stops_the_batch_under_fail() -> None:
    played = play([batch(list("pqrst"), concurrency=2)], {"i.0": ["a", HANG], "i.1": BROKEN})
    assert isinstance(played.ending, Failed)
    assert played.ending.task_id == "i.1"
    outlet = played.outlet
    codes = {data["task_id"]: data["error"]["code"] for data in outlet.data("task_error")}
    assert codes == {"i.1": "upstream_error", "i.0": "cancelled", "b": "task_failed"}
    assert outlet.names("b")[-3:] == ["batch_progress", "batch_complete", "task_error"]
    assert outlet.data("batch_complete") == [{"task_id": "b", "completed": 0, "failed": 2}]
    assert outlet.data("batch_progress")[-1]["done"] == 2
    assert [data["index"] for data in outlet.data("batch_item_complete")] == [0, 1]


def test_a_batch_that_is_retried_runs_the_failed_items_again() -> None:
    played = play(
        [batch(["p", "q", "r"], retries=1, concurrency=1)], {"i.1/1": [fails()], "i.1/2": "well"}
    )
    assert played.outlet.output("b") == ["a says: p", "well", "a says: r"]
    assert [played.agents.called(f"i.{at}") for at in range(3)] == [1, 2, 1]
    assert len(played.outlet.data("batch_item_start")) == 3
    assert len(played.outlet.data("batch_item_complete")) == 3


def test_progress_is_told_at_most_four_times_a_second_and_at_the_end() -> None:
    outlet = RecordingOutlet()
    times: list[float] = []
    agents = ScriptedAgents(lambda call: [0.01, "x"])

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        emit = outlet.emit

        def timed(name: str, data: Any, *, steps: Any = None) -> None:
            if name == "batch_progress":
                times.append(clock())
            emit(name, data, steps=steps)

        outlet.emit = timed  # type: ignore[method-assign]
        document = [batch(list(range(400)), concurrency=4)]
        outlet.ended(await EmbeddedEngine(agents).run(envelope(document), outlet))

    run_virtually(main())
    told = outlet.data("batch_progress")
    assert told[-1] == {"task_id": "b", "done": 400, "failed": 0, "total": 400}
    gaps = [after - before for before, after in pairwise(times[:-1])]
    assert len(gaps) >= 3
    assert min(gaps) >= 0.25
    assert [data["done"] for data in told] == sorted(data["done"] for data in told)


def test_a_large_batch_holds_little_more_than_its_outputs() -> None:
    class Forgetful(RecordingOutlet):
        """Keeps nothing: what is measured is the engine's."""

        def emit(self, name: str, data: Any, *, steps: Any = None) -> None:
            dumps(data), dumps(steps)

        def token(self, task_id: str, raw: bytes) -> bool:
            return True

    agents = ScriptedAgents(lambda call: ["0123456789" * 20 + prompt_of(call)] * 20)
    agents.calls = Nothing()
    agents.ended = Nothing()
    concurrency = min(50, limits.CONCURRENCY)
    document = [batch(list(range(1000)), concurrency=concurrency)]

    async def main() -> int:
        await EmbeddedEngine(agents).run(
            envelope([batch([1])]), Forgetful()
        )  # what is lazy is made
        tracemalloc.start()
        try:
            await EmbeddedEngine(agents).run(envelope(document), Forgetful())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    most = run_virtually(main())
    outputs = 1000 * 20 * 203
    assert agents.most_active == concurrency
    # Twice at most: the list of outputs is written as JSON at the end.
    assert outputs < most < 3 * outputs


class Nothing(list[Any]):
    """A list that keeps nothing."""

    def append(self, value: Any) -> None:
        pass


def test_batches_in_batches_do_not_multiply_without_a_bound() -> None:
    inner = batch(list(range(limits.RUN_ITEMS // 2)))
    outer = {"type": "batch", "id": "o", "items": [1, 2, 3], "concurrency": 1, "task": inner}
    played = play([outer])
    assert isinstance(played.ending, Failed)
    errors = [data["error"] for data in played.outlet.data("task_error")]
    assert errors[0]["code"] == "too_many_items"
    assert "20,000" in errors[0]["message"]
    assert len(played.outlet.data("batch_item_start")) < limits.RUN_ITEMS
