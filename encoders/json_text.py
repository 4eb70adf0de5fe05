"""JSON that never kills a stream, and byte-exact edits of the top level of an object. [pure]

`loads` is orjson with the standard library behind it: orjson refuses lone surrogates, which real
providers send when they cut an emoji in two (the stream goes on). What a client wrote and is kept
is decoded by `encoders.json_exact`.

`Members` finds the spans of the top-level members of a JSON object without decoding values, so
that single members can be replaced, cut out or added while every other byte stays as it was sent:
key order, number spelling, escapes, spaces (M2.2). `respell` does the same at any depth.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import orjson

# One alternative for each thing that matters at the top level; strings are skipped whole.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\],:]', re.DOTALL)
_SPACE: Final = b" \t\n\r"
# Larger documents are told apart without making their values.
_SCANNED_BYTES_MAX: Final = 64 * 1024
_value_at: Final = json.JSONDecoder(strict=False).raw_decode
_QUOTE, _COLON, _COMMA, _CLOSE = b'":,}'
# A member whose value is no object and no array, and the comma or brace behind it.
_WHITE: Final = rb"[ \t\n\r]*+"
_SCALAR: Final = re.compile(
    _WHITE.join((rb"", rb'("[^"\\]*+")', rb":", rb'("(?:[^"\\]|\\.)*+"|[-+.\w]++)', rb"[,}]")),
    re.DOTALL,
).match


def loads(data: bytes | str) -> Any:
    """Decode JSON; lone surrogates are kept as they are.

    Also takes what Python servers write for floats that JSON has no word for (NaN, Infinity).

    Raises:
        ValueError: not JSON, or nested too deeply for either decoder.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if isinstance(data, bytes):  # else the library would guess UTF-16, and skip a BOM
            data = data.decode("utf-8", "surrogatepass")
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def dumps(value: Any) -> bytes:
    """Encode JSON compactly as UTF-8; what UTF-8 cannot hold (lone surrogates) is escaped.

    Raises:
        ValueError: nested too deeply for either encoder.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        try:
            return json.dumps(value, separators=(",", ":")).encode("ascii")
        except RecursionError:
            raise ValueError("nested too deeply") from None


class Member(NamedTuple):
    """One top-level member: `"key": value` at `data[start:end]`, its value at
    `data[value_start:end]`; trailing spaces belong to nobody."""

    key: str
    start: int
    value_start: int
    end: int


class NotAnObject(ValueError):
    """The bytes are not one JSON object."""


def members(data: bytes) -> list[Member]:
    """Return the spans of the top-level members of the JSON object in `data`, in order.

    The caller has parsed `data` already or trusts it to be JSON: this only tells members apart.

    Raises:
        NotAnObject: `data` does not begin and end as an object.
    """
    if data.lstrip(_SPACE)[:1] != b"{":
        raise NotAnObject("not a JSON object")
    if len(data) <= _SCANNED_BYTES_MAX:
        try:
            return _scanned(data)
        except (ValueError, IndexError, RecursionError):
            pass  # what only a more patient reader can tell
    return _tokenised(data)


def _tokenised(data: bytes) -> list[Member]:
    """`members` token by token: for large documents, and for those that nest deeply."""
    found: list[Member] = []
    depth = 0
    key = ""
    key_start = value_start = -1
    for match in _TOKEN.finditer(data):
        token = data[match.start()]
        if token == _QUOTE:  # a key, if the member has none yet
            if depth == 1 and key_start < 0:
                key_start = match.start()
                key = _key_text(match.group())
        elif token in b"{[":
            depth += 1
        elif depth > 1:
            depth -= token in b"}]"
        elif token == _COLON:
            if value_start < 0:
                value_start = _skip_space(data, match.end())
        else:  # the comma behind a member, or the object's end
            if key_start >= 0:
                found.append(_member(data, key, key_start, value_start, match.start()))
                key_start = value_start = -1
            if token != _COMMA:
                if token != _CLOSE or data[match.end() :].strip(_SPACE):
                    break
                return found
    raise NotAnObject("not one JSON object")


def _scanned(data: bytes) -> list[Member]:
    """`members` by the standard library's scanner in C; most need only a regular expression.

    Latin-1 has one character for each byte, and all that structures JSON is ASCII: positions in
    the text are positions in `data`.
    """
    text = data.decode("latin-1")
    found: list[Member] = []
    at = _past_space(text, 0) + 1
    while True:
        scalar = _SCALAR(data, at)
        if scalar is not None:
            (start, stop), (value_start, value_end) = scalar.span(1), scalar.span(2)
            key = data[start + 1 : stop - 1].decode("utf-8", "replace")
            found.append(Member(key, start, value_start, value_end))
            at = scalar.end()
            start = at - 1
            if data[start] == _CLOSE:
                break
            continue
        start = _past_space(text, at)
        if text[start] != '"':
            if text[start] == "}" and not found:
                break
            raise NotAnObject("a member without a key")
        _, end = _value_at(text, start)
        at = _past_space(text, end)
        if text[at] != ":":
            raise NotAnObject("a member without a value")
        value_start = _past_space(text, at + 1)
        _, value_end = _value_at(text, value_start)
        found.append(Member(_key_text(data[start:end]), start, value_start, value_end))
        start = _past_space(text, value_end)
        at = start + 1
        if text[start] == "}":
            break
        if text[start] != ",":
            raise NotAnObject("not one JSON object")
    if data[start + 1 :].strip(_SPACE):
        raise NotAnObject("more than one JSON object")
    return found


def _past_space(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at


def _member(data: bytes, key: str, start: int, value_start: int, stop: int) -> Member:
    if value_start < 0:
        raise NotAnObject("a member without a value")
    while data[stop - 1] in _SPACE:
        stop -= 1
    return Member(key, start, value_start, stop)


def _key_text(token: bytes) -> str:
    """The key's text; only keys with escapes need decoding."""
    if b"\\" in token:
        return str(json.loads(token))
    return token[1:-1].decode("utf-8", "replace")


