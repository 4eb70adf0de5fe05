"""Journals, as functions of an SQLite connection (J1.1, J1.2, J1.4).

A journal is known here by the number of its row; who may write to it is decided in `sqlite_runs`.
Every statement seeks by a key that begins with that number: what one costs does not depend on what
lies before it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from encoders.json_text import dumps
from encoders.workflow import TEXT_ENDS
from relay.stores.base import StoreError
from relay.stores.runs import JournalPage, StoredEvent, StoredText
from relay.stores.sqlite_rows import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from relay.stores.runs import Batch, JournalEvent, TextPiece

_STARTS: Final = "streaming_started"
_ENDS: Final = TEXT_ENDS | {_STARTS}


class Journal(NamedTuple):
    """A journal's row."""

    id: int
    head: int
    oldest: int


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A batch as it is written; made in its caller's thread, so that it is what it was then."""

    events: tuple[JournalEvent, ...]
    texts: tuple[TextPiece, ...]
    steps: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def rows_of(batch: Batch) -> BatchRows:
    """Return a batch as rows.

    Raises:
        ValueError, TypeError: a step or an output is no JSON value.
    """
    return BatchRows(
        tuple(batch.events), tuple(batch.texts), _encoded(batch.steps), _encoded(batch.outputs)
    )


def _encoded(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((text(key), dumps(value).decode()) for key, value in values.items())


# -- writing --------------------------------------------------------------------------------------


def create_journal(connection: sqlite3.Connection, stream: str) -> Journal:
    """Begin a journal.

    Raises:
        sqlite3.IntegrityError: there is one of this name.
    """
    made = connection.execute(
        "INSERT INTO journals (stream, head, oldest) VALUES (?, 0, 1)", (stream,)
    )
    assert made.lastrowid is not None
    return Journal(made.lastrowid, 0, 1)


def append(
    connection: sqlite3.Connection, journal: Journal, rows: BatchRows, *, taken: int = 0
) -> int:
    """Write a batch; return the position of its first event, the head if it has none.

    Args:
        taken: positions behind the head that the journal's row counts as given out already.

    Raises:
        StoreError: a text has no stream, or a gap.
    """
    first = journal.head
    if rows.events:
        first, head = _append_events(connection, journal, rows.events)
        if head != journal.head + taken:
            connection.execute("UPDATE journals SET head = ? WHERE id = ?", (head, journal.id))
    for piece in rows.texts:
        _append_text(connection, journal.id, piece)
    if rows.steps:
        connection.executemany(
            "INSERT INTO steps (journal, key, value) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            [(journal.id, key, value) for key, value in rows.steps],
        )
    if rows.outputs:
        connection.executemany(
            """INSERT INTO outputs (journal, task_id, value) VALUES (?, ?, ?)
               ON CONFLICT (journal, task_id) DO UPDATE SET value = excluded.value""",
            [(journal.id, task_id, value) for task_id, value in rows.outputs],
        )
    return first


# One statement for several rows: with each, this thread takes a turn at the interpreter's lock.
_AT_ONCE: Final = 16
_WRITE: Final = tuple(
    "INSERT INTO events (journal, position, event_id, name, task_id, frame) VALUES "
    + ", ".join(["(?, ?, ?, ?, ?, ?)"] * count)
    for count in range(_AT_ONCE + 1)
)


def _append_events(
    connection: sqlite3.Connection, journal: Journal, events: Sequence[JournalEvent]
) -> tuple[int, int]:
    """Write events; return the position of the first, and the new head."""
    head, first = journal.head, 0
    closed: set[str] = set()
    for start in range(0, len(events), _AT_ONCE):
        part = events[start : start + _AT_ONCE]
        fresh: Sequence[JournalEvent] = part
        begins_at = head + 1
        if not _write(connection, journal.id, head, part):
            begins_at, fresh = _write_rest(connection, journal.id, head, part)
        first = first or begins_at
        for position, event in enumerate(fresh, head + 1):
            if event.task_id and event.name in _ENDS:
                _mark_stream(connection, journal.id, position, event, closed)
        head += len(fresh)
    return first, head


def _write(
    connection: sqlite3.Connection, journal: int, head: int, events: Sequence[JournalEvent]
) -> bool:
    """Write events behind the head; False, and nothing written, if one is there already."""
    values: list[object] = []
    for position, event in enumerate(events, head + 1):
        ids = text(event.event_id), text(event.name), text(event.task_id)
        values += (journal, position, *ids, event.frame)
    try:
        connection.execute(_WRITE[len(events)], values)
    except sqlite3.IntegrityError:
        return False
    return True


def _write_rest(
    connection: sqlite3.Connection, journal: int, head: int, events: Sequence[JournalEvent]
) -> tuple[int, list[JournalEvent]]:
    """Write those that are not there yet (J1.2); return the first one's position, and them.

    Raises:
        StoreError: the journal's row and its events differ.
    """
    first = 0
    fresh: list[JournalEvent] = []
    for event in events:
        found = connection.execute(
            "SELECT position FROM events WHERE journal = ? AND event_id = ?",
            (journal, text(event.event_id)),
        ).fetchone()
        if found is None:
            if not _write(connection, journal, head + len(fresh), [event]):
                raise StoreError(f"a journal has an event behind its head, {head}")
            fresh.append(event)
        first = first or (found[0] if found else head + len(fresh))
    return first, fresh


def _mark_stream(
    connection: sqlite3.Connection,
    journal: int,
    position: int,
    event: JournalEvent,
    closed: set[str],
) -> None:
    """End the task's open stream, and begin one if the event does.

    Args:
        closed: tasks of this append that have no open stream; kept.
    """
    # INDEXED BY: SQLite would rather read all streams of the journal, by its primary key.
    task_id = text(event.task_id)
    if task_id not in closed:
        connection.execute(
            """UPDATE text_streams INDEXED BY open_text_streams SET ended_at = ?
               WHERE journal = ? AND task_id = ? AND ended_at IS NULL""",
            (position, journal, task_id),
        )
        closed.add(task_id)
    if event.name == _STARTS:
        closed.discard(task_id)
        connection.execute(
            """INSERT INTO text_streams (journal, position, task_id, open_from)
               SELECT ?1, ?2, ?3, coalesce(min(position), ?2)
               FROM text_streams INDEXED BY open_text_streams
               WHERE journal = ?1 AND ended_at IS NULL""",
            (journal, position, task_id),
        )


# The stream that a text follows, and how much of it is stored.
_STREAM: Final = """text_streams WHERE journal = ?1 AND task_id = ?3
AND position = (SELECT position FROM events WHERE journal = ?1 AND event_id = ?2)"""
_STORED: Final = """coalesce((
    SELECT start + chars FROM texts
    WHERE journal = ?1 AND texts.position = text_streams.position ORDER BY start DESC LIMIT 1
), 0)"""
_WRITE_NEXT_TEXT: Final = f"""
INSERT INTO texts (journal, position, start, chars, raw)
SELECT ?1, position, ?4, ?5, ?6 FROM {_STREAM} AND {_STORED} = ?4"""


def _append_text(connection: sqlite3.Connection, journal: int, piece: TextPiece) -> None:
    if not piece.raw and not piece.chars:
        return
    stream = journal, text(piece.event_id), text(piece.task_id)
    written = connection.execute(_WRITE_NEXT_TEXT, (*stream, piece.offset, piece.chars, piece.raw))
    if written.rowcount > 0:
        return
    found = connection.execute(f"SELECT {_STORED} FROM {_STREAM}", stream).fetchone()
    if found is None:
        raise StoreError(f"the text of {piece.task_id!r} follows no `{_STARTS}` of its journal")
    if piece.offset + piece.chars > found[0]:  # else it is said again
        raise StoreError(
            f"a piece of the text of {piece.task_id!r} begins at {piece.offset}, not at {found[0]}"
        )


def forget(connection: sqlite3.Connection, journal: Journal) -> None:
    """Delete all that a journal holds; its positions are not given out again."""
    for table in ("events", "text_streams", "texts", "steps", "outputs"):
        connection.execute(f"DELETE FROM {table} WHERE journal = ?", (journal.id,))
    connection.execute("UPDATE journals SET oldest = head + 1 WHERE id = ?", (journal.id,))


# -- reading --------------------------------------------------------------------------------------


def find_journal(connection: sqlite3.Connection, stream: str) -> Journal | None:
    row = connection.execute(
        "SELECT id, head, oldest FROM journals WHERE stream = ?", (stream,)
    ).fetchone()
    return Journal(*row) if row else None


def read(
    connection: sqlite3.Connection, journal: Journal, *, after: int, limit: int
) -> JournalPage:
    rows = connection.execute(
        """SELECT position, name, task_id, frame FROM events WHERE journal = ? AND position > ?
           ORDER BY position LIMIT ?""",
        (journal.id, after, limit),
    )
    events = _events(rows)
    (state,) = connection.execute(
        "SELECT state FROM runs WHERE journal = ?", (journal.id,)
    ).fetchone()
    return JournalPage(events=events, head=journal.head, oldest=journal.oldest, state=state)


def outline(connection: sqlite3.Connection, journal: Journal) -> list[StoredEvent]:
    rows = connection.execute(
        "SELECT position, name, task_id, frame FROM events WHERE journal = ? ORDER BY position",
        (journal.id,),
    )
    return _events(rows)


def _events(rows: Iterable[tuple[int, str, str, bytes]]) -> list[StoredEvent]:
    return [
        StoredEvent(position=place, name=name, task_id=task_id, frame=frame)
        for place, name, task_id, frame in rows
    ]


_TEXTS_BETWEEN: Final = """
SELECT position, task_id FROM text_streams WHERE journal = ? AND position BETWEEN ? AND ?
ORDER BY position"""
# What is open at a position was open already when the newest stream before it began.
_OPEN_TEXTS: Final = """
SELECT position, task_id FROM text_streams
WHERE journal = ?1 AND position <= ?2 AND (ended_at IS NULL OR ended_at > ?2) AND position >= (
    SELECT open_from FROM text_streams WHERE journal = ?1 AND position <= ?2
    ORDER BY position DESC LIMIT 1
) ORDER BY position"""


def texts(
    connection: sqlite3.Connection,
    journal: Journal,
    *,
    first: int,
    last: int,
    bytes_max: int | None = None,
) -> list[StoredText]:
    streams = connection.execute(_TEXTS_BETWEEN, (journal.id, first, last)).fetchall()
    return _texts_of(connection, journal.id, streams, bytes_max)


def open_texts(connection: sqlite3.Connection, journal: Journal, *, at: int) -> list[StoredText]:
    streams = connection.execute(_OPEN_TEXTS, (journal.id, at)).fetchall()
    return _texts_of(connection, journal.id, streams)


def _texts_of(
    connection: sqlite3.Connection,
    journal: int,
    streams: Sequence[tuple[int, str]],
    bytes_max: int | None = None,
) -> list[StoredText]:
    found: list[StoredText] = []
    size = 0
    for position, task_id in streams:
        if bytes_max is not None and size >= bytes_max:
            break
        pieces = connection.execute(
            "SELECT raw, chars FROM texts WHERE journal = ? AND position = ? ORDER BY start",
            (journal, position),
        ).fetchall()
        if pieces:
            raw = b"".join(raw for raw, _ in pieces)
            chars = sum(chars for _, chars in pieces)
            found.append(StoredText(position=position, task_id=task_id, raw=raw, chars=chars))
            size += len(raw)
    return found
