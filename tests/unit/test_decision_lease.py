"""D1.5, D3.8: a lease in the shared store, taken, renewed, lost and released."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from relay.decisions.lease import Lease, LeaseEnd
from relay.stores.base import StoreError
from tests.support.clock import in_virtual_time

if TYPE_CHECKING:
    from relay.stores.base import Store

TTL_S = 0.6
RENEW_S = 0.1


class FakeStore:
    """Answers as it is told."""

    def __init__(self) -> None:
        self.first_end: float | None = None
        self.kept = True
        self.broken = False
        self.hangs = False
        self.renewed = 0
        self.released: list[str] = []

    async def lease_stream(
        self, org: str, stream_id: str, *, limit: int, now: float, until: float
    ) -> float | None:
        await self._answer()
        assert until - now == pytest.approx(TTL_S)
        return None if self.first_end is None else now + self.first_end

    async def renew_stream(self, stream_id: str, *, now: float, until: float) -> bool:
        await self._answer()
        self.renewed += 1
        return self.kept

    async def release_stream(self, stream_id: str) -> None:
        self.released.append(stream_id)
        await self._answer()

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.sleep(60)
        if self.broken:
            raise StoreError("gone")


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def lease(store: FakeStore) -> Lease:
    return Lease(cast("Store", store), "acme", "szws_1", ttl_s=TTL_S, renew_s=RENEW_S)


@in_virtual_time
async def test_it_is_taken_and_renewed(store: FakeStore) -> None:
    held = lease(store)
    assert await held.take(1) is None
    keeping = asyncio.ensure_future(held.keep())
    await asyncio.sleep(RENEW_S * 8)
    assert not keeping.done()
    assert store.renewed >= 3
    keeping.cancel()
    await asyncio.wait({keeping})


@in_virtual_time
async def test_a_full_account(store: FakeStore) -> None:
    """Nothing is held, so nothing is released."""
    store.first_end = 12.5
    held = lease(store)
    assert await held.take(1) == pytest.approx(12.5, abs=0.1)
    await held.release()
    assert store.released == []


@in_virtual_time
async def test_it_is_lost(store: FakeStore) -> None:
    held = lease(store)
    await held.take(1)
    store.kept = False
    assert await asyncio.wait_for(held.keep(), 5) is LeaseEnd.LOST


@pytest.mark.parametrize("how", ["broken", "hangs"])
@in_virtual_time
async def test_a_store_that_is_gone(store: FakeStore, how: str) -> None:
    """It is given up before its time is over, as another socket could have the place then."""
    held = lease(store)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await held.take(1)
    setattr(store, how, True)
    assert await asyncio.wait_for(held.keep(), 5) is LeaseEnd.STORE_GONE
    assert loop.time() - began > TTL_S / 2
    if how == "hangs":
        assert loop.time() - began < TTL_S


@in_virtual_time
async def test_a_store_that_comes_back_in_time(store: FakeStore) -> None:
    held = lease(store)
    await held.take(1)
    store.broken = True
    keeping = asyncio.ensure_future(held.keep())
    await asyncio.sleep(RENEW_S * 3)
    store.broken = False
    await asyncio.sleep(TTL_S * 2)
    assert not keeping.done()
    assert store.renewed >= 2
    keeping.cancel()
    await asyncio.wait({keeping})


@in_virtual_time
async def test_taking_it_from_a_broken_store(store: FakeStore) -> None:
    store.broken = True
    with pytest.raises(StoreError):
        await lease(store).take(1)


@in_virtual_time
async def test_taking_it_from_a_store_that_hangs(store: FakeStore) -> None:
    """What was asked may still be done, so it is released too."""
    store.hangs = True
    held = lease(store)
    with pytest.raises(StoreError, match="in time"):
        await held.take(1)
    store.hangs = False
    await held.release()
    assert store.released == ["szws_1"]


@in_virtual_time
async def test_a_cancelled_opening_releases_what_it_may_have_taken(store: FakeStore) -> None:
    store.hangs = True
    held = lease(store)
    taking = asyncio.ensure_future(held.take(1))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait({taking})
    store.hangs = False
    await held.release()
    assert store.released == ["szws_1"]


@in_virtual_time
async def test_it_is_released_once(store: FakeStore) -> None:
    held = lease(store)
    await held.take(1)
    await held.release()
    await held.release()
    assert store.released == ["szws_1"]


@pytest.mark.parametrize("how", ["broken", "hangs"])
@in_virtual_time
async def test_a_release_never_holds_up_a_close(store: FakeStore, how: str) -> None:
    held = lease(store)
    await held.take(1)
    setattr(store, how, True)
    await asyncio.wait_for(held.release(), 5)
