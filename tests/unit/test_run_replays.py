"""Followers that read a run from its journal: what they hold, and that they get all of it (J2)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from relay.engines.base import Completed
from relay.runs.follower import QUEUE_BYTES_MAX, Follower
from relay.runs.groups import PLACED
from tests.support.running import ListSink, ScriptedEngine, beginning, service_over
from tests.support.workflow_wire import read

if TYPE_CHECKING:
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet

TEXT = b"x" * 200_000


class SlowSink(ListSink):
    """Takes what it was given before it takes more; `most`: bytes that it was given at once."""

    most = 0

    def push(self, data: bytes) -> bool:
        self.most = max(self.most, len(data))
        super().push(data)
        return False


async def long_texts(_: Envelope, outlet: Outlet) -> Ending:
    """Twenty tasks with long texts, so that few frames bring much."""
    outlet.emit("workflow_started", {"inputs": {}})
    for n in range(20):
        task_id = f"t{n}"
        outlet.emit("task_dispatched", {"task_id": task_id, "kind": "task", "attempt": 1})
        outlet.emit("streaming_started", {"task_id": task_id, "model": "m", "provider": "p"})
        outlet.token(task_id, TEXT)
        await outlet.ready()
        outlet.emit("streaming_completed", {"task_id": task_id, "chars": len(TEXT)})
        outlet.emit("task_completed", {"task_id": task_id, "kind": "task"})
    return Completed(final_task_id="t19", summary={})


async def test_a_replay_holds_no_more_than_a_client_takes(tmp_path: Path) -> None:
    """J2.2: a client that takes nothing is owed one mebibyte and a text, not a page of them."""
    async with service_over(tmp_path / "s.db", ScriptedEngine(long_texts)) as service:
        run = await service.begin(beginning(), lambda _: None)
        await asyncio.wait_for(run.ended.wait(), 20)
        sink = SlowSink()
        follower = Follower(service.store, run.execution_id, lambda: None, sink, PLACED, after=0)
        await asyncio.wait_for(follower.serve(), 20)
    assert sink.most < QUEUE_BYTES_MAX + 2 * len(TEXT)
    seen = read(sink.data, placed=True)
    assert seen.texts == {f"t{n}": TEXT.decode() for n in range(20)}


async def test_w2_5_the_texts_of_a_cancelled_run_are_whole_elsewhere_too(tmp_path: Path) -> None:
    """What was said before the cancel is read by those who follow it from another process."""
    go, said = asyncio.Event(), asyncio.Event()

    async def cut_short(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("workflow_started", {"inputs": {}})
        outlet.emit("task_dispatched", {"task_id": "t1", "kind": "task", "attempt": 1})
        outlet.emit("streaming_started", {"task_id": "t1", "model": "m", "provider": "p"})
        outlet.token("t1", b"half ")
        await go.wait()
        outlet.token("t1", b"of it")
        said.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with service_over(tmp_path / "s.db", ScriptedEngine(cut_short)) as service:
        run = await service.begin(beginning(), lambda _: None)
        sinks = ListSink(), ListSink()
        followers = [
            asyncio.create_task(
                Follower(service.store, run.execution_id, hub, sink, PLACED, after=0).serve()
            )
            for hub, sink in zip((lambda: run.hub, lambda: None), sinks, strict=True)
        ]
        async with asyncio.timeout(10):
            while not all("streaming_started" in sink.names for sink in sinks):
                await asyncio.sleep(0.01)
        go.set()
        await said.wait()
        run.cancel()
        await asyncio.wait_for(asyncio.gather(*followers), 10)
        late = ListSink()
        await Follower(service.store, run.execution_id, lambda: None, late, PLACED, after=0).serve()
    for sink in (*sinks, late):
        seen = read(sink.data, placed=True)
        assert (seen.status, seen.texts) == ("cancelled", {"t1": "half of it"})
