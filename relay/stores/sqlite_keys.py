"""Idempotency keys of decides, as functions of an SQLite connection (D6.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from relay.stores.base import KeyClaim, KeyState
from relay.stores.sqlite_operations import write_progress
from relay.stores.sqlite_rows import text

if TYPE_CHECKING:
    import sqlite3

    from relay.money import Progress
    from relay.stores.base import KeyUse

# Who lost its lease may still come to its answer, and keeps it if nobody took the key since.
_LOST_KEPT_S: Final = 3600.0
_OWNED: Final = "org = ? AND key = ? AND owner = ?"


def claim_key(connection: sqlite3.Connection, use: KeyUse, *, now: float, until: float) -> KeyClaim:
    row = connection.execute(
        "SELECT digest, owner, until, answer, forget_at FROM decision_keys"
        " WHERE org = ? AND key = ?",
        (text(use.org), use.key),
    ).fetchone()
    if row is not None:
        digest, owner, ends, answer, forget_at = row
        if (ends if owner is not None else forget_at) > now:
            if digest != use.digest:
                return KeyClaim(KeyState.REUSED)
            if owner is not None:
                return KeyClaim(KeyState.RUNNING, until=ends)
            if answer is None or ends <= now:
                return KeyClaim(KeyState.EXPIRED)
            return KeyClaim(KeyState.ANSWERED, answer=answer)
    connection.execute(
        """INSERT INTO decision_keys (org, key, digest, owner, until, forget_at)
           VALUES (?, ?, ?, ?, ?, ?)
           ON CONFLICT (org, key) DO UPDATE SET digest = excluded.digest, owner = excluded.owner,
           until = excluded.until, forget_at = excluded.forget_at, answer = NULL""",
        (text(use.org), use.key, use.digest, use.owner, until, until + _LOST_KEPT_S),
    )
    return KeyClaim(KeyState.CLAIMED)


def renew_key(connection: sqlite3.Connection, use: KeyUse, *, until: float) -> bool:
    kept = connection.execute(
        f"UPDATE decision_keys SET until = ?, forget_at = ? WHERE {_OWNED}",
        (until, until + _LOST_KEPT_S, *_owner(use)),
    )
    return kept.rowcount > 0


def keep_answer(
    connection: sqlite3.Connection,
    use: KeyUse,
    answer: bytes,
    *,
    until: float,
    forget_at: float,
    progress: Progress | None,
) -> bool:
    kept = connection.execute(
        f"UPDATE decision_keys SET owner = NULL, answer = ?, until = ?, forget_at = ?"
        f" WHERE {_OWNED}",
        (answer, until, forget_at, *_owner(use)),
    )
    if kept.rowcount < 1:
        return False
    if progress is not None:
        write_progress(connection, [progress])
    return True


def leave_key(connection: sqlite3.Connection, use: KeyUse) -> None:
    connection.execute(f"DELETE FROM decision_keys WHERE {_OWNED}", _owner(use))


def erase_answers(connection: sqlite3.Connection, now: float) -> None:
    connection.execute(
        "UPDATE decision_keys SET answer = NULL WHERE answer IS NOT NULL AND until <= ?", (now,)
    )
    connection.execute("DELETE FROM decision_keys WHERE forget_at <= ?", (now,))


def _owner(use: KeyUse) -> tuple[str, str, str]:
    return (text(use.org), use.key, use.owner)
