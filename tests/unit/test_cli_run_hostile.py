"""`sluicegate run` on events that are none: what any engine or server may send (W3.2)."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from encoders.sse import SseEvent
from encoders.workflow import VOCABULARY
from planes.cli_run_events import Cursor, json_line
from planes.cli_run_tree import RunTree
from planes.cli_run_view import plain_line, render

ODD: list[Any] = [
    None, True, -1, 0.5, 10**400, 1e308, float("inf"), float("nan"), "x", "\ud800", "\x1b]0;x\x07",
    "\x9b2J", "." * 100_000, [], {}, [1], [[]], ["a", None, {}], {"a": 1}, {"code": [1]}, 2**64,
]  # fmt: skip
FIELDS = [
    "agent", "attempt", "branch", "done", "duration_ms", "error", "execution_summary", "failed",
    "final_task_id", "index", "kind", "model", "name", "output_preview", "prompt", "reason",
    "round", "schema", "status", "task_id", "task_ids", "total", "usage", "value", "will_retry",
]  # fmt: skip
PARTS = ("data", "elapsed_ms", "execution_id", "task_id", "delta", "offset")


def event(name: str, payload: Any, id: bytes = b"") -> SseEvent:
    return SseEvent(json.dumps(payload).encode(), name.encode(), id)


def shown(*events: SseEvent) -> str:
    """All that a terminal gets of these events: a line for each, and the tree at the end."""
    cursor, tree, out = Cursor(), RunTree(), io.StringIO()
    console = Console(file=out, width=80, height=24, legacy_windows=False)
    execution_id = ""
    for each in events:
        told = cursor.take(each)
        if told is None:
            continue
        json.loads(json_line(told))
        tree.take(told)
        out.write(f"{tree.elapsed_s:9.3f}  {plain_line(told, tree)}\n")
        execution_id = str((told.payload or {}).get("execution_id"))
    console.print(render(tree, console, now_s=tree.elapsed_s, execution_id=execution_id))
    text = out.getvalue()
    assert not set(text) & set("\x1b\x07\x9b"), "it speaks to the terminal"
    return text


BEGINS = [
    event("workflow_started", {"data": {}, "elapsed_ms": 1}),
    event("task_dispatched", {"data": {"task_id": "a", "kind": "batch", "attempt": 1}}),
    event("streaming_started", {"data": {"task_id": "a"}}),
]
ENDS = [
    event("task_dispatched", {"data": {"task_id": "a.b"}, "elapsed_ms": 2}),
    event("task_completed", {"data": {"task_id": "a", "duration_ms": 7}, "elapsed_ms": 3}),
    event("workflow_result", {"data": {"status": "completed"}, "elapsed_ms": 4}),
]


@pytest.mark.parametrize("name", [*sorted(VOCABULARY), "token", "of a newer gateway"])
def test_no_value_of_a_field_ends_the_command(name: str) -> None:
    """One field after the other, then all of them, before and after what is right."""
    for odd in ODD:
        datas = [{"task_id": "a", field: odd} for field in FIELDS]
        datas.append({"task_id": "a"} | dict.fromkeys(FIELDS[:-1], odd) | {"task_id": "a"})
        events = [event(name, {"data": data, "elapsed_ms": 2}) for data in datas]
        right = {"data": {"task_id": "a"}, "task_id": "a", "delta": "x"}
        events += [event(name, {**right, part: odd}) for part in PARTS]
        events.append(event(name, odd))
        shown(*BEGINS, *events)
        assert "completed" in shown(*BEGINS, *events, *ENDS)


@pytest.mark.parametrize(
    "id", [b"1" * 5000, b"-1", b"x", b"\xb2", b"\xc2\xb2", b"9" * 40, b" 1", b"1_0"]
)
def test_what_is_no_position_is_the_next_one(id: bytes) -> None:
    cursor = Cursor(position=4)
    told = cursor.take(event("heartbeat", {"data": {}}, id))
    assert told is not None
    assert told.position == cursor.position == 5


@pytest.mark.parametrize("offset", [None, -3, 1.5, "2", True, [], 10**400])
def test_a_token_whose_offset_is_none_is_what_comes_next(offset: Any) -> None:
    cursor = Cursor()
    cursor.take(event("token", {"task_id": "a", "delta": "abc"}))
    told = cursor.take(event("token", {"task_id": "a", "delta": "def", "offset": offset}))
    assert told is not None
    assert told.payload == {"task_id": "a", "delta": "def"}


def test_containers_without_end_are_shown() -> None:
    """Each task says that it holds the next one."""
    events = [
        event("parallel_start", {"data": {"task_id": f"t{n}", "task_ids": [f"t{n + 1}"]}})
        for n in range(3000)
    ]
    cursor, tree = Cursor(), RunTree()
    for each in events:
        told = cursor.take(each)
        assert told is not None
        tree.take(told)
    assert len(tree.rows(20)) == 19
    assert tree.rows(5000)[-1].depth == 3000
