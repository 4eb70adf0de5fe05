"""Runs without a gateway: a scripted engine, a real store, clients that are lists of bytes."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from encoders.sse import SseDecoder, SseEvent
from relay.engines.base import Checked, Completed, Payer
from relay.inflight import InFlight
from relay.runs.service import Beginning, RunService
from relay.slots import Slots
from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet

PAYER = Payer(org="acme", key_id="key_1")


class ScriptedEngine:
    """Does what a test says."""

    def __init__(self, play: Callable[[Envelope, Outlet], Awaitable[Ending]]) -> None:
        self._play = play
        self.told: list[str] = []

    def check(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Checked:
        return Checked(name="scripted", task_count=1, inputs=inputs)

    async def run(self, envelope: Envelope, outlet: Outlet) -> Ending:
        return await self._play(envelope, outlet)

    async def cancelled(self, execution_id: str) -> None:
        self.told.append(execution_id)

    async def close(self) -> None:
        pass


class ListSink:
    """A client: it takes everything at once, or nothing while `stuck`."""

    def __init__(self) -> None:
        self.data = b""
        self.writes = 0
        self.stuck = False
        self.ended = False  # nothing may come any more
        self.unread = 0  # bytes, of what came while it was stuck
        self._taking = asyncio.Event()

    def push(self, data: bytes) -> bool:
        assert not self.ended
        self.data += data
        self.writes += 1
        if self.stuck:
            self.unread += len(data)
        return not self.stuck

    def last(self, data: bytes) -> bool:
        ready = self.push(data)
        self.ended = True
        return ready

    async def drain(self) -> None:
        while self.stuck:
            self._taking.clear()
            await self._taking.wait()

    def waiting(self) -> int:
        return self.unread

    def take(self) -> None:
        """Read again."""
        self.stuck = False
        self.unread = 0
        self._taking.set()

    @property
    def events(self) -> list[SseEvent]:
        return SseDecoder().feed(self.data)

    @property
    def names(self) -> list[str]:
        return [event.event.decode() for event in self.events]


@asynccontextmanager
async def service_over(
    path: Path,
    engine: ScriptedEngine,
    *,
    owner: str = "worker_a",
    lease_until: float = 4e9,
    **settings: Any,
) -> AsyncIterator[RunService]:
    """A service over the store at `path`; `lease_until`: 0 for a process that seems dead."""
    store = SqliteStore(path)
    await store.open()
    service = RunService(
        store.runs,
        {"workflows": engine},
        settings.pop("inflight", None) or InFlight(),
        Slots(),
        owner=owner,
        sweep=lambda execution_id: store.sweep_run(execution_id, time.time()),
        **{"orphan_after_s": 300.0, "retention_days": 30.0, "runs_max": 100, **settings},
    )
    try:
        await store.renew_lease(owner, lease_until)
        await service.start()
        yield service
    finally:
        await service.close()
        await store.close()


def beginning(**changes: Any) -> Beginning:
    execution_id = secrets.token_hex(16)
    values: dict[str, Any] = {
        "execution_id": execution_id,
        "workflow_id": f"wf_{execution_id[:24]}",
        "name": "scripted",
        "document": "workflow: {}",
        "inputs": {},
        "source": "inline",
        "payer": PAYER,
        "plane": "workflows",
    }
    return Beginning(**{**values, **changes})


async def done(_: Envelope, outlet: Outlet) -> Ending:
    """One task that says hello."""
    outlet.emit("workflow_started", {"inputs": {}})
    outlet.emit("task_dispatched", {"task_id": "t1", "kind": "task", "attempt": 1})
    outlet.emit("streaming_started", {"task_id": "t1", "model": "m", "provider": "p"})
    for piece in (b"hel", b"lo ", b"you"):
        outlet.token("t1", piece)
        await asyncio.sleep(0)
    outlet.emit("streaming_completed", {"task_id": "t1", "chars": 9, "finish_reason": "stop"})
    outlet.emit(
        "task_completed",
        {"task_id": "t1", "kind": "task"},
        steps={"task/t1": {"status": "completed", "output": "hello you"}},
    )
    return Completed(final_task_id="t1", summary={"tasks": 1, "completed": 1})
