"""Byte-exact edits of JSON objects (M2.2), against a parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.json_text import (
    NestedTooDeeply,
    NotAnObject,
    NumberTooLarge,
    dumps,
    edit,
    elements,
    loads,
    loads_exact,
    members,
    place_of_infinity,
    respell,
)

keys = st.sampled_from(["model", "provider", "usage", "choices", "a", 'q"uote', "back\\slash", "ü"])
scalars = st.none() | st.booleans() | st.integers() | st.text() | st.just(1e30)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)
objects = st.dictionaries(keys, values, max_size=6)
spellings = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"separators": (", ", ": ")},
        {"separators": (" , ", " : "), "ensure_ascii": False},
        {"indent": 2},
        {"indent": "\t", "ensure_ascii": False},
    ]
)


def spell(value: Any, spelling: dict[str, Any]) -> bytes:
    return json.dumps(value, **spelling).encode("utf-8", "surrogatepass")


@given(objects, spellings)
def test_members_are_those_of_the_object(value: dict[str, Any], spelling: dict[str, Any]) -> None:
    data = spell(value, spelling)
    spans = members(data)
    assert [span.key for span in spans] == list(value)
    for span in spans:
        assert json.loads(data[span.value_start : span.end]) == value[span.key]
        assert json.loads(b"{" + data[span.start : span.end] + b"}") == {span.key: value[span.key]}


@given(st.lists(values, max_size=5), spellings)
def test_elements_are_those_of_the_array(value: list[Any], spelling: dict[str, Any]) -> None:
    data = spell(value, spelling)
    assert [json.loads(data[start:end]) for start, end in elements(data)] == value


@given(values, values, spellings)
def test_respell_means_the_new_value(old: Any, new: Any, spelling: dict[str, Any]) -> None:
    data = spell(old, spelling)
    assert json.loads(respell(data, json.loads(data), new)) == new


def test_respell_keeps_the_bytes_of_what_did_not_change() -> None:
    data = b'[ {"a": 1.0, "b" : [ "\\u00fc", {"c":1e400}, -0.0 ], "d":"\\/"} , [1.50] ]'
    old = loads(data)
    assert respell(data, old, loads(data)) == data
    new = loads(data)
    new[0]["b"][1] = {"c": 5, "x": None}
    del new[0]["d"]
    assert respell(data, old, new) == (
        b'[ {"a": 1.0, "b" : [ "\\u00fc", {"c":5,"x":null}, -0.0 ]} , [1.50] ]'
    )


@given(
    objects,
    spellings,
    st.dictionaries(keys, scalars, max_size=3),
    st.frozensets(keys, max_size=3),
    st.none() | keys,
)
def test_edit_changes_what_it_is_told_and_nothing_else(
    value: dict[str, Any],
    spelling: dict[str, Any],
    new: dict[str, Any],
    cut: frozenset[str],
    after: str | None,
) -> None:
    cut -= new.keys()
    data = spell(value, spelling)
    spans = members(data)
    edited = edit(data, spans, values={k: dumps(v) for k, v in new.items()}, cut=cut, after=after)
    expected = {k: v for k, v in value.items() if k not in cut} | new
    assert json.loads(edited) == expected
    kept = [k for k in value if k not in cut]
    assert [span.key for span in members(edited) if span.key in kept] == kept
    for span in spans:  # untouched values are the same bytes
        if span.key not in cut and span.key not in new:
            assert data[span.start : span.end] in edited


def test_an_added_member_stands_behind_the_one_it_belongs_to() -> None:
    data = b'{"id":"x", "model" : "m" ,"choices":[]}'
    edited = edit(data, members(data), values={"provider": b'"p"'}, after="model")
    assert edited == b'{"id":"x", "model" : "m","provider":"p" ,"choices":[]}'


def test_number_spelling_and_escapes_stay_as_sent() -> None:
    data = b'{"a":1.50e+07,"b":"\\u00fc\\/","model":"m","c":12345678901234567890123}'
    assert edit(data, members(data), values={"model": b'"s"'}) == data.replace(b'"m"', b'"s"')


def test_a_repeated_key_is_rewritten_everywhere() -> None:
    data = b'{"model":"a","model":"b"}'
    assert edit(data, members(data), values={"model": b'"s"'}) == b'{"model":"s","model":"s"}'


def test_a_key_in_escapes_is_the_same_key() -> None:
    data = b'{"mod\\u0065l":"a"}'
    assert json.loads(edit(data, members(data), values={"model": b'"s"'})) == {"model": "s"}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'"x"', b"{", b'{"a":1', b'{"a":1} x', b'x{"a":1}', b'{"a"}', b"{]"]
)
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(NotAnObject):
        members(data)


def test_lone_surrogates_never_kill_a_stream() -> None:
    """B20."""
    value = loads(b'{"content":"\\ud83d"}')
    assert value == {"content": "\ud83d"}
    assert json.loads(dumps(value)) == value


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbf{}", "{}".encode("utf-16"), "{}".encode("utf-16-le"), b'"\xff"']
)
def test_only_utf_8_is_json(data: bytes) -> None:
    """Whoever edits the bytes must be able to find in them what was decoded."""
    with pytest.raises(ValueError):  # noqa: PT011  any
        loads(data)


def test_nesting_that_no_encoder_takes_is_a_plain_error() -> None:
    """A chunk that is healed is encoded again; what cannot be must not be a fault of ours."""
    value: list[object] = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        dumps(value)


def test_nesting_without_end_is_a_plain_error() -> None:
    with pytest.raises(ValueError, match="nested"):
        loads(b"[" * 200_000)


# --- numbers that are kept ------------------------------------------------------------------------

numbers = st.integers() | st.integers(2**63, 2**70) | st.integers(-(2**70), -(2**63))
any_value = st.recursive(
    scalars | numbers | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
)


@given(any_value, spellings)
def test_numbers_are_kept_exactly(value: Any, spelling: dict[str, Any]) -> None:
    """What is decoded, stored and shown is what was written, whole numbers as whole numbers."""
    data = spell(value, spelling)
    assert repr(loads_exact(data)) == repr(value)
    assert repr(loads_exact(json.dumps(value, **spelling))) == repr(value)
    assert repr(loads_exact(dumps(value))) == repr(value)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"1e400", ()),
        (b'{"a": [0, {"b": -1e400}], "c": 1e999}', ("a", 1, "b")),
        (b'{"a": "\\ud83d", "b": [[], 1e400]}', ("b", 1)),
        (b"[%b]" % (b"9" * 5000), (0,)),
        (b"[-%b]" % (b"9" * 5000), (0,)),
    ],
)
def test_a_number_that_would_become_null_is_refused_at_its_place(
    data: bytes, place: tuple[Any, ...]
) -> None:
    with pytest.raises(NumberTooLarge) as raised:
        loads_exact(data)
    assert raised.value.place == place
    assert place_of_infinity(loads_exact(data, finite=False)) == place


def test_what_is_written_over_is_not_looked_at() -> None:
    assert loads_exact(b'{"a": 1e400, "a": 1}') == {"a": 1}
    assert place_of_infinity({"a": [1e308, {}], "b": "inf"}) is None


@pytest.mark.parametrize("data", [b"NaN", b'{"a": -Infinity}', b"[1e400", b"{1e400: 1}", b""])
def test_what_is_not_json_is_no_number_either(data: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        loads_exact(data)


@pytest.mark.parametrize("leaf", [b"1", b"1e400", b"123456789012345678901"])
def test_levels_are_counted(leaf: bytes) -> None:
    deep = b'{"a":[' * 3 + leaf + b"]}" * 3
    loads_exact(deep, finite=False, levels_max=6)
    with pytest.raises(NestedTooDeeply, match="more than 5 levels"):
        loads_exact(deep, finite=False, levels_max=5)
