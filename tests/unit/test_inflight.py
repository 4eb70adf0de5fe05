"""M3.6: the drain; M1.2: slots; M2.1: comments while waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relay import inflight as inflight_module
from relay.comments import tick_while_waiting
from relay.errors import ConcurrencyExceeded, GatewayDraining, GatewayShutdown
from relay.inflight import InFlight
from relay.slots import Slots


async def test_a_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    inflight = InFlight()
    release = asyncio.Event()

    async def request() -> str:
        with inflight.request():
            async with inflight.interruptible():
                await release.wait()
            return "done"

    running = asyncio.create_task(request())
    await asyncio.sleep(0)
    draining = asyncio.create_task(inflight.drain(grace_s=30))
    await asyncio.sleep(0)
    with pytest.raises(GatewayDraining) as refused, inflight.request():
        pass
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 30
    assert not draining.done()
    release.set()
    await asyncio.wait_for(draining, 5)
    assert await running == "done"


async def test_a_drain_is_told_to_what_never_ends_by_itself() -> None:
    """D3.6: before it waits, and when new requests are refused already."""
    inflight = InFlight()
    told: list[bool] = []
    inflight.on_drain(lambda: told.append(inflight.draining))
    with inflight.request():
        draining = asyncio.create_task(inflight.drain(grace_s=30))
        await asyncio.sleep(0)
        assert told == [True]
    await asyncio.wait_for(draining, 5)
    assert told == [True]


async def test_the_end_of_the_grace_interrupts_wherever_a_request_waits() -> None:
    inflight = InFlight()

    async def request() -> str:
        with inflight.request():
            try:
                async with inflight.interruptible():
                    await asyncio.Event().wait()
            except GatewayShutdown:
                return "told"
        return "lost"

    running = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0)
    await inflight.drain(grace_s=0.01)
    assert await asyncio.gather(*running) == ["told"] * 3
    with pytest.raises(GatewayShutdown):  # one that was admitted before and comes to it late
        async with inflight.interruptible():
            pass


async def test_a_hang_up_is_not_taken_for_a_shutdown() -> None:
    inflight = InFlight()

    async def request() -> None:
        async with inflight.interruptible():
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_inside_a_request_is_not_a_shutdown() -> None:
    with pytest.raises(TimeoutError):
        async with InFlight().interruptible():
            raise TimeoutError


async def test_a_request_that_cannot_end_does_not_hold_the_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inflight_module, "FAREWELL_S", 0.01)
    inflight = InFlight()

    async def request() -> None:
        with inflight.request():
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    await asyncio.wait_for(inflight.drain(grace_s=0.01), 5)
    assert not task.done()
    assert inflight.running == 1
    task.cancel()
    await asyncio.wait([task])


def test_slots_are_counted_by_org_and_freed_on_every_ending() -> None:
    slots = Slots()
    with slots.hold("a", "r1", 2), slots.hold("a", "r2", 2):
        with pytest.raises(ConcurrencyExceeded), slots.hold("a", "r3", 2):
            pass
        with slots.hold("b", "r4", 2), slots.hold("a", "r5", None):
            assert slots.in_use("a") == 3
        with pytest.raises(ZeroDivisionError), slots.hold("b", "r6", 1):
            raise ZeroDivisionError
        assert slots.in_use("b") == 0
    assert slots.in_use("a") == 0
    assert slots._held == {}  # nothing is kept of an org that has gone


class Result:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


async def test_ticks_come_while_the_work_lasts_and_not_after() -> None:
    ticks: list[float] = []
    clock = asyncio.get_running_loop().time
    done = asyncio.Event()

    async def tick() -> None:
        ticks.append(clock())
        if len(ticks) == 3:
            done.set()

    async def work() -> str:
        await done.wait()
        return "answer"

    started = clock()
    assert await tick_while_waiting(work(), tick, first_s=0.05, every_s=0.01) == "answer"
    assert len(ticks) == 3
    assert ticks[0] - started >= 0.05
    await asyncio.sleep(0.03)
    assert len(ticks) == 3


async def test_fast_work_is_never_ticked() -> None:
    async def tick() -> None:
        raise AssertionError

    async def work() -> int:
        return 1

    assert await tick_while_waiting(work(), tick, first_s=5, every_s=5) == 1


@pytest.mark.parametrize("how", ["cancelled", "tick fails"])
async def test_an_abandoned_wait_leaves_nothing(how: str) -> None:
    """No task, no connection: what had just been opened is closed (M4.1)."""
    result = Result()
    stopped = asyncio.Event()

    async def work() -> Result:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set()
            return result  # it had its answer at that very moment
        raise AssertionError

    async def tick() -> None:
        raise ConnectionResetError

    waiting: asyncio.Task[Any] = asyncio.create_task(
        tick_while_waiting(work(), tick, first_s=30 if how == "cancelled" else 0.01, every_s=1)
    )
    await asyncio.sleep(0.001)
    if how == "cancelled":
        waiting.cancel()
    with pytest.raises((asyncio.CancelledError, ConnectionResetError)):
        await waiting
    await asyncio.wait_for(stopped.wait(), 5)
    await asyncio.sleep(0)
    assert result.aborted
