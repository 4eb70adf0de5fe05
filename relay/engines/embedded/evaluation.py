"""What templates compute with: JSON values, and a meter that bounds every operation. [pure]

A template holds the loop, so that its cost is counted before it is spent: one step for each node
that is evaluated, and one for each `CHARS_PER_STEP` characters or entries that an operation reads
or makes. The sum is bounded (`STEPS`), whatever the template and the values are.

Numbers stay within 64 bits, as in JSON codecs; text never grows over `RESULT_CHARS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from encoders.json_text import dumps
from relay.engines.embedded import limits

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1

Names: TypeAlias = Mapping[str, Any]


class Refused(Exception):
    """The operation is not possible, or not within its bounds; the message says which."""


class Missing:
    """A value that is not there: only `default` and `is defined` take it."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class Meter:
    """Counts what one evaluation costs.

    Attributes:
        names: what the template can see.
        variables: those of the `for` loops that are open.
        where: the expression that is evaluated, and its line.
        left: steps left.
    """

    __slots__ = ("_length", "_pieces", "left", "names", "variables", "where")

    def __init__(self, names: Names) -> None:
        self.names = names
        self.variables: dict[str, Any] = {}
        self.where: tuple[str, int] = ("", 1)
        self.left = limits.STEPS
        self._pieces: list[str] = []
        self._length = 0

    def write(self, text: str) -> None:
        """Add to the result.

        Raises:
            Refused: it becomes longer than 1 MiB.
        """
        self._length += len(text)
        if self._length > limits.RESULT_CHARS:
            raise Refused(too_long())
        self._pieces.append(text)

    def result(self) -> str:
        """All that was written."""
        return "".join(self._pieces)

    def spend(self, units: int = 0) -> None:
        """Count one step, and one more for each `CHARS_PER_STEP` of `units`.

        Raises:
            Refused: the steps are used up.
        """
        self.left -= 1 + units // limits.CHARS_PER_STEP
        if self.left < 0:
            raise Refused(f"takes more than {limits.STEPS:,} steps")

    def weigh(self, value: Any) -> None:
        """Count what reading all of `value` costs: one unit for each character, 16 for each
        entry."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, Mapping | list | tuple):
            self._weigh_tree(value)
        else:
            self.spend()

    def _weigh_tree(self, value: Any) -> None:
        stack = [value]
        units = 0
        while stack:
            item = stack.pop()
            units += 16
            if isinstance(item, str):
                units += len(item)
            elif isinstance(item, Mapping):
                units += 16 * len(item)
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
            if units > limits.CHARS_PER_STEP * limits.STEPS:
                break
        self.spend(units)


def present(value: Any) -> Any:
    """The value itself.

    Raises:
        Refused: it is missing.
    """
    if isinstance(value, Missing):
        raise Refused(value.why)
    return value


def to_text(value: Any, meter: Meter) -> str:
    """Text as it is, everything else as JSON.

    Raises:
        Refused: missing, too long or too deep.
    """
    if isinstance(value, str):
        return value
    return to_json(value, meter)


def to_json(value: Any, meter: Meter) -> str:
    """Compact JSON.

    Raises:
        Refused: missing, too long or too deep.
    """
    meter.weigh(present(value))
    try:
        text = dumps(value).decode()
    except (ValueError, TypeError):
        raise Refused("the value cannot be written as JSON: it is nested too deeply") from None
    return short_enough(text)


def short_enough(text: str) -> str:
    """The text itself.

    Raises:
        Refused: it is longer than 1 MiB.
    """
    if len(text) > limits.RESULT_CHARS:
        raise Refused(too_long())
    return text


def too_long() -> str:
    """How the bound of texts is told."""
    return f"the result is longer than {limits.RESULT_CHARS:,} characters (1 MiB)"


def truth(value: Any) -> bool:
    """As in Python: empty is false.

    Raises:
        Refused: missing.
    """
    return bool(present(value))


def attribute(value: Any, key: Any, what: str) -> Any:
    """The entry `key` of a mapping or list; `Missing` if there is none.

    Args:
        what: the expression, for the message.
    """
    if isinstance(value, Missing):
        return value
    if isinstance(value, Mapping):
        if isinstance(key, str) and key in value:
            return value[key]
        return Missing(f"`{what}` is not there: the object has no such entry")
    if isinstance(value, list | tuple | str) and type(key) is int and -len(value) <= key:
        if key < len(value):
            return value[key]
        return Missing(f"`{what}` is not there: {kind(value)} has only {len(value)} entries")
    counted = key in ("length", "size", "count") and isinstance(value, list | tuple | str)
    hint = "; `| length` counts them" if counted else ""
    return Missing(f"`{what}` is not there: {kind(value)} has no such entries{hint}")


def kind(value: Any) -> str:
    """What a value is called in messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return "a missing value"


