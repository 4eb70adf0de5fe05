"""What every store must do (relay/stores/base.py): holds, rows, leases and the sweep (M4.2)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from relay.money import Source
from relay.stores.base import Org, StoreError
from tests.contract.values import (
    NOW,
    OLD,
    TTL_S,
    balance,
    held,
    hold,
    notice_of,
    progress,
    row,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.money import Hold, Settlement
    from relay.stores.base import Store

    Gateway = Callable[..., Awaitable[Store]]

# -- holds ----------------------------------------------------------------------------------------


async def test_a_hold_needs_the_balance_less_what_is_held(store: Store) -> None:
    """To the micro-dollar; the balance itself is debited by the settlement only."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    assert not await store.place_hold(hold("req_0", 101))
    assert await store.place_hold(hold("req_1", 60))
    assert not await store.place_hold(hold("req_2", 41))
    assert await store.place_hold(hold("req_3", 40))
    assert await store.place_hold(hold("req_4", 0))
    assert not await store.place_hold(hold("req_5", 1))
    assert (await balance(store), await held(store)) == (100, ["req_1", "req_3", "req_4"])
    await store.settle([row("req_1", 10)])
    assert await balance(store) == 90
    assert not await store.place_hold(hold("req_6", 51))
    assert await store.place_hold(hold("req_7", 50))


async def test_a_debt_is_no_credit(store: Store) -> None:
    """More was used than was held: the balance is below zero, and even a free hold is refused."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    assert await store.place_hold(hold("req_1", 100))
    await store.settle([row("req_1", 130)])
    assert await balance(store) == -30
    assert not await store.place_hold(hold("req_2", 0))


@pytest.mark.parametrize("org", [None, Org(id="acme"), Org(id="acme", max_concurrent=1)])
async def test_an_org_without_a_balance_has_no_limit(store: Store, org: Org | None) -> None:
    """Without a row likewise."""
    if org is not None:
        await store.put_org(org)
    assert await store.place_hold(hold("req_1", 2**53))
    assert await store.place_hold(hold("req_2", 2**53))
    await store.settle([row("req_1", 2**53)])
    assert await store.get_org("acme") == org


async def test_trial_holds_pass_and_count_for_nothing(store: Store) -> None:
    """They are not debited, so they take nothing from those that are."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    assert await store.place_hold(hold("req_1", 1000, trial=True))
    assert await store.place_hold(hold("req_2", 100))
    assert await store.place_hold(hold("req_3", 1, trial=True))
    assert not await store.place_hold(hold("req_4", 1))
    await store.settle([row("req_1", 50, debit=False)])
    assert await balance(store) == 100
    assert not await store.place_hold(hold("req_4", 1))


async def test_orgs_do_not_hold_for_each_other(store: Store) -> None:
    for org in ("acme", "b"):
        await store.put_org(Org(id=org, balance_micro_usd=100))
        assert await store.place_hold(hold(f"req_{org}", 100, org=org))


async def test_a_hold_is_placed_once(store: Store) -> None:
    """The same call again, as after a failure of which nobody knows how far it came."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    assert await store.place_hold(hold("req_1", 100))
    assert await store.place_hold(hold("req_1", 100))
    assert await store.place_hold(hold("req_1", 50))
    assert await store.open_holds() == [hold("req_1", 100)]
    await store.settle([row("req_1", 0)])
    assert await store.place_hold(hold("req_2", 100))


async def test_a_settled_request_gets_no_hold(store: Store) -> None:
    """Nothing would ever drop it."""
    await store.settle([row("req_1")])
    with pytest.raises(StoreError, match="req_1"):
        await store.place_hold(hold("req_1", trial=True))
    assert await held(store) == []


async def test_open_holds_come_back_as_they_went_in_oldest_first(store: Store) -> None:
    holds = [
        hold("req_1", placed_at=NOW + 2.000001),
        hold("req_2", placed_at=NOW, trial=True, org="b", worker="worker_2"),
        hold("req_3", 2**53, placed_at=NOW + 1, prompt_tokens=0, prompt_micro_usd=2**53),
    ]
    for each in holds:
        assert await store.place_hold(each)
    assert await store.open_holds() == sorted(holds, key=lambda h: h.placed_at)


@pytest.mark.parametrize("gateways", [1, 3])
async def test_holds_that_race_never_overdraw(gateway: Gateway, gateways: int) -> None:
    """As many pass as the balance bears, whichever they are."""
    stores = [await gateway() for _ in range(gateways)]
    await stores[0].put_org(Org(id="acme", balance_micro_usd=1000))
    passed = await asyncio.gather(
        *(stores[i % gateways].place_hold(hold(f"req_{i}", 100)) for i in range(60))
    )
    assert passed.count(True) == 10
    assert len(await held(stores[0])) == 10


# -- settlements ----------------------------------------------------------------------------------


async def test_a_settlement_writes_the_row_drops_the_hold_and_debits(store: Store) -> None:
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    await store.put_org(Org(id="b", balance_micro_usd=100))
    await store.place_hold(hold("req_1"))
    await store.place_hold(hold("req_2", org="b"))
    await store.settle([row("req_1", 30)])
    assert await store.usage() == [row("req_1", 30)]
    assert await held(store) == ["req_2"]
    assert (await balance(store), await balance(store, "b")) == (70, 100)


async def test_a_settlement_needs_no_hold(store: Store) -> None:
    """The store was away when it should have been placed (M4.3)."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    await store.settle([row("req_1", 30), row("req_2", 40, org="nobody"), row("req_3", 5)])
    assert await balance(store) == 65
    assert [r.request_id for r in await store.usage()] == ["req_1", "req_2", "req_3"]


