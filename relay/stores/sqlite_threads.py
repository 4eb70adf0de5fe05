"""Threads that own an SQLite connection, so that the event loop never waits for a disk (J1.5).

    call ──accepted──▶ queue ──▶ thread: operation(connection) ──▶ the caller's future

The thread is given what one turn of the loop accepts at once.

`ReaderThread` runs one operation after another; `WriterThread` runs all that waits in one
transaction (group commit). What was accepted is done, in the order of acceptance, also if its
caller was cancelled meanwhile or the thread is being closed: a caller that left only does not
hear of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from relay.stores.base import StoreError
from relay.stores.sqlite_file import begin, roll_back

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# Far more than a healthy disk lets wait. Beyond it the disk is the problem, and the memory that
# its queue takes must not become the next one.
QUEUE_MAX: Final = 10_000
# Bounds how long one transaction keeps other processes from writing.
BATCH_MAX: Final = 1_000
# An event loop that is never idle lets go of the interpreter again and again, but for a moment that
# is too short for another thread to wake up in; and a thread insists on its turn only after a whole
# interval without such a moment. With Python's 5 ms an operation then took up to 36 s.
SWITCH_INTERVAL_S: Final = 0.0002


@dataclass(slots=True)
class _Job:
    """One accepted operation and what came of it.

    Attributes:
        single: it is one statement: SQLite itself undoes it if it fails.
    """

    operation: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    single: bool = False
    result: Any = None
    error: Exception | None = None


class ConnectionThread(ABC):
    """One thread and its connection.

    Attributes:
        batch_max: how many operations are taken at once; all of them end before one is told.

    Args:
        name: of the thread.
        connect: opens the connection; called in the thread.
        explain: makes a StoreError of whatever was raised.
    """

    batch_max: ClassVar[int] = 1

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        explain: Callable[[Exception], StoreError],
        *,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._name = name
        self._connect = connect
        self._explain = explain
        self._queue_max = queue_max
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._accepted: list[_Job] = []  # not handed over yet
        self._handing: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepts = False
        self._stopping = False
        self._end_seen = False  # the thread's own
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Open the connection; once.

        Raises:
            StoreError: it cannot be opened; the thread has ended.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._loop = asyncio.get_running_loop()
        opened = _Job(_nothing, self._loop.create_future())
        # A daemon: a process that ends without `close` must not hang on it.
        self._thread = threading.Thread(
            target=self._main, args=(opened,), name=self._name, daemon=True
        )
        self._thread.start()
        await opened.future
        self._accepts = not self._stopping

    async def run(
        self,
        operation: Callable[[sqlite3.Connection], T],
        *,
        single: bool = False,
    ) -> T:
        """Run an operation in the thread and return its result.

        Args:
            single: it is one statement, which needs nothing around it to be undone.

        Raises:
            StoreError: it failed, and nothing of it was done; or it was not accepted.
        """
        if not self._accepts or self._loop is None:
            raise StoreError("the store is closed, or was not opened")
        if self._queue.qsize() + len(self._accepted) >= self._queue_max:
            raise StoreError(
                f"{self._queue_max} operations wait for the database already: it is too slow, or "
                "stuck; check its disk"
            )
        job = _Job(operation, self._loop.create_future(), single)
        self._accepted.append(job)
        if self._handing is None:
            # With all that this turn of the loop brings: to wake a thread is dear.
            self._handing = self._loop.call_soon(self._hand_over)
        result: T = await job.future
        return result

    def _hand_over(self) -> None:
        """Give the thread all that was accepted, in order."""
        if self._handing is not None:
            self._handing.cancel()
            self._handing = None
        for job in self._accepted:
            self._queue.put(job)
        self._accepted.clear()

    def stop(self) -> None:
        """Refuse new operations; those accepted are still run, then the connection is closed."""
        self._accepts = False
        if not self._stopping:
            self._stopping = True
            self._hand_over()
            self._queue.put(None)

    async def close(self) -> None:
        """Finish what was accepted and close the connection. Idempotent."""
        self.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # -- in the thread --------------------------------------------------------------------------

    def _main(self, opened: _Job) -> None:
        try:
            connection = self._connect()
        except Exception as error:  # noqa: BLE001  the one who waits for `start` is told
            self._fail([opened], error)
            self._deliver([opened])
            return
        self._deliver([opened])
        try:
            while batch := self._next():
                try:
                    self._work(connection, batch)
                except Exception as error:  # noqa: BLE001  the thread outlives any batch
                    self._fail(batch, error)
                self._deliver(batch)
        finally:
            connection.close()

    def _next(self) -> list[_Job]:
        """Wait for an operation; return all that are there by then, none at the end."""
        batch: list[_Job] = []
        if self._end_seen:
            return batch
        job = self._queue.get()
        while job is not None:
            batch.append(job)
            if len(batch) == self.batch_max:
                return batch
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return batch
        self._end_seen = True
        return batch

    @abstractmethod
    def _work(self, connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
        """Run a batch; put down a result or an error for each job, or raise for all."""

    def _attempt(self, connection: sqlite3.Connection, job: _Job) -> None:
        try:
            job.result = job.operation(connection)
        except Exception as error:  # noqa: BLE001  it is for its own caller
            job.error = self._explain(error)

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> None:
        explained = str(self._explain(error))
        for job in jobs:
            # One for each: an exception that several tasks raise collects all their tracebacks.
            job.error = StoreError(explained)
            job.error.__cause__ = error

    def _deliver(self, jobs: Sequence[_Job]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_complete, jobs)


class ReaderThread(ConnectionThread):
    """Runs one operation after another, each in a transaction: it sees one state of the database,
    however many statements it has.
    """

    def _work(self, connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
        for job in batch:
            connection.execute("BEGIN")
            try:
                self._attempt(connection, job)
            finally:
                roll_back(connection)


class WriterThread(ConnectionThread):
    """Runs all that waits in one transaction; each operation can be undone for itself.

    A failing operation is undone and fails its own caller only. Everyone is told after the
    commit; if that fails, nothing was done and everyone is told so.
    """

    batch_max = BATCH_MAX

    def _work(self, connection: sqlite3.Connection, batch: Sequence[_Job]) -> None:
        try:
            roll_back(connection)  # of a batch whose own did not work
            begin(connection)
            alone = True  # nothing of another is in the transaction
            for job in batch:
                self._undoable(connection, job, alone=alone)
                alone = alone and job.error is not None
            connection.execute("COMMIT")
        except Exception:
            roll_back(connection)
            raise

    def _undoable(self, connection: sqlite3.Connection, job: _Job, *, alone: bool) -> None:
        """Run one operation; if it fails, nothing of it is left in the transaction."""
        in_savepoint = not (alone or job.single)
        if in_savepoint:
            connection.execute("SAVEPOINT operation")
        self._attempt(connection, job)
        if job.error is not None:
            if not connection.in_transaction:
                # Disk full and the like: SQLite has undone the whole transaction.
                raise job.error
            if in_savepoint:
                connection.execute("ROLLBACK TO operation")
            elif alone:
                connection.execute("ROLLBACK")
                begin(connection)
        if in_savepoint:
            connection.execute("RELEASE operation")


def _nothing(_connection: sqlite3.Connection) -> None:
    pass


def _complete(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue  # its caller was cancelled
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
