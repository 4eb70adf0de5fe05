"""All runs of this process: begun, cancelled, answered, taken over, followed (W1, W2.5, J1.3).

A run belongs to the worker that its row names, and the worker's lease says whether it lives. Every
process looks for rows that nobody works on; what was going on in a process that died goes on in
another, or in the same one after its restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import Envelope
from relay.periodic import Periodic
from relay.runs.hub import Hub
from relay.runs.places import Places
from relay.runs.run import Run
from relay.runs.takeover import CANCELLED, end_row, envelope_of, hopeless
from relay.stores.base import StoreError
from relay.stores.runs import ENDED, Batch, NewRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import ExitStack

    from relay.engines.base import Engine, Payer, Source
    from relay.inflight import InFlight
    from relay.money import Settlement
    from relay.slots import Slots
    from relay.stores.runs import RunRow, RunStore

_log: Final = logging.getLogger("sluicegate.runs")

CLAIM_EVERY_S: Final = 2.0
CANCELS_EVERY_S: Final = 0.5
TOUCH_EVERY_S: Final = 60.0
RETIRE_EVERY_S: Final = 3600.0
_CLAIMS: Final = 32
_RETIRED_AT_ONCE: Final = 50
_STOP_S: Final = 5.0
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a run begins with; its document was checked.

    Attributes:
        max_concurrent: of its org: a run holds one of its slots until it ends.
    """

    execution_id: str
    workflow_id: str
    name: str
    document: str | Mapping[str, Any]
    inputs: Mapping[str, Any]
    source: Source
    payer: Payer
    plane: str
    max_concurrent: int | None = None