async def test_a_second_settlement_changes_nothing(store: Store) -> None:
    """In the same call, in a later one, for another org, with another amount."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    await store.settle([row("req_1", 30), row("req_1", 31)])
    await store.settle([row("req_1", 32, status=500), row("req_2", 1)])
    await store.settle([row("req_1", 33, org="b")])
    assert await store.usage() == [row("req_1", 30), row("req_2", 1)]
    assert await balance(store) == 69


async def test_a_trial_is_logged_and_not_debited(store: Store) -> None:
    """M4.2."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    await store.settle([row("req_1", 30, debit=False)])
    assert await balance(store) == 100
    assert await store.usage() == [row("req_1", 30, debit=False)]


async def test_two_gateways_settle_a_request_once(gateway: Gateway) -> None:
    """One row, one debit, one notice for each."""
    one, two = await gateway(notice_of), await gateway(notice_of)
    await one.put_org(Org(id="acme", balance_micro_usd=10_000))
    for i in range(100):
        assert await one.place_hold(hold(f"req_{i}"))
    await asyncio.gather(
        *(
            store.settle([row(f"req_{i}", cost), row(f"req_{99 - i}", cost)])
            for i in range(100)
            for store, cost in ((one, 30), (two, 40))
        )
    )
    rows = await one.usage()
    assert sorted(r.request_id for r in rows) == sorted(f"req_{i}" for i in range(100))
    assert {r.cost_micro_usd for r in rows} <= {30, 40}
    assert await balance(two) == 10_000 - sum(r.cost_micro_usd for r in rows)
    assert await held(two) == []
    told = {n.id: n.payload for n in await two.due_notices(NOW * 2, 1000)}
    assert told == {r.request_id: notice_of(r).payload for r in rows}


async def test_one_failing_call_fails_no_other(store: Store) -> None:
    """Whatever a store does together, each call stands for itself."""
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    calls = [store.settle([row(f"req_{i}", 2**64 if i == 7 else 1)]) for i in range(20)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[7], StoreError)
    assert results[:7] + results[8:] == [None] * 19
    assert await balance(store) == 981
    assert len(await store.usage()) == 19


# -- progress and the sweep -----------------------------------------------------------------------


def lost(placed: Hold, **fields: object) -> Settlement:
    """The row of a hold that nothing was noted of, swept at NOW."""
    values: dict[str, object] = {
        "at": NOW,
        "provider": None,
        "status": 500,
        "error_code": "worker_lost",
        "prompt_tokens": placed.prompt_tokens,
        "completion_tokens": 0,
        "source": Source.COUNTED,
        "cost_micro_usd": placed.prompt_micro_usd,
        "attempts": (),
        "duration_ms": round((NOW - placed.placed_at) * 1000),
    }
    return replace(row(placed.request_id), **values | fields)  # type: ignore[arg-type]


async def test_a_lost_hold_settles_at_its_prompt_estimate(store: Store) -> None:
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    old = hold("req_1", placed_at=OLD)
    await store.place_hold(old)
    assert await store.sweep(NOW, TTL_S) == [lost(old)] == await store.usage()
    assert (await balance(store), await held(store)) == (995, [])
    assert await store.sweep(NOW, TTL_S) == []


async def test_a_lost_hold_settles_at_its_last_progress(store: Store) -> None:
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    old = hold("req_1", placed_at=OLD)
    await store.place_hold(old)
    await store.write_progress([progress("req_1", 1), progress("req_gone", 9)])
    await store.write_progress([progress("req_1", 12, source=Source.REPORTED)])
    (swept,) = await store.sweep(NOW, TTL_S)
    assert swept == lost(
        old,
        provider="fake",
        prompt_tokens=8,
        completion_tokens=3,
        source=Source.REPORTED,
        cost_micro_usd=12,
    )
    assert await balance(store) == 988


async def test_progress_is_not_usage(store: Store) -> None:
    """It shows in nothing but a sweep, and passes over holds that are gone."""
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    await store.place_hold(hold("req_1"))
    await store.write_progress([progress("req_1", 50), progress("req_2", 50)])
    await store.write_progress([])
    assert (await store.open_holds(), await store.usage()) == ([hold("req_1")], [])
    await store.settle([row("req_1", 30)])
    await store.write_progress([progress("req_1", 60)])
    assert (await balance(store), await store.usage()) == (70, [row("req_1", 30)])


