"""Which task of the document an instance is of, and what holds it. [pure]

The id of an instance is the written one, an index for each batch around it, and, of a planned task
or a contribution, its own last parts (docs/spec/workflows.md, W3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from relay.engines.embedded.document import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.engines.embedded.document import Task, Workflow

_TOOL: Final = ".tool."


class _Place(NamedTuple):
    kind: str
    batches: int
    holder: str | None


class Places:
    """The places of a document's tasks."""

    def __init__(self, workflow: Workflow) -> None:
        self._places: dict[str, _Place] = {}
        self._add(workflow.tasks, 0, None)

    def _add(self, tasks: Sequence[Task], batches: int, holder: str | None) -> None:
        for task in tasks:
            self._places[task.id] = _Place(task.type, batches, holder)
            for held in task.lists():
                self._add(held, batches + isinstance(task, Batch), task.id)

    def kind(self, task_id: str) -> str:
        """The kind of an instance, a tool step's included."""
        if _TOOL in task_id:
            return "tool"
        written, *rest = task_id.split(".")
        place = self._places.get(written)
        # What a dynamic or a debate holds has more parts than there are batches.
        return place.kind if place is not None and len(rest) == place.batches else "task"

    def holders(self, task_id: str) -> list[str]:
        """The instances that hold an instance, the nearest first."""
        written, *rest = task_id.split(".")
        place = self._places.get(written)
        found: list[str] = []
        if place is not None and len(rest) > place.batches:
            found.append(".".join([written, *rest[: place.batches]]))
        while place is not None and place.holder is not None:
            written, place = place.holder, self._places[place.holder]
            found.append(".".join([written, *rest[: place.batches]]))
        return found
