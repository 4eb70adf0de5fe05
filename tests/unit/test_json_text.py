"""Byte-exact edits of JSON objects (M2.2), against a parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.json_text import (
    NotAnObject,
    dumps,
    edit,
    elements,
    loads,
    members,
    respell,
)
from tests.support.json_values import keys, objects, scalars, spell, spellings, values


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
