"""How runs are shown, of recorded events: plain lines and the tree, both golden."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planes.cli_run_events import RunEvent, from_json_line
from planes.cli_run_tree import RunTree, held_by
from planes.cli_run_view import TreeView, plain_line, printable, render, words
from relay.engines.embedded.reading import read

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EVENTS = sorted((FIXTURES / "workflows/events").glob("*.jsonl"))
GOLDEN = FIXTURES / "golden/workflows"


def events_of(path: Path) -> list[RunEvent]:
    return [from_json_line(line) for line in path.read_bytes().splitlines()]


def document_of(path: Path) -> dict[str, str | None]:
    """What the document of a recording tells of its tasks."""
    (document,) = (FIXTURES / "workflows/good").glob(f"{path.stem}.*")
    return held_by(read(document.read_text()).value)


def drawn(tree: RunTree, *, width: int = 100, height: int = 40, now_s: float = 1.5) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, legacy_windows=False)
    console.print(render(tree, console, now_s=now_s, execution_id="4f22"))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def shown(path: Path, held: dict[str, str | None]) -> str:
    """The plain lines, then the tree in the middle of the run and at its end."""
    tree = RunTree(held)
    events = events_of(path)
    text = ""
    for number, event in enumerate(events):
        tree.take(event)
        line = plain_line(event, tree)
        text += f"{line}\n" if line is not None else ""
        if number in (len(events) // 2, len(events) - 1):
            text += f"\n{drawn(tree)}\n"
    return text


@pytest.mark.parametrize("path", EVENTS, ids=[path.stem for path in EVENTS])
def test_golden(path: Path) -> None:
    golden = GOLDEN / f"{path.stem}.txt"
    text = shown(path, document_of(path))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert shown(path, {}) == text, "the events alone tell these runs' containers too"


def event(event: str, task_id: str | None = None, /, **data: Any) -> RunEvent:
    told = {"task_id": task_id, **data} if task_id is not None else data
    return RunEvent(event, 1, {"data": told, "elapsed_ms": 1000}, b"")


def token(task_id: str, delta: str) -> RunEvent:
    return RunEvent("token", None, {"task_id": task_id, "delta": delta}, b"")


def tree_of(*events: RunEvent, held: dict[str, str | None] | None = None) -> RunTree:
    tree = RunTree(held)
    for each in events:
        tree.take(each)
    return tree


def lines(tree: RunTree) -> list[str]:
    return [f"{'  ' * row.depth}{row.task.id}" for row in tree.rows(100)]


def test_the_document_tells_branches_apart_that_run_at_once() -> None:
    document = {
        "workflow": {
            "tasks": [
                {
                    "id": "both",
                    "tasks": [
                        {"id": "c1", "then": [{"id": "x"}], "else": [{"id": "y"}]},
                        {"id": "c2", "then": [{"id": "z", "task": {"id": "each"}}]},
                    ],
                },
                {"id": "end"},
            ]
        }
    }
    held = held_by(document)
    holders = {"c1": "both", "c2": "both", "x": "c1", "y": "c1", "z": "c2", "each": "z"}
    assert held == {"both": None, "end": None, **holders}
    tree = tree_of(
        event("parallel_start", "both", task_ids=["c1", "c2"]),
        event("condition_evaluated", "c1", branch="then"),
        event("condition_evaluated", "c2", branch="then"),
        event("task_dispatched", "x"),
        event("task_dispatched", "z"),
        event("task_dispatched", "each.0"),
        event("task_dispatched", "each.0.tool.1"),
        event("task_dispatched", "end"),
        held=held,
    )
    assert lines(tree) == [
        *("both", "  c1", "    x", "  c2", "    z", "      each.0", "        each.0.tool.1", "end")
    ]
    nothings: list[Any] = [None, [], "x", {"workflow": 1}, {"workflow": {"tasks": [1, {"id": 2}]}}]
    for nothing in nothings:
        assert held_by(nothing) == {}


def test_a_retry_begins_its_text_anew() -> None:
    error = {"code": "upstream_error", "message": "gone"}
    tree = tree_of(
        event("task_dispatched", "t", attempt=1, kind="task", agent="a", model="m"),
        event("streaming_started", "t"),
        token("t", "half an"),
        event("task_error", "t", error=error, will_retry=True),
    )
    assert words(tree.tasks["t"]) == ["t", "retrying", "a m", "upstream_error: gone"]
    for each in (
        event("task_dispatched", "t", attempt=2, kind="task", agent="a", model="m"),
        event("streaming_started", "t"),
        token("t", "whole\nanswer"),
    ):
        tree.take(each)
    told = words(tree.tasks["t"], now_s=3.0, tail=8)
    assert told == ["t", "running (attempt 2)", "a m", "2.0 s", "…e answer"]
    tree.take(event("task_error", "t", error=error, will_retry=False))
    assert tree.tasks["t"].state == "failed"
    tree.take(event("task_skipped", "t", kind="task", reason="on_error"))
    assert words(tree.tasks["t"])[1:] == ["skipped", "a m", "0.0 s", "upstream_error: gone"]


@pytest.mark.parametrize(
    ("reason", "told"),
    [("when", "`when` is false"), ("branch", "the other branch was taken"), ("new", "new")],
)
def test_why_a_task_is_skipped_is_told_in_words(reason: str, told: str) -> None:
    tree = RunTree({})
    tree.take(event("task_skipped", "t", kind="task", reason=reason))
    assert words(tree.tasks["t"]) == ["t", "skipped", "task", told]


@pytest.mark.parametrize(("ids", "told"), [(["a"], "1 task"), (["a", "b"], "2 tasks")])
def test_how_much_was_planned(ids: list[str], told: str) -> None:
    planned = event("dynamic_generated", "d", task_ids=ids)
    assert plain_line(planned, RunTree({})) == f"d  planned {told}"


def test_what_a_model_says_cannot_speak_to_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\u202e\ud83d"
    tree = tree_of(
        event("workflow_loaded", name=evil),
        event("task_dispatched", "t", agent=evil, model=evil),
        token("t", evil),
    )
    text = drawn(tree)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\ud800-\udfff]", text)
    assert "[bold]" in text  # its brackets are no markup of ours
    assert printable("a\n\tb\x1b", lines=True) == "a\n\tb "


def test_a_large_batch_shows_what_runs_and_how_far_it_is() -> None:
    tree = tree_of(
        event("task_dispatched", "b", kind="batch"), event("batch_start", "b", total=500)
    )
    for index in range(300):
        tree.take(event("batch_item_start", "b", index=index))
        tree.take(event("task_dispatched", f"x.{index}", kind="task", agent="a"))
        if index % 100 != 7:
            tree.take(event("task_completed", f"x.{index}", duration_ms=10))
            tree.take(event("batch_item_complete", "b", index=index, status="completed"))
    assert [row.depth for row in tree.rows(1000)] == [0] + [1] * 300
    rows = tree.rows(10)
    assert [row.task.id for row in rows] == [
        *("b", "x.7", "x.107", "x.207", "x.295", "x.296", "x.297", "x.298", "x.299")
    ]
    text = drawn(tree, height=14)
    assert len(text.splitlines()) == 11
    assert re.search(r"b  running  batch  0\.5 s +━+.* 297/500\n", text)
    assert text.endswith("└── and 292 more\n")
    tree.take(event("batch_progress", "b", done=299, failed=1, total=500))
    assert tree.tasks["b"].done == 299


def test_every_line_fits_the_terminal() -> None:
    tree = tree_of(
        event("task_dispatched", "t" * 64, agent="a" * 64, model="m" * 200),
        event("task_dispatched", "wide"),
        token("wide", "日本語" * 100),
        event("task_dispatched", "b" * 64, kind="batch"),
        event("batch_start", "b" * 64, total=3),
    )
    text = drawn(tree, width=60)
    assert len(text.splitlines()) == 4


# -- the clock of the live tree -------------------------------------------------------------------


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def at(elapsed_s: float, name: str, **data: Any) -> RunEvent:
    return RunEvent(name, 1, {"data": data, "elapsed_ms": elapsed_s * 1000}, b"")


def test_the_clock_goes_on_between_events_and_never_back() -> None:
    """Tokens tell no time; an event that took long to come tells an old one; a yield stands."""
    clock = Clock()
    tree = RunTree()
    view = TreeView(tree, clock=clock)
    seen: list[float] = []

    def told(*events: RunEvent, after_s: float) -> float:
        clock.at += after_s
        seen.append(view.now_s())
        for each in events:
            tree.take(each)
            view.told(each)
            seen.append(view.now_s())
        return round(seen[-1], 3)

    assert told(after_s=2.0) == 0.0  # nothing has begun
    assert told(at(0.5, "workflow_started"), after_s=1.0) == 0.5
    assert told(at(0.6, "task_dispatched", task_id="t"), after_s=0.1) == 0.6
    assert told(token("t", "a"), after_s=3.0) == 3.6
    assert told(token("t", "b"), after_s=0.5) == 4.1
    assert told(at(5.0, "heartbeat"), after_s=1.9) == 6.0  # it is a second late
    assert told(at(6.1, "workflow_yielded", task_id="ask"), after_s=0.3) == 6.3
    assert told(at(6.1, "workflow_result", status="yielded"), after_s=0.0) == 6.3
    assert told(after_s=30.0) == 6.3
    assert told(token("t", "c"), after_s=1.0) == 6.3
    assert told(at(37.0, "task_dispatched", task_id="u"), after_s=0.0) == 37.3
    assert told(token("u", "a"), after_s=2.0) == 39.3
    assert told(at(1.0, "task_completed", task_id="u"), after_s=0.1) == 39.4  # another clock's
    assert (tree.elapsed_s, tree.tasks["u"].duration_s) == (37.0, 0.0)
    assert told(at(40.0, "workflow_result", status="completed"), after_s=0.0) == 40.0
    assert told(after_s=60.0) == 40.0
    assert seen == sorted(seen)