class RunService:
    """See the module.

    Args:
        engines: by plane. owner: names this worker in rows, as in its lease.
        orphan_after_s: silence of a row that makes it an orphan (W2.5).
        retention_days: of journals and outputs. runs_max: at once in this process.
        sweep: settles what the calls of a run hold whose process was lost; the rows of its calls.
        tell: of each run that has ended, for the log.
    """

    def __init__(
        self,
        store: RunStore,
        engines: Mapping[str, Engine],
        inflight: InFlight,
        slots: Slots,
        *,
        owner: str,
        orphan_after_s: float,
        retention_days: float,
        runs_max: int,
        sweep: Callable[[str], Awaitable[Sequence[Settlement]]],
        tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._engines = engines
        self._inflight = inflight
        self._places = Places(slots, runs_max)
        self._owner = owner
        self._orphan_after_s = orphan_after_s
        self._retention_s = retention_days * _DAY_S
        self._sweep = sweep
        self._tell = tell
        self._clock = clock
        self._started = False
        self._runs: dict[str, Run] = {}
        self._beginning: set[asyncio.Task[Run]] = set()
        self._periodic = (
            Periodic("take over runs", self.take_over, CLAIM_EVERY_S, at_once=True),
            Periodic("look for cancels", self._obey, CANCELS_EVERY_S),
            Periodic("touch runs", self._touch, min(TOUCH_EVERY_S, orphan_after_s / 5)),
            Periodic("retire runs", self._retire, RETIRE_EVERY_S, at_once=True),
        )

    @property
    def running(self) -> int:
        """Runs that work in this process."""
        return len(self._runs)

    @property
    def followers(self) -> int:
        """Clients that follow runs of this process live."""
        return sum(run.hub.listeners for run in [*self._runs.values()])

    def engine(self, plane: str) -> Engine:
        """The engine of a plane."""
        return self._engines[plane]

    def local(self, execution_id: str) -> Run | None:
        """Return a run that works in this process."""
        return self._runs.get(execution_id)

    def hub(self, execution_id: str) -> Hub | None:
        """Return the live end of a run that works in this process."""
        run = self._runs.get(execution_id)
        return run.hub if run is not None else None

    async def start(self) -> None:
        """Begin; the store is open and the lease of this worker is taken."""
        self._started = True
        for periodic in self._periodic:
            periodic.start()

    async def close(self) -> None:
        """Park what still runs, and give it up. Comes before the lease is given up."""
        if self._started:
            await self._stop()
        for engine in {id(engine): engine for engine in self._engines.values()}.values():
            await engine.close()

    async def _stop(self) -> None:
        self._started = False
        for periodic in self._periodic:
            await periodic.close()
        if self._beginning:
            await asyncio.wait(self._beginning)
        parked = [asyncio.ensure_future(run.park()) for run in self._runs.values()]
        if parked:
            _, late = await asyncio.wait(parked, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*parked, return_exceptions=True)
        try:
            await self.store.release_runs(self._owner)
        except StoreError as error:  # its lease runs out all the same
            _log.warning("the runs of this process could not be given up: %s", error)

    # -- begin, answer, cancel -------------------------------------------------------------------

    async def begin(
        self, beginning: Beginning, on_hub: Callable[[Hub], None], *, only_for_caller: bool = False
    ) -> Run:
        """Store a run and start it. One whose caller is cancelled meanwhile begins all the same.

        Args:
            on_hub: called before anything is said, to follow from the first frame (B92).
            only_for_caller: it is cancelled then, once it has begun (A1.6).

        Raises:
            RunsFull, ConcurrencyExceeded: nothing was started. StoreError: likewise.
        """
        org, limit = beginning.payer.org, beginning.max_concurrent
        slot = self._places.take(org, beginning.execution_id, limit)
        work = self._begin(beginning, on_hub, slot)
        return await self._owned(work, only_for_caller=only_for_caller)

    async def _owned(self, work: Any, *, only_for_caller: bool = False) -> Run:
        task: asyncio.Task[Run] = asyncio.ensure_future(work)
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if only_for_caller:
                task.add_done_callback(_cancel_begun)
            raise

    def _begun(self, task: asyncio.Task[Run]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _begin(
        self,
        beginning: Beginning,
        on_hub: Callable[[Hub], None],
        slot: ExitStack,
    ) -> Run:
        now = self._clock()
        payer = beginning.payer
        new = NewRun(
            execution_id=beginning.execution_id,
            workflow_id=beginning.workflow_id,
            org=payer.org,
            key_id=payer.key_id,
            trial=payer.trial,
            plane=beginning.plane,
            name=beginning.name,
            source=beginning.source,
            document=beginning.document,
            inputs=beginning.inputs,
            owner=self._owner,
            created_at=now,
        )
        try:
            await self.store.create_run(new, Batch())
        except BaseException:
            slot.close()
            raise
        envelope = Envelope(
            execution_id=beginning.execution_id,
            workflow_id=beginning.workflow_id,
            document=beginning.document,
            inputs=beginning.inputs,
            source=beginning.source,
            payer=payer,
            created_at=now,
            plane=beginning.plane,
        )
        return self._start(envelope, head=0, generation=1, slot=slot, on_hub=on_hub)

    async def resume(
        self,
        row: RunRow,
        answer: Any,
        on_hub: Callable[[Hub], None],
        *,
        max_concurrent: int | None,
    ) -> Run | None:
        """Answer a run that waits, and start its next leg (W2.3); None if it waits no longer.

        Raises:
            RunsFull, ConcurrencyExceeded, StoreError: nothing was done.
        """
        slot = self._places.take(row.org, row.execution_id, max_concurrent)

        async def go_on() -> Run | None:
            try:
                now = self._clock()
                resumed = await self.store.resume_run(
                    row.execution_id,
                    owner=self._owner,
                    answer=answer,
                    now=now,
                    generation=row.generation,
                )
                if resumed is None:
                    slot.close()
                    return None
                envelope = await envelope_of(self.store, resumed)
            except BaseException:
                slot.close()
                raise
            return self._start(
                envelope,
                head=resumed.head,
                generation=resumed.generation,
                slot=slot,
                on_hub=on_hub,
            )

        return await self._owned(go_on())

    def _start(
        self,
        envelope: Envelope,
        *,
        head: int,
        generation: int,
        slot: ExitStack,
        on_hub: Callable[[Hub], None] | None = None,
    ) -> Run:
        hub = Hub(head)
        run = Run(
            envelope,
            self._engines[envelope.plane],
            self.store,
            hub,
            self._inflight,
            slot,
            generation=generation,
            clock=self._clock,
            waits=self._end_if_cancelled,
            tell=self._tell,
        )
        self._runs[envelope.execution_id] = run
        run.on_end(lambda: self._runs.pop(envelope.execution_id, None))
        if on_hub is not None:
            on_hub(hub)
        run.start()
        return run

    async def cancel(self, row: RunRow) -> RunRow | None:
        """Ask for the end of a run; return its row afterwards (W1.2). Idempotent.

        A run of this process has ended when this returns, one of another process soon.
        """
        asked = await self.store.request_cancel(row.execution_id, self._clock())
        if asked is None or asked.state in ENDED:
            return asked
        run = self._runs.get(row.execution_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()
        await self._end_if_cancelled(row.execution_id)  # it may have begun to wait just then
        return await self.store.get_run(row.execution_id)

    async def _end_if_cancelled(self, execution_id: str) -> None:
        """End a run that waits if its end was asked for, before or after it began to wait."""
        row = await self.store.get_run(execution_id)
        if row is not None and row.state == "yielded" and row.cancel_requested:
            await end_row(self.store, row, CANCELLED, self._clock())
            await self._engines[row.plane].cancelled(execution_id)

    # -- runs that nobody works on ---------------------------------------------------------------

    async def take_over(self) -> None:
        """Take up runs that were left by their processes (W2.5)."""
        room = self._places.free
        if self._inflight.draining or not room:
            return
        now = self._clock()
        rows = await self.store.claim_runs(
            self._owner,
            now=now,
            stale_before=now - self._orphan_after_s,
            limit=min(room, _CLAIMS),
        )
        for row in rows:
            try:
                await self._take_up(row)
            except StoreError:  # it is found again when it is stale
                _log.exception("run %s could not be taken up", row.execution_id)

    async def _take_up(self, row: RunRow) -> None:
        old = self._runs.get(row.execution_id)
        if old is not None:  # it stands still here; its generation is over
            await old.park()
        calls = await self._sweep(row.execution_id)
        failed = hopeless(row, self._engines.get(row.plane))
        if failed is not None:
            _log.warning("run %s is ended: %s", row.execution_id, failed.message)
            await end_row(self.store, row, failed, self._clock(), calls)
            if row.plane in self._engines:
                await self._engines[row.plane].cancelled(row.execution_id)
            return
        _log.warning("run %s was left by its process; it goes on here", row.execution_id)
        envelope = replace(await envelope_of(self.store, row, calls), left=True)
        slot = self._places.take_over(row.org, row.execution_id)
        self._start(envelope, head=row.head, generation=row.generation, slot=slot)

    async def _obey(self) -> None:
        if not self._runs:
            return
        for execution_id in await self.store.cancels_of(self._owner):
            run = self._runs.get(execution_id)
            if run is not None:
                run.cancel()

    async def _touch(self) -> None:
        if self._runs:
            await self.store.touch_runs(self._owner, self._clock())

    async def _retire(self) -> None:
        before = self._clock() - self._retention_s
        while await self.store.retire_runs(before, _RETIRED_AT_ONCE):
            pass  # a part at a time, so that others have their turn at the database


def _cancel_begun(task: asyncio.Task[Run]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()
