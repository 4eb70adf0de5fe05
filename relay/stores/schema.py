"""The SQLite schema: an ordered tuple of scripts, and what brings a database up to date (J1.5).

A script that was released is never changed: a change is a new script at the end. The number of
scripts that a database has had is its `user_version`; `application_id` tells ours from another
program's.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from relay.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APPLICATION_ID: Final = 0x534C4754  # "SLGT"

_FIRST: Final = """
CREATE TABLE orgs (
    id                TEXT PRIMARY KEY,
    balance_micro_usd INTEGER,
    trial             INTEGER NOT NULL CHECK (trial IN (0, 1)),
    max_concurrent    INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    seq        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL UNIQUE,
    digest     BLOB NOT NULL UNIQUE,
    org        TEXT NOT NULL REFERENCES orgs (id),
    name       TEXT,
    status     TEXT NOT NULL CHECK (status IN ('active', 'suspended', 'revoked')),
    created_at REAL NOT NULL
) STRICT;

-- Triggers, so that a change by hand is noticed by running gateways too.
CREATE TABLE keys_version (only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL)
STRICT;
INSERT INTO keys_version VALUES (1, 0);
CREATE TRIGGER key_inserted AFTER INSERT ON keys
BEGIN UPDATE keys_version SET version = version + 1; END;
CREATE TRIGGER key_updated AFTER UPDATE ON keys
WHEN (old.id, old.digest, old.org, old.name, old.status)
    IS NOT (new.id, new.digest, new.org, new.name, new.status)
BEGIN UPDATE keys_version SET version = version + 1; END;
CREATE TRIGGER key_deleted AFTER DELETE ON keys
BEGIN UPDATE keys_version SET version = version + 1; END;
CREATE TRIGGER org_updated AFTER UPDATE ON orgs
WHEN (old.trial, old.max_concurrent) IS NOT (new.trial, new.max_concurrent)
BEGIN UPDATE keys_version SET version = version + 1; END;

