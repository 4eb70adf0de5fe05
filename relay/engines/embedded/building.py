"""Values with their places, made event by event; nothing recurses. [pure]

Only what JSON can hold is made: the scalars of YAML's core schema, no tags, no anchors and aliases,
no merges; a date is text. Keys are text as written.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from relay.engines.base import Problem
from relay.engines.embedded import limits

Place: TypeAlias = tuple[int | str, ...]

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS: Final = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INTEGER_CHARS: Final = 20
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**64 - 1
NO_JSON: Final = "a number does not fit: whole numbers have 64 bits, others must be finite"


class Spot(NamedTuple):
    """Where something stands in the text; lines and columns from 1.

    Attributes:
        key: of its key, of the value itself where there is none.
        block: whether the text begins on the next line (`|`, `>`).
    """

    line: int
    column: int
    key: tuple[int, int]
    block: bool = False


class Wrong(NamedTuple):
    """A problem with a single value.

    Attributes:
        at: line and column, None if there is no text.
        broken: whether there is no value because of it.
    """

    place: Place
    message: str
    at: tuple[int, int] | None = None
    broken: bool = False


@dataclass(slots=True)
class Reading:
    """A document that was read.

    Attributes:
        value: as JSON would hold it; what has a problem is None.
        spots: of each place in the order of the document; None if it came as an object.
        problems: with single values; the rest of the value can be looked at.
        lines: of the text.
    """

    value: Any = None
    spots: dict[Place, Spot | None] = field(default_factory=dict)
    problems: list[Wrong] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def path_of(place: Place) -> str:
    """A place as it is told: `workflow.tasks[0].prompt`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text if len(text) <= 300 else text[:299] + "…"


class Stop(Exception):
    """A document that cannot be read on."""

    def __init__(self, message: str, place: Place = (), at: tuple[int, int] | None = None) -> None:
        line, column = at or (None, None)
        self.problem = Problem(message=message, path=path_of(place), line=line, column=column)


class _Open:
    """A mapping or list that is being read."""

    __slots__ = ("key", "key_at", "place", "value")

    def __init__(self, value: dict[str, Any] | list[Any], place: Place) -> None:
        self.value = value
        self.place = place
        self.key: str | None = None
        self.key_at = (1, 1)


class Builder:
    """Makes the value of a text, event by event."""

    def __init__(self, reading: Reading) -> None:
        self.begun = False
        self._reading = reading
        self._stack: list[_Open] = []
        self._nodes = 0

    def place(self) -> Place:
        """Where the next value stands."""
        if not self._stack:
            return ()
        top = self._stack[-1]
        if isinstance(top.value, list):
            return (*top.place, len(top.value))
        return top.place if top.key is None else (*top.place, top.key)

    def complain(self, message: str, at: tuple[int, int], *, broken: bool = False) -> None:
        """Say what is wrong at the next value."""
        if len(self._reading.problems) <= limits.PROBLEMS:
            self._reading.problems.append(Wrong(self.place(), message, at, broken))

    def open(self, value: dict[str, Any] | list[Any], at: tuple[int, int]) -> None:
        """A mapping or list begins."""
        if self._is_key():
            raise Stop(
                "a key must be text; a value that begins with `{{`, `{` or `[` needs quotes"
                " around it to be text",
                self.place(),
                at,
            )
        place = self._put(value, at)
        if len(self._stack) == limits.NESTING:
            raise Stop(f"is nested more than {limits.NESTING} levels deep", place[:8], at)
        self._stack.append(_Open(value, place))

    def close(self) -> None:
        """The innermost mapping or list ends."""
        self._stack.pop()

    def plain(self, text: str, at: tuple[int, int]) -> None:
        """A scalar without quotes."""
        if self._is_key():
            if text == "<<":
                self.complain("merges (`<<`) are not supported: write the keys out", at)
            self.scalar(text, at)
            return
        try:
            value = _resolve(text)
        except ValueError as error:
            self.complain(str(error), at, broken=True)
            value = None
        self.scalar(value, at)

    def scalar(self, value: Any, at: tuple[int, int], *, block: bool = False) -> None:
        """A scalar, which may be a key."""
        if self._is_key():
            top = self._stack[-1]
            top.key, top.key_at = str(value), at
            assert isinstance(top.value, dict)
            if top.key in top.value:
                self.complain(f"`{top.key[:64]}` is set twice in one mapping", at)
            return
        self._put(value, at, block=block)

    def _is_key(self) -> bool:
        if not self._stack:
            return False
        top = self._stack[-1]
        return isinstance(top.value, dict) and top.key is None

    def _put(self, value: Any, at: tuple[int, int], *, block: bool = False) -> Place:
        self._nodes += 1
        if self._nodes > limits.NODES:
            raise Stop(f"has more than {limits.NODES:,} values", (), at)
        spots = self._reading.spots
        if not self._stack:
            self.begun = True
            self._reading.value = value
            spots[()] = Spot(*at, at, block)
            return ()
        top = self._stack[-1]
        if top.key is None:
            assert isinstance(top.value, list)
            place = (*top.place, len(top.value))
            spots[place] = Spot(*at, at, block)
            top.value.append(value)
            return place
        assert isinstance(top.value, dict)
        place = (*top.place, top.key)
        if top.key not in top.value:  # else it was reported, and the first one stays
            spots[place] = Spot(*at, top.key_at, block)
            top.value[top.key] = value
        top.key = None
        return place


def _resolve(text: str) -> Any:
    """The value of a plain scalar (YAML 1.2, core schema).

    Raises:
        ValueError: JSON has no such number.
    """
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if text[0] not in "-+.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        if len(text) > _INTEGER_CHARS:
            raise ValueError(NO_JSON)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        value = int(text, base)
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(NO_JSON)
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(NO_JSON)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(NO_JSON)
        return number
    return text
