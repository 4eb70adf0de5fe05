"""What every store must do (relay/stores/base.py): its life, orgs and keys, usage, notices.

Holds and rows: test_store_money.py. All of it at random: test_store_model.py. Death in the middle
of it: test_store_crash.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from relay.money import Source
from relay.stores.base import Org, StoreError
from tests.contract.values import NOW, balance, held, hold, key, notice_of, row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.stores.base import Store
    from tests.contract.backends import Backend

    Gateway = Callable[..., Awaitable[Store]]

# -- its life -------------------------------------------------------------------------------------


async def test_what_was_stored_is_there_after_a_restart(backend: Backend) -> None:
    """And opening a database that is up to date changes nothing."""
    org = Org(id="acme", balance_micro_usd=1000, trial=True, max_concurrent=3)
    store = backend.store()
    await store.open()
    await store.put_org(org)
    await store.create_key(key(org=org))
    await store.place_hold(hold("req_1"))
    await store.settle([row("req_2")])
    version = await store.keys_version()
    await store.close()
    for _ in range(2):
        again = backend.store()
        await again.open()
        assert await again.get_org("acme") == replace(org, balance_micro_usd=970)
        assert [k.id for k in await again.list_keys()] == ["key_a"]
        assert await held(again) == ["req_1"]
        assert await again.usage() == [row("req_2")]
        assert await again.keys_version() == version
        await again.close()


async def test_close_finishes_what_was_accepted(backend: Backend) -> None:
    """In the order in which it was called."""
    store = backend.store()
    await store.open()
    placing = [asyncio.create_task(store.place_hold(hold(f"req_{i}"))) for i in range(200)]
    settling = asyncio.create_task(store.settle([row("req_0")]))
    await asyncio.sleep(0)  # all have called
    await store.close()
    assert await asyncio.gather(*placing) == [True] * 200
    await settling
    again = backend.store()
    await again.open()
    try:
        assert set(await held(again)) == {f"req_{i}" for i in range(1, 200)}
    finally:
        await again.close()


async def test_close_is_idempotent_and_refuses_what_comes_later(backend: Backend) -> None:
    store = backend.store()
    await store.open()
    await asyncio.gather(store.close(), store.close())
    await store.close()
    for call in (store.place_hold(hold()), store.usage(), store.settle([row()])):
        with pytest.raises(StoreError, match="closed"):
            await call


async def test_a_store_that_was_not_opened_refuses(backend: Backend) -> None:
    store = backend.store()
    with pytest.raises(StoreError, match="not opened"):
        await store.usage()
    await store.close()


async def test_many_open_a_new_database_at_once(backend: Backend) -> None:
    """Gateways that are started together: one makes it, all use it."""
    stores = [backend.store() for _ in range(8)]
    await asyncio.gather(*(store.open() for store in stores))
    try:
        orgs = [Org(id=f"org_{i}") for i in range(8)]
        await asyncio.gather(*map(_ensure, stores, orgs))
        for store in stores:
            assert [await store.get_org(org.id) for org in orgs] == orgs
    finally:
        await asyncio.gather(*(store.close() for store in stores))


async def _ensure(store: Store, org: Org) -> Org:
    return await store.ensure_org(org)


async def test_a_cancelled_call_comes_before_what_its_caller_calls_next(store: Store) -> None:
    """B35: whether it was done or not, its release finds nothing that comes later."""
    for i in range(50):
        placing = asyncio.create_task(store.place_hold(hold(f"req_{i}")))
        await asyncio.sleep(0)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing
        await store.settle([row(f"req_{i}", 0, source=Source.NONE)])
    assert await held(store) == []
    assert len(await store.usage()) == 50


# -- orgs -----------------------------------------------------------------------------------------


async def test_ensure_org_creates_once(store: Store) -> None:
    """An org that exists keeps all that it is."""
    first = Org(id="acme", balance_micro_usd=5, trial=True, max_concurrent=2)
    assert await store.ensure_org(first) == first
    assert await store.ensure_org(Org(id="acme", balance_micro_usd=99)) == first
    assert await store.get_org("acme") == first
    assert await store.get_org("acm") is None


async def test_put_org_overwrites_all(store: Store) -> None:
    """Keys that refer to it stay."""
    await store.put_org(Org(id="acme", balance_micro_usd=5, trial=True, max_concurrent=2))
    await store.create_key(key())
    await store.put_org(Org(id="acme"))
    assert await store.get_org("acme") == Org(id="acme")
    assert [k.org for k in await store.list_keys()] == [Org(id="acme")]


async def test_add_balance_adds_to_what_is_there(store: Store) -> None:
    """An org without a limit stays without one."""
    await store.put_org(Org(id="acme", balance_micro_usd=-5, trial=True, max_concurrent=2))
    await store.put_org(Org(id="free"))
    more = Org(id="acme", balance_micro_usd=7, trial=True, max_concurrent=2)
    assert await store.add_balance("acme", 12) == more
    assert await store.add_balance("free", 12) == Org(id="free")
    assert await store.add_balance("nobody", 12) is None
    assert await store.list_orgs() == [more, Org(id="free")]


async def test_change_org_changes_what_it_names(store: Store) -> None:
    assert await store.change_org("acme", {}) == Org(id="acme")
    changed = await store.change_org("acme", {"balance_micro_usd": 7, "max_concurrent": 4})
    assert changed == Org(id="acme", balance_micro_usd=7, max_concurrent=4)
    assert await store.change_org("acme", {"trial": True}) == replace(changed, trial=True)
    changed = await store.change_org("acme", {"balance_micro_usd": None, "max_concurrent": None})
    assert changed == Org(id="acme", trial=True) == await store.get_org("acme")


async def test_change_org_undoes_no_debit(gateway: Gateway) -> None:
    """The reason for it: settlements go on while an operator changes a limit."""
    one, two = await gateway(), await gateway()
    await one.put_org(Org(id="acme", balance_micro_usd=1000))
    await asyncio.gather(
        *(one.settle([row(f"req_{i}", 1)]) for i in range(100)),
        *(two.change_org("acme", {"max_concurrent": i + 1}) for i in range(100)),
    )
    after = await two.get_org("acme")
    assert after == Org(id="acme", balance_micro_usd=900, max_concurrent=100)


# -- keys -----------------------------------------------------------------------------------------


async def test_keys_are_listed_with_their_org_as_it_is_now(store: Store) -> None:
    """Oldest first, whatever the order of creation."""
    await store.ensure_org(Org(id="acme", max_concurrent=1))
    await store.ensure_org(Org(id="b"))
    late, early = key("late", created_at=NOW + 1, name=None), key("early", created_at=NOW)
    await store.create_key(late)
    await store.create_key(early)
    await store.create_key(key("b", Org(id="b"), created_at=NOW + 2, status="suspended"))
    await store.change_org("acme", {"trial": True})
    acme = Org(id="acme", trial=True, max_concurrent=1)
    assert await store.list_keys() == [
        replace(early, org=acme),
        replace(late, org=acme),
        key("b", Org(id="b"), created_at=NOW + 2, status="suspended"),
    ]


async def test_a_taken_id_or_digest_is_refused(store: Store) -> None:
    await store.ensure_org(Org(id="acme"))
    await store.create_key(key("a"))
    with pytest.raises(StoreError, match="key_a"):
        await store.create_key(key("a", digest=b"x" * 32))
    with pytest.raises(StoreError, match="key_b"):
        await store.create_key(key("a", id="key_b"))
    assert [k.id for k in await store.list_keys()] == ["key_a"]


async def test_a_key_of_no_org_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no organisation 'acme'"):
        await store.create_key(key())
    assert await store.list_keys() == []


async def test_revoking_is_for_good(store: Store) -> None:
    """Idempotent; an unknown one is told."""
    await store.ensure_org(Org(id="acme"))
    await store.create_key(key("a"))
    await store.create_key(key("b"))
    assert await store.revoke_key("key_a")
    assert await store.revoke_key("key_a")
    assert not await store.revoke_key("key_")
    assert [k.status for k in await store.list_keys()] == ["revoked", "active"]


async def test_the_version_tells_of_keys_and_properties_but_not_of_money(gateway: Gateway) -> None:
    """As another gateway sees it."""
    store, other = await gateway(), await gateway()
    seen = [await other.keys_version()]

    async def changed() -> bool:
        seen.append(await other.keys_version())
        return seen[-1] != seen[-2]

    await store.ensure_org(Org(id="acme", balance_micro_usd=100))
    await changed()
    await store.create_key(key())
    assert await changed()
    await store.change_org("acme", {"trial": True})
    assert await changed()
    await store.put_org(Org(id="acme", balance_micro_usd=100, max_concurrent=5))
    assert await changed()
    await store.place_hold(hold())
    await store.settle([row()])
    await store.change_org("acme", {"balance_micro_usd": 7})
    await store.ensure_org(Org(id="acme", trial=True))
    assert not await changed()
    await store.revoke_key("key_a")
    assert await changed()
    assert len(set(seen)) >= 5


# -- usage ----------------------------------------------------------------------------------------


async def test_a_row_comes_back_as_it_went_in(store: Store) -> None:
    """Every field, absent ones and awkward texts too; lone surrogates become U+FFFD (B20)."""
    rows = [
        row("req_1", at=NOW + 0.123456789),
        row("req_2", 0, provider=None, error_code="x", status=499, source=Source.NONE, attempts=()),
        row("req_3", 2**53, cached_tokens=0, reasoning_tokens=9, debit=False, at=NOW + 3),
        row("req_4", model='l/模型"\\\n\x00🙂\ufeff', attempts=("a: é", ""), at=NOW + 4),
    ]
    await store.settle(rows)
    assert await store.usage() == sorted(rows, key=lambda r: r.at)
    await store.place_hold(hold("req_5", model="local/\ud83d", placed_at=NOW + 5))
    await store.settle([row("req_5", model="local/\ud83d", attempts=("\ude00",), at=NOW + 5)])
    (last,) = await store.usage(since=NOW + 5)
    assert (last.model, last.attempts) == ("local/\ufffd", ("\ufffd",))
    assert await held(store) == []


async def test_usage_since_org_and_limit(store: Store) -> None:
    """Oldest first in every case; rows of one moment in the order of writing."""
    for i, (org, at) in enumerate([("a", 30), ("b", 10), ("a", 10), ("a", 20), ("b", 20)]):
        await store.settle([row(f"req_{i}", org=org, at=float(at))])

    async def ids(since: float = 0.0, org: str | None = None, limit: int | None = None) -> str:
        rows = await store.usage(since=since, org=org, limit=limit)
        return "".join(r.request_id.removeprefix("req_") for r in rows)

    assert await ids() == "12340"
    assert await ids(since=20.0) == "340"
    assert await ids(since=20.1) == "0"
    assert await ids(org="a") == "230"
    assert await ids(org="a", since=20.0) == "30"
    assert await ids(limit=2) == "40"
    assert await ids(limit=2, org="b") == "14"
    assert await ids(limit=9, since=20.0) == "340"
    assert await ids(limit=0) == ""
    assert await ids(org="c") == ""


# -- notices --------------------------------------------------------------------------------------


async def test_every_row_has_its_notice(gateway: Gateway) -> None:
    """Stored with the row, of a settlement and of a swept hold; none for what wrote no row."""
    store = await gateway(notice_of)
    await store.settle([row("req_1", at=10.0), row("req_2", at=5.0)])
    await store.settle([row("req_1", 999, at=1.0)])
    await store.place_hold(hold("req_3", placed_at=NOW - 10))
    await store.sweep(NOW, 5)
    found = await store.due_notices(NOW, 10)
    rows = await store.usage()
    assert [n.id for n in found] == ["req_2", "req_1", "req_3"]
    assert found == [notice_of(r) for r in sorted(rows, key=lambda r: r.at)]


async def test_without_notice_of_there_are_none(store: Store) -> None:
    await store.settle([row()])
    assert await store.due_notices(NOW * 2, 10) == []


async def test_notices_are_due_until_they_are_delivered(gateway: Gateway) -> None:
    """At least once, the same bytes in every try, those due longest first."""
    store, other = await gateway(notice_of), await gateway(notice_of)
    await store.settle([row(f"req_{i}", at=float(i)) for i in (3, 1, 2)])
    assert [n.id for n in await other.due_notices(0.9, 10)] == []
    assert [n.id for n in await other.due_notices(2.0, 10)] == ["req_1", "req_2"]
    assert [n.id for n in await other.due_notices(9.0, 2)] == ["req_1", "req_2"]
    await store.postpone_notice("req_1", 7.0)
    await other.postpone_notice("req_1", 8.0)
    await store.notice_delivered("req_3")
    assert [n.id for n in await other.due_notices(7.9, 10)] == ["req_2"]
    *_, postponed = await store.due_notices(8.0, 10)
    assert postponed == replace(notice_of(row("req_1")), tries=2, due_at=8.0)


async def test_a_delivered_notice_is_never_due_again(gateway: Gateway) -> None:
    """Not by a second settlement, a late postponement or a second delivery either."""
    store, other = await gateway(notice_of), await gateway(notice_of)
    await store.settle([row()])
    await store.notice_delivered("req_1")
    await other.notice_delivered("req_1")
    await other.settle([row()])
    await other.postpone_notice("req_1", 0.0)
    assert await other.due_notices(NOW * 2, 10) == []


async def test_a_row_and_its_notice_are_stored_together_or_not_at_all(gateway: Gateway) -> None:
    """All settlements of one call too: the caller will give all of them again."""
    store = await gateway(notice_of)
    await store.put_org(Org(id="acme", balance_micro_usd=1000))
    await store.place_hold(hold("req_1"))
    with pytest.raises(StoreError):
        await store.settle([row("req_1"), row("req_2", 2**64)])  # more than a database can hold
    assert await store.usage() == []
    assert await store.due_notices(NOW * 2, 10) == []
    assert (await balance(store), await held(store)) == (1000, ["req_1"])
    await store.settle([row("req_1")])
    assert (await balance(store), await held(store)) == (970, [])
