"""Problems of a document with their places: found anywhere, told in the document's order (W1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from relay.engines.base import DocumentError, Problem
from relay.engines.embedded import limits
from relay.engines.embedded.building import Place, Reading, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TASK_LISTS: Final = ("tasks", "then", "else")


def is_task(place: Place) -> bool:
    """Whether a task stands at this place, if the document is well-formed."""
    if not place or place[0] != "workflow":
        return False
    if isinstance(place[-1], int):
        return len(place) > 2 and place[-2] in TASK_LISTS
    return place[-1] == "task" and len(place) > 2 and is_task(place[:-1])


class _Found(NamedTuple):
    at: tuple[int, int]
    order: int
    place: Place
    message: str | Callable[[], str]


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._order = {place: index for index, place in enumerate(reading.spots)}
        self._broken = {wrong.place for wrong in reading.problems if wrong.broken}
        self._found = [
            _Found(wrong.at or (0, 0), self._order.get(wrong.place, 0), wrong.place, wrong.message)
            for wrong in reading.problems
        ]

    def add(
        self, place: Place, message: str | Callable[[], str], *, key: bool = False, line: int = 1
    ) -> None:
        """Add a problem. Silent below a value that could not be read: that is told already.

        Args:
            place: if there is nothing, the nearest place around it is meant.
            message: a function is called only if the problem is told.
            key: whether the key is meant, not its value.
            line: in the text that stands there, from 1.
        """
        if any(place[:length] in self._broken for length in range(len(place) + 1)):
            return
        near = place
        while near not in self._reading.spots and near:
            near = near[:-1]
        at = self._at(near, key, line)
        self._found.append(_Found(at or (0, 0), self._order.get(near, 0), place, message))

    def _at(self, place: Place, key: bool, line: int) -> tuple[int, int] | None:
        spot = self._reading.spots.get(place)
        if spot is None:
            return None
        if key:
            return spot.key
        if line == 1 and not spot.block:
            return spot.line, spot.column
        row = spot.line + line - 1 + spot.block
        text = self._reading.lines[row - 1] if row <= len(self._reading.lines) else ""
        return row, len(text) - len(text.lstrip()) + 1

    def line_of(self, place: Place) -> int | None:
        """The line of what stands at a place."""
        spot = self._reading.spots.get(place)
        return spot.line if spot else None

    @property
    def none(self) -> bool:
        """Whether nothing was found so far."""
        return not self._found

    def check(self, others: list[Problem] | None = None) -> None:
        """Raise what was found, `others` last.

        Raises:
            DocumentError: something was found.
        """
        self._found.sort(key=lambda found: (found.at, found.order))
        told = [self._problem(found) for found in self._found[: limits.PROBLEMS]]
        told = list(dict.fromkeys(told))
        told += (others or [])[: limits.PROBLEMS]
        if len(self._found) > limits.PROBLEMS or len(others or []) > limits.PROBLEMS:
            told.append(Problem(message="there are more problems than these"))
        if told:
            raise DocumentError(told)

    def _problem(self, found: _Found) -> Problem:
        line, column = found.at if found.at != (0, 0) else (None, None)
        return Problem(
            message=found.message if isinstance(found.message, str) else found.message(),
            path=path_of(found.place),
            line=line,
            column=column,
            task_id=self._task_id(found.place),
        )

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
