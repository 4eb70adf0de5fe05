"""Exactly one terminal for each run, whatever races for it (W2.3, J1.3).

Two processes on one database steal runs from each other as if the other were dead, while the runs
end by themselves, time out, fail and are cancelled. Seeded: a failure names its seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Final

import pytest

from encoders.workflow import OUTCOMES
from relay.engines.base import Completed, Failed
from relay.stores.base import StoreError
from tests.support.running import ScriptedEngine, beginning, service_over

if TYPE_CHECKING:
    from pathlib import Path

    from relay.engines.base import Ending, Envelope, Outlet
    from relay.runs.service import RunService
    from relay.stores.runs import RunRow

_AT_ONCE: Final = 100
_STATES: Final = {"workflow_completed": {"completed"}, "workflow_error": {"failed", "cancelled"}}


class Chaos:
    """One seeded world: what each run does, and what is done to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def pause(self) -> float:
        return self.rng.choice((0.0, 0.0, 0.001, 0.003, 0.01)) * self.rng.random()

    async def play(self, envelope: Envelope, outlet: Outlet) -> Ending:
        rng = self.rng
        if not envelope.past.emitted:
            outlet.emit("workflow_started", {"inputs": {}})
        outlet.emit("task_dispatched", {"task_id": "t1", "attempt": 1})
        outlet.emit("streaming_started", {"task_id": "t1"})
        for n in range(rng.randrange(4)):
            outlet.token("t1", b"%d" % n)
            await asyncio.sleep(self.pause())
        match rng.randrange(5):
            case 0:
                return Failed(code="timeout", message="late")
            case 1:
                raise RuntimeError("a bug")
            case 2:
                await asyncio.sleep(1)  # a cancel or a thief comes first
            case _:
                pass
        return Completed(final_task_id="t1", summary={})

    async def trouble(self, services: list[RunService], execution_id: str) -> None:
        """Cancels and thefts at random times, by random processes."""
        rng = self.rng
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(self.pause())
            service = rng.choice(services)
            if rng.random() < 0.5:
                row = await service.store.get_run(execution_id)
                assert row is not None
                await service.cancel(row)
            else:
                await service.take_over()


async def settled(services: list[RunService], execution_id: str) -> RunRow:
    """Wait for the end; a cancel comes to what hangs."""
    while True:
        row = await services[0].store.get_run(execution_id)
        assert row is not None
        if row.state != "running":
            return row
        for service in services:
            await service.cancel(row)
        await asyncio.sleep(0.002)


async def check(service: RunService, row: RunRow) -> None:
    events = await service.store.outline(row.execution_id)
    names = [event.name for event in events]
    outcomes = [name for name in names if name in OUTCOMES]
    assert len(outcomes) == 1, names
    assert names.count("workflow_result") == 1, names
    assert names[-2:] == [outcomes[0], "workflow_result"], names
    assert row.state in _STATES[outcomes[0]], (row.state, names)
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    assert row.head == len(events)


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 400), pytest.param(2, 10_000, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(600)
async def test_exactly_one_terminal(tmp_path: Path, seed: int, count: int) -> None:
    chaos = Chaos(seed)
    engine = ScriptedEngine(chaos.play)
    path = tmp_path / "s.db"
    ahead: dict[str, object] = {"clock": lambda: time.time() + 1e7, "runs_max": 100_000}
    async with (
        service_over(path, engine, owner="a", lease_until=0.0, **ahead) as a,
        service_over(path, engine, owner="b", lease_until=0.0, **ahead) as b,
    ):
        services = [a, b]

        async def race() -> None:
            start = beginning()
            try:
                await chaos.rng.choice(services).begin(start, lambda _: None)
            except StoreError as error:
                raise AssertionError(seed) from error
            await chaos.trouble(services, start.execution_id)
            row = await settled(services, start.execution_id)
            await check(a, row)

        for _ in range(count // _AT_ONCE):
            await asyncio.wait_for(asyncio.gather(*(race() for _ in range(_AT_ONCE))), 120)
        while a.running or b.running:  # who lost a run learns it when it next says something
            await asyncio.sleep(0.01)
