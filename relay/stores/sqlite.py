"""The embedded store: one SQLite file, one writer thread with group commit (J1.5).

    sqlite.py             the Store of the protocol: every method hands an operation to a thread
    sqlite_threads.py     the threads: the writer's transactions, the reader's own connection
    sqlite_operations.py  the operations: SQL on a connection
    sqlite_decision.py    those of the decision plane
    sqlite_keys.py        idempotency keys of decides
    sqlite_run_store.py   the RunStore: as sqlite.py, for runs
    sqlite_runs.py        its operations: rows of runs, saved workflows
    sqlite_journal.py     journals: events, texts
    sqlite_run_rows.py    their rows as values, and back
    sqlite_rows.py        rows as values, and back
    sqlite_file.py        the file: made, opened, its errors explained
    schema.py             the schema and its versions

Several processes may use one file; SQLite lets one of them write at a time. What a crash and what
a power cut can take is told in docs/decisions/0007-sqlite-store.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relay.stores import sqlite_decision as decision
from relay.stores import sqlite_keys as keys
from relay.stores import sqlite_operations as operations
from relay.stores.sqlite_file import explain, open_for_reading, open_for_writing
from relay.stores.sqlite_run_store import SqliteRuns
from relay.stores.sqlite_threads import ReaderThread, WriterThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.money import Hold, Progress, Settlement
    from relay.stores.base import (
        KeyClaim,
        KeyUse,
        Notice,
        NoticeOf,
        Org,
        OrgChange,
        StoredKey,
    )


class SqliteStore:
    """A `Store` in the file `path`, which is made with mode 0600 if it is not there.

    Args:
        path: of the file; a relative one belongs to the working directory of now.
        notice_of: makes the notice that is stored with a row; None stores none. Called in the
            writer's thread, so a pure function.
    """

    def __init__(self, path: str | Path, *, notice_of: NoticeOf | None = None) -> None:
        self.path = Path(path).absolute()
        self._notice_of = notice_of
        told = partial(explain, path=self.path)
        self._writer = WriterThread("store-writer", partial(open_for_writing, self.path), told)
        self._reader = ReaderThread("store-reader", partial(open_for_reading, self.path), told)
        self._runs = SqliteRuns(self._writer, self._reader)

    @property
    def runs(self) -> SqliteRuns:
        return self._runs

    async def open(self) -> None:
        try:
            await self._writer.start()
            await self._reader.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        # The writer's connection goes last: a reader that goes last leaves the WAL files behind.
        self._reader.stop()
        await self._reader.close()
        self._writer.stop()
        await self._writer.close()

    # -- orgs and keys --------------------------------------------------------------------------

    async def ensure_org(self, org: Org) -> Org:
        return await self._writer.run(lambda c: operations.ensure_org(c, org))

    async def put_org(self, org: Org) -> None:
        await self._writer.run(lambda c: operations.put_org(c, org))

    async def change_org(self, org_id: str, change: OrgChange) -> Org:
        return await self._writer.run(lambda c: operations.change_org(c, org_id, change))

    async def get_org(self, org_id: str) -> Org | None:
        return await self._reader.run(lambda c: operations.get_org(c, org_id))

    async def add_balance(self, org_id: str, micro_usd: int) -> Org | None:
        return await self._writer.run(lambda c: operations.add_balance(c, org_id, micro_usd))

    async def list_orgs(self) -> list[Org]:
        return await self._reader.run(operations.list_orgs)

    async def create_key(self, key: StoredKey) -> None:
        await self._writer.run(lambda c: operations.create_key(c, key))

    async def revoke_key(self, key_id: str) -> bool:
        return await self._writer.run(lambda c: operations.revoke_key(c, key_id))

    async def list_keys(self) -> list[StoredKey]:
        return await self._reader.run(operations.list_keys)

    async def keys_version(self) -> int:
        return await self._reader.run(operations.keys_version)

    # -- holds and rows -------------------------------------------------------------------------

    async def place_hold(self, hold: Hold) -> bool:
        return await self._writer.run(lambda c: operations.place_hold(c, hold), single=True)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        rows, notice_of = tuple(settlements), self._notice_of
        await self._writer.run(lambda c: operations.settle(c, rows, notice_of))

    async def write_progress(self, progress: Sequence[Progress]) -> None:
        notes = tuple(progress)
        await self._writer.run(lambda c: operations.write_progress(c, notes))

    async def open_holds(self) -> list[Hold]:
        return await self._reader.run(operations.open_holds)

    # -- leases and the sweep -------------------------------------------------------------------

    async def renew_lease(self, worker: str, until: float) -> None:
        await self._writer.run(lambda c: operations.renew_lease(c, worker, until))

    async def end_lease(self, worker: str) -> None:
        await self._writer.run(lambda c: operations.end_lease(c, worker))

    async def sweep(self, now: float, ttl_s: float) -> list[Settlement]:
        notice_of = self._notice_of
        return await self._writer.run(lambda c: operations.sweep(c, now, ttl_s, notice_of))

    async def sweep_run(self, execution_id: str, now: float) -> list[Settlement]:
        notice_of = self._notice_of
        return await self._writer.run(
            lambda c: operations.sweep_run(c, execution_id, now, notice_of)
        )

    # -- decision streams -----------------------------------------------------------------------

    async def lease_stream(
        self, org: str, stream_id: str, *, limit: int, now: float, until: float
    ) -> float | None:
        return await self._writer.run(
            lambda c: decision.lease_stream(c, org, stream_id, limit=limit, now=now, until=until)
        )

    async def renew_stream(self, stream_id: str, *, now: float, until: float) -> bool:
        return await self._writer.run(
            lambda c: decision.renew_stream(c, stream_id, now=now, until=until)
        )

    async def release_stream(self, stream_id: str) -> None:
        await self._writer.run(lambda c: decision.release_stream(c, stream_id))

    async def start_decision(self, org: str, *, now: float, per_minute: float, burst: int) -> float:
        return await self._writer.run(
            lambda c: decision.start_decision(c, org, now=now, per_minute=per_minute, burst=burst)
        )

    # -- idempotency keys of decides --------------------------------------------------------------

    async def claim_key(self, use: KeyUse, *, now: float, until: float) -> KeyClaim:
        return await self._writer.run(lambda c: keys.claim_key(c, use, now=now, until=until))

    async def renew_key(self, use: KeyUse, *, until: float) -> bool:
        return await self._writer.run(lambda c: keys.renew_key(c, use, until=until))

    async def keep_answer(
        self,
        use: KeyUse,
        answer: bytes,
        *,
        until: float,
        forget_at: float,
        progress: Progress | None,
    ) -> bool:
        return await self._writer.run(
            lambda c: keys.keep_answer(
                c, use, answer, until=until, forget_at=forget_at, progress=progress
            )
        )

    async def leave_key(self, use: KeyUse) -> None:
        await self._writer.run(lambda c: keys.leave_key(c, use))

    async def erase_answers(self, now: float) -> None:
        await self._writer.run(lambda c: keys.erase_answers(c, now))

    # -- usage ----------------------------------------------------------------------------------

    async def usage(
        self, *, since: float = 0.0, org: str | None = None, limit: int | None = None
    ) -> list[Settlement]:
        return await self._reader.run(lambda c: operations.usage(c, since, org, limit))

    # -- notices --------------------------------------------------------------------------------

    async def due_notices(self, now: float, limit: int) -> list[Notice]:
        return await self._reader.run(lambda c: operations.due_notices(c, now, limit))

    async def notice_delivered(self, notice_id: str) -> None:
        await self._writer.run(lambda c: operations.notice_delivered(c, notice_id))

    async def postpone_notice(self, notice_id: str, until: float) -> None:
        await self._writer.run(lambda c: operations.postpone_notice(c, notice_id, until))
