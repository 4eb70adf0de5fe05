"""What templates can see at one place of a run: inputs, ended tasks, batch variables. [pure]"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Scope:
    """The tasks of a document, or those of one item of a batch.

    A task sees those of its own scope and of the scopes around it; an item's are gone when it ends.

    Args:
        variables: the batch variables, the outer ones included.
        suffix: what the ids of instances have after the written id: `.<index>` for each batch.
    """

    __slots__ = ("_inputs", "_tasks", "_variables", "suffix")

    def __init__(
        self,
        inputs: Mapping[str, Any],
        *,
        tasks: ChainMap[str, Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        suffix: str = "",
    ) -> None:
        self._inputs = inputs
        self._tasks = ChainMap() if tasks is None else tasks
        self._variables = variables or {}
        self.suffix = suffix

    def item(self, index: int, name: str, value: Any) -> Scope:
        """The scope of one item of a batch."""
        return Scope(
            self._inputs,
            tasks=self._tasks.new_child(),
            variables={**self._variables, name: value},
            suffix=f"{self.suffix}.{index}",
        )

    def knows(self, task_id: str) -> bool:
        """Whether a task, by its written id, has ended in this scope."""
        return task_id in self._tasks.maps[0]

    def record(self, task_id: str, status: str, output: Any) -> None:
        """Note how a task ended."""
        self._tasks[task_id] = {"output": output, "status": status}

    def names(self) -> dict[str, Any]:
        """As templates get it."""
        return {**self._variables, "inputs": self._inputs, "tasks": self._tasks}
