"""JSON whose numbers are kept or refused: for what a client wrote and is stored. [pure]

orjson makes floats of whole numbers beyond 64 bits, and writes a number that no double holds as
null. Here whole numbers of any size stay as they are, and none becomes null.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

import orjson

_INT_MIN, _INT_END = -(2**63), 2**64  # what orjson reads exactly
_LOOKED_AT: Final = (dict, list, float)


class NumberTooLarge(ValueError):
    """JSON has no bound for a number: this one has no value here.

    Attributes:
        place: the keys and indexes that lead to it.
    """

    def __init__(self, place: tuple[str | int, ...]) -> None:
        super().__init__("a number is larger than a double holds")
        self.place = place


class NestedTooDeeply(ValueError):
    """More levels than were allowed."""


def loads_exact(data: bytes | str, *, finite: bool = True, levels_max: int = 1024) -> Any:
    """Decode JSON and keep its numbers: whole ones exactly, others as the nearest double. Lone
    surrogates are kept, NaN and Infinity are not JSON, a byte order mark is passed over.

    Args:
        finite: whether `NumberTooLarge` is raised; else such a number is an infinity.
        levels_max: of objects and arrays in each other.

    Raises:
        NumberTooLarge: one has no nearest double.
        NestedTooDeeply: `levels_max`.
        ValueError: not JSON, or nested too deeply for either decoder.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        try:
            value = _EXACT.decode(text)
        except (ValueError, RecursionError):
            raise error from None
        _is_rounded(value, levels_max)
        place = place_of_infinity(value) if finite else None
        if place is not None:
            raise NumberTooLarge(place) from None
        return value
    if _is_rounded(value, levels_max):
        value = _EXACT.decode(data.decode() if isinstance(data, bytes) else data)
    return value


def place_of_infinity(value: Any) -> tuple[str | int, ...] | None:
    """The keys and indexes that lead to the first infinity in a value of JSON; None without one."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, dict):
            waiting += [((*place, key), each) for key, each in reversed(item.items())]
        elif isinstance(item, list):
            waiting += [((*place, at), item[at]) for at in range(len(item) - 1, -1, -1)]
        elif isinstance(item, float) and math.isinf(item):
            return place
    return None


def _is_rounded(value: Any, levels_max: int) -> bool:
    """Whether there is a float that may have been written as a whole number: orjson makes floats of
    those beyond 64 bits.

    Raises:
        NestedTooDeeply: it has more than so many levels.
    """
    rounded = False
    level = [value] if isinstance(value, _LOOKED_AT) else []
    for _ in range(levels_max + 1):
        inner = []
        for item in level:
            if isinstance(item, float):
                rounded = rounded or not _INT_MIN <= item < _INT_END
            else:
                inner.append(item.values() if isinstance(item, dict) else item)
        if not inner:
            return rounded
        level = [each for items in inner for each in items if isinstance(each, _LOOKED_AT)]
    raise NestedTooDeeply(f"nested more than {levels_max} levels deep")


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _whole(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # more digits than Python converts
        return -math.inf if text[0] == "-" else math.inf


_EXACT: Final = json.JSONDecoder(parse_constant=_no_constant, parse_int=_whole)
