"""What a store does for the decision plane, as functions of an SQLite connection (D1.5, D5.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.stores.sqlite_rows import text

if TYPE_CHECKING:
    import sqlite3


def lease_stream(
    connection: sqlite3.Connection,
    org: str,
    stream_id: str,
    *,
    limit: int,
    now: float,
    until: float,
) -> float | None:
    name = text(org)
    connection.execute("DELETE FROM streams WHERE org = ? AND until <= ?", (name, now))
    held, first = connection.execute(
        "SELECT count(*), min(until) FROM streams WHERE org = ?", (name,)
    ).fetchone()
    if held >= limit:
        return float(first)
    connection.execute(
        "INSERT INTO streams (id, org, until) VALUES (?, ?, ?)", (text(stream_id), name, until)
    )
    return None


def renew_stream(
    connection: sqlite3.Connection, stream_id: str, *, now: float, until: float
) -> bool:
    # One that ran out stays so: another socket may have been let in since.
    kept = connection.execute(
        "UPDATE streams SET until = ? WHERE id = ? AND until > ?", (until, text(stream_id), now)
    )
    return kept.rowcount > 0


def release_stream(connection: sqlite3.Connection, stream_id: str) -> None:
    connection.execute("DELETE FROM streams WHERE id = ?", (text(stream_id),))


def start_decision(
    connection: sqlite3.Connection, org: str, *, now: float, per_minute: float, burst: int
) -> float:
    every_s = 60 / per_minute
    row = connection.execute(
        "SELECT full_at FROM decision_starts WHERE org = ?", (text(org),)
    ).fetchone()
    # A bucket that was full long ago is full now, and a clock that was set back frees nobody of
    # more than one whole bucket.
    full_at = max(now, min(row[0], now + burst * every_s)) if row else now
    wait_s = full_at + every_s - (now + burst * every_s)
    if wait_s > 1e-6:
        return float(wait_s)
    connection.execute(
        """INSERT INTO decision_starts (org, full_at) VALUES (?, ?)
           ON CONFLICT DO UPDATE SET full_at = excluded.full_at""",
        (text(org), full_at + every_s),
    )
    return 0.0
