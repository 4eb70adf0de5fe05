"""The database file: how it is made and opened, and what its errors mean to an operator."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Final

from relay.stores.base import StoreError
from relay.stores.schema import check, migrate

if TYPE_CHECKING:
    from pathlib import Path

_SQLITE_MIN: Final = (3, 37)  # STRICT tables
# How long one waits for another process's write before it gives up.
BUSY_WAIT_S: Final = 5.0
# A writer's wait is made of tries of its own: SQLite's grow to 100 ms, and between two gateways
# that both write all the time the one that is just asleep then loses its turn again and again.
_TRY_MS: Final = 5
_PAUSE_S: Final = 0.001
# A WAL that a long read let grow is cut back to this.
_WAL_KEPT_BYTES: Final = 64 * 1024 * 1024

_creating: Final = threading.Lock()

# By SQLite's primary result code: what it is, and what to do.
_MEANINGS: Final = {
    sqlite3.SQLITE_BUSY: "another process has been writing to it for too long; stop that process",
    sqlite3.SQLITE_LOCKED: "another process has been writing to it for too long; stop that process",
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_IOERR: "reading or writing it failed; check the disk and its free space",
    sqlite3.SQLITE_READONLY: "it cannot be written; give this user write permission on the file "
    "and its folder",
    sqlite3.SQLITE_PERM: "it cannot be written; give this user write permission on the file and "
    "its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that its folder exists and that this "
    "user may write there",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database; name another file in `store.url`",
    sqlite3.SQLITE_CORRUPT: "the database is damaged; restore a copy, or save what `sqlite3 FILE "
    ".recover` finds",
}


def create(path: Path) -> None:
    """Make the file, readable and writable by its owner only, if there is none.

    SQLite gives its `-wal` and `-shm` files the same mode. A file that is there is not touched:
    to open and close it would free the locks that other connections of this process hold on it.
    """
    with _creating:  # ... and so would closing one that another thread has opened already
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Make or open the database and bring its schema up to date.

    Raises:
        StoreError, sqlite3.Error, OSError: see `explain`.
    """
    if sqlite3.sqlite_version_info < _SQLITE_MIN:
        raise StoreError(
            f"SQLite 3.37 or newer is needed, this Python has {sqlite3.sqlite_version}; use a "
            "newer Python or system"
        )
    create(path)
    connection = _connect(path)
    try:
        check(connection, path)  # before anything is changed: it may be another program's
        _use_wal(connection, path)
        begin(connection)
        try:
            migrate(connection, path)
            connection.execute("COMMIT")
        except BaseException:
            roll_back(connection)
            raise
        connection.execute(f"PRAGMA busy_timeout = {_TRY_MS}")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a database that `open_for_writing` has opened before."""
    connection = _connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    # A URI, as only then nothing is created and no name has a meaning of its own (`:memory:`).
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_WAIT_S, isolation_level=None
    )
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    # Two that open a new file at once: SQLite does not wait here, whatever its timeout.
    (mode,) = _patiently(connection, "PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"the database {path} cannot have a write-ahead log there; put it on a local disk"
        )
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")


def begin(connection: sqlite3.Connection) -> None:
    """Begin a transaction that may write; waits while another process writes."""
    _patiently(connection, "BEGIN IMMEDIATE")


def _patiently(connection: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    until = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            return connection.execute(statement)
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE_S)


def roll_back(connection: sqlite3.Connection) -> None:
    """End a transaction without effect, if SQLite has not done so itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection was in the way."""
    return _primary(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def explain(error: Exception, path: Path) -> StoreError:
    """Return what to tell of a failure: the file, what happened, what to do."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, sqlite3.Error):
        meaning = _MEANINGS.get(_primary(error))
        told = f"{meaning} ({error})" if meaning else str(error)
    elif isinstance(error, IsADirectoryError):
        told = "it is a folder; name a file in `store.url`"
    elif isinstance(error, FileNotFoundError):
        told = "its folder does not exist; make it, or name another file in `store.url`"
    elif isinstance(error, OSError):
        told = f"it cannot be made: {error.strerror}; give this user write permission on its folder"
    else:
        told = f"{type(error).__name__}: {error}"
    explained = StoreError(f"the database {path}: {told}")
    explained.__cause__ = error
    return explained


def _primary(error: sqlite3.Error) -> int:
    # Errors of the module itself (a closed connection, a bad value) have no code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
