"""A run's streams made one: positions, offsets, cuts (W2.6); the JSON lines of `run --json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.sse import SseEvent
from planes.cli_run_events import Cursor, RunEvent, from_json_line, json_line

EVENTS = Path(__file__).resolve().parents[2] / "fixtures/workflows/events"
RECORDED = {
    path.stem: path.read_bytes().splitlines(keepends=True) for path in sorted(EVENTS.iterdir())
}


def sse(event: RunEvent, last_id: int) -> SseEvent:
    """As the numbered POST stream says it."""
    position = event.position or last_id
    return SseEvent(event.raw, event.name.encode(), str(position).encode() if position else b"")


def token(task_id: str, delta: str, offset: int | None = None) -> SseEvent:
    told: dict[str, object] = {"task_id": task_id, "delta": delta}
    if offset is not None:
        told["offset"] = offset
    return SseEvent(json.dumps(told).encode(), b"token")


def first_stream(lines: list[bytes]) -> list[SseEvent]:
    events, last = [], 0
    for line in lines:
        event = from_json_line(line)
        last = event.position or last
        events.append(sse(event, last))
    return events


def followed(lines: list[bytes], after: int) -> list[SseEvent]:
    """As the re-attach route says the same: a text so far is one token with an offset."""
    events: list[SseEvent] = []
    texts: dict[str, str] = {}
    before = True
    for line in lines:
        event = from_json_line(line)
        if event.name == "token":
            assert event.payload is not None
            texts[str(event.task_id)] += event.payload["delta"]
            continue
        if event.name in ("streaming_completed", "task_error"):
            text = texts.pop(str(event.task_id), "")
            if text and (event.position or 0) > after:
                events.append(token(str(event.task_id), text, 0))
        before = (event.position or 0) <= after
        if event.name == "streaming_started":
            texts[str(event.task_id)] = ""
        if not before:
            events.append(sse(event, 0))
    return events


def read(events: list[SseEvent], cursor: Cursor) -> list[RunEvent]:
    return [told for event in events if (told := cursor.take(event)) is not None]


def engine_lines(events: list[RunEvent]) -> list[bytes]:
    return [json_line(event) for event in events if event.name != "token"]


def texts(events: list[RunEvent]) -> dict[str, str]:
    """Of each task, the deltas since its last `streaming_started`, as a script sums them up."""
    found: dict[str, str] = {}
    for event in events:
        if event.name == "streaming_started":
            found[str(event.task_id)] = ""
        elif event.name == "token":
            assert event.payload is not None
            assert list(event.payload) == ["task_id", "delta"]
            found[str(event.task_id)] += event.payload["delta"]
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_json_lines_are_what_the_stream_said(name: str) -> None:
    """Golden: the recorded lines, byte for byte."""
    told = read(first_stream(RECORDED[name]), Cursor())
    assert [json_line(event) for event in told] == RECORDED[name]
    positions = [event.position for event in told if event.position is not None]
    assert positions == list(range(1, len(positions) + 1))


@given(st.data())
def test_w2_6_a_stream_that_was_cut_reads_as_one_that_was_not(data: st.DataObject) -> None:
    lines = RECORDED[data.draw(st.sampled_from(sorted(RECORDED)))]
    cursor = Cursor()
    told: list[RunEvent] = []
    stream = first_stream(lines)
    for _ in range(data.draw(st.integers(0, 4))):
        cut = data.draw(st.integers(0, len(stream)))
        told += read(stream[:cut], cursor)
        stream = followed(lines, cursor.position)
    told += read(stream, cursor)
    whole = read(first_stream(lines), Cursor())
    assert engine_lines(told) == engine_lines(whole)
    assert texts(told) == texts(whole)
    assert cursor.last == "workflow_result"


def test_a_text_that_overlaps_is_cut_to_what_is_new() -> None:
    cursor = Cursor()
    cursor.take(SseEvent(b'{"data":{"task_id":"t"}}', b"streaming_started", b"5"))
    cursor.take(token("t", "Hel"))
    told = cursor.take(token("t", "Hello", 0))
    assert told is not None
    assert told.raw == b'{"task_id":"t","delta":"lo"}'
    assert cursor.take(token("t", "lo", 3)) is None
    assert cursor.take(token("t", "", 5)) is None
    told = cursor.take(token("t", "lo!", 3))
    assert told is not None
    assert told.payload == {"task_id": "t", "delta": "!"}


def test_what_is_about_the_stream_is_no_event_of_the_run() -> None:
    cursor = Cursor(position=3)
    assert cursor.take(SseEvent(b'{"after":3}', b"stream_reset", b"3")) is None
    assert cursor.take(SseEvent(b"[]", b"token", b"3")) is None
    assert cursor.position == 3


@pytest.mark.parametrize(
    ("data", "raw"),
    [
        (b"no JSON", b'"no JSON"'),
        (b"\xff", '"\ufffd"'.encode()),
        (b'{"a":\n1}', b'{"a":1}'),
        (b'{"a": 1e400}', b'{"a": 1e400}'),
        (b'{"a":1.50}', b'{"a":1.50}'),
        (b'"\\ud83d"', b'"\\ud83d"'),
        (b'{"a":NaN}', b'{"a":null}'),
    ],
)
def test_what_a_remote_engine_says_is_one_line_of_json(data: bytes, raw: bytes) -> None:
    told = Cursor().take(SseEvent(data, "odd näme".encode()))
    assert told is not None
    line = json_line(told)
    assert line == '{"event":"odd näme","position":1,"data":'.encode() + raw + b"}\n"
    assert line.count(b"\n") == 1
    json.loads(line)
