"""The writer behind the SQLite store: group commit, isolation, cancellation, close (J1.5)."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

from relay.stores.base import StoreError
from relay.stores.sqlite_threads import BATCH_MAX, WriterThread
from tests.support.sqlite_threads import (
    Database,
    Gate,
    called,
    handed_over,
    insert,
    started,
    told,
    writer_on,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "t.db")


async def test_what_waits_is_one_transaction(database: Database) -> None:
    """In the order of the calls, each in a savepoint of its own but for the first: what undoes
    that one undoes nothing else.
    """
    writer = writer_on(database)
    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        calls = [called(writer, n) for n in range(5)]
        await handed_over()
        gate.open()
        await first
        assert await asyncio.gather(*calls) == list(range(5))
    one, many = database.transactions()
    assert one == ["COMMIT"]
    assert [s for s in many if s.startswith("INSERT")] == [
        f"INSERT INTO t VALUES ({n})" for n in range(5)
    ]
    assert many.count("SAVEPOINT operation") == many.count("RELEASE operation") == 4
    assert many[-1] == "COMMIT"


async def test_nobody_istold_before_the_commit(database: Database) -> None:
    """A result that a crash could still take is no result."""
    writer = writer_on(database)
    async with started(writer):
        gate, behind = Gate(), Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        inserted = called(writer, 1)
        last = asyncio.create_task(writer.run(behind))
        await handed_over()
        gate.open()
        await behind.until_reached()  # the insertion has run, its transaction has not ended
        await asyncio.sleep(0.05)
        assert first.done()
        assert not inserted.done()
        assert database.rows() == []
        behind.open()
        assert await inserted == 1
        assert database.rows() == [1]
        await last


async def test_a_failure_fails_its_own_caller_only(database: Database) -> None:
    """And is undone whole: of an operation that failed half-way nothing is left."""
    writer = writer_on(database)

    def half_way(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (100)")
        raise ValueError("half-way")

    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        before, twice, after = called(writer, 1), called(writer, 1), called(writer, 2)
        broken = asyncio.create_task(writer.run(half_way))
        await handed_over()
        gate.open()
        await first
        assert (await before, await after) == (1, 2)
        with pytest.raises(StoreError, match="told: UNIQUE constraint failed"):
            await twice
        with pytest.raises(StoreError, match="told: half-way"):
            await broken
    assert len(database.transactions()) == 2
    assert database.rows() == [1, 2]


async def test_a_first_failure_begins_anew(database: Database) -> None:
    """The first of a transaction has no savepoint; nothing of it is left all the same."""
    writer = writer_on(database)

    def half_way(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (100)")
        raise ValueError("half-way")

    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        broken = [asyncio.create_task(writer.run(half_way)) for _ in range(2)]
        after = [called(writer, n) for n in (1, 2)]
        await handed_over()
        gate.open()
        await first
        for one in broken:
            with pytest.raises(StoreError, match="told: half-way"):
                await one
        assert await asyncio.gather(*after) == [1, 2]
    assert database.rows() == [1, 2]
    _, *failed, last = database.transactions()
    assert [transaction[-1] for transaction in failed] == ["ROLLBACK", "ROLLBACK"]
    assert [s for s in last if s.startswith("INSERT")] == [
        f"INSERT INTO t VALUES ({n})" for n in (1, 2)
    ]


async def test_one_statement_needs_no_savepoint(database: Database) -> None:
    """SQLite undoes a statement that fails, and nothing else."""
    writer = writer_on(database)

    def twice(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (9), (1)")

    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        before = asyncio.create_task(writer.run(insert(1), single=True))
        broken = asyncio.create_task(writer.run(twice, single=True))
        after = asyncio.create_task(writer.run(insert(2), single=True))
        await handed_over()
        gate.open()
        await first
        assert (await before, await after) == (1, 2)
        with pytest.raises(StoreError, match="told: UNIQUE"):
            await broken
    assert database.rows() == [1, 2]
    _, together = database.transactions()
    assert not [s for s in together if "SAVEPOINT" in s]


async def test_what_one_turn_of_the_loop_brings_is_one_transaction(database: Database) -> None:
    """However idle the thread is."""
    writer = writer_on(database)
    async with started(writer):
        assert await asyncio.gather(*(writer.run(insert(n)) for n in range(20))) == [*range(20)]
    assert len(database.transactions()) == 1


async def test_a_failed_commit_fails_everyone_and_does_nothing(database: Database) -> None:
    """Each with an exception of its own; the thread goes on."""
    writer = writer_on(database)

    def owe(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO child VALUES (7)")

    async with started(writer):
        await writer.run(_deferred_foreign_key)
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        good, bad = called(writer, 1), asyncio.create_task(writer.run(owe))
        await handed_over()
        gate.open()
        await first
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError, StoreError]
        assert results[0] is not results[1]
        assert "told: FOREIGN KEY" in str(results[0])
        other = sqlite3.connect(database.path, timeout=0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # nobody is kept out by what failed
        other.close()
        assert database.rows() == []
        assert await writer.run(insert(2)) == 2
    assert database.rows() == [2]


def _deferred_foreign_key(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    connection.execute(
        "CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
    )
    connection.execute("COMMIT")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN")
    connection.execute("SAVEPOINT operation")


async def test_a_transaction_that_sqlite_gave_up_fails_everyone(database: Database) -> None:
    """Disk full and the like undo the whole transaction: what ran before in it is gone too."""
    writer = writer_on(database)

    def undone(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")  # as SQLite does it
        raise sqlite3.OperationalError("database or disk is full")

    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        calls = [called(writer, 1), asyncio.create_task(writer.run(undone)), called(writer, 2)]
        await handed_over()
        gate.open()
        await first
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError] * 3
        assert database.rows() == []
        assert await writer.run(insert(3)) == 3


async def test_a_cancelled_caller_undoes_nothing(database: Database) -> None:
    """What was accepted is done; the others of its batch do not notice."""
    writer = writer_on(database)
    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        calls = [called(writer, n) for n in range(4)]
        await handed_over()
        calls[1].cancel()
        first.cancel()  # even the one that runs
        gate.open()
        results = await asyncio.gather(*calls, first, return_exceptions=True)
        assert results[:1] + results[2:4] == [0, 2, 3]
        assert isinstance(results[1], asyncio.CancelledError)
        assert isinstance(results[4], asyncio.CancelledError)
    assert database.rows() == [0, 1, 2, 3]


async def test_a_cancelled_caller_whose_operation_failed_is_silent(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """No "exception was never retrieved" in anybody's log."""
    writer = writer_on(database)
    async with started(writer):
        await writer.run(insert(1))
        for _ in range(20):
            twice = called(writer, 1)
            await asyncio.sleep(0)
            twice.cancel()
            await asyncio.wait({twice})
            del twice
        with pytest.raises(StoreError):
            await writer.run(insert(1))
    assert caplog.records == []


