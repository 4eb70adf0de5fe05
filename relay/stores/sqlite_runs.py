"""Runs and saved workflows, as functions of an SQLite connection (J1.3, W1.2, W2.4, W2.5)."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Final

from relay.stores import sqlite_journal as journals
from relay.stores.base import StoreError
from relay.stores.sqlite_journal import Journal, create_journal, find_journal, forget
from relay.stores.sqlite_rows import text
from relay.stores.sqlite_run_rows import (
    END,
    NEW_RUN,
    RUN,
    WORKFLOW,
    json_text,
    json_value,
    run_of,
    workflow_of,
)

if TYPE_CHECKING:
    from relay.stores.runs import RunRow, StoredWorkflow
    from relay.stores.sqlite_journal import BatchRows
    from relay.stores.sqlite_rows import Row

# -- saved workflows ------------------------------------------------------------------------------


def put_workflow(
    connection: sqlite3.Connection,
    org: str,
    workflow_id: str,
    *,
    name: str,
    document: str,
    now: float,
) -> bool:
    key = (text(org), text(workflow_id))
    changed = connection.execute(
        "UPDATE workflows SET name = ?, document = ?, updated_at = ? WHERE org = ? AND id = ?",
        (text(name), document, now, *key),
    )
    if changed.rowcount > 0:
        return False
    connection.execute(
        """INSERT INTO workflows (org, id, name, document, created_at, updated_at)
           VALUES (?, ?, ?, ?, ?, ?)""",
        (*key, text(name), document, now, now),
    )
    return True


def get_workflow(
    connection: sqlite3.Connection, org: str, workflow_id: str
) -> StoredWorkflow | None:
    row = connection.execute(
        f"SELECT {WORKFLOW.names} FROM workflows WHERE org = ? AND id = ?",
        (text(org), text(workflow_id)),
    ).fetchone()
    return workflow_of(row) if row else None


def delete_workflow(connection: sqlite3.Connection, org: str, workflow_id: str) -> bool:
    deleted = connection.execute(
        "DELETE FROM workflows WHERE org = ? AND id = ?", (text(org), text(workflow_id))
    )
    return deleted.rowcount > 0


def list_workflows(connection: sqlite3.Connection, org: str) -> list[StoredWorkflow]:
    names = WORKFLOW.names.replace("document", "NULL")
    rows = connection.execute(
        f"SELECT {names} FROM workflows WHERE org = ? ORDER BY id", (text(org),)
    )
    return [workflow_of(row) for row in rows]


# -- rows -----------------------------------------------------------------------------------------

_SELECT_RUN: Final = f"""
SELECT {RUN.names} FROM journals JOIN runs ON runs.journal = journals.id
JOIN run_requests ON run_requests.journal = journals.id"""

_NEW_RUN: Final = f"""
INSERT INTO runs (journal, {NEW_RUN.names}, state, generation, attempts, answers)
VALUES (?, {NEW_RUN.marks}, 'running', 1, 1, '{{}}')"""
# Whoever does not own a run has no generation, and may end one that waits too.
_END_RUN: Final = f"""
UPDATE runs SET ({END.names}) = ({END.marks})
WHERE journal = (SELECT id FROM journals WHERE stream = ?{len(END) + 1})
AND (state = 'running' AND generation = ?{len(END) + 2}
    OR ?{len(END) + 2} IS NULL AND state IN ('running', 'yielded'))
RETURNING journal"""


def stream_of(execution_id: str) -> str:
    """The name of a run's journal (J1.1)."""
    return f"run/{text(execution_id)}"


def create_run(
    connection: sqlite3.Connection, row: Row, document: str, inputs: str, rows: BatchRows
) -> None:
    """Write the row (of `row_of_new_run`) and the first events."""
    execution_id = row[0]
    try:
        journal = create_journal(connection, stream_of(execution_id))
    except sqlite3.IntegrityError as error:
        raise StoreError(f"there is a run {execution_id!r} already") from error
    connection.execute(_NEW_RUN, (journal.id, *row))
    connection.execute(
        "INSERT INTO run_requests (journal, document, inputs) VALUES (?, ?, ?)",
        (journal.id, document, inputs),
    )
    journals.append(connection, journal, rows)


