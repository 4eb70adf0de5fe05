"""Runs over a real store: order, terminals, followers, takeovers (W2, J1.3, J1.4, J2)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from encoders.json_text import loads
from relay.engines.base import Completed, Failed, Yielded
from relay.inflight import InFlight
from relay.runs.groups import NUMBERED
from relay.runs.places import RunsFull
from relay.runs.run import Run
from relay.runs.takeover import ATTEMPTS_MAX
from relay.stores.sqlite import SqliteStore
from tests.contract.values import hold
from tests.support.following import attach, begun, text_of
from tests.support.running import ListSink, ScriptedEngine, beginning, done, service_over

if TYPE_CHECKING:
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet
    from relay.runs.service import RunService


async def test_the_post_stream_has_everything_in_order(tmp_path: Path) -> None:
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        sink = ListSink()
        run, follower = await begun(service, sink)
        await asyncio.wait_for(follower.serve(), 10)
        assert sink.names == [
            "workflow_started", "task_dispatched", "streaming_started", "token", "token", "token",
            "streaming_completed", "task_completed", "workflow_completed", "workflow_result",
        ]  # fmt: skip
        assert b"id:" not in sink.data
        tokens = [loads(e.data) for e in sink.events if e.event == b"token"]
        assert all(list(token) == ["task_id", "delta"] for token in tokens)
        assert text_of(sink) == "hello you"
        row = await service.store.get_run(run.execution_id)
        assert row is not None
        assert (row.state, row.head, row.final_task_id) == ("completed", 7, "t1")
        assert await service.store.output(run.execution_id, "t1") == ("hello you",)
        envelope = loads(sink.events[-1].data)
        assert list(envelope) == [
            "workflow_id", "execution_id", "timestamp", "type", "data", "elapsed_ms",
        ]  # fmt: skip
        assert envelope["data"]["result_url"].endswith(f"/{run.execution_id}/t1")


async def test_positions_are_the_count_of_engine_frames(tmp_path: Path) -> None:
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        sink = ListSink()
        _, follower = await begun(service, sink, NUMBERED)
        await asyncio.wait_for(follower.serve(), 10)
        ids = [line for line in sink.data.split(b"\n") if line.startswith(b"id: ")]
        assert ids == [b"id: %d" % n for n in range(1, 8)]


@pytest.mark.parametrize("after", range(8))
async def test_a_run_that_has_ended_is_replayed_from_anywhere(tmp_path: Path, after: int) -> None:
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        run, follower = await begun(service, ListSink())
        await asyncio.wait_for(follower.serve(), 10)
        sink = ListSink()
        await asyncio.wait_for(attach(service, run.execution_id, sink, after=after).serve(), 10)
        ids = [int(event.id) for event in sink.events if event.event != b"token"]
        assert ids == list(range(after + 1, 8))
        if after <= 3:
            assert text_of(sink) == "hello you"
            at = sink.names.index("token")
            assert "streaming_completed" in sink.names[at:]
            assert after >= 3 or sink.names[at - 1] == "streaming_started"


async def test_a_follower_that_comes_in_the_middle_gets_it_all_once(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def slowly(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": "t1"})
        outlet.token("t1", b"one ")
        await outlet.settled()
        outlet.token("t1", b"two ")
        await go.wait()
        outlet.token("t1", b"three")
        outlet.emit("task_completed", {"task_id": "t1"})
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(slowly)) as service:
        first = ListSink()
        run, follower = await begun(service, first)
        serving = asyncio.create_task(follower.serve())
        while text_of(first) != "one two ":
            await asyncio.sleep(0.01)
        sinks = [ListSink() for _ in range(3)]
        others = [
            asyncio.create_task(attach(service, run.execution_id, sink, after=after).serve())
            for sink, after in zip(sinks, (0, 1, 1), strict=True)
        ]
        while any(text_of(sink) != "one two " for sink in sinks):
            await asyncio.sleep(0.01)
        go.set()
        await asyncio.wait_for(asyncio.gather(serving, *others), 10)
        for sink, after in zip(sinks, (0, 1, 1), strict=True):
            assert text_of(sink) == "one two three"
            assert [int(e.id) for e in sink.events if e.event != b"token"] == [*range(after + 1, 5)]


async def test_text_that_is_durable_before_it_is_shown_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy loop learns of a commit after a reader has seen it."""
    go = asyncio.Event()

    async def talks(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": "t1"})
        await outlet.settled()
        outlet.emit("heartbeat", {"running": ["t1"]})
        outlet.token("t1", b"x" * 600)
        await outlet.settled()
        await go.wait()
        outlet.emit("task_completed", {"task_id": "t1"})
        return Completed(final_task_id="t1", summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(talks)) as service:
        append = type(service.store).append

        async def told_late(self: Any, execution_id: str, generation: int, batch: Any) -> Any:
            first = await append(self, execution_id, generation, batch)
            if batch.texts:
                await asyncio.sleep(0.3)
            return first

        monkeypatch.setattr(type(service.store), "append", told_late)
        run, _ = await begun(service, ListSink())
        while not await service.store.open_texts(run.execution_id, at=1):
            await asyncio.sleep(0.005)
        sink = ListSink()
        serving = asyncio.create_task(attach(service, run.execution_id, sink).serve())
        await asyncio.sleep(0.5)
        go.set()
        await asyncio.wait_for(serving, 10)
        assert [loads(e.data)["offset"] for e in sink.events if e.event == b"token"] == [0]
        assert text_of(sink) == "x" * 600


async def test_a_cancel_ends_it_once(tmp_path: Path) -> None:
    hanging = asyncio.Event()

    async def hang(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("workflow_started", {"inputs": {}})
        hanging.set()
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(hang)
    async with service_over(tmp_path / "s.db", engine) as service:
        sink = ListSink()
        run, follower = await begun(service, sink)
        await hanging.wait()
        row = await service.store.get_run(run.execution_id)
        assert row is not None
        after = await service.cancel(row)
        assert after is not None
        assert after.state == "cancelled"
        again = await service.cancel(row)
        assert again is not None
        assert again.state == "cancelled"
        await asyncio.wait_for(follower.serve(), 10)
        assert sink.names == ["workflow_started", "workflow_error", "workflow_result"]
        assert loads(sink.events[1].data)["data"]["error"]["code"] == "cancelled"
        assert engine.told == [run.execution_id]


async def test_a_cancel_that_comes_as_the_run_begins_to_wait_ends_it(tmp_path: Path) -> None:
    """The engine has returned; the row does not say yet that the run waits."""

    async def asks(envelope: Envelope, outlet: Outlet) -> Ending:
        row = await service.store.request_cancel(envelope.execution_id, 1.0)  # by another process
        assert row is not None
        outlet.emit("workflow_yielded", {"task_id": "ask", "prompt": "?", "resume_url": "/"})
        return Yielded(task_id="ask", prompt="?")

    async with service_over(tmp_path / "s.db", ScriptedEngine(asks)) as service:
        run, follower = await begun(service, ListSink())
        await asyncio.wait_for(follower.serve(), 10)
        await asyncio.wait_for(run.ended.wait(), 10)
        row = await service.store.get_run(run.execution_id)
        assert row is not None
        assert row.state == "cancelled"
        sink = ListSink()
        await asyncio.wait_for(attach(service, run.execution_id, sink).serve(), 10)
        assert sink.names == [
            "workflow_yielded", "workflow_result", "workflow_error", "workflow_result",
        ]  # fmt: skip


async def test_the_end_of_a_grace_parks_a_run_and_the_next_process_goes_on(tmp_path: Path) -> None:
    inflight = InFlight()

    async def hang(envelope: Envelope, outlet: Outlet) -> Ending:
        assert not envelope.left
        outlet.emit("workflow_started", {"inputs": {}})
        outlet.emit("task_dispatched", {"task_id": "t1", "kind": "task", "attempt": 1})
        await asyncio.Event().wait()
        raise AssertionError

    async with service_over(tmp_path / "s.db", ScriptedEngine(hang), inflight=inflight) as service:
        sink = ListSink()
        run, follower = await begun(service, sink)
        serving = asyncio.create_task(follower.serve())
        while len(sink.names) < 2:
            await asyncio.sleep(0.01)
        await inflight.drain(0.05)
        serving.cancel()
    pasts = []

    async def go_on(envelope: Envelope, outlet: Outlet) -> Ending:
        assert envelope.left
        pasts.append(envelope.past)
        return Completed(final_task_id=None, summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(go_on), owner="worker_b") as service:
        sink = ListSink()
        await asyncio.wait_for(attach(service, run.execution_id, sink, after=1).serve(), 20)
        assert sink.names == ["task_dispatched", "workflow_completed", "workflow_result"]
        assert pasts[0].emitted == {("workflow_started", "", 0)}
        assert pasts[0].open == {"t1": 1}


async def test_an_engine_that_fails_ends_its_run(tmp_path: Path) -> None:
    async def fail(envelope: Envelope, outlet: Outlet) -> Ending:
        raise RuntimeError("a secret of ours")

    async with service_over(tmp_path / "s.db", ScriptedEngine(fail)) as service:
        sink = ListSink()
        run, follower = await begun(service, sink)
        await asyncio.wait_for(follower.serve(), 10)
        assert sink.names == ["workflow_error", "workflow_result"]
        assert b"secret" not in sink.data
        assert isinstance(run.ending, Failed)


async def test_w2_2_a_text_is_not_sent_again_when_its_run_is_lost_to_another(
    tmp_path: Path,
) -> None:
    """The follower was live, and reads on in the journal: in the middle of a text."""

    async def stands_still(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": "t1"})
        outlet.token("t1", b"half of ")
        while True:
            await asyncio.sleep(0.05)
            outlet.emit("heartbeat", {"running": ["t1"]})

    async def again(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("task_error", {"task_id": "t1", "will_retry": True})
        outlet.emit("streaming_started", {"task_id": "t1"})
        outlet.token("t1", b"all of it")
        return Completed(final_task_id="t1", summary={})

    path = tmp_path / "s.db"
    async with service_over(path, ScriptedEngine(stands_still), lease_until=0) as first:
        sink = ListSink()
        _, follower = await begun(first, sink)
        serving = asyncio.create_task(follower.serve())
        while b"half of" not in sink.data:
            await asyncio.sleep(0.01)
        async with service_over(path, ScriptedEngine(again), owner="worker_b"):
            await asyncio.wait_for(serving, 20)
    names = [name for name in sink.names if name != "heartbeat"]
    assert names == [
        "streaming_started", "token", "task_error", "streaming_started", "token",
        "workflow_completed", "workflow_result",
    ]  # fmt: skip


async def test_a_process_works_on_so_many_runs_and_no_more(tmp_path: Path) -> None:
    """W1: the next one is refused, and nothing of it is stored."""
    go = asyncio.Event()

    async def wait(envelope: Envelope, outlet: Outlet) -> Ending:
        await go.wait()
        return Completed(final_task_id=None, summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(wait), runs_max=1) as service:
        first, _ = await begun(service, ListSink())
        refused = beginning()
        with pytest.raises(RunsFull, match="all 1 runs") as full:
            await service.begin(refused, lambda _: None)
        assert (full.value.status, full.value.code) == (503, "overloaded")
        assert await service.store.get_run(refused.execution_id) is None
        go.set()
        await asyncio.wait_for(first.ended.wait(), 10)
        await begun(service, ListSink())


async def test_runs_that_begin_together_are_counted(tmp_path: Path) -> None:
    """W1: they have their places before their rows are written."""
    go = asyncio.Event()

    async def wait(envelope: Envelope, outlet: Outlet) -> Ending:
        await go.wait()
        return Completed(final_task_id=None, summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(wait), runs_max=3) as service:
        begins = [service.begin(beginning(), lambda _: None) for _ in range(20)]
        told = await asyncio.gather(*begins, return_exceptions=True)
        runs = [each for each in told if isinstance(each, Run)]
        assert len(runs) == service.running == 3
        assert [type(each) for each in told if each not in runs] == [RunsFull] * 17
        go.set()
        async with asyncio.timeout(10):
            for run in runs:
                await run.ended.wait()
        for _ in range(3):  # every place is free again
            await service.begin(beginning(), lambda _: None)


async def test_w2_5_a_run_that_kills_every_process_ends_as_an_orphan(tmp_path: Path) -> None:
    claims: list[str] = []

    async def lost(envelope: Envelope, outlet: Outlet) -> Ending:
        claims.append(envelope.execution_id)
        await asyncio.Event().wait()
        raise AssertionError

    engine, path, start = ScriptedEngine(lost), tmp_path / "s.db", beginning()
    async with service_over(path, engine) as service:
        await service.begin(start, lambda _: None)
    for n in range(ATTEMPTS_MAX):
        async with service_over(path, engine, owner=f"worker_{n}") as service:
            async with asyncio.timeout(10):
                while not service.running and not await _has_ended(service, start.execution_id):
                    await asyncio.sleep(0.01)
    async with service_over(path, engine) as service:
        row = await service.store.get_run(start.execution_id)
        assert row is not None
        assert (row.state, row.error["code"]) == ("failed", "orphaned")
    assert len(claims) == ATTEMPTS_MAX


async def test_w2_5_a_lost_run_that_is_ended_tells_what_its_open_calls_used(tmp_path: Path) -> None:
    async def dispatch(envelope: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("task_dispatched", {"task_id": "t", "kind": "task", "attempt": 2})
        await asyncio.Event().wait()
        raise AssertionError

    engine, path, start = ScriptedEngine(dispatch), tmp_path / "s.db", beginning()
    async with service_over(path, engine) as service:
        await service.begin(start, lambda _: None)
    store = SqliteStore(path)
    await store.open()
    calls = [hold(f"{start.execution_id}/t/{attempt}/x", worker="dead") for attempt in (1, 2, 2)]
    calls[2] = replace(calls[2], request_id=f"{calls[2].request_id}/2")
    for call in calls:  # the first stands in a step by now
        await store.place_hold(call)
    await store.runs.request_cancel(start.execution_id, 1.0)
    async with service_over(path, engine) as service, asyncio.timeout(10):
        while (row := await service.store.get_run(start.execution_id)) and row.state == "running":
            await asyncio.sleep(0.01)
    assert row is not None
    assert (row.state, row.error["code"]) == ("cancelled", "cancelled")
    used = 2 * calls[0].prompt_tokens
    assert row.usage == {"prompt_tokens": used, "completion_tokens": 0, "total_tokens": used}
    assert await store.open_holds() == []
    assert len(await store.usage()) == 3
    await store.close()


async def _has_ended(service: RunService, execution_id: str) -> bool:
    row = await service.store.get_run(execution_id)
    return row is not None and row.state == "failed"
