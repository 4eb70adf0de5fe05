"""What is SQLite's own in the SQLite store: the file, its versions, other processes, errors."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from relay.stores import schema
from relay.stores.base import Org, StoreError
from relay.stores.sqlite import SqliteStore
from relay.stores.sqlite_file import open_for_writing
from tests.contract.values import hold, row

if TYPE_CHECKING:
    from pathlib import Path


async def refusal(path: str | Path) -> str:
    """What `open` says of a path that cannot be used; nothing is left running."""
    store = SqliteStore(path)
    with pytest.raises(StoreError) as error:
        await store.open()
    with pytest.raises(StoreError, match="closed"):
        await store.usage()
    assert [t.name for t in threading.enumerate() if t.name.startswith("store-")] == []
    return str(error.value)


def written(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def asked(path: Path, query: str) -> Any:
    connection = sqlite3.connect(path)
    (answer,) = connection.execute(query).fetchone()
    connection.close()
    return answer


# -- the file -------------------------------------------------------------------------------------


async def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    """With what belongs to it, whatever the umask."""
    path = tmp_path / "a.db"
    mask = os.umask(0)
    try:
        store = SqliteStore(path)
        await store.open()
        await store.ensure_org(Org(id="acme"))
        files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
        await store.close()
    finally:
        os.umask(mask)
    assert files == {"a.db": 0o600, "a.db-wal": 0o600, "a.db-shm": 0o600}
    assert [p.name for p in tmp_path.iterdir()] == ["a.db"]


async def test_the_mode_of_a_file_that_is_there_stays(tmp_path: Path) -> None:
    """An operator's choice."""
    path = tmp_path / "a.db"
    path.touch()
    path.chmod(0o640)
    store = SqliteStore(path)
    await store.open()
    await store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["a b.db", "ü%20?#.db", ":memory:"])
async def test_any_name_is_a_name(tmp_path: Path, name: str) -> None:
    """Nothing of it is read as a part of a URL."""
    store = SqliteStore(tmp_path / name)
    await store.open()
    await store.close()
    assert [p.name for p in tmp_path.iterdir()] == [name]


async def test_a_relative_path_belongs_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the moment of making."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("a.db")
    monkeypatch.chdir(tmp_path / "other")
    await store.open()
    await store.close()
    assert (tmp_path / "a.db").exists()


async def test_the_settings_of_the_connection(tmp_path: Path) -> None:
    """WAL and synchronous=NORMAL are the promise of docs/decisions/0007."""
    connection = open_for_writing(tmp_path / "a.db")
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "application_id", "user_version")
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
    connection.close()
    assert found == ["wal", 1, 1, 0x534C4754, len(schema.MIGRATIONS)]


# -- what cannot be used --------------------------------------------------------------------------


async def test_no_folder(tmp_path: Path) -> None:
    told = await refusal(tmp_path / "no" / "a.db")
    assert told.startswith(f"the database {tmp_path}/no/a.db: its folder does not exist; make it")


async def test_a_folder(tmp_path: Path) -> None:
    told = await refusal(tmp_path)
    assert told.startswith(f"the database {tmp_path}: ")
    assert "folder" in told


async def test_a_place_where_nothing_can_be_made() -> None:
    """Not even by root."""
    told = await refusal("/proc/a.db")
    assert told.startswith("the database /proc/a.db: ")
    assert "folder" in told


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_no_permission(tmp_path: Path) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o500)
    assert "give this user write permission" in await refusal(folder / "a.db")
    path = written(tmp_path / "a.db", "PRAGMA user_version = 0")
    path.chmod(0o400)
    assert "give this user write permission" in await refusal(path)