async def test_close_finishes_what_was_accepted(database: Database) -> None:
    """However much it is; nothing is accepted after it."""
    writer = writer_on(database)
    await writer.start()
    gate = Gate()
    first = asyncio.create_task(writer.run(gate))
    await gate.until_reached()
    calls = [called(writer, n) for n in range(2 * BATCH_MAX + 1)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    with pytest.raises(StoreError, match="closed"):
        await writer.run(insert(-1))
    assert not closing.done()
    gate.open()
    await closing
    await first
    assert await asyncio.gather(*calls) == list(range(2 * BATCH_MAX + 1))
    assert database.rows() == list(range(2 * BATCH_MAX + 1))
    assert len(database.transactions()) == 4  # a transaction has a largest size
    await writer.close()


async def test_a_close_that_is_cancelled_goes_on(database: Database) -> None:
    """The second one waits for the same end."""
    writer = writer_on(database)
    await writer.start()
    gate = Gate()
    first = asyncio.create_task(writer.run(gate))
    await gate.until_reached()
    inserted = called(writer, 1)
    await asyncio.sleep(0)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    await asyncio.wait({closing})
    gate.open()
    await writer.close()
    assert await inserted == 1
    await first


async def test_a_thread_that_cannot_connect_says_so(database: Database) -> None:
    """It has ended then, and refuses."""

    def fail() -> sqlite3.Connection:
        raise OSError("no such disk")

    writer = WriterThread("writer", fail, told)
    with pytest.raises(StoreError, match="told: no such disk"):
        await writer.start()
    with pytest.raises(StoreError, match="not opened"):
        await writer.run(insert(1))
    await writer.close()
    assert "writer" not in [thread.name for thread in threading.enumerate()]


async def test_a_start_that_is_cancelled_leaves_no_thread(database: Database) -> None:
    """A signal during the start."""
    connecting = threading.Event()

    def connect() -> sqlite3.Connection:
        connecting.wait(30)
        return database.connect()

    writer = WriterThread("writer", connect, told)
    starting = asyncio.create_task(writer.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait({starting})
    connecting.set()
    await writer.close()
    assert "writer" not in [thread.name for thread in threading.enumerate()]


async def test_a_full_queue_refuses_at_once(database: Database) -> None:
    """A stuck disk must not become memory without bound; the message says what to look at."""
    writer = writer_on(database, queue_max=10)
    async with started(writer):
        gate = Gate()
        first = asyncio.create_task(writer.run(gate))
        await gate.until_reached()
        calls = [called(writer, n) for n in range(12)]
        results = asyncio.gather(*calls, return_exceptions=True)
        await handed_over()
        assert [call.done() for call in calls] == [False] * 10 + [True] * 2
        gate.open()
        *accepted, eleventh, twelfth = await results
        assert accepted == list(range(10))
        for refused in (eleventh, twelfth):
            assert isinstance(refused, StoreError)
            assert "10 operations wait" in str(refused)
            assert "check its disk" in str(refused)
        assert await writer.run(insert(99)) == 99
        await first
    assert database.rows() == [*range(10), 99]
