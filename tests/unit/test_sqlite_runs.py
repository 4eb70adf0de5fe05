"""What runs cost in the SQLite store: keys are sought, no journal is read from its start (J1.1)."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from relay.stores import schema
from relay.stores import sqlite_journal as journals
from relay.stores import sqlite_runs as runs
from relay.stores.runs import Batch
from relay.stores.sqlite import SqliteStore
from relay.stores.sqlite_file import open_for_reading, open_for_writing
from relay.stores.sqlite_journal import find_journal, rows_of
from relay.stores.sqlite_run_rows import row_of_new_run
from tests.contract.values import NOW, event, events, hold, key, new_run, piece, row, run_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from relay.stores.sqlite_journal import Journal

# What a sweep looks at is all that runs now, not all that ever ran.
SCANNED_BY_CLAIMS = "SCAN runs USING INDEX runs_running"
# What of a plan reads no table by itself.
TABLELESS = re.compile(r"((CORRELATED )?SCALAR|REUSE) SUBQUERY \d+|SCAN \d+ CONSTANT ROWS?")


class Traced:
    """The statements that a store runs, as SQLite sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements: set[str] = set()
        for name, connect in (
            ("open_for_writing", open_for_writing),
            ("open_for_reading", open_for_reading),
        ):
            monkeypatch.setattr(f"relay.stores.sqlite.{name}", self._tracing(connect))

    def _tracing(
        self, connect: Callable[[Path], sqlite3.Connection]
    ) -> Callable[[Path], sqlite3.Connection]:
        def traced(path: Path) -> sqlite3.Connection:
            connection = connect(path)
            connection.set_trace_callback(self.statements.add)
            return connection

        return traced

    def plan(self, path: Path) -> dict[str, list[str]]:
        """How SQLite finds what each of them asks for."""
        connection = sqlite3.connect(path)
        plans: dict[str, list[str]] = {}
        for statement in sorted(self.statements):
            if statement.split()[0] in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                steps = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
                plans[" ".join(statement.split())] = [detail for *_, detail in steps]
        connection.close()
        return plans


async def every_call(store: SqliteStore) -> None:
    """Each method of the store of runs, at least once with something to do."""
    runs = store.runs
    await runs.put_workflow("acme", "w", name="w", document={}, now=NOW)
    await runs.put_workflow("acme", "w", name="w", document={}, now=NOW)
    await runs.get_workflow("acme", "w")
    await runs.list_workflows("acme")
    await runs.delete_workflow("acme", "w")
    said = Batch(
        events=[
            event("a", "streaming_started", "t1"),
            event("b", "streaming_started", "t2"),
            event("c", "streaming_completed", "t1"),
        ],
        texts=[piece("a", 0, b"abc"), piece("a", 3, b"def")],
        steps={"s": 1},
        outputs={"t1": 1},
    )
    await runs.create_run(new_run(), said)
    await runs.append("e1", 1, said)
    await runs.get_run("e1")
    await runs.newest_run("acme", "wf_1")
    await runs.touch_runs("worker_1", NOW)
    await runs.request_cancel("e1", NOW)
    await runs.cancels_of("worker_1")
    await runs.release_runs("worker_1")
    await runs.claim_runs("worker_2", now=NOW, stale_before=NOW, limit=9)
    await runs.read("e1", after=1, limit=9)
    await runs.texts("e1", first=1, last=9)
    await runs.open_texts("e1", at=2)
    await runs.steps("e1")
    await runs.outline("e1")
    await runs.output("e1", "t1")
    await runs.outputs("e1")
    await runs.finish("e1", 2, events("x"), run_end("yielded", waits_for={"task_id": "t"}))
    await runs.resume_run("e1", owner="w", answer=1, now=NOW)
    await runs.finish("e1", None, events("y"), run_end(at=NOW))
    await runs.retire_runs(NOW + 1, 9)