async def test_a_swept_trial_is_not_debited(store: Store) -> None:
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    await store.place_hold(hold("req_1", placed_at=OLD, trial=True))
    (swept,) = await store.sweep(NOW, TTL_S)
    assert (swept.debit, swept.cost_micro_usd, await balance(store)) == (False, 5, 1000)


async def test_only_old_holds_of_workers_without_a_lease_are_swept(store: Store) -> None:
    """A live worker's hold is its own, however old it is."""
    for worker in ("live", "late", "never", "ended"):
        await store.place_hold(hold(f"{worker}_old", worker=worker, placed_at=OLD))
        await store.place_hold(hold(f"{worker}_young", worker=worker, placed_at=NOW - TTL_S + 1))
    await store.renew_lease("live", NOW - 10)
    await store.renew_lease("live", NOW + 10)
    await store.renew_lease("late", NOW - 1)
    await store.renew_lease("ended", NOW + 10)
    await store.end_lease("ended")
    await store.end_lease("nobody")
    swept = await store.sweep(NOW, TTL_S)
    assert {r.request_id for r in swept} == {"late_old", "never_old", "ended_old"}
    assert "live_old" in await held(store)
    assert await store.sweep(NOW, TTL_S) == []
    await store.end_lease("live")
    assert [r.request_id for r in await store.sweep(NOW, TTL_S)] == ["live_old"]


async def test_the_lost_holds_of_one_run_are_swept_at_once(store: Store) -> None:
    """Of any age, of its calls only, and never those of a worker that lives."""
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    await store.renew_lease("live", NOW + 10)
    dead = hold("run1/t/1/a", worker="dead", placed_at=NOW)
    await store.place_hold(dead)
    await store.place_hold(hold("run1/t/2/a", worker="live", placed_at=OLD))
    for other in ("run1", "run10/t/1/a", "run2/t/1/a"):
        await store.place_hold(hold(other, worker="dead", placed_at=OLD))
    await store.settle([row("run1/s/1/a", 30), row("run10/s/1/a", 30)])
    expected = [row("run1/s/1/a", 30), lost(dead)]
    assert await store.sweep_run("run1", NOW) == expected
    assert sorted(await held(store)) == ["run1", "run1/t/2/a", "run10/t/1/a", "run2/t/1/a"]
    assert await store.sweep_run("run1", NOW + 1) == expected
    assert await store.sweep_run("run3", NOW) == []
    assert await balance(store) == 1000 - 60 - 5


async def test_a_lease_that_ran_out_can_be_taken_again(store: Store) -> None:
    """A worker whose machine slept for a day: the sweep has forgotten the lease by then."""
    await store.place_hold(hold("req_1", placed_at=OLD))
    await store.renew_lease("worker_1", NOW - 86400)
    await store.sweep(NOW - 100_000, TTL_S)
    await store.renew_lease("worker_1", NOW + 15)
    assert await store.sweep(NOW, TTL_S) == []
    assert await held(store) == ["req_1"]


async def test_settling_a_swept_hold_changes_nothing(gateway: Gateway) -> None:
    """The worker was alive after all, only late: the row of the sweep stands, and its notice."""
    store, other = await gateway(notice_of), await gateway(notice_of)
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    await store.place_hold(hold("req_1", placed_at=OLD))
    (swept,) = await other.sweep(NOW, TTL_S)
    await store.settle([row("req_1", 500)])
    assert await store.usage() == [swept]
    assert await balance(store) == 995
    assert await store.due_notices(NOW * 2, 9) == [notice_of(swept)]


async def test_two_sweeps_share_the_rows(gateway: Gateway) -> None:
    """No row is written or returned twice; settlements in between are respected."""
    one, two = await gateway(), await gateway()
    await one.put_org(Org(id="acme", balance_micro_usd=10_000))
    for i in range(200):
        assert await one.place_hold(hold(f"req_{i}", 1, placed_at=OLD))
    results = await asyncio.gather(
        *(store.sweep(NOW, TTL_S) for store in (one, two) for _ in range(3)),
        *(two.settle([row(f"req_{i}", 30)]) for i in range(100)),
        return_exceptions=True,
    )
    returned = [r for swept in results if isinstance(swept, list) for r in swept]
    assert [r for r in results if isinstance(r, Exception)] == []
    rows = await one.usage()
    assert len(rows) == len({r.request_id for r in rows}) == 200
    by_sweep = [r.request_id for r in rows if r.error_code == "worker_lost"]
    assert sorted(r.request_id for r in returned) == sorted(by_sweep)
    assert await balance(one) == 10_000 - sum(r.cost_micro_usd for r in rows)
    assert await held(one) == []
