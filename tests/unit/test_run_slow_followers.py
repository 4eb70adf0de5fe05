"""Followers that do not keep up with a run (J2.2; hazards B81, B84)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from relay.engines.base import Completed
from tests.support.following import attach, begun, text_of
from tests.support.running import ListSink, ScriptedEngine, service_over

if TYPE_CHECKING:
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet


class FullAtOnce(ListSink):
    """Has room for one push."""

    def push(self, data: bytes) -> bool:
        self.stuck = True
        return super().push(data)


async def flood_2000(envelope: Envelope, outlet: Outlet) -> Ending:
    for n in range(2000):
        outlet.emit("task_dispatched", {"task_id": f"t{n}", "pad": "x" * 500})
        if n % 100 == 0:
            await outlet.settled()
    return Completed(final_task_id=None, summary={})


async def test_a_stuck_follower_is_reset_and_costs_nobody_else(tmp_path: Path) -> None:
    async with service_over(tmp_path / "s.db", ScriptedEngine(flood_2000)) as service:
        stuck, well = ListSink(), ListSink()
        run, follower = await begun(service, stuck)
        stuck.stuck = True
        serving = asyncio.create_task(follower.serve())
        other = asyncio.create_task(attach(service, run.execution_id, well).serve())
        await asyncio.wait_for(asyncio.gather(serving, other), 30)
        assert len(well.events) == 2002
        assert stuck.names[-1] == "stream_reset"
        assert "stream_reset" not in stuck.names[:-1]
        assert len(stuck.data) < 3 * 1024 * 1024


async def test_j2_2_one_that_fell_behind_is_reset_from_the_journal_too(tmp_path: Path) -> None:
    """It takes what waited when it fell behind, and then nothing of what is read for it."""
    async with service_over(tmp_path / "s.db", ScriptedEngine(flood_2000)) as service:
        sink = FullAtOnce()
        sink.stuck = True
        run, follower = await begun(service, sink)
        serving = asyncio.create_task(follower.serve())
        await asyncio.wait_for(run.ended.wait(), 10)
        had = len(sink.events)
        sink.take()
        await asyncio.wait_for(serving, 10)
        assert had + 1 < len(sink.events) < 2002  # some of the journal, and its last word
        assert follower.was_reset
        assert sink.names[-1] == "stream_reset"
        assert "stream_reset" not in sink.names[:-1]


async def test_j2_2_one_that_fell_behind_and_reads_slowly_is_not_reset(tmp_path: Path) -> None:
    async with service_over(tmp_path / "s.db", ScriptedEngine(flood_2000)) as service:
        sink = ListSink()
        sink.stuck = True
        sink.unread = 1000  # what was sent before
        run, follower = await begun(service, sink)
        serving = asyncio.create_task(follower.serve())
        await asyncio.wait_for(run.ended.wait(), 10)
        for _ in range(100):  # far longer than `lag_s`, a byte at a time
            await asyncio.sleep(0.01)
            sink.unread -= 1
        assert not serving.done()
        sink.take()
        await asyncio.wait_for(serving, 10)
        assert not follower.was_reset
        assert len(sink.events) == 2002


async def test_a_follower_that_lags_and_takes_again_misses_nothing(tmp_path: Path) -> None:
    async def much(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": "t1"})
        for n in range(1000):
            outlet.token("t1", b"%d " % n)
            if n % 2 == 0:
                outlet.emit("task_dispatched", {"task_id": f"x{n}"})
            if n % 50 == 0:
                await outlet.settled()
                await asyncio.sleep(0.001)
        outlet.emit("task_completed", {"task_id": "t1"})
        await asyncio.sleep(0.2)
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(much)) as service:
        sink = ListSink()
        sink.stuck = True
        _, follower = await begun(service, sink)
        serving = asyncio.create_task(follower.serve())
        for _ in range(20):
            await asyncio.sleep(0.01)
            sink.take()
            await asyncio.sleep(0.005)
            sink.stuck = True
        sink.take()
        await asyncio.wait_for(serving, 10)
        assert not follower.was_reset
        assert text_of(sink) == "".join(f"{n} " for n in range(1000))
        assert sink.names.count("task_dispatched") == 500
