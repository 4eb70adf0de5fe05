"""D4.4, D5.4, D6.2, D6.5, D6.7: what happens around one decide."""

from __future__ import annotations

import asyncio
import hashlib
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.decision_attachments import Attachment
from encoders.decision_errors import error
from encoders.decision_served import ModelLimits, Served, Subject
from relay.deciders.base import DecisionReply
from relay.decisions import service as module
from relay.decisions.effects import Decided, Failed
from relay.decisions.limits import DecisionLimits
from relay.decisions.service import Asked, Caller, DecideService
from relay.decisions.tariff import Tariff
from relay.ledger import Ledger
from relay.money import Price, Source
from relay.slots import Slots
from relay.stores.base import KeyClaim, KeyState, KeyUse, Org, StoreError
from relay.stores.sqlite import SqliteStore
from tests.support.checks import until
from tests.support.deciding import decide_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from encoders.decision_errors import DecisionError
    from relay.money import Settlement

SERVED = Served(models={"m": ModelLimits(questions=2)}, media=("image",))
QUESTION = {"type": "boolean", "instructions": "?"}
ANSWER = DecisionReply(body=b'{"a":1}', server_timing="decide;dur=1", answered=1)
TARIFF = Tariff(text={"m": Price(prompt_usd_per_mtok=Decimal(1))})
IMAGE = Attachment("i", "image", "image/png", 9, b"\x89PNG\r\n\x1a\n", b"x" * 400)


class FakeBackend:
    """Answers with what it is given."""

    def __init__(self, answer: DecisionReply | DecisionError | Exception = ANSWER) -> None:
        self.answer = answer
        self.keys: list[str | None] = []
        self.go: asyncio.Event | None = None

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        self.keys.append(idempotency_key)
        assert body.startswith(b"body")
        if self.go is not None:
            await self.go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        pass


def asked(
    key: str | None = None,
    *,
    model: str = "m",
    body: bytes = b"body",
    files: tuple[Attachment, ...] = (),
    **questions: Any,
) -> Asked:
    subject = Subject(model, questions or {"q": QUESTION}, files)
    return Asked(body=body, subject=subject, idempotency_key=key)


async def decide(
    service: DecideService, what: Asked | None = None, org: str = "acme", **caller: Any
) -> Decided | Failed:
    caller = {"org": org, "key_id": "key_1"} | caller
    return await service.decide(service.begin(Caller(**caller), what or asked()))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "s.db")
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def ledger(store: SqliteStore) -> AsyncIterator[Ledger]:
    ledger = Ledger(store)
    ledger.start()
    yield ledger
    await ledger.close()


async def rows(store: SqliteStore, count: int) -> list[Settlement]:
    async def there() -> bool:
        return len(await store.usage()) >= count and not await store.open_holds()

    async with asyncio.timeout(10):
        while not await there():
            await asyncio.sleep(0.01)
    found = await store.usage()
    assert len(found) == count
    return found


def code_of(found: Decided | Failed) -> str:
    assert isinstance(found, Failed)
    return found.error.code


# --- one decide -----------------------------------------------------------------------------------


async def test_an_answer() -> None:
    slots = Slots()
    service = decide_service(FakeBackend(), SERVED, slots=slots)
    found = await decide(service, max_concurrent=1)
    assert isinstance(found, Decided)
    assert (found.reply, found.server_timing) == (ANSWER.body, "decide;dur=1")
    assert found.request_id.startswith("req_")
    assert found.latency_ms is not None
    assert not found.replayed
    assert slots.in_use("acme") == 0


async def test_a_failure_of_the_backend_is_an_answer() -> None:
    problem = error("capacity_exhausted", "later", retry_after_ms=5)
    found = await decide(decide_service(FakeBackend(problem), SERVED))
    assert isinstance(found, Failed)
    assert found.error is problem


async def test_what_is_not_served_is_refused_before_the_backend_is_asked() -> None:
    backend = FakeBackend()
    service = decide_service(backend, SERVED)
    for wrong, code in (
        (asked(model="other"), "model_not_found"),
        (asked(a=QUESTION, b=QUESTION, c=QUESTION), "questions_too_large"),
    ):
        assert code_of(await decide(service, wrong)) == code
    assert backend.keys == []


async def test_a_slot_is_taken_for_a_dispatch() -> None:
    """D5.4, D1.6: none free is 429, and nothing was dispatched."""
    slots, backend = Slots(), FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, slots=slots)
    first = asyncio.ensure_future(decide(service, max_concurrent=1))
    await until(lambda: len(backend.keys) == 1)
    assert slots.in_use("acme") == 1
    second = await decide(service, max_concurrent=1)
    assert isinstance(second, Failed)
    assert (second.error.status, second.error.code) == (429, "concurrency_limit_exceeded")
    assert second.error.details == {"cause": "account_concurrency"}
    assert second.error.retryable
    assert len(backend.keys) == 1
    backend.go.set()
    assert isinstance(await first, Decided)
    assert slots.in_use("acme") == 0


