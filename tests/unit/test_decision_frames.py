"""D2.2, D2.6: a client's bytes as events, whatever they are and however they are cut."""

from __future__ import annotations

import itertools
import os
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ProtocolError

from planes.decision.frames import (
    ClientClose,
    Event,
    FrameReader,
    Message,
    Ping,
    Pong,
    Violation,
    encode_close,
    encode_close_back,
    encode_ping,
    encode_pong,
    encode_text,
)
from tests.support.websocket import BINARY, CLOSE, CONT, PING, PONG, TEXT, close, frame

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 100_000


def read(*pieces: bytes, limit: int = LIMIT, now: float = 0.0) -> list[Event]:
    reader = FrameReader(limit)
    return [event for piece in pieces for event in reader.feed(piece, now)]


def codes(events: Iterable[Event]) -> list[int]:
    return [event.code for event in events if isinstance(event, Violation)]


def test_a_message() -> None:
    assert read(frame(TEXT, b"hi")) == [Message(b"hi")]
    assert read(frame(TEXT)) == [Message(b"")]


def test_fragments_are_one_message_and_controls_stand_between_them() -> None:
    events = read(
        frame(TEXT, b"a", fin=False),
        frame(PING, b"p"),
        frame(CONT, b"b", fin=False),
        frame(PONG, b"q"),
        frame(CONT, b"c"),
    )
    assert events == [Ping(b"p"), Pong(b"q"), Message(b"abc")]


@given(cuts=st.lists(st.integers(0, 400)), sizes=st.lists(st.integers(0, 150), max_size=6))
def test_how_the_bytes_are_cut_changes_nothing(cuts: list[int], sizes: list[int]) -> None:
    texts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    data = b"".join(frame(TEXT, text) for text in texts)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert read(*pieces) == [Message(text) for text in texts]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(frame(TEXT, b"hi", masked=False), id="unmasked text"),
        pytest.param(frame(PING, b"", masked=False), id="unmasked ping"),
        pytest.param(frame(TEXT, b"hi", rsv=4), id="rsv1"),
        pytest.param(frame(TEXT, b"hi", rsv=2), id="rsv2"),
        pytest.param(frame(PONG, b"", rsv=1), id="rsv3"),
        pytest.param(frame(CONT, b"no beginning"), id="continuation of nothing"),
        pytest.param(frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), id="text in a text"),
        pytest.param(frame(PING, b"x", fin=False), id="ping in parts"),
        pytest.param(frame(PING, b"x" * 126), id="long ping"),
        pytest.param(frame(3), id="reserved 3"),
        pytest.param(frame(11), id="reserved 11"),
        pytest.param(frame(CLOSE, b"x"), id="close of one byte"),
        pytest.param(frame(CLOSE, struct.pack("!H", 1005)), id="close 1005"),
        pytest.param(frame(CLOSE, struct.pack("!H", 1006)), id="close 1006"),
        pytest.param(frame(CLOSE, struct.pack("!H", 5000)), id="close 5000"),
        pytest.param(frame(CLOSE, struct.pack("!H", 999)), id="close 999"),
    ],
)
def test_what_breaks_rfc_6455_is_1002(wrong: bytes) -> None:
    """D2.2; what came before it counts, what comes after it is not read."""
    events = read(frame(TEXT, b"before") + wrong + frame(TEXT, b"after"), frame(TEXT, b"after"))
    assert events[0] == Message(b"before")
    assert codes(events) == [1002]
    assert len(events) == 2


def test_an_unmasked_frame_is_refused_at_its_head() -> None:
    assert codes(read(frame(TEXT, b"x" * 1000, masked=False)[:2])) == [1002]


@pytest.mark.parametrize("fin", [True, False])
def test_a_binary_frame_is_1003(fin: bool) -> None:
    assert codes(read(frame(BINARY, b"x", fin=fin))) == [1003]


def test_a_close_reason_that_is_not_utf_8_is_1007() -> None:
    assert codes(read(frame(CLOSE, struct.pack("!H", 1000) + b"\xff"))) == [1007]