def get_run(connection: sqlite3.Connection, execution_id: str) -> RunRow | None:
    row = connection.execute(
        f"{_SELECT_RUN} WHERE journals.stream = ?", (stream_of(execution_id),)
    ).fetchone()
    return run_of(row) if row else None


def newest_run(connection: sqlite3.Connection, org: str, workflow_id: str) -> str | None:
    row = connection.execute(
        """SELECT execution_id FROM runs WHERE org = ? AND workflow_id = ?
           ORDER BY created_at DESC, journal DESC LIMIT 1""",
        (text(org), text(workflow_id)),
    ).fetchone()
    return row[0] if row else None


def touch_runs(connection: sqlite3.Connection, owner: str, now: float) -> None:
    connection.execute(
        "UPDATE runs SET updated_at = ? WHERE state = 'running' AND owner = ?", (now, text(owner))
    )


def request_cancel(connection: sqlite3.Connection, execution_id: str, now: float) -> RunRow | None:
    # `updated_at` stays: a client that asks again and again would keep an orphan from being found.
    connection.execute(
        """UPDATE runs SET cancel_requested_at = coalesce(cancel_requested_at, ?)
           WHERE journal = (SELECT id FROM journals WHERE stream = ?)
           AND state IN ('running', 'yielded')""",
        (now, stream_of(execution_id)),
    )
    return get_run(connection, execution_id)


def cancels_of(connection: sqlite3.Connection, owner: str) -> list[str]:
    rows = connection.execute(
        """SELECT execution_id FROM runs WHERE state = 'running' AND owner = ?
           AND cancel_requested_at IS NOT NULL ORDER BY cancel_requested_at""",
        (text(owner),),
    )
    return [execution_id for (execution_id,) in rows]


def release_runs(connection: sqlite3.Connection, owner: str) -> None:
    connection.execute(
        "UPDATE runs SET owner = '' WHERE state = 'running' AND owner = ?", (text(owner),)
    )


# What runs is few; what ever ran is not.
_LOST: Final = """
SELECT journal FROM runs INDEXED BY runs_running WHERE state = 'running' AND (
    owner = '' OR updated_at < :stale_before OR (
        owner <> :owner
        AND NOT EXISTS (SELECT 1 FROM leases WHERE worker = runs.owner AND until > :now)
    )
) ORDER BY updated_at, journal LIMIT :limit"""


def claim_runs(
    connection: sqlite3.Connection, owner: str, *, now: float, stale_before: float, limit: int
) -> list[RunRow]:
    name = text(owner)
    lost = connection.execute(
        _LOST, {"owner": name, "now": now, "stale_before": stale_before, "limit": limit}
    ).fetchall()
    connection.executemany(
        """UPDATE runs SET owner = ?, updated_at = ?, generation = generation + 1,
           attempts = attempts + 1 WHERE journal = ?""",
        [(name, now, journal) for (journal,) in lost],
    )
    return [_run_at(connection, journal) for (journal,) in lost]


def _run_at(connection: sqlite3.Connection, journal: int) -> RunRow:
    row = connection.execute(f"{_SELECT_RUN} WHERE journals.id = ?", (journal,)).fetchone()
    return run_of(row)


def resume_run(
    connection: sqlite3.Connection,
    execution_id: str,
    *,
    owner: str,
    answer: str,
    now: float,
    generation: int | None = None,
) -> RunRow | None:
    """Args: answer: as JSON."""
    row = connection.execute(
        """SELECT journal, answers, waits_for FROM runs
           WHERE journal = (SELECT id FROM journals WHERE stream = ?) AND state = 'yielded'
           AND generation = coalesce(?, generation)""",
        (stream_of(execution_id), generation),
    ).fetchone()
    if row is None:
        return None
    journal, answers, waits_for = row
    answered = json_value(answers)
    answered[json_value(waits_for)["task_id"]] = json_value(answer)
    connection.execute(
        """UPDATE runs SET state = 'running', owner = ?, generation = generation + 1,
           updated_at = ?, answers = ?, waits_for = NULL WHERE journal = ?""",
        (text(owner), now, json_text(answered), journal),
    )
    return _run_at(connection, journal)


