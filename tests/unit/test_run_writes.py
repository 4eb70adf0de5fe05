"""What a run asks of the store and of its clients, and what it leaves behind (W2.2, J1.4)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from relay.engines.base import Completed
from relay.errors import GatewayShutdown
from relay.inflight import InFlight
from relay.runs import outlet as outlets
from relay.runs.lane import CHECKPOINT_CHARS
from tests.support.following import begun
from tests.support.running import ListSink, ScriptedEngine, done, service_over

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet
    from relay.runs.service import RunService
    from relay.stores.runs import Batch

DISPATCHED = {"task_id": "t1", "kind": "task", "attempt": 1}
STARTED = {"task_id": "t1", "model": "m", "provider": "p"}


class Writes:
    """What a service's store is given: `a` for an append, `f` for a finish, and their batches."""

    def __init__(self, service: RunService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds = ""
        self.batches: list[Batch] = []
        store: Any = service.store
        for name in ("append", "finish"):
            monkeypatch.setattr(store, name, self._seen(name[0], getattr(store, name)))

    def _seen(self, kind: str, write: Any) -> Any:
        async def seen(execution_id: str, generation: int, batch: Batch, *more: Any) -> Any:
            self.kinds += kind
            self.batches.append(batch)
            return await write(execution_id, generation, batch, *more)

        return seen


async def test_what_an_engine_says_last_is_written_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("task_dispatched", DISPATCHED)
        await outlet.settled()
        outlet.emit("streaming_started", STARTED)
        outlet.token("t1", b"hello")
        outlet.emit("streaming_completed", {"task_id": "t1"})
        outlet.emit("task_completed", {"task_id": "t1"}, steps={"task/t1": {"output": "hello"}})
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(play)) as service:
        writes = Writes(service, monkeypatch)
        sink = ListSink()
        run, follower = await begun(service, sink)
        await asyncio.wait_for(follower.serve(), 10)
        assert writes.kinds == "af"
        assert [piece.raw for piece in writes.batches[1].texts] == [b"hello"]
        assert sink.names == [
            "task_dispatched", "streaming_started", "token", "streaming_completed",
            "task_completed", "workflow_completed", "workflow_result",
        ]  # fmt: skip
        assert sink.writes == 2  # with each commit one
        assert sink.ended  # the last one was said to be it
        assert await service.store.output(run.execution_id, "t1") == ("hello",)


@pytest.mark.parametrize("then", ["wait", "frame", "settled"])
async def test_a_checkpoint_alone_waits_for_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It is written after a moment, with the next frame, or when somebody waits for it."""
    monkeypatch.setattr(outlets, "CHECKPOINT_WAIT_S", 0.2 if then == "wait" else 60.0)
    seen: list[str] = []
    writes: list[Writes] = []

    async def play(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", STARTED)
        await outlet.settled()
        for _piece in range(3):
            outlet.token("t1", b"x" * CHECKPOINT_CHARS)
        for _turn in range(5):
            await asyncio.sleep(0)
        seen.append(writes[0].kinds)
        if then == "frame":
            outlet.emit("heartbeat", {"running": ["t1"]})
        elif then == "settled":
            await outlet.settled()
        async with asyncio.timeout(20):
            while writes[0].kinds == "a":
                await asyncio.sleep(0.01)
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(play)) as service:
        writes.append(Writes(service, monkeypatch))
        _, follower = await begun(service, ListSink())
        await asyncio.wait_for(follower.serve(), 30)
    assert seen == ["a"]
    assert writes[0].kinds == "aaf"
    assert [piece.chars for piece in writes[0].batches[1].texts] == [CHECKPOINT_CHARS] * 3
    assert len(writes[0].batches[1].events) == (then == "frame")


async def test_much_text_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "CHECKPOINT_WAIT_S", 60.0)

    async def play(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", STARTED)
        await outlet.settled()
        for _piece in range(64):
            outlet.token("t1", b"x" * CHECKPOINT_CHARS)
        async with asyncio.timeout(20):
            while writes.kinds == "a":
                await asyncio.sleep(0.01)
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(play)) as service:
        writes = Writes(service, monkeypatch)
        _, follower = await begun(service, ListSink())
        await asyncio.wait_for(follower.serve(), 30)
    assert writes.kinds == "aaf"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_a_run_that_has_ended_is_freed_by_itself(tmp_path: Path) -> None:
    """No cycle keeps it: some hundred runs a second would keep the collector busy."""
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        run, follower = await begun(service, ListSink())
        await asyncio.wait_for(follower.serve(), 10)
        await run.ended.wait()
        gone = weakref.ref(run)
        hub = weakref.ref(run.hub)
        del run, follower
        await asyncio.sleep(0.05)  # its task's last turn
        assert gone() is None
        assert hub() is None


async def test_the_end_of_a_grace_lets_calls_end_by_themselves(tmp_path: Path) -> None:
    """M3.6: a call is told that the gateway stops; it is not cancelled as by a hang-up. Which of a
    run's scopes is interrupted first is chance, so there are many.
    """
    inflight = InFlight()
    ended: list[str] = []
    at_work: list[str] = []

    async def play(envelope: Envelope, _: Outlet) -> Ending:
        at_work.append(envelope.execution_id)
        try:
            async with inflight.interruptible():
                await asyncio.sleep(60)
        except GatewayShutdown:
            ended.append("told")
            raise
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError

    engine = ScriptedEngine(play)
    async with service_over(tmp_path / "s.db", engine, inflight=inflight) as service:
        runs = [(await begun(service, ListSink()))[0] for _ in range(30)]
        async with asyncio.timeout(20):
            while len(at_work) < len(runs):
                await asyncio.sleep(0.01)
            await inflight.drain(0.01)
            for run in runs:
                await run.ended.wait()
        assert {run.ending for run in runs} == {None}  # parked
    assert ended == ["told"] * 30
