"""Reading documents: YAML, JSON and objects, bounded, with places (W1.4)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.engines.base import DocumentError
from relay.engines.embedded import limits
from relay.engines.embedded.building import Spot
from relay.engines.embedded.reading import read

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(
    allow_nan=False, allow_infinity=False
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # fmt: skip
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def refused(document: Any) -> str:
    before = time.process_time()
    with pytest.raises(DocumentError) as caught:
        read(document)
    assert time.process_time() - before < 2
    [problem] = caught.value.problems
    return f"{problem.line}:{problem.column} {problem.message}"


@given(JSON, st.booleans())
def test_json_text_is_read_as_json(value: Any, ascii_only: bool) -> None:
    document = {"workflow": value}
    text = json.dumps(document, ensure_ascii=ascii_only, indent="\t")
    if not ascii_only and any(ord(c) in range(0x7F, 0xA0) or ord(c) >= 0xFFFE for c in text):
        return  # raw control characters are refused
    found = read(text)
    assert found.value == document
    assert found.problems == []
    assert read(document).value == document


@given(JSON)
def test_yaml_text_is_read_as_a_core_schema_reader_would(value: Any) -> None:
    text = yaml.safe_dump({"workflow": value}, sort_keys=False, width=1000)
    if any(mark in text for mark in ("&id", "!!")):
        return
    assert json.dumps(read(text).value) == json.dumps({"workflow": value})


@settings(max_examples=300)
@given(st.text(st.sampled_from("{}[]:,-?&*!|>'\"%@`# \n\tab1\\"), max_size=60))
def test_nothing_else_is_raised(text: str) -> None:
    problems = None
    try:
        read(text)
    except DocumentError as error:
        problems = error.problems
    assert problems != []


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_refused(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        assert "is not UTF-8" in refused(b"workflow:\n" + data)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("~", None), ("null", None), ("true", True), ("yes", "yes"), ("off", "off"),
        ("1", 1), ("-1", -1), ("+1", 1), ("010", 10), ("0o10", 8), ("0x1F", 31), ("1_000", "1_000"),
        ("0b1", "0b1"), ("1:30", "1:30"), ("1.5", 1.5), (".5", 0.5), ("1e3", 1000.0), ("1.", 1.0),
        (".", "."), ("2024-01-01", "2024-01-01"), ("=", "="), ("'1'", "1"),
        ('"\\u00e9"', "é"), ("12:30:45", "12:30:45"), ("v1", "v1"), ("-a", "-a"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_the_core_schema(written: str, value: Any) -> None:
    found = read(f"a: {written}\n")
    assert found.value == {"a": value}
    assert type(found.value["a"]) is type(value)


def test_keys_are_text_as_written() -> None:
    assert read("{1: a, true: b, null: c, 2024-01-01: d}").value == {
        "1": "a", "true": "b", "null": "c", "2024-01-01": "d",
    }  # fmt: skip


def test_places_are_those_of_keys_and_values() -> None:
    found = read("workflow:\n  name: a\n  tasks:\n    - {id: x}\n    - |\n      text\n")
    assert found.spots[("workflow",)] == Spot(2, 3, (1, 1))
    assert found.spots[("workflow", "name")] == Spot(2, 9, (2, 3))
    assert found.spots[("workflow", "tasks", 0)] == Spot(4, 7, (4, 7))
    assert found.spots[("workflow", "tasks", 0, "id")] == Spot(4, 12, (4, 8))
    assert found.spots[("workflow", "tasks", 1)] == Spot(5, 7, (5, 7), block=True)
    found = read('{"workflow":\n {"name": "é\\ud83d\\ude00", "x": [1,\n2]}}')
    assert found.spots[("workflow", "x")] == Spot(2, 33, (2, 28))
    assert found.spots[("workflow", "x", 1)] == Spot(3, 1, (3, 1))


def test_a_byte_order_mark_is_skipped() -> None:
    assert read(b"\xef\xbb\xbfworkflow: 1").value == {"workflow": 1}


def test_ten_megabytes_are_refused_unread() -> None:
    for document in ("a: b\n" * 2_000_000, b"[" * 10_000_000, {"a": "x" * 10_000_000}):
        before = time.process_time()
        assert "at most 262,144 (256 KiB)" in refused(document)
        assert time.process_time() - before < 0.5


def test_a_character_of_many_bytes_counts_as_many() -> None:
    fits = "a: " + "é" * ((limits.DOCUMENT_BYTES - 4) // 2) + "\n"
    assert len(fits.encode()) <= limits.DOCUMENT_BYTES
    assert read(fits).problems == []
    assert "bytes; at most" in refused(fits + "é" * 4)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("[" * 900, "1:65 is nested more than 64 levels deep"),
        ("[" * 200_000, "1:1001 is nested more than 64 levels deep"),
        ("{a: " * 60_000, "1:257 is nested more than 64 levels deep"),
        ("- " * 100_000, "1:129 is nested more than 64 levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "1:321 is nested more than 64 levels deep"),
        ("[" + "1," * 60_000 + "]", "1:100000 has more than 50,000 values"),
        ('{"a":[' + "1," * 60_000 + "1]}", "1:100003 has more than 50,000 values"),
        ("a: b\n\x1b", "2:1 holds a control character (U+001B)"),
        ("a: \x00", "1:4 holds a control character (U+0000)"),
        ("a: \ud800", "1:4 holds half of a surrogate pair, which is no character"),
        (b"a: b\nc: \xff", "2:4 is not UTF-8"),
        ("", "1:1 the document is empty: it must begin with `workflow:`"),
        ("# x\n---\n...\n", "1:1 the document is empty: it must begin with `workflow:`"),
        ("a: 1\n---\nb: 2", "2:1 a second document begins here (`---`)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_at_once(document: Any, problem: str) -> None:
    assert refused(document) == problem


def test_objects_are_bounded_as_text_is() -> None:
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    assert "64 levels" in refused({"a": deep})
    loop: list[Any] = []
    loop.append(loop)
    assert "64 levels" in refused({"a": loop})
    assert "50,000 values" in refused({"a": [0] * 60_000})
    found = read({"a": {1: 2}, "b": {3}, "c": float("inf")})
    assert [(w.place, w.message) for w in found.problems] == [
        (("a",), "a key must be text"),
        (("b",), "is nothing that JSON can hold"),
        (("c",), "a number does not fit: whole numbers have 64 bits, others must be finite"),
    ]


def test_a_large_document_is_read_fast() -> None:
    tasks = "".join(
        f"    - {{type: yield, id: t{n}, prompt: '{'lorem ipsum ' * 38}'}}\n" for n in range(500)
    )
    text = f"workflow:\n  name: large\n  tasks:\n{tasks}"
    assert len(text) > 200_000
    before = time.process_time()
    read(text)
    assert time.process_time() - before < 1.5  # about 15 ms
