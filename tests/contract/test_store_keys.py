"""D6.2: idempotency keys of decides, shared by every gateway on a store."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from relay.stores.base import KeyClaim, KeyState, KeyUse
from tests.contract.backends import BACKENDS, Backend
from tests.contract.values import NOW, OLD, TTL_S, held, hold, progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from relay.money import Progress
    from relay.stores.base import Store

LEASE_S = 30.0
DAY_S = 86_400.0
MONTH_S = 30 * DAY_S
USE = KeyUse(org="acme", key="k", digest=b"d" * 32, owner="try_1")
OTHER = replace(USE, owner="try_2")


async def claim(store: Store, use: KeyUse, now: float = NOW) -> KeyClaim:
    return await store.claim_key(use, now=now, until=now + LEASE_S)


async def keep(
    store: Store,
    use: KeyUse = USE,
    answer: bytes = b"{}",
    *,
    now: float = NOW,
    progress: Progress | None = None,
) -> bool:
    until = now + DAY_S
    return await store.keep_answer(
        use, answer, until=until, forget_at=until + MONTH_S, progress=progress
    )


async def test_an_answer_is_there_for_a_day_and_its_key_for_a_month_more(store: Store) -> None:
    assert (await claim(store, USE)).state is KeyState.CLAIMED
    assert await keep(store, answer=b'{"a":1}') is True
    for erased in (False, True):
        if erased:
            await store.erase_answers(NOW + DAY_S + 1)
        else:
            last = NOW + DAY_S - 1
            assert await claim(store, OTHER, last) == KeyClaim(KeyState.ANSWERED, 0.0, b'{"a":1}')
            await store.erase_answers(last)
            assert (await claim(store, OTHER, last)).state is KeyState.ANSWERED
        for now in (NOW + DAY_S, NOW + DAY_S + MONTH_S - 1):
            assert (await claim(store, OTHER, now)).state is KeyState.EXPIRED
            other_body = replace(OTHER, digest=b"e" * 32)
            assert (await claim(store, other_body, now)).state is KeyState.REUSED
    free = NOW + DAY_S + MONTH_S
    assert (await claim(store, replace(OTHER, digest=b"e" * 32), free)).state is KeyState.CLAIMED


async def test_what_is_over_is_forgotten(store: Store) -> None:
    """The answer at its end, the key at its own, and a key whose owner was lost."""
    await claim(store, USE)
    await keep(store)
    await claim(store, replace(USE, key="lost"))
    await store.erase_answers(NOW + DAY_S + MONTH_S)
    assert await keep(store, replace(USE, key="lost")) is False
    assert (await claim(store, OTHER, NOW)).state is KeyState.CLAIMED  # whatever the time


async def test_a_key_that_is_taken_is_running_until_its_lease_ends(store: Store) -> None:
    assert (await claim(store, USE)).state is KeyState.CLAIMED
    found = await claim(store, OTHER, NOW + 1)
    assert found == KeyClaim(KeyState.RUNNING, NOW + LEASE_S)
    assert await store.renew_key(USE, until=NOW + 40) is True
    assert await claim(store, OTHER, NOW + 39) == KeyClaim(KeyState.RUNNING, NOW + 40)
    other_body = replace(OTHER, digest=b"e" * 32)
    assert (await claim(store, other_body, NOW + 39)).state is KeyState.REUSED
    assert (await claim(store, other_body, NOW + 40)).state is KeyState.CLAIMED
    assert await store.renew_key(USE, until=NOW + 80) is False
    assert await keep(store) is False
    await store.leave_key(USE)
    assert (await claim(store, USE, NOW + 41)).state is KeyState.REUSED


async def test_a_late_owner_keeps_its_key_if_nobody_took_it(store: Store) -> None:
    await claim(store, USE)
    assert await store.renew_key(USE, until=NOW + 300) is True
    assert await keep(store, now=NOW + 400) is True
    assert (await claim(store, OTHER, NOW + 401)).state is KeyState.ANSWERED


async def test_a_failed_try_leaves_the_key(store: Store) -> None:
    await claim(store, USE)
    await store.leave_key(USE)
    await store.leave_key(USE)
    assert (await claim(store, replace(OTHER, digest=b"e" * 32))).state is KeyState.CLAIMED


async def test_an_answer_is_not_left_again(store: Store) -> None:
    await claim(store, USE)
    await keep(store)
    await store.leave_key(USE)
    assert await keep(store, answer=b"other") is False
    assert (await claim(store, OTHER)).answer == b"{}"


async def test_a_key_is_the_accounts_own(store: Store) -> None:
    await claim(store, USE)
    await keep(store)
    assert (await claim(store, replace(OTHER, org="b"))).state is KeyState.CLAIMED


async def test_one_of_many_tries_gets_the_key(gateway: Callable[..., Awaitable[Store]]) -> None:
    stores = [await gateway(), await gateway()]
    tries = [replace(USE, owner=f"try_{i}") for i in range(20)]
    found = await asyncio.gather(*(claim(stores[i % 2], use) for i, use in enumerate(tries)))
    states = [each.state for each in found]
    assert states.count(KeyState.CLAIMED) == 1
    assert states.count(KeyState.RUNNING) == 19


async def test_answers_and_keys_outlive_a_gateway(
    gateway: Callable[..., Awaitable[Store]],
) -> None:
    first = await gateway()
    await claim(first, USE)
    await keep(first, answer=bytes(range(256)))
    await claim(first, replace(USE, key="running"))
    await first.close()
    second = await gateway()
    assert (await claim(second, OTHER)).answer == bytes(range(256))
    assert (await claim(second, replace(OTHER, key="running"))).state is KeyState.RUNNING


async def test_the_cost_of_an_answer_is_noted_with_it(store: Store) -> None:
    """A gateway that is lost between answer and settlement: billed once, when it is swept."""
    await store.place_hold(hold("req_1", placed_at=OLD, prompt_tokens=0, prompt_micro_usd=0))
    await claim(store, USE)
    assert await keep(store, progress=progress("req_1", 42)) is True
    (row,) = await store.sweep(NOW, TTL_S)
    assert (row.cost_micro_usd, row.error_code) == (42, "worker_lost")
    assert await held(store) == []


async def test_no_cost_is_noted_for_an_answer_that_is_not_kept(store: Store) -> None:
    await store.place_hold(hold("req_1", placed_at=OLD, prompt_tokens=0, prompt_micro_usd=0))
    assert await keep(store, progress=progress("req_1", 42)) is False
    (row,) = await store.sweep(NOW, TTL_S)
    assert row.cost_micro_usd == 0


class KeyMachine(RuleBasedStateMachine):
    """Any calls at any times, beside the same in plain dictionaries."""

    kind: type[Backend]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        backend = self.kind(Path(self.folder.name))
        self.stores = [backend.store(), backend.store()]
        for store in self.stores:
            self.run(store.open())
        self.now = NOW
        self.tries = 0
        self.rows: dict[str, dict[str, Any]] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(call)

    def teardown(self) -> None:
        for store in self.stores:
            self.run(store.close())
        self.runner.close()
        self.folder.cleanup()

    @rule(key=st.sampled_from("ab"), body=st.sampled_from("xy"), gateway=st.integers(0, 1))
    def claim(self, key: str, body: str, gateway: int) -> None:
        self.tries += 1
        use = replace(USE, key=key, digest=body.encode() * 32, owner=f"try_{self.tries}")
        found = self.run(claim(self.stores[gateway], use, self.now))
        row = self.rows.get(key)
        if row is None or row["free_at"] <= self.now:
            assert found.state is KeyState.CLAIMED
            self.rows[key] = {"use": use, "answer": None, "free_at": self.now + LEASE_S}
        elif row["use"].digest != use.digest:
            assert found.state is KeyState.REUSED
        elif row["answer"] is None:
            assert found == KeyClaim(KeyState.RUNNING, row["free_at"])
        elif row["free_at"] - MONTH_S <= self.now:
            assert found.state is KeyState.EXPIRED
        else:
            assert found == KeyClaim(KeyState.ANSWERED, 0.0, row["answer"])

    @rule(key=st.sampled_from("ab"), gateway=st.integers(0, 1))
    def renew(self, key: str, gateway: int) -> None:
        row = self.rows.get(key)
        use = row["use"] if row else replace(USE, key=key)
        kept = self.run(self.stores[gateway].renew_key(use, until=self.now + LEASE_S))
        assert kept is (row is not None and row["answer"] is None)
        if row and kept:
            row["free_at"] = self.now + LEASE_S

    @rule(key=st.sampled_from("ab"), answer=st.binary(max_size=3), gateway=st.integers(0, 1))
    def answer(self, key: str, answer: bytes, gateway: int) -> None:
        row = self.rows.get(key)
        use = row["use"] if row else replace(USE, key=key)
        kept = self.run(keep(self.stores[gateway], use, answer, now=self.now))
        assert kept is (row is not None and row["answer"] is None)
        if row and kept:
            row |= {"answer": answer, "free_at": self.now + DAY_S + MONTH_S}

    @rule(key=st.sampled_from("ab"), gateway=st.integers(0, 1))
    def leave(self, key: str, gateway: int) -> None:
        row = self.rows.get(key)
        use = row["use"] if row else replace(USE, key=key)
        self.run(self.stores[gateway].leave_key(use))
        if row and row["answer"] is None:
            del self.rows[key]

    @rule(seconds=st.sampled_from((1.0, 10.0, 29.0, 30.0, DAY_S, MONTH_S)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(gateway=st.integers(0, 1))
    def erase(self, gateway: int) -> None:
        self.run(self.stores[gateway].erase_answers(self.now))
        for key, row in [*self.rows.items()]:
            lost_for = 0.0 if row["answer"] is not None else 3600.0
            if row["free_at"] + lost_for <= self.now:
                del self.rows[key]


@pytest.mark.parametrize("kind", BACKENDS)
def test_any_sequence_of_calls(kind: type[Backend]) -> None:
    machine = type("Machine", (KeyMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
