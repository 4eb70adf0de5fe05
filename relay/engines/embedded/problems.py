"""Problems of a document with their places: found anywhere, told in the document's order (W1.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import DocumentError, Problem
from relay.engines.embedded import limits
from relay.engines.embedded.reading import Place, Reading, path_of

if TYPE_CHECKING:
    from collections.abc import Mapping

TASK_LISTS: Final = ("tasks", "then", "else")


def is_task(place: Place) -> bool:
    """Whether a task stands at this place, if the document is well-formed."""
    if not place or place[0] != "workflow":
        return False
    if isinstance(place[-1], int):
        return len(place) > 2 and place[-2] in TASK_LISTS
    return place[-1] == "task" and len(place) > 2 and is_task(place[:-1])


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._found: list[tuple[tuple[int, int, int], Problem]] = []
        self._order = {place: index for index, place in enumerate(reading.spots)}
        for problem in reading.problems:
            self._keep(problem, 0)

    def add(self, place: Place, message: str, *, key: bool = False, line: int = 1) -> None:
        """Add a problem.

        Args:
            place: if there is nothing, the nearest place around it is meant.
            key: whether the key is meant, not its value.
            line: in the text that stands there, from 1.
        """
        near = place
        while near not in self._reading.spots and near:
            near = near[:-1]
        spot = self._reading.spots.get(near)
        problem = Problem(message=message, path=path_of(place), task_id=self._task_id(place))
        if spot is not None:
            at = spot.key if key else (spot.line, spot.column)
            if not key and (line > 1 or spot.block):
                row = spot.line + line - 1 + spot.block
                text = self._reading.lines[row - 1] if row <= len(self._reading.lines) else ""
                at = (row, len(text) - len(text.lstrip()) + 1)
            problem = replace(problem, line=at[0], column=at[1])
        self._keep(problem, self._order.get(near, 0))

    def line_of(self, place: Place) -> int | None:
        """The line of what stands at a place."""
        spot = self._reading.spots.get(place)
        return spot.line if spot else None

    def check(self, others: list[Problem] | None = None) -> None:
        """Raise what was found, and `others` after it.

        Raises:
            DocumentError: something was found.
        """
        found = [problem for _, problem in sorted(self._found, key=lambda entry: entry[0])]
        found += others or []
        found = list(dict.fromkeys(found))
        if len(found) > limits.PROBLEMS:
            more = len(found) - limits.PROBLEMS
            found = [*found[: limits.PROBLEMS], Problem(message=f"and {more:,} problems more")]
        if found:
            raise DocumentError(found)

    def _keep(self, problem: Problem, order: int) -> None:
        self._found.append(((problem.line or 0, problem.column or 0, order), problem))

    def _task_id(self, place: Place) -> str | None:
        value: Any = self._reading.value
        found = None
        for index, step in enumerate(place):
            value = _entry(value, step)
            if is_task(place[: index + 1]) and isinstance(value, dict):
                identifier = value.get("id")
                found = identifier[:64] if isinstance(identifier, str) else None
        return found


def _entry(value: Any, step: int | str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None


def named(names: Mapping[str, Any] | list[str] | tuple[str, ...], most: int = 20) -> str:
    """Names in a message, not too many."""
    written = [f"`{name[:64]}`" for name in list(names)[:most]]
    return ", ".join(written) + (", …" if len(names) > most else "")
