"""Numbers of clients: kept exactly, or refused at their place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.json_exact import NestedTooDeeply, NumberTooLarge, loads_exact, place_of_infinity
from encoders.json_text import dumps
from tests.support.json_values import keys, scalars, spell, spellings

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