CREATE TABLE holds (
    request_id         TEXT PRIMARY KEY,
    org                TEXT NOT NULL,
    key_id             TEXT NOT NULL,
    plane              TEXT NOT NULL,
    model              TEXT NOT NULL,
    worker             TEXT NOT NULL,
    placed_at          REAL NOT NULL,
    amount_micro_usd   INTEGER NOT NULL,
    prompt_tokens      INTEGER NOT NULL,
    prompt_micro_usd   INTEGER NOT NULL,
    trial              INTEGER NOT NULL CHECK (trial IN (0, 1)),
    -- how far its stream is; all NULL until the first note
    noted_provider          TEXT,
    noted_prompt_tokens     INTEGER,
    noted_completion_tokens INTEGER,
    noted_source            TEXT,
    noted_micro_usd         INTEGER
) STRICT, WITHOUT ROWID;
-- What an org's open holds come to. A sum over ten thousand of them would take longer than all
-- the rest of placing one.
CREATE TABLE held (
    org       TEXT PRIMARY KEY,
    micro_usd INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TRIGGER hold_placed AFTER INSERT ON holds WHEN NOT new.trial BEGIN
    INSERT INTO held VALUES (new.org, new.amount_micro_usd)
    ON CONFLICT (org) DO UPDATE SET micro_usd = micro_usd + excluded.micro_usd;
END;
CREATE TRIGGER hold_dropped AFTER DELETE ON holds WHEN NOT old.trial BEGIN
    UPDATE held SET micro_usd = micro_usd - old.amount_micro_usd WHERE org = old.org;
END;

CREATE TABLE usage (
    seq               INTEGER PRIMARY KEY,
    request_id        TEXT NOT NULL UNIQUE,
    at                REAL NOT NULL,
    org               TEXT NOT NULL,
    key_id            TEXT NOT NULL,
    plane             TEXT NOT NULL,
    model             TEXT NOT NULL,
    provider          TEXT,
    status            INTEGER NOT NULL,
    error_code        TEXT,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens     INTEGER,
    reasoning_tokens  INTEGER,
    source            TEXT NOT NULL,
    cost_micro_usd    INTEGER NOT NULL,
    debit             INTEGER NOT NULL CHECK (debit IN (0, 1)),
    attempts          TEXT NOT NULL,  -- a JSON array of strings
    duration_ms       INTEGER NOT NULL
) STRICT;
CREATE INDEX usage_by_time ON usage (at);
CREATE INDEX usage_by_org ON usage (org, at);

CREATE TABLE leases (
    worker TEXT PRIMARY KEY,
    until  REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE notices (
    seq     INTEGER PRIMARY KEY,
    id      TEXT NOT NULL UNIQUE,
    payload BLOB NOT NULL,
    tries   INTEGER NOT NULL,
    due_at  REAL NOT NULL
) STRICT;
CREATE INDEX notices_due ON notices (due_at);
"""

_DECISION_STREAMS: Final = """
CREATE TABLE streams (
    id    TEXT PRIMARY KEY,
    org   TEXT NOT NULL,
    until REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX streams_by_org ON streams (org, until);

-- A bucket as one number: when it is full again, if nothing more is taken from it.
CREATE TABLE decision_starts (
    org     TEXT PRIMARY KEY,
    full_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""

_DECISION_KEYS: Final = """
-- An idempotency key: taken by `owner` until `until`; or answered, and the answer there until then.
CREATE TABLE decision_keys (
    seq       INTEGER PRIMARY KEY,
    org       TEXT NOT NULL,
    key       TEXT NOT NULL,
    digest    BLOB NOT NULL,
    owner     TEXT,
    until     REAL NOT NULL,
    answer    BLOB,
    forget_at REAL NOT NULL,
    UNIQUE (org, key)
) STRICT;
CREATE INDEX decision_answers_by_time ON decision_keys (until) WHERE answer IS NOT NULL;
CREATE INDEX decision_keys_by_time ON decision_keys (forget_at);
"""

_RUNS: Final = """
CREATE TABLE workflows (
    seq        INTEGER PRIMARY KEY,
    org        TEXT NOT NULL,
    id         TEXT NOT NULL,
    name       TEXT NOT NULL,
    document   TEXT NOT NULL,  -- JSON
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    UNIQUE (org, id)
) STRICT;

-- A journal is named by its stream, `run/<execution_id>`.
CREATE TABLE journals (
    id     INTEGER PRIMARY KEY,
    stream TEXT NOT NULL UNIQUE,
    head   INTEGER NOT NULL,  -- the newest position, 0 if there is none
    oldest INTEGER NOT NULL   -- the oldest position that is kept, head + 1 if none is
) STRICT;

CREATE TABLE events (
    journal  INTEGER NOT NULL,
    position INTEGER NOT NULL,
    event_id TEXT NOT NULL,
    name     TEXT NOT NULL,
    task_id  TEXT NOT NULL,  -- '' if it is nobody's
    frame    BLOB NOT NULL,
    PRIMARY KEY (journal, position),
    UNIQUE (journal, event_id)
) STRICT, WITHOUT ROWID;

-- One row for each `streaming_started`, at its position.
CREATE TABLE text_streams (
    journal   INTEGER NOT NULL,
    position  INTEGER NOT NULL,
    task_id   TEXT NOT NULL,
    open_from INTEGER NOT NULL,  -- the first of the streams that were open then, itself included
    ended_at  INTEGER,           -- the position of the event that ended it, NULL while it is open
    PRIMARY KEY (journal, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX open_text_streams ON text_streams (journal, task_id) WHERE ended_at IS NULL;

-- Checkpoints of a stream's text.
CREATE TABLE texts (
    journal  INTEGER NOT NULL,
    position INTEGER NOT NULL,
    start    INTEGER NOT NULL,  -- the characters before it
    chars    INTEGER NOT NULL CHECK (chars > 0),
    raw      BLOB NOT NULL,
    PRIMARY KEY (journal, position, start)
) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    seq     INTEGER PRIMARY KEY,
    journal INTEGER NOT NULL,
    key     TEXT NOT NULL,
    value   TEXT NOT NULL,  -- JSON
    UNIQUE (journal, key)
) STRICT;

CREATE TABLE outputs (
    seq     INTEGER PRIMARY KEY,
    journal INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    value   TEXT NOT NULL,  -- JSON
    UNIQUE (journal, task_id)
) STRICT;

-- What a run was asked for is in a table of its own: SQLite writes a changed row as a whole.
CREATE TABLE run_requests (
    journal  INTEGER PRIMARY KEY REFERENCES journals (id),
    document TEXT NOT NULL,  -- JSON, as all that follow
    inputs   TEXT NOT NULL
) STRICT;
CREATE TABLE runs (
    journal             INTEGER PRIMARY KEY REFERENCES journals (id),
    execution_id        TEXT NOT NULL,
    workflow_id         TEXT NOT NULL,
    org                 TEXT NOT NULL,
    key_id              TEXT NOT NULL,
    trial               INTEGER NOT NULL CHECK (trial IN (0, 1)),
    plane               TEXT NOT NULL,
    name                TEXT NOT NULL,
    source              TEXT NOT NULL,
    state               TEXT NOT NULL
        CHECK (state IN ('running', 'yielded', 'completed', 'failed', 'cancelled')),
    owner               TEXT NOT NULL,
    generation          INTEGER NOT NULL,
    attempts            INTEGER NOT NULL,
    cancel_requested_at REAL,
    created_at          REAL NOT NULL,
    updated_at          REAL NOT NULL,
    finished_at         REAL,
    final_task_id       TEXT,
    error               TEXT,
    summary             TEXT,
    usage               TEXT,
    answers             TEXT NOT NULL,
    waits_for           TEXT,
    kept_since          REAL  -- when it ended, until its journal is forgotten
) STRICT;
CREATE INDEX runs_by_workflow ON runs (org, workflow_id, created_at);
CREATE INDEX runs_running ON runs (owner) WHERE state = 'running';
CREATE INDEX runs_kept ON runs (kept_since) WHERE kept_since IS NOT NULL;
"""

MIGRATIONS: Final[tuple[str, ...]] = (_FIRST, _DECISION_STREAMS, _DECISION_KEYS, _RUNS)


def check(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of a database that is ours or empty.

    Raises:
        StoreError: it is another program's, or a newer sluicegate wrote it.
    """
    alone = not connection.in_transaction
    if alone:
        connection.execute("BEGIN")  # one view of all three: another gateway may be making it now
    version = _number(connection, "PRAGMA user_version")
    owner = _number(connection, "PRAGMA application_id")
    empty = not _number(connection, "SELECT count(*) FROM sqlite_master")
    if alone:
        connection.execute("COMMIT")
    if owner != APPLICATION_ID and not (empty and owner == version == 0):
        raise StoreError(
            f"{path} is a database of another program; name another file in `store.url`"
        )
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer sluicegate (schema {version}, this one knows "
            f"{len(MIGRATIONS)}); install that version again, or name another file in `store.url`"
        )
    return version


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the schema up to date; inside a transaction of the caller's, so whole or not at all.

    Raises:
        StoreError: as `check`.
    """
    version = check(connection, path)
    for script in MIGRATIONS[version:]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _number(connection: sqlite3.Connection, query: str) -> int:
    (number,) = connection.execute(query).fetchone()
    return int(number)


def _statements(script: str) -> Iterator[str]:
    """Split a script; `executescript` would commit the transaction that it runs in."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
