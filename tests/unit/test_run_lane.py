"""The lane of a run: order, checkpoints, texts that are cut anywhere (W2.2, J1.4, B20)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.json_text import dumps, loads
from relay.runs.lane import CHECKPOINT_CHARS, CommittedFrame, Lane, Text, count_chars

if TYPE_CHECKING:
    from relay.runs.lane import Leaving
    from relay.stores.runs import Batch

STARTED: Final = ("streaming_started", b"started", "t1")
ENDED: Final = ("streaming_completed", b"ended", "t1")


class Clerk:
    """A store that is asked when the test says so, and followers that are lists."""

    def __init__(self) -> None:
        self.lane = Lane(1)
        self.head = 0
        self.batches: list[Batch] = []
        self.seen: list[Leaving] = []

    def token(self, raw: bytes, task_id: str = "t1") -> None:
        text = self.lane.token(task_id, raw)
        if text is not None:
            self.seen.append(text)

    def commit(self) -> None:
        batch = self.lane.take()
        self.batches.append(batch)
        self.seen += self.lane.committed(self.head + 1)
        self.head += len(batch.events)

    @property
    def names(self) -> list[str]:
        return [
            item.event.name if isinstance(item, CommittedFrame) else "token" for item in self.seen
        ]

    def text(self) -> str:
        raw = b"".join(item.raw for item in self.seen if isinstance(item, Text))
        said: str = loads(b'"' + raw + b'"')
        return said

    def stored(self) -> str:
        raw = b"".join(piece.raw for batch in self.batches for piece in batch.texts)
        said: str = loads(b'"' + raw + b'"')
        return said


def test_a_token_waits_for_the_frame_before_it() -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    clerk.token(b"a")
    assert clerk.names == []
    clerk.commit()
    assert clerk.names == ["streaming_started", "token"]
    clerk.token(b"b")
    assert clerk.names[-1] == "token"
    clerk.lane.emit(*ENDED)
    clerk.token(b"too late")  # after its turn's end (J1.4)
    clerk.commit()
    assert clerk.names == ["streaming_started", "token", "token", "streaming_completed"]


def test_a_durable_frame_flushes_what_was_admitted_before_it() -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    clerk.commit()
    clerk.token(b"abc")
    assert not clerk.lane.has_work  # never a write for a token
    clerk.lane.emit("heartbeat", b"beat")
    clerk.commit()
    (piece,) = clerk.batches[-1].texts
    assert (piece.raw, piece.offset, piece.chars, piece.event_id) == (b"abc", 0, 3, "1.1")


def test_text_is_a_checkpoint_every_512_characters() -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    clerk.commit()
    for _ in range(10 * CHECKPOINT_CHARS // 4):
        clerk.token(b"four")
        if clerk.lane.has_work:
            clerk.commit()
    assert [piece.chars for batch in clerk.batches for piece in batch.texts] == [512] * 10


def test_a_retry_begins_a_text_of_its_own() -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    clerk.token(b"one")
    clerk.lane.emit("task_error", b"error", "t1")
    clerk.lane.emit(*STARTED)
    clerk.token(b"two")
    clerk.lane.emit(*ENDED)
    clerk.commit()
    assert [(p.event_id, p.raw, p.offset) for p in clerk.batches[0].texts] == [
        ("1.1", b"one", 0),
        ("1.3", b"two", 0),
    ]
    assert clerk.names == [
        "streaming_started", "token", "task_error", "streaming_started", "token",
        "streaming_completed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([b"\\ud83d", b"\\ude00"], "\U0001f600"),
        ([b"a\\ud83d", b"b"], "a\ufffdb"),
        ([b"\\ud83d"], "\ufffd"),
        ([b"\\ude00x"], "\ufffdx"),
        ([b"\\ud83da", b"\\\\ud83d"], "\ufffda\\ud83d"),
        ([b"\\ud83d\\ude00\\ud83d"], "\U0001f600\ufffd"),
    ],
)
def test_halves_of_an_emoji(pieces: list[bytes], whole: str) -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    clerk.commit()
    for piece in pieces:
        clerk.token(piece)
    clerk.lane.emit(*ENDED)
    clerk.commit()
    assert clerk.text() == clerk.stored() == whole
    assert clerk.names[-1] == "streaming_completed"


@given(
    words=st.lists(st.text(min_size=1), max_size=20),
    commits=st.lists(st.booleans(), min_size=21, max_size=21),
    escaped=st.booleans(),
)
def test_any_text_is_said_and_stored_whole(
    words: list[str], commits: list[bool], escaped: bool
) -> None:
    clerk = Clerk()
    clerk.lane.emit(*STARTED)
    for word, commit in zip(words, commits, strict=False):
        raw = dumps(word)[1:-1]
        if escaped:
            raw = b"".join(b"\\u%04x" % ord(c) if ord(c) < 0xD800 else c.encode() for c in word)
        clerk.token(raw)
        if commit and clerk.lane.has_work:
            clerk.commit()
    clerk.lane.emit(*ENDED)
    clerk.commit()
    assert clerk.lane.idle
    assert clerk.text() == clerk.stored() == "".join(words)
    pieces = [piece for batch in clerk.batches for piece in batch.texts]
    at = 0
    for piece in pieces:
        assert piece.offset == at
        assert piece.chars == count_chars(piece.raw)
        at += piece.chars