# -- the journal ----------------------------------------------------------------------------------


def append(
    connection: sqlite3.Connection, execution_id: str, generation: int, rows: BatchRows
) -> int | None:
    count = len(rows.events)
    journal = _writable(connection, execution_id, generation, count)
    return journals.append(connection, journal, rows, taken=count) if journal else None


def finish(
    connection: sqlite3.Connection,
    execution_id: str,
    generation: int | None,
    rows: BatchRows,
    end: Row,
) -> int | None:
    """Args: end: of `row_of_end`."""
    ended = connection.execute(_END_RUN, (*end, stream_of(execution_id), generation)).fetchone()
    if ended is None:
        return None
    count = len(rows.events)
    row = connection.execute(f"{_TAKE} id = ? {_TAKEN}", (count, *ended, count)).fetchone()
    return journals.append(connection, Journal(*row), rows, taken=count)


# Positions are given out by the statement that looks who may write: each is a turn at a lock.
_TAKE: Final = "UPDATE journals SET head = head + ? WHERE"
_TAKEN: Final = "RETURNING id, head - ?, oldest"
_OWNED: Final = """stream = ? AND EXISTS (
    SELECT 1 FROM runs WHERE journal = journals.id AND state = 'running' AND generation = ?
)"""


def _writable(
    connection: sqlite3.Connection, execution_id: str, generation: int, count: int
) -> Journal | None:
    """The run's journal as it was, and so many positions behind its head given out, if the run is
    running under this generation (J1.3).

    The transaction has the database's only write lock: nobody else can change the row before it
    ends.
    """
    owned = stream_of(execution_id), generation
    if count:
        row = connection.execute(f"{_TAKE} {_OWNED} {_TAKEN}", (count, *owned, count)).fetchone()
    else:
        query = f"SELECT id, head, oldest FROM journals WHERE {_OWNED}"
        row = connection.execute(query, owned).fetchone()
    return Journal(*row) if row else None


def steps(connection: sqlite3.Connection, journal: Journal) -> dict[str, Any]:
    rows = connection.execute(
        "SELECT key, value FROM steps WHERE journal = ? ORDER BY seq", (journal.id,)
    )
    return {key: json_value(value) for key, value in rows}


def output(connection: sqlite3.Connection, journal: Journal, task_id: str) -> tuple[Any] | None:
    row = connection.execute(
        "SELECT value FROM outputs WHERE journal = ? AND task_id = ?", (journal.id, text(task_id))
    ).fetchone()
    return (json_value(row[0]),) if row else None


def outputs(connection: sqlite3.Connection, journal: Journal) -> dict[str, Any]:
    rows = connection.execute(
        "SELECT task_id, value FROM outputs WHERE journal = ? ORDER BY seq", (journal.id,)
    )
    return {task_id: json_value(value) for task_id, value in rows}


def run_journal(connection: sqlite3.Connection, execution_id: str) -> Journal | None:
    return find_journal(connection, stream_of(execution_id))


def retire_run(connection: sqlite3.Connection, before: float) -> bool:
    """Forget the journal of the run that ended first, if that was before then."""
    row = connection.execute(
        """SELECT id, head, oldest FROM runs JOIN journals ON journals.id = runs.journal
           WHERE kept_since < ? ORDER BY kept_since LIMIT 1""",
        (before,),
    ).fetchone()
    if row is None:
        return False
    forget(connection, Journal(*row))
    connection.execute("UPDATE runs SET kept_since = NULL WHERE journal = ?", (row[0],))
    return True
