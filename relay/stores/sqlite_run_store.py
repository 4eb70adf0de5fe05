"""The `RunStore` in an SQLite file: every method hands an operation to a thread.

What goes in is encoded in the caller's thread, so that it is stored as it was when it was handed
over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from relay.stores import sqlite_journal as journals
from relay.stores import sqlite_runs as runs
from relay.stores.sqlite_journal import rows_of
from relay.stores.sqlite_run_rows import json_text, row_of_end, row_of_new_run

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from relay.stores.runs import (
        Batch,
        JournalPage,
        NewRun,
        RunEnd,
        RunRow,
        StoredEvent,
        StoredText,
        StoredWorkflow,
    )
    from relay.stores.sqlite_journal import Journal
    from relay.stores.sqlite_threads import ReaderThread, WriterThread

T = TypeVar("T")
N = TypeVar("N")


class SqliteRuns:
    """The runs of a `SqliteStore`, whose threads these are."""

    def __init__(self, writer: WriterThread, reader: ReaderThread) -> None:
        self._writer = writer
        self._reader = reader

    # -- saved workflows ------------------------------------------------------------------------

    async def put_workflow(
        self, org: str, workflow_id: str, *, name: str, document: Any, now: float
    ) -> bool:
        stored = json_text(document)
        return await self._writer.run(
            lambda c: runs.put_workflow(c, org, workflow_id, name=name, document=stored, now=now)
        )

    async def get_workflow(self, org: str, workflow_id: str) -> StoredWorkflow | None:
        return await self._reader.run(lambda c: runs.get_workflow(c, org, workflow_id))

    async def delete_workflow(self, org: str, workflow_id: str) -> bool:
        return await self._writer.run(lambda c: runs.delete_workflow(c, org, workflow_id))

    async def list_workflows(self, org: str) -> list[StoredWorkflow]:
        return await self._reader.run(lambda c: runs.list_workflows(c, org))

    # -- rows -----------------------------------------------------------------------------------

    async def create_run(self, run: NewRun, batch: Batch) -> None:
        row, rows = row_of_new_run(run), rows_of(batch)
        document, inputs = json_text(run.document), json_text(run.inputs)
        await self._writer.run(lambda c: runs.create_run(c, row, document, inputs, rows))

    async def get_run(self, execution_id: str) -> RunRow | None:
        return await self._reader.run(lambda c: runs.get_run(c, execution_id))

    async def newest_run(self, org: str, workflow_id: str) -> str | None:
        return await self._reader.run(lambda c: runs.newest_run(c, org, workflow_id))

    async def touch_runs(self, owner: str, now: float) -> None:
        await self._writer.run(lambda c: runs.touch_runs(c, owner, now))

    async def request_cancel(self, execution_id: str, now: float) -> RunRow | None:
        return await self._writer.run(lambda c: runs.request_cancel(c, execution_id, now))

    async def cancels_of(self, owner: str) -> list[str]:
        return await self._reader.run(lambda c: runs.cancels_of(c, owner))

    async def release_runs(self, owner: str) -> None:
        await self._writer.run(lambda c: runs.release_runs(c, owner))

    async def claim_runs(
        self, owner: str, *, now: float, stale_before: float, limit: int
    ) -> list[RunRow]:
        return await self._writer.run(
            lambda c: runs.claim_runs(c, owner, now=now, stale_before=stale_before, limit=limit)
        )

    async def resume_run(
        self,
        execution_id: str,
        *,
        owner: str,
        answer: Any,
        now: float,
        generation: int | None = None,
    ) -> RunRow | None:
        stored = json_text(answer)
        resume = partial(
            runs.resume_run, owner=owner, answer=stored, now=now, generation=generation
        )
        return await self._writer.run(lambda c: resume(c, execution_id))

    # -- the journal ----------------------------------------------------------------------------

    async def append(self, execution_id: str, generation: int, batch: Batch) -> int | None:
        rows = rows_of(batch)
        return await self._writer.run(lambda c: runs.append(c, execution_id, generation, rows))

    async def finish(
        self, execution_id: str, generation: int | None, batch: Batch, end: RunEnd
    ) -> int | None:
        if end.state == "running":
            raise ValueError("a run does not end by running")
        if end.state == "yielded" and end.waits_for is None:
            raise ValueError("a run that yields waits for something")
        rows, ended = rows_of(batch), row_of_end(end)
        return await self._writer.run(
            lambda c: runs.finish(c, execution_id, generation, rows, ended)
        )

    async def read(self, execution_id: str, *, after: int, limit: int) -> JournalPage | None:
        read = partial(journals.read, after=after, limit=limit)
        return await self._reader.run(lambda c: _of(c, execution_id, read, None))

    async def texts(
        self, execution_id: str, *, first: int, last: int, bytes_max: int | None = None
    ) -> list[StoredText]:
        texts = partial(journals.texts, first=first, last=last, bytes_max=bytes_max)
        return await self._reader.run(lambda c: _of(c, execution_id, texts, []))

    async def open_texts(self, execution_id: str, *, at: int) -> list[StoredText]:
        texts = partial(journals.open_texts, at=at)
        return await self._reader.run(lambda c: _of(c, execution_id, texts, []))

    async def steps(self, execution_id: str) -> dict[str, Any]:
        return await self._reader.run(lambda c: _of(c, execution_id, runs.steps, {}))

    async def outline(self, execution_id: str) -> list[StoredEvent]:
        return await self._reader.run(lambda c: _of(c, execution_id, journals.outline, []))

    async def output(self, execution_id: str, task_id: str) -> tuple[Any] | None:
        output = partial(runs.output, task_id=task_id)
        return await self._reader.run(lambda c: _of(c, execution_id, output, None))

    async def outputs(self, execution_id: str) -> dict[str, Any]:
        return await self._reader.run(lambda c: _of(c, execution_id, runs.outputs, {}))

    async def retire_runs(self, before: float, limit: int) -> int:
        for retired in range(limit):
            # One at a time: others may write between two long journals.
            if not await self._writer.run(lambda c: runs.retire_run(c, before)):
                return retired
        return limit


def _of(
    connection: sqlite3.Connection,
    execution_id: str,
    read: Callable[[sqlite3.Connection, Journal], T],
    none: N,
) -> T | N:
    """What `read` finds in the journal of a run, `none` if there is no such run."""
    journal = runs.run_journal(connection, execution_id)
    return none if journal is None else read(connection, journal)
