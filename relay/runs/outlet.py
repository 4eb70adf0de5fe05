"""What an engine says, made durable and visible: the `Outlet` of one run (W2.1, W2.2, J1.4).

One task of its own, the flusher, hands to the store whatever has gathered: frames that come while
an append runs go in the next one together. A store that fails is tried again with the same batch,
whose event ids make that harmless (J1.2).
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from encoders import workflow
from relay.engines.base import Usage
from relay.runs.lane import CHECKPOINT_WAIT_S, Lane
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.runs.hub import Hub
    from relay.runs.lane import Leaving
    from relay.stores.runs import Batch, RunStore

_log: Final = logging.getLogger("sluicegate.runs")
_RETRY_FIRST_S: Final = 0.05
_RETRY_MAX_S: Final = 2.0


class RunOutlet:
    """See `relay.engines.base.Outlet`.

    Args:
        started_at: Unix seconds of the run's beginning, for `elapsed_ms`.
        lost: called once, when the run turns out to be somebody else's.

    Attributes:
        summary, usage: what a run came to whose engine was stopped (`came_to`). unsaid: a step of
            what no other step tells of that usage.
    """

    def __init__(
        self,
        store: RunStore,
        hub: Hub,
        *,
        execution_id: str,
        workflow_id: str,
        generation: int,
        started_at: float,
        lost: Callable[[], None],
    ) -> None:
        self._store = store
        self._hub = hub
        self._execution_id = execution_id
        self._frames = workflow.RunFrames(workflow_id, execution_id)
        self._generation = generation
        self._started_at = started_at
        self._lost: Callable[[], None] | None = lost  # not kept longer: who is told holds us
        self.summary: Mapping[str, Any] = {}
        self.usage = Usage()
        self.unsaid: Mapping[str, Any] = {}
        self._lane = Lane(generation)
        self._work = asyncio.Event()
        self._moved = asyncio.Event()  # set and replaced whenever the store has caught up a bit
        self._checkpoint: asyncio.TimerHandle | None = None  # the store is given text then
        self._closed = False
        self._flusher = asyncio.create_task(self._flush(), name=f"journal {execution_id}")

    # -- said by the engine -----------------------------------------------------------------------

    def emit(
        self, name: str, data: Mapping[str, Any], *, steps: Mapping[str, Any] | None = None
    ) -> None:
        if self._closed:
            return
        task_id = data.get("task_id")
        self._lane.emit(
            name, self.made(name, data), task_id if isinstance(task_id, str) else "", steps
        )
        self._work.set()

    def frame(
        self, name: str, frame: bytes, task_id: str = "", *, steps: Mapping[str, Any] | None = None
    ) -> None:
        if self._closed:
            return
        self._lane.emit(name, frame, task_id, steps)
        self._work.set()

    def token(self, task_id: str, raw: bytes) -> bool:
        if self._closed:
            return True
        text = self._lane.token(task_id, raw)
        if text is not None:
            self._hub.publish([text])
        lane = self._lane
        if lane.has_work:
            if not lane.can_wait:
                self._work.set()
            elif self._checkpoint is None:
                loop = asyncio.get_running_loop()
                self._checkpoint = loop.call_later(CHECKPOINT_WAIT_S, self._work.set)
        return not lane.full

    def came_to(self, summary: Mapping[str, Any], usage: Usage, *, unsaid: Usage) -> None:
        self.summary, self.usage = summary, usage
        if unsaid != Usage():
            self.unsaid = {f"unsaid/{self._generation}": {"usage": unsaid.step()}}

    async def ready(self) -> None:
        while self._lane.full and not self._closed:
            await self._moved.wait()

    async def settled(self) -> None:
        self._work.set()  # text that waits for more is wanted now
        while not self._lane.idle and not self._closed:
            await self._moved.wait()

    def made(self, name: str, data: Mapping[str, Any]) -> bytes:
        """Return one frame of ours."""
        return frame_of(self._frames, name, data, started_at=self._started_at, now=time.time())

    # -- the end ----------------------------------------------------------------------------------

    def seal(self) -> None:
        """Take nothing more, and give nothing more to the store: what is not durable yet is for
        the terminal's transaction (`close`). Idempotent.
        """
        self._closed = True
        self._stop_checkpoint()

    async def close(self) -> Batch:
        """Return what is not durable yet, for the terminal's transaction.

        An append that runs is waited for. Not called twice.
        """
        self.seal()
        self._moved.set()
        self._work.set()
        await asyncio.wait({self._flusher})
        self._lost = None
        return self._lane.take(last=True)

    def publish(self, first: int, then: Sequence[Leaving] = (), *, final: bool = False) -> None:
        """What `close` returned is durable, from this position on.

        Args:
            then: what leaves behind it. final: as for `Hub.publish`.
        """
        self._hub.publish([*self._lane.committed(first), *then], final=final)

    def abandon(self) -> None:
        """The run goes on elsewhere: nothing more is written. Idempotent."""
        self.seal()
        self._moved.set()
        self._flusher.cancel()
        self._lost = None

    # -- the flusher ------------------------------------------------------------------------------

    async def _flush(self) -> None:
        try:
            while not self._closed:
                await self._work.wait()
                self._work.clear()
                while self._lane.has_work and not self._closed:
                    self._stop_checkpoint()
                    first = await self._append(self._lane.take())
                    if first is None:
                        self._lose()
                        return
                    self._hub.publish(self._lane.committed(first))
                    moved, self._moved = self._moved, asyncio.Event()
                    moved.set()
        except Exception:  # noqa: BLE001  the run is told, whatever it was
            _log.exception("the journal of run %s failed", self._execution_id)
            self._lose()

    def _stop_checkpoint(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.cancel()
            self._checkpoint = None

    def _lose(self) -> None:
        self.seal()
        self._moved.set()
        if self._lost is not None:
            self._lost()

    async def _append(self, batch: Batch) -> int | None:
        delay_s = _RETRY_FIRST_S
        while True:
            try:
                return await self._store.append(self._execution_id, self._generation, batch)
            except StoreError as error:
                _log.warning("run %s waits for its journal: %s", self._execution_id, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)


def frame_of(
    frames: workflow.RunFrames,
    name: str,
    data: Mapping[str, Any],
    *,
    started_at: float,
    now: float,
) -> bytes:
    """Return one frame of ours (W2.1). Times are Unix seconds."""
    elapsed_ms = max(0, round((now - started_at) * 1000))
    return frames.frame(name, data, timestamp=timestamp(now), elapsed_ms=elapsed_ms)


def timestamp(at: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    second, micro = divmod(round(at * 1e6), 1_000_000)
    return f"{_to_the_second(second)}.{micro // 1000:03}Z"


@lru_cache(maxsize=4)
def _to_the_second(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().removesuffix("+00:00")
