"""Strict JSON of the decision plane, and its canonical compact form (D2.2, D4.5, D4.10).

Strict: UTF-8 without a byte order mark, no member named twice, no NaN or Infinity (spelled out, or
as a number that no double holds), no lone surrogates. Compact: no spaces, UTF-8 unescaped but for
what JSON must escape, members in the order sent. Both are the standard library's, which the real
client uses too; orjson accepts repeated members and deeper nesting.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from json.encoder import encode_basestring  # in C where there is one
from typing import Any, Final

MAX_DEPTH: Final = 256

_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_STRING: Final = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{}'))
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord('"'): 0}
_PEELED: Final = 8  # times that leaves are taken off before every mark is looked at
_LONGEST_SAFE_INT: Final = 300  # digits that surely are a double


class MalformedJson(ValueError):
    """Not strict JSON: 1007 on a stream. The message quotes nothing that was sent."""


class NestedTooDeeply(ValueError):
    """More than `MAX_DEPTH` levels: 413 `state_too_large`."""


def loads(data: bytes) -> Any:
    """Decode one strict JSON text.

    Raises:
        MalformedJson: it is not.
        NestedTooDeeply: it has more than `MAX_DEPTH` levels; whether the rest is JSON is not seen.
    """
    if depth_exceeds(data, MAX_DEPTH):
        raise NestedTooDeeply(f"more than {MAX_DEPTH} levels")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedJson("not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except MalformedJson:
        raise
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedJson(f"an error at {place}") from None
    except (ValueError, RecursionError):
        raise MalformedJson("not JSON") from None
    if _SURROGATE.search(data) is not None:
        try:
            compact(value)
        except UnicodeEncodeError:
            raise MalformedJson("a lone surrogate") from None
    return value


def compact(value: Any) -> bytes:
    """Encode a value of `loads` in compact form.

    Raises:
        UnicodeEncodeError: it holds a lone surrogate.
    """
    return _ENCODER.encode(value).encode("utf-8")


def compact_text(text: str) -> bytes:
    """The compact form of a string, without its quotes: these concatenate as the strings do."""
    quoted: str = encode_basestring(text)
    return quoted[1:-1].encode("utf-8")


def depth_exceeds(data: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than `limit`."""
    if _openers(data) <= limit:
        return False
    if b"\\" in data:
        data = _ESCAPE.sub(b"", data)
    # Two quotes in a row are an empty string, or the end of one and the start of another: either
    # way the marks around them are in or out of strings as before.
    marks = _STRING.sub(b"", data.translate(None, _NOT_STRUCTURE).replace(b'""', b""))
    inner = marks
    for removed in range(0, 2 * _PEELED, 2):  # each kind that goes lowers the depth by one at most
        if _openers(inner) + removed <= limit:
            return False
        size = len(inner)
        inner = inner.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == size:
            break
    return any(depth > limit for depth in accumulate(map(_STEP.__getitem__, marks)))


def _openers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise MalformedJson("a member is named twice")
    return members


def _constant(name: str) -> Any:
    raise MalformedJson(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise MalformedJson("a number that is not finite")
    return value


def _int(text: str) -> int:
    if len(text) > _LONGEST_SAFE_INT:
        _float(text)
    return int(text)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_constant=_constant, parse_float=_float, parse_int=_int
)
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
