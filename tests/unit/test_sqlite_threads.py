"""The reader behind the SQLite store, and turns of the interpreter (J1.5)."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import pytest

from relay.stores.base import StoreError
from relay.stores.sqlite_threads import SWITCH_INTERVAL_S, ReaderThread
from tests.support.sqlite_threads import (
    Database,
    Gate,
    handed_over,
    insert,
    started,
    told,
    writer_on,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "t.db")


async def test_a_read_sees_one_moment_however_many_statements_it_has(database: Database) -> None:
    """A page of a journal and its head are of one state; the next read sees the newer one."""

    def counts(connection: sqlite3.Connection) -> list[int]:
        before = _count(connection)
        other = database.connect()
        other.execute("INSERT INTO t VALUES (1)")  # commits
        other.close()
        return [before, _count(connection)]

    reader = ReaderThread("reader", database.connect, told)
    async with started(reader):
        assert await reader.run(counts) == [0, 0]
        assert await reader.run(_count) == 1
        with pytest.raises(StoreError, match="UNIQUE"):
            await reader.run(counts)
        assert await reader.run(_count) == 1


async def test_a_reader_tells_each_as_soon_as_it_has_it(database: Database) -> None:
    """A small read does not wait for the large one behind it."""
    reader = ReaderThread("reader", database.connect, told)
    async with started(reader):
        gate, behind = Gate(), Gate()
        first = asyncio.create_task(reader.run(gate))
        await gate.until_reached()
        small = asyncio.create_task(reader.run(_count))
        large = asyncio.create_task(reader.run(behind))
        await handed_over()
        gate.open()
        assert await asyncio.wait_for(small, 30) == 0
        assert not large.done()
        behind.open()
        await asyncio.gather(first, large)


def _count(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM t").fetchone()
    return int(count)


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Python's own at the beginning, and what it was at the end."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
async def test_a_loop_that_is_never_idle_starves_no_thread(database: Database) -> None:
    """The interpreter's lock goes round; with Python's interval one turn can take half a minute."""

    async def work() -> None:
        while True:
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    writer = writer_on(database)
    longest_s = 0.0
    async with started(writer):
        assert sys.getswitchinterval() <= SWITCH_INTERVAL_S * 1.01
        working = asyncio.create_task(work())
        for n in range(300):
            begun = time.perf_counter()
            await writer.run(insert(n))
            longest_s = max(longest_s, time.perf_counter() - begun)
        working.cancel()
        await asyncio.wait({working})
    assert longest_s < 2


async def test_an_interval_that_is_shorter_stays(database: Database) -> None:
    """Someone knew why."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    try:
        async with started(writer_on(database)):
            assert sys.getswitchinterval() < 0.0001
    finally:
        sys.setswitchinterval(before)
