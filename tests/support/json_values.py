"""Values of JSON and ways to write them, for hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

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
    """Write a value in one of `spellings`."""
    return json.dumps(value, **spelling).encode("utf-8", "surrogatepass")
