"""From what a client sends to plain values with their places (W1.4).

    YAML text --libyaml's events--> _Builder --> value + spot of each place
    JSON text --tokens------------> _Builder
    an object --------------------> the same value, places without spots

Events are taken one by one, so that a bound (nesting, nodes) stops the work at once, whatever the
text would become; nothing recurses. Only what JSON can hold is made: the scalars of YAML's core
schema, no tags, no anchors and aliases, no merges; a date is text. Keys are text as written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import yaml

from relay.engines.base import DocumentError, Problem
from relay.engines.embedded import limits

Place: TypeAlias = tuple[int | str, ...]

_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE: Final = re.compile(
    "[^\\t\\n\\r\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"
)
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS: Final = {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TOKEN: Final = re.compile(r'[{}\[\],:]|"(?:[^"\\]|\\.)*+"|[^ \t\n\r{}\[\],:"]+')
_INTEGER_CHARS: Final = 20
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
_NO_JSON: Final = "a number does not fit: whole numbers have 64 bits, others must be finite"


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
    """A problem with a single value; `at` is None if there is no text."""

    place: Place
    message: str
    at: tuple[int, int] | None = None


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


def read(document: str | bytes | Mapping[str, Any]) -> Reading:
    """Read a document.

    Raises:
        DocumentError: it is too large, too deep, or no YAML; the first such problem is the only
            one.
    """
    try:
        if isinstance(document, str | bytes):
            return _read_text(_text(document))
        return _read_object(document)
    except _Stop as stop:
        raise DocumentError([stop.problem]) from None


def plain(value: Any, name: str) -> tuple[Any, list[Problem]]:
    """JSON values that came as objects (inputs, answers): the value and its problems.

    Raises:
        DocumentError: it is too large or too deep.
    """
    reading = Reading()
    try:
        made = _Plain(reading).make(value, (name,))
    except _Stop as stop:
        raise DocumentError([stop.problem]) from None
    wrong = [Problem(message=w.message, path=path_of(w.place)) for w in reading.problems]
    return made, wrong


def path_of(place: Place) -> str:
    """A place as it is told: `workflow.tasks[0].prompt`."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text if len(text) <= 300 else text[:299] + "…"


class _Stop(Exception):
    def __init__(self, message: str, place: Place = (), at: tuple[int, int] | None = None) -> None:
        line, column = at or (None, None)
        self.problem = Problem(message=message, path=path_of(place), line=line, column=column)


# -- text


def _text(document: str | bytes) -> str:
    """The text, of bounded size.

    Raises:
        _Stop: too large, or not Unicode.
    """
    _check_size(len(document))
    if isinstance(document, bytes):
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Stop("is not UTF-8", (), _at(document[: error.start].decode())) from None
    else:
        text = document
        try:
            _check_size(len(text.encode()))
        except UnicodeEncodeError as error:
            message = "holds half of a surrogate pair, which is no character"
            raise _Stop(message, (), _at(text[: error.start])) from None
    return text.removeprefix("\ufeff")


def _check_size(size: int) -> None:
    if size > limits.DOCUMENT_BYTES:
        raise _Stop(
            f"the document has {size:,} bytes; at most {limits.DOCUMENT_BYTES:,} (256 KiB)"
            " are allowed"
        )


def _at(before: str) -> tuple[int, int]:
    line_start = before.rfind("\n") + 1
    return before.count("\n") + 1, len(before) - line_start + 1


def _read_text(text: str) -> Reading:
    wrong = _UNPRINTABLE.search(text)
    if wrong:
        code = f"U+{ord(wrong[0]):04X}"
        raise _Stop(f"holds a control character ({code})", (), _at(text[: wrong.start()]))
    reading = Reading(lines=text.split("\n"))
    builder = _Builder(reading)
    if text.lstrip()[:1] == "{" and _is_json(text):
        _json(text, builder)
    else:
        _yaml(text, builder)
    if not builder.begun or reading.value is None:
        raise _Stop("the document is empty: it must begin with `workflow:`", (), (1, 1))
    return reading


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _json(text: str, builder: _Builder) -> None:
    """Tell a builder what JSON text holds. YAML alone would not do: it has no surrogate pairs."""
    line, line_start = 1, 0
    end = 0
    for token in _TOKEN.finditer(text):
        written, start = token[0], token.start()
        newlines = text.count("\n", end, start)
        if newlines:
            line += newlines
            line_start = text.rfind("\n", end, start) + 1
        end = token.end()
        at = (line, start - line_start + 1)
        match written[0]:
            case "{":
                builder.open({}, at)
            case "[":
                builder.open([], at)
            case "}" | "]":
                builder.close()
            case ":" | ",":
                pass
            case '"':
                builder.scalar(orjson.loads(written), at)
            case _:
                builder.plain(written, at)


def _yaml(text: str, builder: _Builder) -> None:
    loader = _Loader(text)
    try:
        documents = 0
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Stop("a second document begins here (`---`)", (), _mark(event))
            else:
                _event(event, builder)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "syntax error"
        at = (mark.line + 1, mark.column + 1) if mark else None
        raise _Stop(f"is not YAML: {what[:200]}", builder.place(), at) from None
    except yaml.YAMLError as error:
        raise _Stop(f"is not YAML: {str(error)[:200]}") from None
    finally:
        loader.dispose()


