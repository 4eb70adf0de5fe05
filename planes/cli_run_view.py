"""How a run is shown: a live tree on a terminal, plain lines elsewhere, JSON lines for scripts.

What is shown of a run goes to standard error, so that standard output has its output alone; the
JSON lines go to standard output. Only the live tree imports rich.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from planes.cli_run_events import json_line
from planes.cli_run_tree import task_ids_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from rich.console import Console, RenderableType

    from planes.cli_run_events import RunEvent
    from planes.cli_run_tree import RunTree, Task

REFRESH_S: Final = 0.125
_NOTE_CHARS: Final = 100
_BAR_CELLS: Final = 24
_STYLES: Final = {
    "running": "cyan",
    "retrying": "yellow",
    "yielded": "magenta",
    "completed": "green",
    "failed": "red",
}


class OutputGone(Exception):
    """Nobody reads standard output any more."""


class View(Protocol):
    """Shows a run; a context manager around the time in which events come."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def told(self, event: RunEvent) -> None:
        """Show an event, which the tree has taken already."""

    def notice(self, text: str) -> None:
        """Say something about the connection."""

    async def keep_showing(self) -> None:
        """Show what goes on without events (durations), until cancelled."""


def view_for(tree: RunTree, *, json_lines: bool) -> View:
    """The view that fits where the command was started."""
    if json_lines:
        return JsonView()
    if sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return TreeView(tree)
    return PlainView(tree)


def printable(text: str, *, lines: bool = False) -> str:
    """The text without what would speak to a terminal: models and prompts do not move cursors.

    Args:
        lines: whether line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else " " for c in text)


class _Quiet:
    """What views have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def notice(self, text: str) -> None:
        print(f"sluicegate: {printable(text)}", file=sys.stderr, flush=True)

    async def keep_showing(self) -> None:
        await asyncio.Event().wait()


class JsonView(_Quiet):
    """One JSON object for each event, on standard output."""

    def told(self, event: RunEvent) -> None:
        try:
            sys.stdout.buffer.write(json_line(event))
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            raise OutputGone from error


class PlainView(_Quiet):
    """A line for each thing that happens."""

    def __init__(self, tree: RunTree) -> None:
        self._tree = tree

    def told(self, event: RunEvent) -> None:
        line = plain_line(event, self._tree)
        if line is not None:
            print(f"{self._tree.elapsed_s:9.3f}  {line}", file=sys.stderr, flush=True)


def plain_line(event: RunEvent, tree: RunTree) -> str | None:
    """What a line says of an event; None for one that is not worth a line."""
    data = event.data
    task = tree.tasks.get(event.task_id or "")
    match event.name:
        case "workflow_started":
            told = (event.payload or {}).get("execution_id")
            return printable(f"{tree.name}: started, execution {told}")
        case "workflow_completed" | "workflow_error":
            return None  # the end of the command says it
        case "workflow_result":
            return printable(f"{tree.name}: {tree.status}")
        case "task_dispatched" | "task_completed" | "task_error" | "task_skipped":
            pass
        case "condition_evaluated":
            value = str(data.get("value")).lower()  # as JSON has it
            return printable(f"{event.task_id}  {value}: {data.get('branch')}")
        case "batch_progress":
            failed = f", {data['failed']} failed" if data.get("failed") else ""
            return printable(f"{event.task_id}  {data.get('done')} of {data.get('total')}{failed}")
        case "dynamic_generated":
            planned = len(task_ids_of(data))
            tasks = "task" if planned == 1 else "tasks"
            return printable(f"{event.task_id}  planned {planned} {tasks}")
        case "debate_round_complete":
            return printable(f"{event.task_id}  round {data.get('round')} is over")
        case "workflow_yielded":
            return printable(f"{event.task_id}  waits for an answer")
        case _:
            return None
    return "  ".join(words(task, tail=_NOTE_CHARS)) if task is not None else None


