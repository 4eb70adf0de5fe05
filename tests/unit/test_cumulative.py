"""M2.7, B20: texts that are repeated with every chunk, and characters that arrive in halves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.cumulative import CumulativeText, SurrogateJoiner

LONG = "It was a dark and stormy night; the rain fell in torrents."


def tails(texts: list[str]) -> list[str]:
    target = CumulativeText()
    return [*map(target.tail, texts), target.flush()]


@given(st.lists(st.text()))
def test_only_what_is_new_is_told(pieces: list[str]) -> None:
    snapshots = list(itertools.accumulate(pieces))
    assert "".join(tails(snapshots)) == "".join(pieces)


@given(st.lists(st.text(alphabet="ab"), min_size=1), st.integers(1, 3))
def test_a_snapshot_that_is_repeated_tells_nothing(pieces: list[str], times: int) -> None:
    snapshots = [s for s in itertools.accumulate(pieces) for _ in range(times)]
    assert "".join(tails(snapshots)) == "".join(pieces)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["Hello", "Hello world"], ["Hello", " world"]),
        (["Hello", "", "Hello!"], ["Hello", "", "!"]),
        # shorter by its white space, as last snapshots are
        (["Hello world\n", "Hello world"], ["Hello world\n", ""]),
        (["Hello world\n", "Hello world", "Hello world\nx"], ["Hello world\n", "", "x"]),
        # what was told stands, whatever the provider makes of it later
        ([f"{LONG} wrld", f"{LONG} world, you"], [f"{LONG} wrld", "d, you"]),
        ([f"{LONG} wrld", f"{LONG} word"], [f"{LONG} wrld", ""]),
        (["wrld", "world"], ["wrld", "world"]),  # too short to tell
        # deltas among snapshots
        (["Hello", " world", "Hello world!"], ["Hello", " world", "!"]),
        (["Hello", " world", " and", " you"], ["Hello", " world", " and", " you"]),
        # bytes that are no character yet
        (["a\ufffd", "a\u4f60", "a\u4f60b"], ["a", "\u4f60", "b"]),
        (["a\ufffd\ufffd", "a\ufffd\ufffd!"], ["a", "\ufffd\ufffd!"]),
        (["a\ud83d", "a\U0001f600"], ["a", "\U0001f600"]),
    ],
)
def test_snapshots_deltas_and_mixtures(texts: list[str], told: list[str]) -> None:
    assert tails(texts) == [*told, ""]


def test_what_never_settles_is_told_at_the_end() -> None:
    assert tails(["a", "a\ufffd"]) == ["a", "", "\ufffd"]


def test_a_long_answer_in_deltas_is_not_copied_for_each() -> None:
    """A flagged provider that sends deltas all the same costs no more than any other."""
    target = CumulativeText()
    pieces = [f"{number:07} " for number in range(50_000)]
    assert "".join(map(target.tail, pieces)) == "".join(pieces)
    assert len(target._pieces) > 49_000  # never joined
    assert target.tail("".join(pieces) + "x") == "x"


@given(st.text(), st.data())
def test_pairs_cut_anywhere_are_joined(text: str, data: st.DataObject) -> None:
    units = [
        half
        for char in text
        for half in (
            [char]
            if ord(char) < 0x10000
            else map(chr, memoryview(char.encode("utf-16-le")).cast("H"))
        )
    ]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(units)), max_size=4)))
    joiner = SurrogateJoiner()
    pieces = ["".join(units[a:b]) for a, b in itertools.pairwise([0, *cuts, len(units)])]
    assert "".join([*map(joiner.join, pieces), joiner.flush()]) == text


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (["\ud83d"], "\ufffd"),
        (["\ud83d", "x"], "\ufffdx"),
        (["\ude00x"], "\ufffdx"),
        (["a\ud83d", "", "\ude00"], "a\U0001f600"),
        (["\ud83d\ud83d", "\ude00"], "\ufffd\U0001f600"),
    ],
)
def test_a_half_that_stays_alone_is_replaced(pieces: list[str], told: str) -> None:
    joiner = SurrogateJoiner()
    got = "".join([*map(joiner.join, pieces), joiner.flush()])
    assert got == told
    got.encode()


def test_replacements_without_end_do_not_wait_for_it() -> None:
    text = CumulativeText()
    told = text.tail("a" * 40) + "".join(text.tail("\ufffd") for _ in range(16))
    assert len(told) > 45