def _mark(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _event(event: Any, builder: _Builder) -> None:
    match event:
        case yaml.ScalarEvent():
            at = _mark(event)
            builder.refuse(event, at)
            if event.style is None or event.style == "":
                builder.plain(event.value, at)
            else:
                builder.scalar(event.value, at, block=event.style in "|>")
        case yaml.MappingStartEvent():
            builder.refuse(event, _mark(event))
            builder.open({}, _mark(event))
        case yaml.SequenceStartEvent():
            builder.refuse(event, _mark(event))
            builder.open([], _mark(event))
        case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
            builder.close()
        case yaml.AliasEvent():
            builder.complain("aliases (`*…`) are not supported: write the value out", _mark(event))
            builder.scalar(None, _mark(event))
        case _:
            pass  # begin and end of the stream and of the document


class _Open:
    """A mapping or list that is being read."""

    __slots__ = ("key", "key_at", "place", "value")

    def __init__(self, value: dict[str, Any] | list[Any], place: Place) -> None:
        self.value = value
        self.place = place
        self.key: str | None = None
        self.key_at = (1, 1)


class _Builder:
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

    def complain(self, message: str, at: tuple[int, int]) -> None:
        """Say what is wrong at the next value."""
        if len(self._reading.problems) <= limits.PROBLEMS:
            self._reading.problems.append(Wrong(self.place(), message, at))

    def refuse(self, event: Any, at: tuple[int, int]) -> None:
        """Say that tags and anchors are not supported, if the event has any."""
        if event.tag is not None:
            self.complain("tags (`!…`) are not supported", at)
        if event.anchor is not None:
            self.complain("anchors (`&…`) are not supported", at)

    def open(self, value: dict[str, Any] | list[Any], at: tuple[int, int]) -> None:
        """A mapping or list begins."""
        if self._is_key():
            raise _Stop(
                "a key must be text; a value that begins with `{{`, `{` or `[` needs quotes"
                " around it to be text",
                self.place(),
                at,
            )
        place = self.place()
        self._put(value, at)
        if len(self._stack) == limits.NESTING:
            raise _Stop(f"is nested more than {limits.NESTING} levels deep", place[:8], at)
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
            self.complain(str(error), at)
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

    def _put(self, value: Any, at: tuple[int, int], *, block: bool = False) -> None:
        self._nodes += 1
        if self._nodes > limits.NODES:
            raise _Stop(f"has more than {limits.NODES:,} values", (), at)
        place = self.place()
        if not self._stack:
            self.begun = True
            self._reading.value = value
            self._reading.spots[place] = Spot(*at, at, block)
            return
        top = self._stack[-1]
        if isinstance(top.value, list):
            self._reading.spots[place] = Spot(*at, at, block)
            top.value.append(value)
            return
        assert top.key is not None
        if top.key not in top.value:  # else it was reported, and the first one stays
            self._reading.spots[place] = Spot(*at, top.key_at, block)
            top.value[top.key] = value
        top.key = None


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
            raise ValueError(_NO_JSON)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        value = int(text, base)
        if not _INT_MIN <= value <= _INT_MAX:
            raise ValueError(_NO_JSON)
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(_NO_JSON)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(_NO_JSON)
        return number
    return text


# -- objects


def _read_object(document: Mapping[str, Any]) -> Reading:
    reading = Reading()
    reading.value = _Plain(reading).make(document, ())
    if not reading.problems:
        _check_size(len(orjson.dumps(reading.value)))
    return reading


class _Plain:
    """Copies what JSON can hold, and keeps the places."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._nodes = 0

    def make(self, value: Any, place: Place, depth: int = 0) -> Any:
        """The plain value at a place; None, and a problem, if it has none."""
        self._nodes += 1
        if self._nodes > limits.NODES:
            raise _Stop(f"has more than {limits.NODES:,} values", place[:8])
        if depth > limits.NESTING:
            raise _Stop(f"is nested more than {limits.NESTING} levels deep", place[:8])
        self._reading.spots[place] = None
        match value:
            case None | bool():
                return value
            case str():
                return self._string(value, place)
            case int() if _INT_MIN <= value <= _INT_MAX:
                return value
            case float() if math.isfinite(value):
                return value
            case int() | float():
                return self._fail(_NO_JSON, place)
            case Mapping():
                return dict(self._entries(value, place, depth))
            case list() | tuple():
                return [self.make(v, (*place, i), depth + 1) for i, v in enumerate(value)]
            case _:
                return self._fail("is nothing that JSON can hold", place)

    def _entries(
        self, value: Mapping[Any, Any], place: Place, depth: int
    ) -> Iterator[tuple[str, Any]]:
        for key, entry in value.items():
            if isinstance(key, str):
                yield key, self.make(entry, (*place, key), depth + 1)
            else:
                self._fail("a key must be text", place)

    def _string(self, value: str, place: Place) -> str | None:
        try:
            value.encode()
        except UnicodeEncodeError:
            self._fail("holds half of a surrogate pair, which is no character", place)
            return None
        return value

    def _fail(self, message: str, place: Place) -> None:
        if len(self._reading.problems) <= limits.PROBLEMS:
            self._reading.problems.append(Wrong(place, message))