def cut(value: Any, start: Any, stop: Any, step: Any, meter: Meter) -> Any:
    """A slice of text or of a list."""
    present(value)
    if not isinstance(value, str | list | tuple):
        raise Refused(f"{kind(value)} has no slices: they are for lists and text")
    for bound in (start, stop, step):
        if bound is not None and type(bound) is not int:
            raise Refused("the bounds of a slice must be whole numbers")
    if step == 0:
        raise Refused("the step of a slice must not be 0")
    meter.spend(len(value) * (1 if isinstance(value, str) else 16))
    return value[start:stop:step]


def _number(value: Any, operator: str) -> int | float:
    if isinstance(present(value), bool) or not isinstance(value, int | float):
        raise Refused(f"`{operator}` is for numbers, not for {kind(value)}")
    return value


def number(value: Any) -> Any:
    """A result of arithmetic.

    Raises:
        Refused: it is not a number of JSON within 64 bits.
    """
    if isinstance(value, int) and _INT_MIN <= value <= _INT_MAX:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise Refused("a number is too large: whole numbers have 64 bits, others must be finite")


def add(left: Any, right: Any, meter: Meter) -> Any:
    """Numbers, two texts or two lists."""
    if isinstance(left, str) and isinstance(right, str):
        if len(left) + len(right) > limits.RESULT_CHARS:
            raise Refused(too_long())
        meter.spend(len(left) + len(right))
        return left + right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.spend(16 * (len(left) + len(right)))
        return [*left, *right]
    return number(_number(left, "+") + _number(right, "+"))


def _power(left: Any, right: Any) -> Any:
    base, exponent = _number(left, "**"), _number(right, "**")
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent < 0:
            base = float(base)
        elif abs(base) > 1 and exponent * (base.bit_length() - 1) > 64:
            raise Refused("a number is too large: whole numbers have 64 bits")
    elif base < 0 and exponent != int(exponent):
        raise Refused("`**`: a negative number has no such power")
    return base**exponent


_ARITHMETIC: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "-": lambda a, b: _number(a, "-") - _number(b, "-"),
    "*": lambda a, b: _number(a, "*") * _number(b, "*"),
    "/": lambda a, b: _number(a, "/") / _number(b, "/"),
    "//": lambda a, b: _number(a, "//") // _number(b, "//"),
    "%": lambda a, b: _number(a, "%") % _number(b, "%"),
    "**": _power,
}


def arithmetic(operator: str, left: Any, right: Any, meter: Meter) -> Any:
    """`+ - * / // % **`; all but `+` take numbers only, so that none makes long texts or lists.

    Raises:
        Refused: other operands, or a result that is too large.
    """
    if operator == "+":
        return add(left, right, meter)
    try:
        return number(_ARITHMETIC[operator](left, right))
    except ZeroDivisionError:
        raise Refused(f"`{operator}`: division by zero") from None
    except (OverflowError, ValueError):
        raise Refused("a number is too large, or not finite") from None


def compare(operator: str, left: Any, right: Any, meter: Meter) -> bool:
    """`== != < <= > >= in`, `not in`.

    Raises:
        Refused: the two cannot be compared so.
    """
    present(left), present(right)
    try:
        match operator:
            case "eq" | "ne":
                meter.weigh(left)
                meter.weigh(right)
                return bool(left == right) is (operator == "eq")
            case "in" | "notin":
                return _contains(left, right, meter) is (operator == "in")
            case _:
                return _ordered(operator, left, right, meter)
    except RecursionError:
        raise Refused("the values are nested too deeply to be compared") from None


def _contains(needle: Any, value: Any, meter: Meter) -> bool:
    if isinstance(value, str):
        if not isinstance(needle, str):
            raise Refused(f"`in`: text holds text, not {kind(needle)}")
        meter.spend(len(value) + len(needle))
        return needle in value
    if isinstance(value, Mapping):
        return isinstance(needle, str) and needle in value
    if isinstance(value, list | tuple):
        meter.weigh(value)
        meter.weigh(needle)
        return needle in value
    raise Refused(f"`in` is for lists, objects and text, not for {kind(value)}")


def _ordered(operator: str, left: Any, right: Any, meter: Meter) -> bool:
    texts = isinstance(left, str) and isinstance(right, str)
    if texts:
        meter.spend(min(len(left), len(right)))
    else:
        left, right = _number(left, "<"), _number(right, "<")
    match operator:
        case "lt":
            return bool(left < right)
        case "lteq":
            return bool(left <= right)
        case "gt":
            return bool(left > right)
        case _:
            return bool(left >= right)