def test_the_limit_is_exact() -> None:
    """D2.2: exactly so many bytes are taken, whole or in fragments, one more is 1009."""
    assert read(frame(TEXT, b"x" * LIMIT)) == [Message(b"x" * LIMIT)]
    assert codes(read(frame(TEXT, b"x" * (LIMIT + 1)))) == [1009]
    half = frame(TEXT, b"x" * (LIMIT // 2), fin=False)
    assert read(half, frame(CONT, b"x" * (LIMIT // 2))) == [Message(b"x" * LIMIT)]
    assert codes(read(half, frame(CONT, b"x" * (LIMIT // 2 + 1)))) == [1009]
    assert codes(read(half, frame(CONT, b"x" * (LIMIT // 2 + 1), fin=False))) == [1009]


def test_a_far_too_large_frame_is_refused_at_its_head() -> None:
    head = bytes([0x81, 0xFF]) + struct.pack("!Q", 1 << 62)
    assert codes(read(head)) == [1009]


def test_a_control_frame_is_not_held_to_what_is_left_of_a_message() -> None:
    events = read(frame(TEXT, b"x" * LIMIT, fin=False), frame(PING, b"p" * 125), frame(CONT, b""))
    assert events == [Ping(b"p" * 125), Message(b"x" * LIMIT)]


@pytest.mark.parametrize("code", [None, 1000, 1001, 1011, 3000, 4999])
def test_a_client_closes(code: int | None) -> None:
    (event,) = read(close(code) + frame(TEXT, b"after"))
    assert isinstance(event, ClientClose)
    assert event.code == code
    assert encode_close_back(event.payload) == frame(
        CLOSE, b"" if code is None else struct.pack("!H", code), masked=False
    )


def test_a_client_may_close_in_the_middle_of_a_message() -> None:
    """RFC 6455 §5.4: control frames may stand between fragments."""
    (event,) = read(frame(TEXT, b"half", fin=False) + close(1001, "bye"))
    assert event == ClientClose(1001, struct.pack("!H", 1001) + b"bye")


def test_fragments_that_bring_little_are_1008() -> None:
    """D2.6."""
    dribble = [frame(TEXT, b"x", fin=False), *([frame(CONT, b"x", fin=False)] * 500)]
    events = read(*dribble)
    assert codes(events) == [1008]
    empty = [frame(TEXT, b"", fin=False), *([frame(CONT, b"", fin=False)] * 500)]
    assert codes(read(*empty)) == [1008]


def test_any_number_of_fragments_that_bring_enough_is_a_message() -> None:
    parts = [frame(TEXT, b"x" * 20, fin=False), *([frame(CONT, b"x" * 20, fin=False)] * 4000)]
    assert read(*parts, frame(CONT)) == [Message(b"x" * 20 * 4001)]


@pytest.mark.parametrize("fragments", [True, False])
def test_a_message_that_dribbles_for_ten_seconds_is_1008(fragments: bool) -> None:
    """D2.6: in fragments or in the bytes of one frame."""
    reader = FrameReader(LIMIT)
    whole = frame(TEXT, b"x" * 1000)
    found: list[Event] = []
    at = 0.0
    for i in range(200):
        piece = frame(CONT if i else TEXT, b"x", fin=False) if fragments else whole[i : i + 1]
        at = 0.5 * i
        found = list(reader.feed(piece, at))
        if found:
            break
    assert codes(found) == [1008]
    assert at == pytest.approx(10.0)


def test_silence_is_no_dribble() -> None:
    """It is the heartbeats' (D3.3): a client whose network rests is to reconnect, and 1008 would
    forbid it."""
    reader = FrameReader(LIMIT)
    whole = frame(TEXT, b"x" * 1000)
    assert list(reader.feed(whole[:10], 0.0)) == []
    assert list(reader.feed(whole[10:20], 60.0)) == []
    assert list(reader.feed(whole[20:], 61.0)) == [Message(b"x" * 1000)]


def test_messages_that_never_rest_are_no_dribble() -> None:
    reader = FrameReader(LIMIT)
    data = frame(TEXT, b"x" * 50) * 200
    found = [e for i in range(0, len(data), 7) for e in reader.feed(data[i : i + 7], i / 7)]
    assert found == [Message(b"x" * 50)] * 200


def test_pending_bytes() -> None:
    reader = FrameReader(LIMIT)
    assert not list(reader.feed(frame(TEXT, b"x" * 10, fin=False), 0))
    assert not list(reader.feed(frame(CONT, b"y" * 20)[:-5], 0))
    assert reader.pending_bytes == 25


@given(st.binary(max_size=300))
def test_any_bytes_come_to_events_or_one_violation(data: bytes) -> None:
    reader = FrameReader(1000)
    events = list(reader.feed(data, 0.0))
    ends = [i for i, e in enumerate(events) if isinstance(e, Violation | ClientClose)]
    assert ends in ([], [len(events) - 1])
    assert reader.ended == bool(ends)
    assert 1011 not in codes(events)
    assert list(reader.feed(os.urandom(10), 0.0)) == [] or not ends


def test_frames_of_ours() -> None:
    for size in (0, 125, 126, 65535, 65536):
        assert encode_text(b"x" * size) == frame(TEXT, b"x" * size, masked=False)
    assert encode_ping(b"p") == frame(PING, b"p", masked=False)
    assert encode_pong(b"p") == frame(PONG, b"p", masked=False)


def test_a_close_of_ours_is_legal() -> None:
    """D3.10."""
    assert encode_close(1012, "shutdown") == frame(
        CLOSE, struct.pack("!H", 1012) + b"shutdown", masked=False
    )
    long = encode_close(1008, "ä" * 100)
    assert len(long) == 2 + 2 + 122
    assert long[4:].decode() == "ä" * 61
    for code in (1004, 1005, 1006, 1015, 5000):
        with pytest.raises(ProtocolError):
            encode_close(code, "")
