"""M4.2: characters of a stream, counted without parsing where that is right."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from encoders.text_counter import TextCounter

texts = st.text() | st.sampled_from(
    ['a"b', "back\\slash", "\u4f60\u597d", "\U0001f600", '"},', "]}"]
)
deltas = st.one_of(
    st.fixed_dictionaries({"content": texts}),
    st.fixed_dictionaries({"reasoning_content": texts}),
    st.fixed_dictionaries({"content": texts, "refusal": texts, "role": st.just("assistant")}),
    st.just({}),
    st.just({"content": None}),
    st.builds(
        lambda arguments: {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]},
        texts,
    ),
)


def expected(delta: dict[str, Any]) -> int:
    calls = delta.get("tool_calls", [])
    fields = ("content", "refusal", "reasoning_content")
    return sum(len(delta.get(field) or "") for field in fields) + sum(
        len(call["function"]["arguments"]) for call in calls
    )


@given(st.lists(deltas, max_size=20), st.booleans(), st.booleans())
def test_counts_what_a_parser_counts(
    sent: list[dict[str, Any]], escaped: bool, spaced: bool
) -> None:
    counter = TextCounter()
    total = 0
    for delta in sent:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        inside = json.dumps(
            choice, ensure_ascii=escaped, separators=(", ", ": ") if spaced else (",", ":")
        )
        counter.add_bytes(inside.encode("utf-8", "replace"))
        total += expected(delta)
    assert counter.characters == total


def test_what_is_put_by_is_bounded() -> None:
    counter = TextCounter()
    inside = json.dumps({"index": 0, "delta": {"content": "x" * 1000}}).encode()
    for _ in range(1000):
        counter.add_bytes(inside)
        assert counter._put_by_bytes <= 17 * 1024 + len(inside)
    assert counter.characters == 1_000_000


def test_one_text_under_two_names_is_counted_once() -> None:
    """B90: mirrored reasoning."""
    counter = TextCounter()
    counter.add_choices([{"delta": {"reasoning": "abc", "reasoning_content": "abc"}}])
    assert counter.characters == 3


def test_a_whole_reply_is_counted_by_its_messages() -> None:
    counter = TextCounter()
    counter.add_choices([{"message": {"content": "abc"}}, {"message": {"content": "de"}}])
    assert counter.characters == 5


def test_nonsense_is_no_text() -> None:
    counter = TextCounter()
    counter.add_bytes(b'{"delta":')
    counter.add_choices(None)
    counter.add_choices(["x", {"delta": {"content": 3, "tool_calls": {"a": 1}}}])
    assert counter.characters == 0


def test_a_text_that_is_none_of_the_answer_is_never_counted() -> None:
    counter = TextCounter()
    inside = b'{"index":0,"delta":{},"note":{"content":"%b"}}'
    for size in range(1, 50):
        counter.add_bytes(inside % (b"x" * size))
    assert counter.characters == 0