async def test_a_cancelled_decide_frees_its_slot() -> None:
    slots, backend = Slots(), FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, slots=slots)
    running = asyncio.ensure_future(decide(service, max_concurrent=1))
    await until(lambda: len(backend.keys) == 1)
    running.cancel()
    await asyncio.wait({running})
    assert slots.in_use("acme") == 0


async def test_a_bug_in_a_backend_is_500(caplog: pytest.LogCaptureFixture) -> None:
    found = await decide(decide_service(FakeBackend(RuntimeError("a secret")), SERVED))
    assert isinstance(found, Failed)
    assert (found.error.status, found.error.code) == (500, "internal_error")
    assert "secret" not in found.error.message
    assert not found.error.retryable
    assert "a decision backend failed" in caplog.text


async def test_a_backend_without_an_end_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5.6, D6.1."""
    monkeypatch.setattr(module, "DECIDE_S", 0.05)
    monkeypatch.setattr(module, "_OVERTIME_S", 0.05)
    backend = FakeBackend()
    backend.go = asyncio.Event()
    found = await decide(decide_service(backend, SERVED))
    assert isinstance(found, Failed)
    assert (found.error.status, found.error.code) == (504, "system_zero_timeout")


# --- its key (D6.2) -------------------------------------------------------------------------------


async def test_keys_of_two_accounts_never_meet(store: SqliteStore) -> None:
    """Also where account and key together read the same."""
    backend = FakeBackend(error("internal_error", "no"))  # nothing is kept
    service = decide_service(backend, SERVED, store=store)
    for org, key in (("a", "bc"), ("ab", "c"), ("a", "bc"), ("1:a", "b"), ("a", None)):
        await decide(service, asked(key), org)
    first, second, third, fourth, none = backend.keys
    assert first == third
    assert none is None
    assert len({first, second, fourth}) == 3
    assert "bc" not in (first or "")


async def test_an_answer_is_given_again_and_is_the_accounts_own(store: SqliteStore) -> None:
    backend = FakeBackend()
    service = decide_service(backend, SERVED, store=store)
    first = await decide(service, asked("k"))
    backend.answer = DecisionReply(body=b"{}")
    again = await decide(service, asked("k"))
    assert isinstance(first, Decided)
    assert isinstance(again, Decided)
    assert (again.reply, again.replayed, first.replayed) == (first.reply, True, False)
    assert code_of(await decide(service, asked("k", body=b"body 2"))) == "idempotency_key_reuse"
    assert len(backend.keys) == 1
    other = await decide(service, asked("k"), "other")
    assert isinstance(other, Decided)
    assert (other.reply, other.replayed) == (b"{}", False)


async def test_what_the_client_sent_counts_and_not_what_became_of_it(store: SqliteStore) -> None:
    service = decide_service(FakeBackend(), SERVED, store=store)
    what = asked("k")
    for text, replayed in ((b"{ }", False), (b"{ }", True)):
        sent = Asked(
            body=what.body,
            subject=what.subject,
            idempotency_key="k",
            digest=hashlib.sha256(text).digest(),
        )
        found = await decide(service, sent)
        assert isinstance(found, Decided)
        assert found.replayed is replayed
    assert code_of(await decide(service, what)) == "idempotency_key_reuse"


async def test_a_running_key_is_a_conflict(store: SqliteStore) -> None:
    backend = FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, store=store)
    first = asyncio.ensure_future(decide(service, asked("k")))
    await until(lambda: len(backend.keys) == 1)
    second = await decide(service, asked("k"))
    assert isinstance(second, Failed)
    assert (second.error.status, second.error.code) == (409, "idempotency_conflict")
    assert second.error.retry_after_ms == 3000
    assert second.error.retryable
    assert code_of(await decide(service, asked("k", body=b"body 2"))) == "idempotency_key_reuse"
    backend.go.set()
    assert isinstance(await first, Decided)
    assert len(backend.keys) == 1


async def test_a_failed_try_leaves_its_key(store: SqliteStore) -> None:
    """Failed by the backend, by a bug, for want of a slot, by a cancellation."""
    backend, slots = FakeBackend(error("internal_error", "no")), Slots()
    service = decide_service(backend, SERVED, store=store, slots=slots)
    assert code_of(await decide(service, asked("k"))) == "internal_error"
    backend.answer = RuntimeError("bug")
    assert code_of(await decide(service, asked("k"))) == "internal_error"
    with slots.hold("acme", "other", 1):
        full = await decide(service, asked("k"), max_concurrent=1)
    assert code_of(full) == "concurrency_limit_exceeded"
    backend.answer, backend.go = ANSWER, asyncio.Event()
    running = asyncio.ensure_future(decide(service, asked("k")))
    await until(lambda: len(backend.keys) == 3)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    backend.go = None
    found = await decide(service, asked("k", body=b"body 2"))
    assert isinstance(found, Decided)


async def test_a_key_is_renewed_while_its_decide_runs(store: SqliteStore) -> None:
    """A lease of 0.3 s, a decide of 1 s: nobody else gets the key."""
    limits = DecisionLimits(idempotency_lease_ms=300, idempotency_renew_interval_ms=100)
    backend = FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, store=store, limits=limits)
    first = asyncio.ensure_future(decide(service, asked("k")))
    await until(lambda: len(backend.keys) == 1)
    for _ in range(10):
        await asyncio.sleep(0.1)
        assert code_of(await decide(service, asked("k"))) == "idempotency_conflict"
    backend.go.set()
    assert isinstance(await first, Decided)
    assert len(asyncio.all_tasks()) == 1  # the renewal has ended


async def test_a_key_that_was_lost_is_free_when_its_lease_ends(store: SqliteStore) -> None:
    limits = DecisionLimits(idempotency_lease_ms=1200, idempotency_renew_interval_ms=600)
    service = decide_service(FakeBackend(), SERVED, store=store, limits=limits)
    lost = KeyUse(org="acme", key="k", digest=hashlib.sha256(b"body").digest(), owner="gone")
    loop = asyncio.get_running_loop()
    now, began = time.time(), loop.time()
    await store.claim_key(lost, now=now, until=now + 1.2)
    waits = []
    while isinstance(found := await decide(service, asked("k")), Failed):
        assert found.error.code == "idempotency_conflict"
        assert found.error.retry_after_ms is not None
        waits.append(found.error.retry_after_ms)
        await asyncio.sleep(found.error.retry_after_ms / 1000)
    assert not found.replayed
    assert loop.time() - began >= 1.1
    assert waits[0] == 120  # it may live
    assert waits[-1] <= 600  # it does not: what is left of its lease
    assert len(waits) <= 9


class ClaimedBy:
    """A store in which another try has every key, with so much left of its lease."""

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    async def claim_key(self, use: KeyUse, *, now: float, until: float) -> KeyClaim:
        return KeyClaim(KeyState.RUNNING, now + self.left_s)


@given(left_s=st.floats(0.001, 30), draws=st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_the_real_client_outlasts_a_lost_lease(left_s: float, draws: list[float]) -> None:
    """Whatever is left of it and whatever jitter it draws: its five waits reach the end, within
    its budget of 60 s."""

    async def waits() -> float:
        store = ClaimedBy(left_s)
        service = decide_service(FakeBackend(), SERVED, store=store)
        waited = 0.0
        for attempt, draw in enumerate(draws):
            if store.left_s <= 0:
                break
            found = await decide(service, asked("k"))
            assert isinstance(found, Failed)
            told = (found.error.retry_after_ms or 0) / 1000
            wait_s = max(told, min(8.0, 0.5 * 2 ** min(attempt, 4)) * draw)
            waited += wait_s
            store.left_s -= wait_s
        assert store.left_s <= 0
        return waited

    assert asyncio.run(waits()) < 60


async def test_who_lost_its_key_gives_no_answer_and_bills_none(
    store: SqliteStore, ledger: Ledger
) -> None:
    """Another try has it since: that one answers."""
    backend = FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, store=store, hooks=(ledger,), tariff=TARIFF)
    first = asyncio.ensure_future(decide(service, asked("k")))
    await until(lambda: len(backend.keys) == 1)
    other = KeyUse(org="acme", key="k", digest=b"d" * 32, owner="other")
    claimed = await store.claim_key(other, now=4e9, until=4e9 + 30)
    assert claimed.state is KeyState.CLAIMED
    backend.go.set()
    assert code_of(await first) == "idempotency_conflict"
    (row,) = await rows(store, 1)
    assert (row.cost_micro_usd, row.source, row.status) == (0, Source.NONE, 409)


class BrokenStore:
    """Fails at one call."""

    def __init__(self, store: SqliteStore, broken: str) -> None:
        self._store, self._broken = store, broken

    def __getattr__(self, name: str) -> Any:
        if name != self._broken:
            return getattr(self._store, name)

        async def fail(*_: Any, **__: Any) -> Any:
            raise StoreError("gone")

        return fail


@pytest.mark.parametrize("broken", ["claim_key", "keep_answer"])
async def test_a_store_that_fails_is_503_and_bills_nothing(
    store: SqliteStore, ledger: Ledger, broken: str
) -> None:
    service = decide_service(
        FakeBackend(), SERVED, store=BrokenStore(store, broken), hooks=(ledger,), tariff=TARIFF
    )
    found = await decide(service, asked("k"))
    assert isinstance(found, Failed)
    assert (found.error.status, found.error.code) == (503, "idempotency_unavailable")
    assert found.error.retryable
    if broken == "keep_answer":
        (row,) = await rows(store, 1)
        assert row.cost_micro_usd == 0


async def test_an_answer_that_is_there_is_kept_and_billed_though_nobody_waits(
    store: SqliteStore, ledger: Ledger
) -> None:
    """D5.7: cancelled while the answer is being stored."""

    class Slow:
        def __init__(self) -> None:
            self.keeping = asyncio.Event()
            self.go = asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def keep_answer(self, *args: Any, **more: Any) -> bool:
            self.keeping.set()
            await self.go.wait()
            return await store.keep_answer(*args, **more)

    slow = Slow()
    service = decide_service(FakeBackend(), SERVED, store=slow, hooks=(ledger,), tariff=TARIFF)
    running = asyncio.ensure_future(decide(service, asked("k")))
    await slow.keeping.wait()
    running.cancel()
    await asyncio.sleep(0)
    slow.go.set()
    await asyncio.wait({running})
    (row,) = await rows(store, 1)
    assert (row.status, row.cost_micro_usd) == (200, 110)
    found = await decide(service, asked("k"))
    assert isinstance(found, Decided)
    assert found.replayed


# --- its money (D6.7) -----------------------------------------------------------------------------


async def test_a_decide_is_held_for_and_billed_once(store: SqliteStore, ledger: Ledger) -> None:
    """One of two questions refused, an image, 1000 tokens of which 200 are the image's."""
    await store.put_org(Org(id="acme", balance_micro_usd=10_000))
    reply = DecisionReply(
        body=b"{}", answered=1, input_tokens=1000, media_tokens=200, cached_input_tokens=100
    )
    backend = FakeBackend(reply)
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, store=store, hooks=(ledger,), tariff=TARIFF)
    what = asked("k", body=b"body" + b"." * 796, files=(IMAGE,), a=QUESTION, b=QUESTION)
    running = asyncio.ensure_future(decide(service, what))
    await until(lambda: len(backend.keys) == 1)
    (hold,) = await store.open_holds()
    assert (hold.plane, hold.amount_micro_usd) == ("decision", 100 + 3000 + 200 + 10)
    assert hold.prompt_micro_usd == 0
    backend.go.set()
    assert isinstance(await running, Decided)
    assert isinstance(await decide(service, what), Decided)
    (row,) = await rows(store, 1)
    assert (row.cost_micro_usd, row.plane, row.model) == (800 + 3000 + 100 + 10, "decision", "m")
    assert (row.prompt_tokens, row.cached_tokens, row.provider) == (1000, 100, "fake")
    org = await store.get_org("acme")
    assert org is not None
    assert org.balance_micro_usd == 10_000 - 3910


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (error("capacity_exhausted", "later", retry_after_ms=5), 429),
        (RuntimeError("bug"), 500),
        (DecisionReply(body=b"{}", answered=0, input_tokens=1000), 200),
    ],
)
async def test_what_is_not_answered_costs_nothing(
    store: SqliteStore,
    ledger: Ledger,
    answer: DecisionReply | DecisionError | Exception,
    status: int,
) -> None:
    service = decide_service(FakeBackend(answer), SERVED, hooks=(ledger,), tariff=TARIFF)
    await decide(service)
    (row,) = await rows(store, 1)
    assert (row.status, row.cost_micro_usd) == (status, 0)


