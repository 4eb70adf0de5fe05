"""M4.2: a worker keeps its own holds from being lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from relay.billing import Billing
from relay.custody import Custody
from relay.money import Hold
from relay.prices import PriceBook
from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from relay.money import Settlement


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "x.db")
    await store.open()
    yield store
    await store.close()


def hold(worker: str) -> Hold:
    return Hold(
        request_id=f"req_of_{worker}",
        org="test",
        key_id="key_1",
        plane="models",
        model="fast",
        worker=worker,
        placed_at=time.time() - 100,
        amount_micro_usd=100,
        prompt_tokens=3,
        prompt_micro_usd=6,
    )


async def test_a_sweep_takes_the_holds_of_the_dead_and_never_its_own(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of the process or a jump of the clock lets its own lease run out."""
    billing = Billing((), PriceBook({}, {}), worker="me", hold_output_tokens=1)
    custody = Custody(store, billing, worker="me", sweep_interval_s=0.02, hold_ttl_s=1)
    await store.place_hold(hold("me"))
    await store.place_hold(hold("dead"))
    sweep, sweeps = store.sweep, 0

    async def then_run_out(now: float, ttl_s: float) -> list[Settlement]:
        nonlocal sweeps
        rows = await sweep(now, ttl_s)
        await store.renew_lease("me", time.time() - 3600)
        sweeps += 1
        return rows

    monkeypatch.setattr(store, "sweep", then_run_out)
    await custody.start()
    async with asyncio.timeout(10):
        while sweeps < 5:
            await asyncio.sleep(0.01)
    assert [held.worker for held in await store.open_holds()] == ["me"]
    assert [row.request_id for row in await store.usage()] == ["req_of_dead"]
    await custody.close()


async def test_a_pause_between_renewing_and_sweeping_loses_no_stream(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    billing = Billing((), PriceBook({}, {}), worker="me", hold_output_tokens=1)
    custody = Custody(store, billing, worker="me", sweep_interval_s=3600, hold_ttl_s=1)
    await store.place_hold(hold("me"))
    renew, now = store.renew_lease, time.time()

    async def then_pause(worker: str, until: float) -> None:
        nonlocal now
        await renew(worker, until)
        now += 60  # longer than a lease

    monkeypatch.setattr(store, "renew_lease", then_pause)
    monkeypatch.setattr("relay.custody.time.time", lambda: now)
    await custody._sweep()
    assert [held.worker for held in await store.open_holds()] == ["me"]
