"""The filters of templates: a closed list, each bounded by the meter (cnl.md). [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from relay.engines.embedded import limits
from relay.engines.embedded.evaluation import (
    Meter,
    Missing,
    Refused,
    kind,
    present,
    short_enough,
    to_json,
    to_text,
    too_long,
    truth,
)

_LEEWAY: Final = 5  # characters over its length that `truncate` leaves alone, as Jinja does


class Filter(NamedTuple):
    """A filter and the names of its arguments, all of them optional."""

    apply: Callable[..., Any]
    arguments: tuple[str, ...] = ()


def _default(meter: Meter, value: Any, default_value: Any = "", boolean: Any = False) -> Any:
    if isinstance(value, Missing) or (truth(boolean) and not value):
        return default_value
    return value


def _join(meter: Meter, value: Any, d: Any = "") -> str:
    if not isinstance(present(value), list | tuple):
        raise Refused(f"`join` is for lists, not for {kind(value)}")
    between = to_text(d, meter)
    pieces: list[str] = []
    length = 0
    for entry in value:
        piece = to_text(entry, meter)
        meter.spend(len(piece) + len(between))
        length += len(piece) + len(between)
        if length - len(between) > limits.RESULT_CHARS:
            raise Refused(too_long())
        pieces.append(piece)
    return between.join(pieces)


def _length(meter: Meter, value: Any) -> int:
    if not isinstance(present(value), str | list | tuple | Mapping):
        raise Refused(f"`length` is for lists, objects and text, not for {kind(value)}")
    return len(value)


def _text(meter: Meter, value: Any) -> str:
    text = to_text(value, meter)
    meter.spend(len(text))
    return text


def _lower(meter: Meter, value: Any) -> str:
    return short_enough(_text(meter, value).lower())


def _upper(meter: Meter, value: Any) -> str:
    return short_enough(_text(meter, value).upper())


def _trim(meter: Meter, value: Any, chars: Any = None) -> str:
    if chars is not None and (not isinstance(chars, str) or len(chars) > limits.CHARS_PER_STEP):
        raise Refused(f"`trim` takes text of at most {limits.CHARS_PER_STEP} characters")
    text = _text(meter, value)
    if chars:
        meter.spend(len(text) * len(chars))
    return text.strip(chars)


def _tojson(meter: Meter, value: Any) -> str:
    return to_json(value, meter)


def _first(meter: Meter, value: Any) -> Any:
    return _end("first", value, 0)


def _last(meter: Meter, value: Any) -> Any:
    return _end("last", value, -1)


def _end(name: str, value: Any, index: int) -> Any:
    if not isinstance(present(value), str | list | tuple):
        raise Refused(f"`{name}` is for lists and text, not for {kind(value)}")
    return value[index] if value else Missing(f"`{name}`: there are no entries")


def _truncate(
    meter: Meter, value: Any, length: Any = 255, killwords: Any = False, end: Any = "..."
) -> str:
    text = _text(meter, value)
    if type(length) is not int or not isinstance(end, str) or length < len(end):
        raise Refused("`truncate` takes a whole number that is not less than the length of its end")
    if len(text) <= length + _LEEWAY:
        return text
    kept = text[: length - len(end)]
    return (kept if truth(killwords) else kept.rsplit(" ", 1)[0]) + end


FILTERS: Final[Mapping[str, Filter]] = {
    "default": Filter(_default, ("default_value", "boolean")),
    "first": Filter(_first),
    "join": Filter(_join, ("d",)),
    "last": Filter(_last),
    "length": Filter(_length),
    "lower": Filter(_lower),
    "tojson": Filter(_tojson),
    "trim": Filter(_trim, ("chars",)),
    "truncate": Filter(_truncate, ("length", "killwords", "end")),
    "upper": Filter(_upper),
}
