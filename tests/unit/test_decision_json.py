"""Strict JSON of the decision plane (D2.2) and its compact form (D4.5)."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.decision_json import (
    MAX_DEPTH,
    MalformedJson,
    NestedTooDeeply,
    compact,
    compact_text,
    depth_exceeds,
    loads,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)

MALFORMED = [
    b"",
    b" ",
    b"{",
    b"}",
    b"[1,]",
    b"[,1]",
    b'{"a"}',
    b'{"a":}',
    b'{"a":1,}',
    b"{'a':1}",
    b"{a:1}",
    b"[1] [2]",
    b"[1]x",
    b"nul",
    b"True",
    b"undefined",
    b"NaN",
    b"[Infinity]",
    b"-Infinity",
    b"[1e400]",
    b"[-1e999]",
    b"[" + b"9" * 310 + b"]",
    b"9" * 5000,
    b"01",
    b"+1",
    b"1.",
    b".5",
    b"0x10",
    b"1_000",
    b'"',
    b'"\\x"',
    b'"\\u12"',
    b'"\\u12G4"',
    b'"a\nb"',
    b'"a\tb"',
    b'"\x00"',
    b"/* c */ 1",
    b"1 // c",
    b"\xef\xbb\xbf1",
    b"\xff\xfe1\x00",
    b'"\xff"',
    b'"\xc0\x80"',
    b'"\xed\xa0\x80"',
    b'"\xf4\x90\x80\x80"',
    b'"\xe2\x82"',
    b'"\\ud800"',
    b'"\\udfff"',
    b'"\\uDC00\\uD800"',
    b'"\\ud83dx\\ude00"',
    b'{"a":1,"a":1}',
    b'{"a":1,"\\u0061":2}',
    b'{"b":{"a":1,"c":2,"a":3}}',
    b'[{"":1,"":2}]',
    b"[" * 100,
]


@pytest.mark.parametrize("data", MALFORMED)
def test_what_is_not_strict_json(data: bytes) -> None:
    with pytest.raises(MalformedJson):
        loads(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_malformed(data: bytes) -> None:
    try:
        value = loads(data)
    except (MalformedJson, NestedTooDeeply):
        return
    assert json.loads(data) == value


def test_what_is_malformed_has_its_place_and_none_of_its_words() -> None:
    with pytest.raises(MalformedJson, match=r"^an error at line 2, column 3$"):
        loads(b'{"a": 1,\n  secret: 2}')


@given(VALUES)
def test_compact_and_loads_are_inverse(value: object) -> None:
    data = compact(value)
    assert loads(data) == value
    assert compact(loads(data)) == data
    assert loads(json.dumps(value, indent=2).encode()) == value


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_compact_texts_concatenate_as_the_texts_do(parts: list[str]) -> None:
    assert b'"%s"' % b"".join(map(compact_text, parts)) == compact("".join(parts))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),
        (b'"\\u0000"', "\0"),
        (b" \t\r\n[1 , 2]\n", [1, 2]),
        (b"1e308", 1e308),
        (b"1e-999", 0.0),
        (b"-0.0", -0.0),
        (b"[" + b"9" * 308 + b"]", [int("9" * 308)]),
    ],
)
def test_what_is(data: bytes, value: object) -> None:
    assert loads(data) == value


def test_numbers_keep_their_value() -> None:
    assert compact(loads(b"[12345678901234567890, 0.1, 1E2, -0.0]")) == (
        b"[12345678901234567890,0.1,100.0,-0.0]"
    )


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_over_256(opening: bytes, closing: bytes) -> None:
    deepest = opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH
    assert compact(loads(deepest)) == deepest
    with pytest.raises(NestedTooDeeply):
        loads(opening + deepest + closing)


@pytest.mark.parametrize(
    "data",
    [b"[" * 1_000_000, b'{"a":' * 100_000, b"[" * 5000 + b"]" * 5000, b"[" * 300 + b"\xff"],
)
def test_far_too_deep_is_told_without_recursion(data: bytes) -> None:
    with pytest.raises(NestedTooDeeply):
        loads(data)


@pytest.mark.parametrize(
    "data",
    [
        compact("[" * 1000),
        compact('"[' * 1000),
        compact("\\[" * 1000),
        compact(['\\"[{' * 300, "\\", "[" * 300]),
        compact([[]] * 1000),
        compact([{"[": "{"}] * 1000),
    ],
)
def test_brackets_inside_strings_and_beside_each_other_are_no_depth(data: bytes) -> None:
    assert not depth_exceeds(data, MAX_DEPTH)
    assert compact(loads(data)) == data


NESTS: st.SearchStrategy[object] = st.recursive(
    st.just([]) | st.just({}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("["), inner),
    max_leaves=30,
)


@given(VALUES | NESTS, st.integers(0, 20))
def test_depth_is_that_of_the_value(value: object, limit: int) -> None:
    def depth(value: object) -> int:
        if isinstance(value, dict):
            return 1 + max(map(depth, value.values()), default=0)
        if isinstance(value, list):
            return 1 + max(map(depth, value), default=0)
        return 0

    for data in (compact(value), json.dumps(value).encode()):
        assert depth_exceeds(data, limit) is (depth(value) > limit)


def test_loads_takes_its_depth_also_far_down_a_stack() -> None:
    """Nested calls of our own leave less of the interpreter's recursion limit."""

    def down(levels: int) -> object:
        return down(levels - 1) if levels else loads(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)

    frames = 0
    frame = sys._getframe()
    while (back := frame.f_back) is not None:
        frames, frame = frames + 1, back
    assert down(max(0, 400 - frames))