def words(task: Task, *, now_s: float | None = None, tail: int = 0) -> list[str]:
    """What is known of a task: id, state, who answers, how long, how much, how it reads.

    Args:
        now_s: seconds since the run began, for how long it runs already.
        tail: characters of the end of its text.
    """
    state = {"waiting": "waits", "yielded": "waits for an answer"}.get(task.state, task.state)
    if task.attempt > 1 and not task.over:
        state += f" (attempt {task.attempt})"
    told = [task.id, state]
    told.append(" ".join(filter(None, (task.agent, task.model))) or task.kind)
    if task.duration_s is not None:
        told.append(f"{task.duration_s:.1f} s")
    elif now_s is not None and task.began_s is not None and not task.over:
        told.append(f"{max(0.0, now_s - task.began_s):.1f} s")
    if task.tokens:
        told.append(f"{task.tokens} tokens")
    if task.note and task.state != "completed":
        told.append(task.note[:_NOTE_CHARS])
    elif tail > 0 and task.tail:
        text = " ".join(task.tail.split())
        told.append(text if len(text) <= tail else "…" + text[-tail:])
    return [printable(word) for word in told if word]


class Elapsed:
    """Seconds since a run began, as they are shown: they go on between its events, and never back.

    Events tell the time by the gateway's clock, and come later than they were made, now more and
    now less: the one that came soonest says best when the run began.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._shown_s = 0.0

    def told(self, elapsed_s: float) -> None:
        """An event came; so it tells."""
        began_at = self._clock() - elapsed_s
        self._began_at = began_at if self._began_at is None else min(self._began_at, began_at)
        self._shown_s = max(self._shown_s, elapsed_s)

    def seconds(self, *, going_on: bool) -> float:
        """What to show now. A run that has ended, or waits, stands where it was."""
        if going_on and self._began_at is not None:
            self._shown_s = max(self._shown_s, self._clock() - self._began_at)
        return self._shown_s


class TreeView(_Quiet):
    """The live tree.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, tree: RunTree, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tree = tree
        self._execution_id = ""
        self._elapsed = Elapsed(clock)
        self._console = Console(stderr=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # by our loop, which changes the tree: no second thread reads it
            get_renderable=self._shown,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        self._console.print(self._shown())

    def told(self, event: RunEvent) -> None:
        if event.elapsed_s is not None:  # tokens tell no time
            self._elapsed.told(event.elapsed_s)
        told = (event.payload or {}).get("execution_id")
        self._execution_id = told if isinstance(told, str) else self._execution_id

    def notice(self, text: str) -> None:
        self._console.print(f"sluicegate: {printable(text)}", markup=False, highlight=False)

    async def keep_showing(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._live.refresh()

    def now_s(self) -> float:
        """The seconds that are shown now."""
        return self._elapsed.seconds(going_on=self._tree.status == "running")

    def _shown(self) -> RenderableType:
        now_s = self.now_s()
        return render(self._tree, self._console, now_s=now_s, execution_id=self._execution_id)


def render(
    tree: RunTree, console: Console, *, now_s: float, execution_id: str = ""
) -> RenderableType:
    """The tree as rich draws it, no higher than the terminal.

    Args:
        now_s: seconds since the run began.
    """
    from rich.text import Text
    from rich.tree import Tree

    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(printable(tree.name or "workflow"), "bold")
    head.append(f"  {printable(tree.status)}  {now_s:.1f} s", _STYLES.get(tree.status, ""))
    head.append(f"  {printable(execution_id)}", "dim")
    most = max(3, console.height - 4)
    rows = tree.rows(most)
    drawn = Tree(head)
    nodes: list[Tree] = [drawn]  # the last one of each depth
    for row in rows:
        depth = min(row.depth, len(nodes) - 1)
        room = console.width - 4 * (depth + 1)
        nodes[depth + 1 :] = [nodes[depth].add(_label(row.task, room, now_s))]
    if len(rows) < len(tree.tasks):
        drawn.add(Text(f"and {len(tree.tasks) - len(rows)} more", "dim"))
    return drawn


def _label(task: Task, room: int, now_s: float) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    known = words(task, now_s=now_s)
    used = sum(map(len, known)) + 2 * len(known)
    is_batch = task.total is not None
    if not is_batch:
        known = words(task, now_s=now_s, tail=max(0, room - used - 4))
    label = Text(no_wrap=True, overflow="ellipsis")
    label.append(known[0], "bold")
    label.append(f"  {known[1]}", _STYLES.get(task.state, "dim"))
    for word in known[2:]:
        label.append(f"  {word}", "dim" if task.over else "")
    if not is_batch:
        return label
    grid = Table.grid(padding=(0, 2))
    failed = f", {task.items_failed} failed" if task.items_failed else ""
    bar = ProgressBar(total=task.total or 1, completed=task.done, width=_BAR_CELLS)
    grid.add_row(label, bar, Text(f"{task.done}/{task.total}{failed}", no_wrap=True))
    return grid
