"""A store against a model of it in memory: any sequence of calls, from two gateways."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from relay.money import Source
from relay.stores.base import Notice, Org, StoreError
from tests.contract.backends import BACKENDS, Backend
from tests.contract.values import NOW, TTL_S, hold, notice_of, progress, row

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from relay.money import Hold, Progress, Settlement
    from relay.stores.base import Store

ORGS = ("acme", "b")
REQUESTS = [f"req_{i}" for i in range(12)]
WORKERS = ("worker_1", "worker_2")

some_org = st.sampled_from(ORGS)
some_request = st.sampled_from(REQUESTS)
some_worker = st.sampled_from(WORKERS)
amount = st.integers(0, 120)
balance = st.none() | st.integers(0, 300)
gateway = st.integers(0, 1)


class StoreMachine(RuleBasedStateMachine):
    """The calls; beside each, what it means in plain dictionaries."""

    kind: type[Backend]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        backend = self.kind(Path(self.folder.name))
        self.stores = [backend.store(notice_of), backend.store(notice_of)]
        for store in self.stores:
            self.run(store.open())
        self.now = NOW
        self.orgs: dict[str, Org] = {}
        self.holds: dict[str, Hold] = {}
        self.noted: dict[str, Progress] = {}
        self.rows: dict[str, Settlement] = {}
        self.leases: dict[str, float] = {}
        self.notices: dict[str, Notice] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def teardown(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.folder.cleanup)
            stack.callback(self.runner.close)
            for store in self.stores:
                stack.callback(self.run, store.close())

    # -- what the calls mean --------------------------------------------------------------------

    def held(self, org: str) -> int:
        paying = (h for h in self.holds.values() if h.org == org and not h.trial)
        return sum(h.amount_micro_usd for h in paying)

    def settled(self, settlement: Settlement) -> bool:
        if settlement.request_id in self.rows:
            return False
        self.rows[settlement.request_id] = settlement
        self.holds.pop(settlement.request_id, None)
        self.noted.pop(settlement.request_id, None)
        self.notices[settlement.request_id] = notice_of(settlement)
        org = self.orgs.get(settlement.org)
        if settlement.debit and org is not None and org.balance_micro_usd is not None:
            left = org.balance_micro_usd - settlement.cost_micro_usd
            self.orgs[org.id] = replace(org, balance_micro_usd=left)
        return True

    def swept(self, old: Hold) -> Settlement:
        note = self.noted.get(old.request_id)
        return row(
            old.request_id,
            note.cost_micro_usd if note else old.prompt_micro_usd,
            at=self.now,
            org=old.org,
            provider=note.provider if note else None,
            status=500,
            error_code="worker_lost",
            prompt_tokens=note.prompt_tokens if note else old.prompt_tokens,
            completion_tokens=note.completion_tokens if note else 0,
            source=note.source if note else Source.COUNTED,
            debit=not old.trial,
            attempts=(),
            duration_ms=round((self.now - old.placed_at) * 1000),
        )

    # -- the calls ------------------------------------------------------------------------------

    @rule(gateway=gateway, org=some_org, balance=balance, trial=st.booleans())
    def ensure_org(self, gateway: int, org: str, balance: int | None, trial: bool) -> None:
        wanted = Org(id=org, balance_micro_usd=balance, trial=trial)
        stored = self.run(self.stores[gateway].ensure_org(wanted))
        assert stored == self.orgs.setdefault(org, wanted)

    @rule(gateway=gateway, org=some_org, balance=balance)
    def set_balance(self, gateway: int, org: str, balance: int | None) -> None:
        before = self.orgs.get(org, Org(id=org))
        self.orgs[org] = replace(before, balance_micro_usd=balance)
        change = self.stores[gateway].change_org(org, {"balance_micro_usd": balance})
        assert self.run(change) == self.orgs[org]

    @rule(
        gateway=gateway,
        request=some_request,
        org=some_org,
        amount=amount,
        worker=some_worker,
        trial=st.sampled_from((False, False, True)),
    )
    def place_hold(
        self, gateway: int, request: str, org: str, amount: int, worker: str, trial: bool
    ) -> None:
        wanted = hold(request, amount, org=org, worker=worker, trial=trial, placed_at=self.now)
        call = self.stores[gateway].place_hold(wanted)
        if request in self.rows:
            with pytest.raises(StoreError):
                self.run(call)
            return
        known = self.orgs.get(org)
        limit = known.balance_micro_usd if known else None
        passes = request in self.holds or trial or limit is None or limit - self.held(org) >= amount
        assert self.run(call) is passes
        if passes:
            self.holds.setdefault(request, wanted)

    @rule(
        gateway=gateway,
        requests=st.lists(some_request, max_size=4),
        org=some_org,
        cost=amount,
        debit=st.booleans(),
    )
    def settle(self, gateway: int, requests: list[str], org: str, cost: int, debit: bool) -> None:
        rows = [row(r, cost, org=org, debit=debit, at=self.now) for r in requests]
        self.run(self.stores[gateway].settle(rows))
        for each in rows:
            self.settled(each)

    @rule(gateway=gateway, requests=st.lists(some_request, max_size=4), cost=amount)
    def write_progress(self, gateway: int, requests: list[str], cost: int) -> None:
        notes = [progress(r, cost, completion_tokens=cost) for r in requests]
        self.run(self.stores[gateway].write_progress(notes))
        self.noted.update({n.request_id: n for n in notes if n.request_id in self.holds})

    @rule(gateway=gateway, worker=some_worker, lasts=st.integers(1, 2000))
    def renew_lease(self, gateway: int, worker: str, lasts: int) -> None:
        self.leases[worker] = self.now + lasts
        self.run(self.stores[gateway].renew_lease(worker, self.now + lasts))

    @rule(gateway=gateway, worker=some_worker)
    def end_lease(self, gateway: int, worker: str) -> None:
        self.leases.pop(worker, None)
        self.run(self.stores[gateway].end_lease(worker))

    @rule(seconds=st.sampled_from((1, 10, 500, 1000, 5000)))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(gateway=gateway, both=st.booleans())
    def sweep(self, gateway: int, both: bool) -> None:
        async def sweeps() -> list[Settlement]:
            stores = self.stores if both else [self.stores[gateway]]
            found = await asyncio.gather(*(s.sweep(self.now, TTL_S) for s in stores))
            return [each for swept in found for each in swept]

        lost = [
            self.swept(h)
            for h in self.holds.values()
            if h.placed_at < self.now - TTL_S and self.leases.get(h.worker, 0) <= self.now
        ]
        assert sorted(self.run(sweeps()), key=_id) == sorted(lost, key=_id)
        for each in lost:
            assert self.settled(each)

    @rule(gateway=gateway, request=some_request)
    def deliver(self, gateway: int, request: str) -> None:
        self.notices.pop(request, None)
        self.run(self.stores[gateway].notice_delivered(request))

    @rule(gateway=gateway, request=some_request, wait=st.integers(1, 1000))
    def postpone(self, gateway: int, request: str, wait: int) -> None:
        known = self.notices.get(request)
        if known is not None:
            later = replace(known, tries=known.tries + 1, due_at=self.now + wait)
            self.notices[request] = later
        self.run(self.stores[gateway].postpone_notice(request, self.now + wait))

    # -- what must be true between any two ------------------------------------------------------

    @invariant()
    def both_gateways_see_what_the_model_says(self) -> None:
        for store in self.stores:
            self.run(self._compare(store))

    async def _compare(self, store: Store) -> None:
        assert [await store.get_org(org) for org in ORGS] == [self.orgs.get(org) for org in ORGS]
        assert sorted(await store.open_holds(), key=_id) == sorted(self.holds.values(), key=_id)
        assert sorted(await store.usage(), key=_id) == sorted(self.rows.values(), key=_id)
        due = [n for n in self.notices.values() if n.due_at <= self.now]
        found = await store.due_notices(self.now, 100)
        assert sorted(found, key=lambda n: n.id) == sorted(due, key=lambda n: n.id)
        assert [n.due_at for n in found] == sorted(n.due_at for n in found)


def _id(value: Hold | Settlement) -> str:
    return value.request_id


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_store_is_its_model(kind: type[Backend]) -> None:
    """Balances, holds, rows and notices, after every call."""
    machine = type("Machine", (StoreMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
