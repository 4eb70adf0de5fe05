"""A small database and operations on it, for tests of the threads behind the SQLite store."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from relay.stores.base import StoreError
from relay.stores.sqlite_threads import ConnectionThread, WriterThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


class Database:
    """A file with a table `t (n INTEGER UNIQUE)`, and what was said to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.statements: list[str] = []
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE t (n INTEGER UNIQUE) STRICT")
        connection.close()

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.set_trace_callback(self.statements.append)
        return connection

    def rows(self) -> list[int]:
        connection = sqlite3.connect(self.path)
        found = [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]
        connection.close()
        return found

    def transactions(self) -> list[list[str]]:
        """The statements between each BEGIN and its end, that included."""
        found: list[list[str]] = []
        for statement in self.statements:
            if statement.startswith("BEGIN"):
                found.append([])
            else:
                found[-1].append(statement)
        return found


@asynccontextmanager
async def started(thread: ConnectionThread) -> AsyncIterator[None]:
    await thread.start()
    try:
        yield
    finally:
        await thread.close()


def writer_on(database: Database, *, queue_max: int = 100_000) -> WriterThread:
    return WriterThread("writer", database.connect, told, queue_max=queue_max)


def told(error: Exception) -> StoreError:
    return StoreError(f"told: {error}")


def insert(n: int) -> Callable[[sqlite3.Connection], int]:
    def operation(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (?)", (n,))
        return n

    return operation


class Gate:
    """An operation that keeps its thread until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, _connection: sqlite3.Connection) -> None:
        self.reached.set()
        assert self._opened.wait(30)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 30)

    def open(self) -> None:
        self._opened.set()


async def handed_over() -> None:
    """Wait until the threads have what was called: one turn for the calls, one for their batch."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def called(thread: ConnectionThread, n: int) -> asyncio.Task[int]:
    return asyncio.create_task(thread.run(insert(n)))