async def test_nothing_is_found_by_looking_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEARCH is a seek; of a journal's parts by journal and position, or by what is still open."""
    traced = Traced(monkeypatch)
    store = SqliteStore(tmp_path / "a.db")
    await store.open()
    traced.statements.clear()
    await every_call(store)
    await store.close()
    plans = traced.plan(store.path)
    assert len(plans) > 40
    whole = re.compile(
        r"SELECT position, name, task_id, frame FROM events WHERE journal = \d+ ORDER|DELETE"
    )
    for statement, details in plans.items():
        for detail in details:
            if detail == SCANNED_BY_CLAIMS and statement.startswith("SELECT journal FROM runs"):
                continue
            assert (
                detail.startswith("SEARCH ")
                or TABLELESS.fullmatch(detail)
                or (detail == "USE TEMP B-TREE FOR ORDER BY" and "FROM events" not in statement)
            ), (statement, details)
            if re.match(r"SEARCH (events|texts|text_streams) ", detail):
                seeks_in_it = detail.count("=?") + detail.count("<?") + detail.count(">?") > 1
                assert (
                    seeks_in_it or "INDEX open_text_streams" in detail or whole.match(statement)
                ), (statement, details)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = open_for_writing(tmp_path / "a.db")
    yield opened
    opened.close()


def instructions(connection: sqlite3.Connection, operation: Callable[[], object]) -> int:
    """How many instructions of SQLite's machine an operation takes; no clock tells as exactly."""
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return 0

    connection.set_progress_handler(counted, 1)
    operation()
    connection.set_progress_handler(None, 1)
    return count


def test_an_append_costs_the_same_anywhere(connection: sqlite3.Connection) -> None:
    """J1.1: at position 10 and at 20,000, and so do reads and checkpoints there."""

    def journal() -> Journal:
        found = find_journal(connection, "run/e1")
        assert found is not None
        return found

    def costs(tag: str) -> list[int]:
        head = journal().head
        start = Batch(events=[event(f"{tag}.s", "streaming_started", "t1")])
        end = Batch(events=[event(f"{tag}.e", "streaming_completed", "t1")])
        text = Batch(texts=[piece(f"{tag}.s", 0, b"abc")])
        steps: tuple[Callable[[], Any], ...] = (
            lambda: journals.append(connection, journal(), rows_of(events(f"{tag}.a"))),
            lambda: journals.append(connection, journal(), rows_of(start)),
            lambda: journals.append(connection, journal(), rows_of(text)),
            lambda: journals.open_texts(connection, journal(), at=head + 2),
            lambda: journals.append(connection, journal(), rows_of(end)),
            lambda: journals.open_texts(connection, journal(), at=head + 3),
            lambda: journals.texts(connection, journal(), first=head + 1, last=head + 3),
            lambda: journals.read(connection, journal(), after=head, limit=3),
        )
        return [instructions(connection, step) for step in steps]

    first = rows_of(events(*map(str, range(10))))
    runs.create_run(connection, row_of_new_run(new_run()), "{}", "{}", first)
    early = costs("early")
    connection.execute("BEGIN")
    for n in range(5_000):
        said = Batch(
            events=[
                event(f"{n}.s", "streaming_started", f"t{n}"),
                *(event(f"{n}.{i}") for i in range(2)),
                event(f"{n}.e", "streaming_completed", f"t{n}"),
            ],
            texts=[piece(f"{n}.s", 0, b"abc", f"t{n}")],
        )
        journals.append(connection, journal(), rows_of(said))
    connection.execute("COMMIT")
    assert journal().head > 20_000
    late = costs("late")
    assert late == early
    assert min(early) > 0


async def test_a_database_of_the_release_before_runs_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J1.5: what it holds is kept, and runs can be stored."""
    path = tmp_path / "a.db"
    with monkeypatch.context() as before:
        before.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
        old = SqliteStore(path)
        await old.open()
        stored_key = key("a")
        await old.put_org(stored_key.org)
        await old.create_key(stored_key)
        await old.settle([row("req_1")])
        await old.place_hold(hold("req_2"))
        await old.renew_lease("worker_1", NOW + 15)
        await old.close()
    assert _version(path) == 3
    store = SqliteStore(path)
    await store.open()
    try:
        assert await store.list_keys() == [stored_key]
        assert await store.usage() == [row("req_1")]
        assert await store.open_holds() == [hold("req_2")]
        await store.runs.create_run(new_run(), events("a"))
        claim = store.runs.claim_runs("worker_2", now=NOW, stale_before=0.0, limit=1)
        assert await claim == []  # the lease was kept too
        assert await store.runs.append("e1", 1, events("b")) == 2
    finally:
        await store.close()
    assert _version(path) == len(schema.MIGRATIONS)


def _version(path: Path) -> int:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)
