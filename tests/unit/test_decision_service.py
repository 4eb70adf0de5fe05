"""D4.4, D5.4, D6.2, D6.5: what happens around one decide."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from encoders.decision_errors import error
from encoders.decision_served import ModelLimits, Served, Subject
from relay.deciders.base import DecisionReply
from relay.decisions import service as module
from relay.decisions.effects import Decided, Failed, StartDecide
from relay.decisions.service import DecideService
from relay.slots import Slots

if TYPE_CHECKING:
    import pytest

    from encoders.decision_errors import DecisionError

SERVED = Served(models={"m": ModelLimits(questions=1)}, media=("image",))
QUESTION = {"type": "boolean", "instructions": "?"}


class FakeBackend:
    """Answers with what it is given."""

    def __init__(self, answer: DecisionReply | DecisionError | Exception | None = None) -> None:
        self.answer = answer or DecisionReply(body=b"{}", server_timing="decide;dur=1")
        self.keys: list[str | None] = []
        self.go: asyncio.Event | None = None

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        self.keys.append(idempotency_key)
        assert body == b"body"
        if self.go is not None:
            await self.go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def asked(key: str | None = None, *, model: str = "m", **questions: Any) -> StartDecide:
    subject = Subject(model, questions or {"q": QUESTION}, ())
    return StartDecide(1, b"body", key, 1, subject)


async def test_an_answer() -> None:
    slots = Slots()
    found = await DecideService(FakeBackend(), SERVED, slots).decide(
        "acme", asked(), max_concurrent=1
    )
    assert isinstance(found, Decided)
    assert (found.reply, found.server_timing) == (b"{}", "decide;dur=1")
    assert found.request_id.startswith("req_")
    assert found.latency_ms is not None
    assert slots.in_use("acme") == 0


async def test_a_failure_of_the_backend_is_an_answer() -> None:
    problem = error("capacity_exhausted", "later", retry_after_ms=5)
    service = DecideService(FakeBackend(problem), SERVED, Slots())
    found = await service.decide("acme", asked(), max_concurrent=None)
    assert isinstance(found, Failed)
    assert found.error is problem


async def test_what_is_not_served_is_refused_before_the_backend_is_asked() -> None:
    backend = FakeBackend()
    service = DecideService(backend, SERVED, Slots())
    for wrong, code in (
        (asked(model="other"), "model_not_found"),
        (asked(a=QUESTION, b=QUESTION), "questions_too_large"),
    ):
        found = await service.decide("acme", wrong, max_concurrent=None)
        assert isinstance(found, Failed)
        assert found.error.code == code
    assert backend.keys == []


async def test_a_slot_is_taken_for_a_dispatch() -> None:
    """D5.4, D1.6: none free is 429, and nothing was dispatched."""
    slots, backend = Slots(), FakeBackend()
    backend.go = asyncio.Event()
    service = DecideService(backend, SERVED, slots)
    first = asyncio.ensure_future(service.decide("acme", asked(), max_concurrent=1))
    await asyncio.sleep(0)
    assert slots.in_use("acme") == 1
    second = await service.decide("acme", asked(), max_concurrent=1)
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
    service = DecideService(backend, SERVED, slots)
    running = asyncio.ensure_future(service.decide("acme", asked(), max_concurrent=1))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert slots.in_use("acme") == 0


async def test_keys_of_two_accounts_never_meet() -> None:
    """D6.2: also where account and key together read the same."""
    backend = FakeBackend()
    service = DecideService(backend, SERVED, Slots())
    for org, key in (("a", "bc"), ("ab", "c"), ("a", "bc"), ("1:a", "b"), ("a", None)):
        await service.decide(org, asked(key), max_concurrent=None)
    first, second, third, fourth, none = backend.keys
    assert first == third
    assert none is None
    assert len({first, second, fourth}) == 3


async def test_a_bug_in_a_backend_is_500(caplog: pytest.LogCaptureFixture) -> None:
    service = DecideService(FakeBackend(RuntimeError("a secret")), SERVED, Slots())
    found = await service.decide("acme", asked(), max_concurrent=None)
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
    found = await DecideService(backend, SERVED, Slots()).decide(
        "acme", asked(), max_concurrent=None
    )
    assert isinstance(found, Failed)
    assert (found.error.status, found.error.code) == (504, "system_zero_timeout")
