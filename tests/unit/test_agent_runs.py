"""Followers on the OpenAI wire over a real store: takeovers, lags, clients that leave (A1)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from encoders.agent import AgentChunks
from relay.engines.base import Completed
from relay.runs import follower as follower_module
from relay.runs.agent_wire import AgentWire
from relay.runs.follower import Follower
from tests.support import following
from tests.support.checks import until
from tests.support.running import ListSink, ScriptedEngine, beginning, done, service_over

if TYPE_CHECKING:
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet
    from relay.runs.run import Run
    from relay.runs.service import Beginning, RunService

TASK: Final = "t1"
DONE: Final = "[DONE]"


def wire(execution_id: str) -> AgentWire:
    chunks = AgentChunks(execution_id, created=1, model="m", usage_chunk=False)
    return AgentWire(TASK, chunks)


def events_of(sink: ListSink) -> list[Any]:
    """What stands in the events: chunks, or what is not JSON as it is."""
    blocks = [b for b in sink.data.decode().split("\n\n") if b and not b.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [DONE if block[6:] == DONE else json.loads(block[6:]) for block in blocks]


def text_of(sink: ListSink) -> str:
    deltas = [e["choices"][0]["delta"] for e in events_of(sink) if e != DONE and "error" not in e]
    assert deltas.count({"role": "assistant"}) == 1
    return "".join(delta.get("content", "") for delta in deltas)


async def begun(
    service: RunService, sink: ListSink, start: Beginning | None = None, **more: Any
) -> tuple[Run, Follower]:
    """Begin the run of an agent, followed as a chat completion."""
    start = start or beginning()
    return await following.begun(service, sink, wire(start.execution_id), start=start, **more)


@pytest.mark.parametrize("seen", [True, False])
async def test_a_run_that_another_process_begins_again(tmp_path: Path, seen: bool) -> None:
    """Its client, still here, gets an error if it has text, else the new one's text."""

    async def stands_still(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("task_dispatched", {"task_id": TASK, "kind": "task", "attempt": 1})
        outlet.emit("streaming_started", {"task_id": TASK, "model": "old", "provider": "p"})
        if seen:
            outlet.token(TASK, b"half of ")
        while True:  # until it finds that the run is another's
            await asyncio.sleep(0.05)
            outlet.emit("heartbeat", {"running": [TASK]})

    async def again(envelope: Envelope, outlet: Outlet) -> Ending:
        assert envelope.left
        outlet.emit("task_dispatched", {"task_id": TASK, "kind": "task", "attempt": 2})
        outlet.emit("streaming_started", {"task_id": TASK, "model": "new", "provider": "p"})
        outlet.token(TASK, b"all of it")
        outlet.emit("task_completed", {"task_id": TASK, "kind": "task"})
        return Completed(final_task_id=TASK, summary={})

    path = tmp_path / "s.db"
    async with service_over(path, ScriptedEngine(stands_still), lease_until=0) as first:
        sink = ListSink()
        _, one = await begun(first, sink, keepalive=b": alive\n\n", keepalive_s=0.1)
        serving = asyncio.create_task(one.serve())
        await until(lambda: b"half of" in sink.data or not seen)
        async with service_over(path, ScriptedEngine(again), owner="worker_b"):
            await asyncio.wait_for(serving, 20)
    if not seen:
        assert text_of(sink) == "all of it"
        assert events_of(sink)[-1] == DONE
        assert events_of(sink)[0]["model"] == "new"
        return
    assert text_of(sink) == "half of "
    assert events_of(sink)[-1]["error"]["code"] == "engine_error"
    assert b"[DONE]" not in sink.data
    assert not sink.data.endswith(b": alive\n\n")


async def test_nothing_follows_the_end(tmp_path: Path) -> None:
    """No keepalive between `[DONE]` and the run's last frame, which is not told here."""
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        sink = ListSink()
        _, one = await begun(service, sink, keepalive=b": alive\n\n", keepalive_s=0.001)
        await asyncio.wait_for(one.serve(), 10)
        assert text_of(sink) == "hello you"
        assert sink.data.endswith(b"data: [DONE]\n\n")


async def test_silence_is_filled_while_the_run_works_elsewhere(tmp_path: Path) -> None:
    """A1.3, B74: also when there is no hub to wait at."""
    go = asyncio.Event()

    async def waits(envelope: Envelope, outlet: Outlet) -> Ending:
        await go.wait()
        return await done(envelope, outlet)

    async with service_over(tmp_path / "s.db", ScriptedEngine(waits)) as service:
        run, _ = await begun(service, ListSink())
        sink = ListSink()
        one = Follower(
            service.store,
            run.execution_id,
            lambda: None,
            sink,
            wire(run.execution_id),
            after=0,
            one_leg=True,
            keepalive=b": alive\n\n",
            keepalive_s=0.1,
        )
        serving = asyncio.create_task(one.serve())
        await until(lambda: sink.data.count(b": alive\n\n") >= 2)
        go.set()
        await asyncio.wait_for(serving, 20)
        assert text_of(sink) == "hello you"
        assert events_of(sink)[-1] == DONE


@pytest.mark.parametrize("pause_s", [0.0, 0.4])
async def test_a_client_that_lags_gets_every_character_once(tmp_path: Path, pause_s: float) -> None:
    """It falls behind, over and over, in the middle of its text."""
    count = 1500

    async def much(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": TASK, "model": "m", "provider": "p"})
        for n in range(count):
            outlet.token(TASK, f"é{n} ".encode())
            if n % 50 == 0:
                await outlet.settled()
                await asyncio.sleep(0.002)
        outlet.emit("streaming_completed", {"task_id": TASK, "finish_reason": "length"})
        outlet.emit("task_completed", {"task_id": TASK, "kind": "task"})
        return Completed(final_task_id=TASK, summary={})

    async with service_over(tmp_path / "s.db", ScriptedEngine(much)) as service:
        sink = ListSink()
        sink.stuck = True
        _, one = await begun(service, sink, lag_s=20.0, frames_max=16)
        serving = asyncio.create_task(one.serve())
        for _ in range(10):
            await asyncio.sleep(0.005)
            sink.take()
            await asyncio.sleep(0.003)
            sink.stuck = True
        await asyncio.sleep(pause_s)
        sink.take()
        await asyncio.wait_for(serving, 20)
        assert not one.was_reset
        assert text_of(sink) == "".join(f"é{n} " for n in range(count))
        final = events_of(sink)[-2]
        assert final["choices"][0]["finish_reason"] == "length"
        assert sink.data.count(b"[DONE]") == 1


async def test_a_key_that_is_revoked_ends_it_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J2.4: an end without a word is a success to the SDKs."""
    monkeypatch.setattr(follower_module, "CHECK_EVERY_S", 0.1)
    allowed = [True]

    async def hangs(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("streaming_started", {"task_id": TASK, "model": "m", "provider": "p"})
        outlet.token(TASK, b"half")
        await asyncio.Event().wait()
        raise AssertionError

    async with service_over(tmp_path / "s.db", ScriptedEngine(hangs)) as service:
        sink = ListSink()
        run, one = await begun(service, sink, allowed=lambda: allowed[0])
        serving = asyncio.create_task(one.serve())
        await until(lambda: b"half" in sink.data)
        await asyncio.sleep(0.3)
        assert not serving.done()
        allowed[0] = False
        await asyncio.wait_for(serving, 10)
        assert "API key" in events_of(sink)[-1]["error"]["message"]
        assert b"[DONE]" not in sink.data
        assert not run.ended.is_set()  # J2.5


@pytest.mark.parametrize("only", [True, False])
async def test_a_client_that_leaves_while_its_run_begins(tmp_path: Path, only: bool) -> None:
    """A1.6: there is a run nobody knows of; it works on unless it was only for its client."""
    async with service_over(tmp_path / "s.db", ScriptedEngine(done)) as service:
        start = beginning()
        asked = asyncio.create_task(service.begin(start, lambda _: None, only_for_caller=only))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        row = None
        async with asyncio.timeout(20):
            while row is None or row.finished_at is None:
                await asyncio.sleep(0.01)
                row = await service.store.get_run(start.execution_id)
        assert row.state == ("cancelled" if only else "completed")


@pytest.mark.parametrize("on_disconnect", ["cancel", None])
async def test_a_run_that_was_only_for_its_client_is_not_taken_up_again(
    tmp_path: Path, on_disconnect: str | None
) -> None:
    """A1.6: the client went with the process that it was connected to."""

    async def hangs(_: Envelope, outlet: Outlet) -> Ending:
        outlet.emit("task_dispatched", {"task_id": TASK, "kind": "task", "attempt": 1})
        await asyncio.Event().wait()
        raise AssertionError

    document = {"agent": TASK, "messages": []}
    if on_disconnect is not None:
        document["on_disconnect"] = on_disconnect
    path = tmp_path / "s.db"
    async with service_over(path, ScriptedEngine(hangs)) as service:
        run, _ = await begun(service, ListSink(), beginning(document=document, source="agent"))
    async with service_over(path, ScriptedEngine(done), owner="worker_b") as service:
        row = None
        async with asyncio.timeout(20):
            while row is None or row.finished_at is None:
                await asyncio.sleep(0.01)
                row = await service.store.get_run(run.execution_id)
        assert row.state == ("cancelled" if on_disconnect else "completed")
        if on_disconnect:
            assert row.error is not None
            assert row.error["code"] == "cancelled"
            assert "its client" in row.error["message"]
