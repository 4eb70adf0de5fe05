"""From what a client sends to plain values with their places (W1.4). [pure]

    YAML text --libyaml's events--> Builder --> value + spot of each place
    JSON text --tokens------------> Builder
    an object --------------------> the same value, places without spots

Events are taken one by one, so that a bound (nesting, nodes) stops the work at once, whatever the
text would become.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
import yaml

from relay.engines.base import DocumentError, Problem
from relay.engines.embedded import limits
from relay.engines.embedded.building import (
    INT_MAX,
    INT_MIN,
    NO_JSON,
    Builder,
    Place,
    Reading,
    Stop,
    Wrong,
    path_of,
)

_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNPRINTABLE: Final = re.compile(
    "[^\\t\\n\\r\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"
)
_TOKEN: Final = re.compile(r'[{}\[\],:]|"(?:[^"\\]|\\.)*+"|[^ \t\n\r{}\[\],:"]+')


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
    except Stop as stop:
        raise DocumentError([stop.problem]) from None


def plain(value: Any, name: str) -> tuple[Any, list[Problem]]:
    """JSON values that came as objects (inputs, answers): the value and its problems.

    Raises:
        DocumentError: it is too large or too deep.
    """
    reading = Reading()
    try:
        made = _Plain(reading).make(value, (name,))
    except Stop as stop:
        raise DocumentError([stop.problem]) from None
    wrong = [Problem(message=w.message, path=path_of(w.place)) for w in reading.problems]
    return made, wrong


# -- text


def _text(document: str | bytes) -> str:
    """The text, of bounded size.

    Raises:
        Stop: too large, or not Unicode.
    """
    _check_size(len(document))
    if isinstance(document, bytes):
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Stop("is not UTF-8", (), _at(document[: error.start].decode())) from None
    else:
        text = document
        try:
            _check_size(len(text.encode()))
        except UnicodeEncodeError as error:
            message = "holds half of a surrogate pair, which is no character"
            raise Stop(message, (), _at(text[: error.start])) from None
    return text.removeprefix("\ufeff")


def _check_size(size: int) -> None:
    if size > limits.DOCUMENT_BYTES:
        raise Stop(
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
        raise Stop(f"holds a control character ({code})", (), _at(text[: wrong.start()]))
    reading = Reading(lines=text.split("\n"))
    builder = Builder(reading)
    if text.lstrip()[:1] == "{" and _is_json(text):
        _json(text, builder)
    else:
        _yaml(text, builder)
    if not builder.begun or reading.value is None:
        raise Stop("the document is empty: it must begin with `workflow:`", (), (1, 1))
    return reading


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _json(text: str, builder: Builder) -> None:
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


# What libyaml says where a document's writer made one of the usual mistakes.
_YAML_HINTS: Final = {
    "mapping values are not allowed": " (text with `: ` in it needs quotes; else a line above or"
    " this one is not indented as it should be)",
    "did not find expected key": " (this line, or one above, is not indented as its neighbours are,"
    " or text follows a closing quote)",
    "did not find expected '-' indicator": " (this line is not indented as its neighbours are)",
    "cannot start any token": " (text that begins with a sign of YAML's own, as `@`, `` ` `` or"
    " `%`, needs quotes)",
}


def _yaml(text: str, builder: Builder) -> None:
    loader = _Loader(text)
    try:
        documents = 0
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise Stop("a second document begins here (`---`)", (), _mark(event))
            else:
                _event(event, builder)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem))) or "syntax error"
        at = (mark.line + 1, mark.column + 1) if mark else None
        if "maximum nesting depth" in what:  # the scanner looks ahead of the events
            raise Stop(f"is nested more than {limits.NESTING} levels deep", (), at) from None
        if at and "\t" in "".join(text.split("\n")[at[0] - 1 : at[0]])[: at[1]]:
            what += " (tabs do not indent)"
        elif "quoted scalar" in what and error.context_mark:  # where it begins, not where all ends
            at = (error.context_mark.line + 1, error.context_mark.column + 1)
            what = "the quote that is opened here is not closed"
        else:
            what += next((hint for said, hint in _YAML_HINTS.items() if said in what), "")
        raise Stop(f"is not YAML: {what[:200]}", builder.place(), at) from None
    except yaml.YAMLError as error:
        raise Stop(f"is not YAML: {str(error)[:200]}") from None
    finally:
        loader.dispose()


def _mark(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _event(event: Any, builder: Builder) -> None:
    kind = type(event)
    if kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
        builder.close()
        return
    mark = event.start_mark
    at = (mark.line + 1, mark.column + 1)
    if kind is yaml.AliasEvent:
        builder.complain("aliases (`*…`) are not supported: write the value out", at, broken=True)
        builder.scalar(None, at)
        return
    if kind not in (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent):
        return  # the end of the document or of the stream
    if event.tag is not None:
        builder.complain("tags (`!…`) are not supported", at, broken=True)
    if event.anchor is not None:
        builder.complain("anchors (`&…`) are not supported", at)
    if kind is yaml.MappingStartEvent:
        builder.open({}, at)
    elif kind is yaml.SequenceStartEvent:
        builder.open([], at)
    elif event.style:
        builder.scalar(event.value, at, block=event.style in "|>")
    else:
        builder.plain(event.value, at)


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
            raise Stop(f"has more than {limits.NODES:,} values", place[:8])
        if depth > limits.NESTING:
            raise Stop(f"is nested more than {limits.NESTING} levels deep", place[:8])
        self._reading.spots[place] = None
        match value:
            case None | bool():
                return value
            case str():
                return self._string(value, place)
            case int() if INT_MIN <= value <= INT_MAX:
                return value
            case float() if math.isfinite(value):
                return value
            case int() | float():
                return self._fail(NO_JSON, place)
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
            if not isinstance(key, str):
                self._fail("a key must be text", place)
            elif self._string(key, place, "a key ") is not None:
                yield key, self.make(entry, (*place, key), depth + 1)

    def _string(self, value: str, place: Place, what: str = "") -> str | None:
        try:
            value.encode()
        except UnicodeEncodeError:
            self._fail(f"{what}holds half of a surrogate pair, which is no character", place)
            return None
        return value

    def _fail(self, message: str, place: Place) -> None:
        if len(self._reading.problems) <= limits.PROBLEMS:
            self._reading.problems.append(Wrong(place, message, None, True))
