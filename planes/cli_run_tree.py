"""A run as its events tell it: tasks in their containers, and which of them to show.

Pure. Events do not say what a task stands in, but for the tasks of a list. So the document helps
where it is at hand (`held_by`), else what was said last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from planes.cli_run_events import count_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from planes.cli_run_events import RunEvent

TAIL_CHARS: Final = 240  # kept of a text
_ID_CHARS_MAX: Final = 512  # of a task that is shown
ENDED: Final = frozenset({"completed", "failed", "skipped"})
_SKIPPED: Final = {"when": "`when` is false", "branch": "the other branch was taken"}
State = Literal["waiting", "running", "retrying", "yielded", "completed", "failed", "skipped"]


@dataclass(slots=True, eq=False)
class Task:
    """One task of a run.

    Attributes:
        item: its index in a batch. began_s: seconds since the run began.
        tail: the end of its text. note: why it failed, was skipped, or what it waits for.
        done, total: of a batch, its items. items_failed: those of them.
        held: the tasks that stand in it, in the order in which they were told of.
    """

    id: str
    kind: str = ""
    state: State = "waiting"
    agent: str = ""
    model: str = ""
    attempt: int = 1
    began_s: float | None = None
    duration_s: float | None = None
    tokens: int | None = None
    tail: str = ""
    note: str = ""
    branch: str | None = None
    done: int = 0
    items_failed: int = 0
    total: int | None = None
    parent: Task | None = None
    held: list[Task] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Row:
    """One line of what is shown: a task, and how deep it stands."""

    depth: int
    task: Task


class RunTree:
    """What is known of a run.

    Attributes:
        name, status: of the run; a status is "running" until its `workflow_result`.
        elapsed_s: at its last event; never goes back. error: of `workflow_error`.
        waits: data of a yield. final_task_id: whose output is the run's.
        summary: of `workflow_completed`.
    """

    def __init__(self, held_by: Mapping[str, str | None] | None = None) -> None:
        self._held_by = held_by or {}
        self.tasks: dict[str, Task] = {}
        self.top: list[Task] = []
        self.name = ""
        self.status = "running"
        self.elapsed_s = 0.0
        self.error: dict[str, Any] | None = None
        self.waits: dict[str, Any] | None = None
        self.final_task_id: str | None = None
        self.summary: dict[str, Any] = {}
        self._open_items: dict[str, Task] = {}  # by the suffix of their ids: whose they are
        self._branches: list[Task] = []  # conditions that were decided, the newest last

    def take(self, event: RunEvent) -> None:
        """Take the next event."""
        task_id = event.task_id
        if event.name == "token":
            task = self.tasks.get(task_id or "")
            if task is not None:
                task.tail = (task.tail + (event.payload or {})["delta"])[-TAIL_CHARS:]
            return
        self.elapsed_s = max(self.elapsed_s, event.elapsed_s or 0.0)
        outcome = event.name in ("workflow_completed", "workflow_result")
        if task_id is not None and len(task_id) <= _ID_CHARS_MAX and not outcome:
            task = self.tasks.get(task_id) or self._add(task_id)
            self._of_task(event.name, event.data, task)
        self._of_run(event.name, event.data)

    def take_row(self, row: Mapping[str, Any]) -> None:
        """Take what the status route tells of a run."""
        self.name, self.status = _text(row.get("name")), _text(row.get("status"))
        waits = row.get("waits_for")
        self.waits = waits if isinstance(waits, dict) else {}

    def _of_run(self, name: str, data: dict[str, Any]) -> None:
        match name:
            case "workflow_loaded":
                self.name = _text(data.get("name"))
            case "workflow_started":
                self.status, self.waits = "running", None
            case "workflow_yielded":
                self.waits = data
            case "workflow_error":
                self.error = _error(data)
            case "workflow_completed":
                told = data.get("execution_summary")
                self.summary = told if isinstance(told, dict) else {}
                self.final_task_id = _text(data.get("final_task_id")) or None
            case "workflow_result":
                self.status = _text(data.get("status")) or "completed"
                self.final_task_id = _text(data.get("final_task_id")) or self.final_task_id
            case _:
                self.status = "running"

    def _of_task(self, name: str, data: dict[str, Any], task: Task) -> None:
        match name:
            case "task_dispatched":
                self._dispatched(data, task)
            case "streaming_started":
                task.tail = ""
                task.model = _text(data.get("model")) or task.model
            case "task_completed":
                task.state = "completed"
                task.tail = task.tail or _text(data.get("output_preview"))[:TAIL_CHARS]
                self._ended(data, task)
            case "task_error":
                error = _error(data)
                task.note = f"{error.get('code')}: {error.get('message')}"
                task.state = "retrying" if data.get("will_retry") else "failed"
                if task.state == "failed":
                    self._ended(data, task)
            case "task_skipped":
                task.state, task.kind = "skipped", _text(data.get("kind")) or task.kind
                reason = _text(data.get("reason"))
                task.note = task.note if reason == "on_error" else _SKIPPED.get(reason, reason)
                self._ended(data, task)
            case "workflow_yielded":
                task.state, task.note = "yielded", _text(data.get("prompt"))
            case _:
                self._of_container(name, data, task)

    def _dispatched(self, data: dict[str, Any], task: Task) -> None:
        task.state, task.note = "running", ""
        task.kind = _text(data.get("kind")) or task.kind
        task.agent = _text(data.get("agent"))
        task.model = _text(data.get("model"))
        task.attempt = count_of(data.get("attempt")) or 1
        if task.began_s is None:
            task.began_s = self.elapsed_s

    def _ended(self, data: dict[str, Any], task: Task) -> None:
        told = seconds_of(data.get("duration_ms"))
        if told is not None:
            task.duration_s = told
        elif task.began_s is not None:
            task.duration_s = self.elapsed_s - task.began_s
        usage = data.get("usage")
        if isinstance(usage, dict):
            task.tokens = count_of(usage.get("total_tokens"))

    def _of_container(self, name: str, data: dict[str, Any], task: Task) -> None:
        match name:
            case "sequential_start" | "parallel_start" | "dynamic_generated":
                for held in task_ids_of(data):
                    if held not in self.tasks:
                        self._add(held, task)
            case "condition_evaluated":
                task.branch = _text(data.get("branch")) or None
                self._branches.append(task)
            case "batch_start":
                task.total = count_of(data.get("total"))
            case "batch_item_start":
                self._open_items[f"{_suffix(task.id)}.{data.get('index')}"] = task
            case "batch_item_complete":
                task.done += 1
                task.items_failed += data.get("status") == "failed"
            case "batch_progress":
                task.done = max(task.done, count_of(data.get("done")) or 0)
                total = count_of(data.get("total"))
                task.total = task.total if total is None else total
            case _:
                pass

    # -- who holds whom ---------------------------------------------------------------------------

    def _add(self, task_id: str, parent: Task | None = None) -> Task:
        task = self.tasks[task_id] = Task(task_id)
        task.parent = parent or self._parent_of(task_id)
        (task.parent.held if task.parent is not None else self.top).append(task)
        return task

    def _parent_of(self, task_id: str) -> Task | None:
        prefix = task_id
        while "." in prefix:  # planned tasks, contributions to a debate, steps of a tool
            prefix = prefix.rpartition(".")[0]
            if prefix in self.tasks:
                return self.tasks[prefix]
        written, suffix = task_id.partition(".")[0], _suffix(task_id)
        if written in self._held_by:
            holder = self._held_by[written]
            if holder is None:
                return None
            for place in (suffix, suffix.rpartition(".")[0]):  # the second: it is a batch's item
                if (found := self.tasks.get(holder + place)) is not None:
                    return found
        if (batch := self._open_items.pop(suffix, None)) is not None:
            return batch
        decided = (task for task in reversed(self._branches) if not task.over)
        return next((task for task in decided if _suffix(task.id) == suffix), None)

    # -- what is shown ----------------------------------------------------------------------------

    def rows(self, most: int) -> list[Row]:
        """What to show on so many lines: what has not ended first of all, the newest of the rest.

        If something is left out, one line is left for saying so.
        """
        everything = list(_walk(self.top))
        if len(everything) <= most:
            return everything
        room = max(0, most - 1)
        alive = [row for row in everything if not row.task.over][:room]
        wanted = {row.task.id for row in alive}
        for row in reversed(everything):
            if len(wanted) >= room:
                break
            wanted.add(row.task.id)
        return [row for row in everything if row.task.id in wanted]


def _walk(tasks: list[Task]) -> Iterator[Row]:
    waiting = [Row(0, task) for task in reversed(tasks)]
    while waiting:
        row = waiting.pop()
        yield row
        waiting += [Row(row.depth + 1, task) for task in reversed(row.task.held)]


def held_by(document: Any) -> dict[str, str | None]:
    """What each task of a document stands in, by their ids: None for the list of the workflow.

    Args:
        document: as YAML or JSON gives it; whatever is no document has no tasks.
    """
    found: dict[str, str | None] = {}
    waiting: list[tuple[Any, str | None]] = []
    if isinstance(document, dict) and isinstance(document.get("workflow"), dict):
        waiting.append((document["workflow"].get("tasks"), None))
    while waiting:
        node, holder = waiting.pop()
        if isinstance(node, list):
            waiting.extend((entry, holder) for entry in node)
        elif isinstance(node, dict) and isinstance(node.get("id"), str):
            found[node["id"]] = holder
            inside = (node.get(name) for name in ("tasks", "then", "else", "task"))
            waiting.extend((entry, node["id"]) for entry in inside)
    return found


def _suffix(task_id: str) -> str:
    """What an id has behind its written part, in a batch: `.3`."""
    _, dot, suffix = task_id.partition(".")
    return dot + suffix


def task_ids_of(data: Mapping[str, Any]) -> list[str]:
    """The ids that an event lists."""
    told = data.get("task_ids")
    if not isinstance(told, list):
        return []
    return [each for each in told if isinstance(each, str) and len(each) <= _ID_CHARS_MAX]


def _error(data: Mapping[str, Any]) -> dict[str, Any]:
    told = data.get("error")
    return told if isinstance(told, dict) else {"message": str(told)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