async def test_who_has_too_little_left_is_refused_before_the_backend(
    store: SqliteStore, ledger: Ledger
) -> None:
    await store.put_org(Org(id="acme", balance_micro_usd=50))
    backend = FakeBackend()
    service = decide_service(backend, SERVED, store=store, hooks=(ledger,), tariff=TARIFF)
    found = await decide(service, asked("k"))
    assert isinstance(found, Failed)
    assert (found.error.status, found.error.code) == (402, "insufficient_credits")
    assert not found.error.retryable
    assert backend.keys == []
    assert await store.usage() == []
    assert isinstance(await decide(service, asked("k"), trial=True), Decided)  # the key is free
    (row,) = await rows(store, 1)
    assert (row.debit, row.cost_micro_usd) == (False, 110)


async def test_a_hang_up_is_a_row_that_costs_nothing(store: SqliteStore, ledger: Ledger) -> None:
    backend = FakeBackend()
    backend.go = asyncio.Event()
    service = decide_service(backend, SERVED, hooks=(ledger,), tariff=TARIFF)
    running = asyncio.ensure_future(decide(service))
    await until(lambda: len(backend.keys) == 1)
    running.cancel()
    await asyncio.wait({running})
    (row,) = await rows(store, 1)
    assert (row.status, row.error_code, row.cost_micro_usd) == (499, "client_abort", 0)
