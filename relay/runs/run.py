"""One run that works in this process, from its claim to its one terminal (W2.3, J1.3).

The engine works in a task of its own; what it returns becomes the terminal here. Whatever races for
that (the end, a cancel, a timeout, another process), `RunStore.finish` decides, and who lost stays
silent.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from relay.engines.base import Completed, Failed, Yielded
from relay.errors import GatewayDraining, GatewayShutdown
from relay.runs.lane import CommittedFrame
from relay.runs.outlet import RunOutlet
from relay.stores.base import StoreError
from relay.stores.runs import JournalEvent, RunEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractContextManager

    from relay.engines.base import Ending, Engine, Envelope, Usage
    from relay.inflight import InFlight
    from relay.runs.hub import Hub
    from relay.stores.runs import RunStore

_log: Final = logging.getLogger("sluicegate.runs")
_RETRY_S: Final = 0.5
_INTERRUPTED_S: Final = 0.1


class Run:
    """One leg of a run.

    Args:
        hub: where it becomes visible; closed with the leg.
        generation: under which this process owns it. slot: held for the length of the leg.
        clock: Unix seconds. waits: told the id of a run that yielded, before `ended` is set.
        tell: told once how its leg ended, for the log.

    Attributes:
        ended: set when nothing more happens here. ending: how it ended, None if it goes on
            elsewhere.
    """

    def __init__(
        self,
        envelope: Envelope,
        engine: Engine,
        store: RunStore,
        hub: Hub,
        inflight: InFlight,
        slot: AbstractContextManager[object],
        *,
        generation: int,
        clock: Callable[[], float],
        waits: Callable[[str], Awaitable[None]],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.envelope = envelope
        self.hub = hub
        self.ended = asyncio.Event()
        self.ending: Ending | None = None
        self._engine = engine
        self._store = store
        self._inflight = inflight
        self._slot = slot
        self._generation = generation
        self._clock = clock
        self._waits = waits
        self._tell = tell
        self._cancelled = self._lost = self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Task[Ending] | None = None
        self._told: list[Callable[[], object]] = []
        self._outlet = RunOutlet(
            store,
            hub,
            execution_id=envelope.execution_id,
            workflow_id=envelope.workflow_id,
            generation=generation,
            started_at=envelope.created_at,
            lost=self._lose,
        )

    @property
    def execution_id(self) -> str:
        """The run's id."""
        return self.envelope.execution_id

    def on_end(self, tell: Callable[[], object]) -> None:
        """Have `tell` called when nothing more happens here, before `ended` is set."""
        self._told.append(tell)

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._main(), name=f"run {self.execution_id}")

    def cancel(self) -> None:
        """End it as cancelled, unless it has ended (W1.2). Idempotent."""
        self._cancelled = True
        self._stop()

    def _lose(self) -> None:
        self._lost = True
        self._stop()

    def _stop(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def park(self) -> None:
        """Stop working on it: another process takes it up. Returns when nothing is left here."""
        self._closing = True
        self._stop()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _main(self) -> None:
        try:
            with self._slot:
                await self._to_its_end()
        except Exception:  # noqa: BLE001  its clients are let go, and another process finds it
            _log.exception("run %s failed", self.execution_id)
            self._outlet.abandon()
        finally:
            self.hub.close(complete=False)  # unless it is closed
            for tell in self._told:
                tell()
            self.ended.set()

    async def _to_its_end(self) -> None:
        try:
            ending = await self._supervised()
        except (GatewayShutdown, GatewayDraining):
            self._closing = True
            ending = None
        if self._lost:
            _log.warning("run %s is another process's now", self.execution_id)
            self._outlet.abandon()
        elif ending is not None:
            await self._end(ending)
            if isinstance(ending, Yielded):
                await self._patiently(lambda: self._waits(self.execution_id))
            elif self._cancelled:
                await self._engine.cancelled(self.execution_id)
        else:
            await self._give_up()

    async def _work_and_seal(self) -> Ending:
        ending = await self._engine.run(self.envelope, self._outlet)
        self._outlet.seal()  # what it said last is made durable together with its end
        return ending

    async def _supervised(self) -> Ending | None:
        """Let the engine work; None: it was stopped, and the run goes on elsewhere."""
        with self._inflight.request():
            async with self._inflight.interruptible():
                self._work = asyncio.create_task(self._work_and_seal())
                if self._cancelled or self._closing or self._lost:
                    self._work.cancel()
                try:
                    await asyncio.wait({self._work})
                except asyncio.CancelledError:  # the end of a grace
                    # Calls are ended by it themselves, and know why; the rest is stopped behind.
                    await asyncio.wait({self._work}, timeout=_INTERRUPTED_S)
                    self._work.cancel()
                    await asyncio.wait({self._work})
                    raise
        work = self._work
        if work.cancelled():
            if self._cancelled and not self._lost:
                return Failed(
                    code="cancelled",
                    message="the run was cancelled",
                    summary=self._outlet.summary,
                    usage=self._outlet.usage,
                )
            return None
        bug = work.exception()
        if bug is None:
            return work.result()
        if isinstance(bug, GatewayShutdown):
            raise bug
        _log.error("the engine failed in run %s", self.execution_id, exc_info=bug)
        return Failed(
            code="engine_error",
            message="the engine failed; the gateway's operator can see why",
            summary=self._outlet.summary,
            usage=self._outlet.usage,
        )

    async def _give_up(self) -> None:
        """Make durable what was said; the row is given up by the service."""
        batch = await self._outlet.close()
        batch = replace(batch, steps={**batch.steps, **self._outlet.unsaid})
        first = await self._patiently(
            lambda: self._store.append(self.execution_id, self._generation, batch)
        )
        if first is not None:
            self._outlet.publish(first)

    async def _end(self, ending: Ending) -> None:
        batch = await self._outlet.close()
        now = self._clock()
        summary = summary_of(ending.summary, ending.usage, now - self.envelope.created_at)
        terminal = [
            JournalEvent(event_id=f"{self._generation}.{name}", name=name, frame=frame)
            for name, frame in self._last_frames(ending, summary)
        ]
        whole = replace(batch, events=[*batch.events, *terminal])
        end = row_end(ending, now, summary)
        first = await self._patiently(
            lambda: self._store.finish(self.execution_id, self._generation, whole, end)
        )
        if first is None:
            _log.info("run %s was ended by another", self.execution_id)
            return
        frames = [
            CommittedFrame(at, event)
            for at, event in enumerate(terminal, first + len(batch.events))
        ]
        self._outlet.publish(first, frames, final=not isinstance(ending, Yielded))
        self.ending = ending
        self.hub.close(complete=True)
        error = error_of(ending) if isinstance(ending, Failed) else {}
        fields = {
            "execution_id": self.execution_id,
            "org": self.envelope.payer.org,
            "plane": self.envelope.plane,
            "status": end.state,
            "error_code": error.get("code"),
            "error": error.get("message"),
            "tasks_completed": summary["completed"],
            "tasks_failed": summary["failed"],
            "duration_ms": summary["duration_ms"],
        }
        self._tell({name: value for name, value in fields.items() if value is not None})

    async def _patiently(self, write: Callable[[], Any]) -> int | None:
        while True:
            try:
                done: int | None = await write()
            except StoreError as error:
                _log.warning("run %s waits for its store: %s", self.execution_id, error)
                await asyncio.sleep(_RETRY_S)
            else:
                return done

    def _last_frames(self, ending: Ending, summary: dict[str, Any]) -> list[tuple[str, bytes]]:
        made = [
            (name, self._outlet.made(name, data))
            for name, data in last_events(ending, self.execution_id, summary)
        ]
        said = list(ending.verbatim)
        if said and said[-1][0] != made[-1][0]:  # the engine ended without its `workflow_result`
            said.append(made[-1])
        return said or made


def summary_of(counts: Mapping[str, int], usage: Usage, took_s: float) -> dict[str, Any]:
    """Return an `execution_summary`."""
    return {
        **{name: counts.get(name, 0) for name in ("tasks", "completed", "failed", "skipped")},
        "duration_ms": max(0, round(took_s * 1000)),
        "usage": usage.document(),
    }


def last_events(
    ending: Ending, execution_id: str, summary: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the outcome and `workflow_result`, names and data (W2.3)."""
    if isinstance(ending, Completed):
        final = ending.final_task_id
        result: dict[str, Any] = {"status": "completed"}
        if final is not None:
            result["final_task_id"] = final
            result["result_url"] = result_url(execution_id, final)
        outcome = {"final_task_id": final, "execution_summary": summary}
        return [("workflow_completed", outcome), ("workflow_result", result)]
    if isinstance(ending, Failed):
        outcome = {"error": error_of(ending)}
        return [("workflow_error", outcome), ("workflow_result", {"status": _state(ending)})]
    return [("workflow_result", {"status": "yielded"})]


def _state(failed: Failed) -> Literal["cancelled", "failed"]:
    return "cancelled" if failed.code == "cancelled" else "failed"


def error_of(failed: Failed) -> dict[str, Any]:
    """The `error` of events and rows."""
    error = {"code": failed.code, "message": failed.message}
    if failed.task_id is not None:
        error["task_id"] = failed.task_id
    return error


def result_url(execution_id: str, task_id: str) -> str:
    """Where a task's output is read (W1.3)."""
    return f"/v1/workflows/results/{execution_id}/{task_id}"


def row_end(ending: Ending, at: float, summary: dict[str, Any]) -> RunEnd:
    """What an ending makes of the run's row. `at`: Unix seconds."""
    if isinstance(ending, Completed):
        final = ending.final_task_id
        return RunEnd(
            state="completed", at=at, final_task_id=final, summary=summary, usage=summary["usage"]
        )
    if isinstance(ending, Failed):
        return RunEnd(
            state=_state(ending),
            at=at,
            error=error_of(ending),
            summary=summary,
            usage=summary["usage"],
        )
    waits = {"task_id": ending.task_id, "prompt": ending.prompt, "schema": ending.schema}
    return RunEnd(state="yielded", at=at, summary=summary, usage=summary["usage"], waits_for=waits)