def _skip_space(data: bytes, at: int) -> int:
    while at < len(data) and data[at] in _SPACE:
        at += 1
    return at


def edit(
    data: bytes,
    spans: list[Member],
    *,
    values: dict[str, bytes] | None = None,
    cut: frozenset[str] = frozenset(),
    after: str | None = None,
) -> bytes:
    """Rewrite top-level members of `data` and leave every other byte as it is.

    Args:
        data: one JSON object.
        spans: `members(data)`.
        values: key → encoded JSON value. A key that is there gets the value in place; a key that
            is not is added behind the member `after`, else at the end. A repeated key is rewritten
            at each place (decoders differ on which one wins).
        cut: keys removed together with one comma.
        after: see `values`.
    """
    values = values or {}
    present = {span.key for span in spans}
    missing = b"".join(
        [b",%s:%s" % (dumps(key), value) for key, value in values.items() if key not in present]
    )
    keep = [span for span in spans if span.key not in cut] if cut else spans
    anchor = next((s for s in reversed(keep) if s.key == after), keep[-1] if keep else None)
    if anchor is None:
        return b"{" + missing[1:] + b"}"
    out: list[bytes] = [data[: spans[0].start]]
    at = keep[0].start  # all before it is written, or cut
    end = at
    for span in spans:
        if span.key in cut:
            if span.start > at:  # with the comma before it
                out.append(data[at:end])
                at = span.end
        elif value := values.get(span.key):
            out += (data[at : span.value_start], value)
            at = span.end
        if span is anchor and missing:
            out += (data[at : span.end], missing)
            at = span.end
        end = span.end
    out.append(data[at:])
    return b"".join(out)


def elements(data: bytes) -> list[tuple[int, int]]:
    """Return where each element of the JSON array in `data` begins and ends, spaces excluded.

    The caller has parsed `data` already.
    """
    found: list[tuple[int, int]] = []
    depth = 0
    start = -1
    for match in _TOKEN.finditer(data):
        token = data[match.start()]
        if token in b"{[":
            depth += 1
            if depth == 1:
                start = _skip_space(data, match.end())
        elif depth == 1 and token in b",]":
            stop = match.start()
            while stop > start and data[stop - 1] in _SPACE:
                stop -= 1
            if stop > start:
                found.append((start, stop))
            start = _skip_space(data, match.end())
            depth -= token != _COMMA
        else:
            depth -= token in b"}]"
    return found


def respell(data: bytes, old: Any, new: Any) -> bytes:
    """Encode `new` with the bytes of `data` for all that did not change.

    Args:
        data: JSON. old: the same, parsed.
    """
    if old == new:
        return data
    if isinstance(old, dict) and isinstance(new, dict):
        spans = members(data)
        values = {
            span.key: respell(data[span.value_start : span.end], old[span.key], new[span.key])
            for span in spans
            if span.key in new
        }
        values |= {key: dumps(value) for key, value in new.items() if key not in old}
        return edit(data, spans, values=values, cut=frozenset(old.keys() - new.keys()))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        out: list[bytes] = []
        at = 0
        for (start, stop), before, after in zip(elements(data), old, new, strict=True):
            out += (data[at:start], respell(data[start:stop], before, after))
            at = stop
        return b"".join([*out, data[at:]])
    return dumps(new)