async def test_no_database(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to have what could be a header\n" * 20)
    told = await refusal(path)
    assert told.startswith(f"the database {path}: it is not an SQLite database; name another file")
    assert path.read_text().startswith("not a database")


async def test_an_sqlite_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with Python."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 9))
    assert "SQLite 3.37 or newer is needed" in await refusal(tmp_path / "a.db")
    assert list(tmp_path.iterdir()) == []


async def test_another_programs_database(tmp_path: Path) -> None:
    """It is left as it was."""
    path = written(tmp_path / "a.db", "CREATE TABLE songs (name TEXT)")
    assert "another program" in await refusal(path)
    marked = written(tmp_path / "b.db", "PRAGMA application_id = 7", "PRAGMA user_version = 1")
    assert "another program" in await refusal(marked)
    assert asked(path, "PRAGMA journal_mode") == "delete"
    assert asked(path, "SELECT group_concat(name) FROM sqlite_master") == "songs"


async def test_a_database_of_a_newer_program(tmp_path: Path) -> None:
    """The schema is never taken down."""
    newer = len(schema.MIGRATIONS) + 1
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    written(path, f"PRAGMA user_version = {newer}")
    told = await refusal(path)
    assert f"{path} was written by a newer sluicegate (schema {newer}," in told
    assert "install that version again" in told
    assert asked(path, "PRAGMA user_version") == newer


async def test_a_database_of_an_older_program_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the scripts that it has not had; whole or not at all."""
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.open()
    await store.settle([row("req_1")])
    await store.close()
    good = "CREATE TABLE later (n INTEGER);\nINSERT INTO later VALUES (1);\n"
    first = len(schema.MIGRATIONS)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, good, "INSERT INTO no;"))
    assert "syntax error" in await refusal(path)
    assert asked(path, "PRAGMA user_version") == first
    assert asked(path, "SELECT count(*) FROM sqlite_master WHERE name = 'later'") == 0
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], "DELETE FROM later;\n"))
    for _ in range(2):
        again = SqliteStore(path)
        await again.open()
        assert await again.usage() == [row("req_1")]
        await again.close()
    assert asked(path, "PRAGMA user_version") == first + 2


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as such; what fits is still stored, and reading goes on."""

    def small(path: Path) -> sqlite3.Connection:
        connection = open_for_writing(path)
        connection.execute("PRAGMA max_page_count = 60")  # SQLite's own way to be full
        return connection

    monkeypatch.setattr("relay.stores.sqlite.open_for_writing", small)
    path = tmp_path / "a.db"
    store = SqliteStore(path)
    await store.open()
    with pytest.raises(StoreError) as error:
        await _fill(store)
    assert str(error.value).startswith(f"the database {path}: the disk is full; free some space")
    rows = await store.usage()
    assert [r.request_id for r in rows] == [f"req_{i}" for i in range(len(rows))]
    assert len(rows) > 50
    await store.notice_delivered("req_1")  # nothing to delete: a write that needs no room
    await store.close()


async def _fill(store: SqliteStore) -> None:
    for i in range(1000):
        await store.settle([row(f"req_{i}", model="m" * 500)])


# -- other processes ------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    opened = SqliteStore(tmp_path / "a.db")
    await opened.open()
    yield opened
    await opened.close()


async def test_a_write_waits_for_another_process_and_the_loop_does_not(store: SqliteStore) -> None:
    """Reads do not wait either."""
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO orgs VALUES ('b', 7, 0, NULL)")
    placing = asyncio.create_task(store.place_hold(hold()))
    for _ in range(50):
        await asyncio.sleep(0.005)
        assert await store.get_org("b") is None
        assert not placing.done()
    other.execute("COMMIT")
    other.close()
    async with asyncio.timeout(10):
        assert await placing
    assert await store.get_org("b") == Org(id="b", balance_micro_usd=7)


async def test_a_write_does_not_wait_for_ever(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is in the way; afterwards all is as before."""
    monkeypatch.setattr("relay.stores.sqlite_file.BUSY_WAIT_S", 0.2)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begun = time.monotonic()
    results = await asyncio.gather(
        store.place_hold(hold()), store.settle([row("req_2")]), return_exceptions=True
    )
    assert 0.1 < time.monotonic() - begun < 5
    for result in results:
        assert isinstance(result, StoreError)
        assert f"the database {store.path}: another process has been writing" in str(result)
    other.execute("COMMIT")
    other.close()
    assert await store.place_hold(hold())
    assert await store.usage() == []


async def test_reads_do_not_wait_behind_writes(store: SqliteStore) -> None:
    """A long sweep or a slow disk holds up no look at the usage."""
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [asyncio.create_task(store.place_hold(hold(f"req_{i}"))) for i in range(100)]
    async with asyncio.timeout(2):
        assert await store.usage() == []
        assert await store.list_keys() == []
        assert await store.open_holds() == []
    assert not any(write.done() for write in writes)
    other.execute("COMMIT")
    other.close()
    assert await asyncio.gather(*writes) == [True] * 100


async def test_a_change_by_hand_changes_the_version(store: SqliteStore) -> None:
    """An operator with `sqlite3` is noticed by running gateways."""
    seen = [await store.keys_version()]
    for statement in (
        "INSERT INTO orgs VALUES ('b', 7, 0, NULL)",
        "INSERT INTO keys VALUES (1, 'key_1', x'00', 'b', NULL, 'active', 0)",
        "UPDATE keys SET status = 'suspended'",
        "UPDATE orgs SET max_concurrent = 2",
        "DELETE FROM keys",
    ):
        written(store.path, statement)
        seen.append(await store.keys_version())
    assert len(set(seen[1:])) == 5
    written(store.path, "UPDATE orgs SET balance_micro_usd = 9")
    assert await store.keys_version() == seen[-1]


async def test_a_database_of_the_first_release_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    with monkeypatch.context() as before:
        before.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        old = SqliteStore(path)
        await old.open()
        await old.ensure_org(Org(id="acme", balance_micro_usd=5))
        await old.close()
    store = SqliteStore(path)
    await store.open()
    try:
        assert await store.get_org("acme") == Org(id="acme", balance_micro_usd=5)
        assert await store.lease_stream("acme", "szws_1", limit=1, now=0.0, until=15.0) is None
        assert await store.start_decision("acme", now=0.0, per_minute=60, burst=5) == 0
    finally:
        await store.close()
