"""D1.5, D5.4: leases of sockets and starts of decisions, shared by every gateway on a store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.backends import BACKENDS, Backend
from tests.contract.values import NOW

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.stores.base import Store

TTL_S = 15.0


async def lease(store: Store, stream: str, *, limit: int = 1, now: float = NOW) -> float | None:
    return await store.lease_stream("acme", stream, limit=limit, now=now, until=now + TTL_S)


async def start(store: Store, *, now: float = NOW, org: str = "acme") -> float:
    return await store.start_decision(org, now=now, per_minute=60, burst=5)


async def test_a_lease_keeps_the_next_socket_out(store: Store) -> None:
    """D1.5: the refusal says when the first lease runs out."""
    assert await lease(store, "szws_1") is None
    assert await lease(store, "szws_2", now=NOW + 4) == NOW + TTL_S
    assert await store.lease_stream("b", "szws_3", limit=1, now=NOW, until=NOW + TTL_S) is None


async def test_leases_count_up_to_the_limit(store: Store) -> None:
    assert [await lease(store, f"szws_{i}", limit=3, now=NOW + i) for i in range(3)] == [None] * 3
    assert await lease(store, "szws_3", limit=3, now=NOW + 3) == NOW + TTL_S


async def test_a_released_lease_is_free_at_once(store: Store) -> None:
    assert await lease(store, "szws_1") is None
    await store.release_stream("szws_1")
    await store.release_stream("szws_1")
    assert await lease(store, "szws_2") is None


async def test_a_lease_that_ran_out_is_free_and_cannot_be_renewed(store: Store) -> None:
    """D3.8: what it was for is closed with `lease_lost`."""
    assert await lease(store, "szws_1") is None
    assert await store.renew_stream("szws_1", now=NOW + TTL_S, until=NOW + 2 * TTL_S) is False
    assert await lease(store, "szws_2", now=NOW + TTL_S) is None
    assert await store.renew_stream("szws_1", now=NOW + TTL_S, until=NOW + 2 * TTL_S) is False
    assert await store.renew_stream("szws_9", now=NOW, until=NOW + TTL_S) is False


async def test_a_renewed_lease_holds_on(store: Store) -> None:
    assert await lease(store, "szws_1") is None
    for step in range(1, 6):
        now = NOW + 5.0 * step
        assert await store.renew_stream("szws_1", now=now, until=now + TTL_S) is True
        assert await lease(store, "szws_2", now=now) == now + TTL_S


async def test_one_socket_is_let_in_of_many_that_come_at_once(
    gateway: Callable[..., Awaitable[Store]],
) -> None:
    """D1.5: the limit holds across machines."""
    stores = [await gateway(), await gateway()]
    asked = [lease(stores[i % 2], f"szws_{i}", limit=3) for i in range(20)]
    answers = await asyncio.gather(*asked)
    assert answers.count(None) == 3
    assert set(answers) == {None, NOW + TTL_S}


async def test_a_burst_of_starts_and_then_one_a_second(store: Store) -> None:
    """D5.4: 60 a minute, burst 5."""
    assert [await start(store) for _ in range(5)] == [0.0] * 5
    assert await start(store) == pytest.approx(1.0)
    assert await start(store, now=NOW + 0.25) == pytest.approx(0.75)
    assert await start(store, now=NOW + 1) == 0.0
    assert await start(store, now=NOW + 1) == pytest.approx(1.0)
    assert await start(store, org="b") == 0.0


async def test_the_starts_of_all_gateways_are_one_budget(
    gateway: Callable[..., Awaitable[Store]],
) -> None:
    stores = [await gateway(), await gateway()]
    waits = await asyncio.gather(*(start(stores[i % 2]) for i in range(20)))
    assert waits.count(0.0) == 5


async def test_a_long_rest_saves_up_no_more_than_a_burst(store: Store) -> None:
    assert await start(store) == 0.0
    later = NOW + 3600
    assert [await start(store, now=later) for _ in range(5)] == [0.0] * 5
    assert await start(store, now=later) == pytest.approx(1.0)


async def test_a_clock_that_is_set_back_costs_one_bucket_at_most(store: Store) -> None:
    assert await start(store) == 0.0
    assert 0 < await start(store, now=NOW - 86_400) <= 1.0


@pytest.mark.parametrize("kind", BACKENDS)
@given(gaps=st.lists(st.floats(0, 5), min_size=1, max_size=40))
def test_no_more_starts_than_the_bucket_has(
    kind: type[Backend], tmp_path_factory: pytest.TempPathFactory, gaps: list[float]
) -> None:
    """Any times: in any stretch of t seconds at most 5 + t starts; a wait that was told is enough
    and not too long."""

    async def run() -> None:
        store = kind(tmp_path_factory.mktemp("budget")).store()
        await store.open()
        try:
            now, taken = NOW, list[float]()
            for gap in gaps:
                now += gap
                wait = await start(store, now=now)
                if wait:
                    if wait > 1e-4:  # a tenth of less is within the rounding of clocks
                        assert await start(store, now=now + wait * 0.9) > 0
                    now += wait
                    assert await start(store, now=now) == 0.0
                taken.append(now)
            for i, first in enumerate(taken):
                for j, last in enumerate(taken[i:], start=1):
                    assert j <= 5 + (last - first) + 1e-3
        finally:
            await store.close()

    asyncio.run(run())
