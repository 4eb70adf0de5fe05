"""M4.2, M4.4: prices, estimates and what a request that ended so costs."""

from __future__ import annotations

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.usage import TokenUsage
from relay import meter
from relay.billing import Billing, InsufficientCredits
from relay.errors import GatewayShutdown, UpstreamError, UpstreamRateLimited
from relay.lifecycle import Outcome
from relay.money import (
    Hold,
    Price,
    Settlement,
    Source,
    dearest,
    estimate_prompt_tokens,
    max_output_tokens,
    tokens_of,
)
from relay.prices import PriceBook, bundled_price
from relay.record import RequestRecord
from relay.request import RelayRequest
from relay.routing import Candidate, Provider
from relay.upstreams.unavailable import UnavailableUpstream

PRICE = Price(prompt_usd_per_mtok=Decimal("0.15"), completion_usd_per_mtok=Decimal("0.60"))
counts = st.integers(0, 10**12)
rates = st.decimals(0, 1000, places=6)


def test_a_price_for_a_million_tokens_is_micro_usd_for_one() -> None:
    assert PRICE.cost_micro_usd(1_000_000, 0) == 150_000
    assert PRICE.cost_micro_usd(0, 1_000_000) == 600_000
    assert PRICE.cost_micro_usd(23, 235) == 144  # 3.45 + 141 = 144.45
    assert PRICE.cost_micro_usd(10, 0) == 2  # 1.5, half up, once


def test_cached_tokens_have_their_own_price() -> None:
    price = Price(prompt_usd_per_mtok=Decimal(2), cached_usd_per_mtok=Decimal(1))
    assert price.cost_micro_usd(100, 0, cached=40) == 160
    assert price.cost_micro_usd(100, 0, cached=1000) == 100  # never more than the prompt
    assert PRICE.cost_micro_usd(100, 0, cached=40) == PRICE.cost_micro_usd(100, 0)


@given(rates, rates, counts, counts, counts)
def test_costs_are_whole_never_negative_and_fit_the_store(
    prompt_rate: Decimal, completion_rate: Decimal, prompt: int, completion: int, cached: int
) -> None:
    price = Price(prompt_usd_per_mtok=prompt_rate, completion_usd_per_mtok=completion_rate)
    cost = price.cost_micro_usd(prompt, completion, cached)
    assert 0 <= cost < 2**63
    assert dearest([price, PRICE]).cost_micro_usd(prompt, completion) >= cost


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 100),
        ({"messages": [{"role": "user", "content": "abcde"}]}, 2),
        ({"messages": [{"role": "user", "content": "\u4f60" * 8}]}, 2),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x" * 40},
                            {"type": "image_url", "image_url": {"url": "data:" + "x" * 10**6}},
                            {"type": "image_url", "image_url": {"url": "https://x"}},
                        ],
                    }
                ]
            },
            2010,
        ),
        ({}, 0),
        ({"messages": None, "tools": None}, 0),
    ],
)
def test_prompt_estimates(body: dict[str, Any], tokens: int) -> None:
    assert estimate_prompt_tokens(body) == tokens


def test_tool_schemas_are_part_of_the_prompt() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "x" * 80}}}
    with_tools = estimate_prompt_tokens({"messages": [], "tools": [schema]})
    assert 30 <= with_tools <= 60


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 4096),
        ({"max_tokens": 16}, 16),
        ({"max_tokens": 16, "max_completion_tokens": 8}, 16),
        ({"max_tokens": 100_000, "max_completion_tokens": 0}, 100_000),
        ({"max_tokens": 100_000.0}, 100_000),
        ({"max_tokens": float("nan")}, 4096),
        ({"max_tokens": 1e999}, 10**9),
        ({"max_tokens": 16, "n": 2.0}, 32),
        ({"max_tokens": 16, "n": 3}, 48),
        ({"max_tokens": "many"}, 4096),
        ({"max_tokens": -1}, 4096),
        ({"max_tokens": 0}, 4096),
        ({"max_tokens": 10**30}, 10**9),
    ],
)
def test_largest_outputs(body: dict[str, Any], tokens: int) -> None:
    assert max_output_tokens(body, 4096) == tokens


@pytest.mark.parametrize(
    ("usage", "characters", "expected"),
    [
        (None, 0, (7, 0, Source.NONE)),
        (None, 24, (7, 6, Source.COUNTED)),
        (None, 25, (7, 7, Source.COUNTED)),
        (TokenUsage(prompt_tokens=3, completion_tokens=5), 99, (3, 5, Source.REPORTED)),
        (TokenUsage(prompt_tokens=0, completion_tokens=0), 99, (0, 0, Source.REPORTED)),  # B27
        (TokenUsage(prompt_tokens=3), 24, (3, 6, Source.COUNTED)),
        (TokenUsage(completion_tokens=5), 0, (7, 5, Source.REPORTED)),
    ],
)
def test_readings(
    usage: TokenUsage | None, characters: int, expected: tuple[int, int, Source]
) -> None:
    got = meter.read(usage, lambda: characters, 7)
    assert (got.prompt_tokens, got.completion_tokens, got.source) == expected


# --- endings ----------------------------------------------------------------------------------


class Hook:
    """A billing hook that remembers."""

    name = "test"

    def __init__(self, fault: Exception | None = None) -> None:
        self.told: list[tuple[str, Settlement]] = []
        self.held: list[Hold] = []
        self.fault = fault

    async def authorize(self, hold: Hold) -> None:
        self.held.append(hold)
        if self.fault is not None:
            raise self.fault

    def settle(self, settlement: Settlement) -> None:
        self.told.append(("settle", settlement))
        if self.fault is not None:
            raise self.fault

    def release(self, settlement: Settlement) -> None:
        self.told.append(("release", settlement))


REQUEST = RelayRequest(
    request_id="req_1",
    slug="fast",
    stream=True,
    include_usage=False,
    choices=1,
    created=1,
    body={"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 50},
    prompt_tokens=100,
)
CANDIDATES = tuple(
    Candidate(provider=Provider(name=name, upstream=UnavailableUpstream(name, "")), model="m")
    for name in ("cheap", "dear")
)
BOOK = PriceBook(
    {},
    {"cheap": "http://cheap", "dear": "http://dear"},
    lambda url, _: PRICE if "cheap" in url else Price(completion_usd_per_mtok=Decimal(10)),
)


def billing(*hooks: Any) -> Billing:
    return Billing(hooks, BOOK, worker="w1", hold_output_tokens=4096)


def record(**fields: Any) -> RequestRecord:
    values = {"org": "test", "key_id": "k", "provider": "cheap", "upstream_model": "m"} | fields
    return RequestRecord(request_id="req_1", started=0.0, **values)


def end(
    outcome: Outcome, reading: meter.Reading | None, *, trial: bool = False, **fields: Any
) -> tuple[str, Settlement]:
    hook = Hook()
    target = billing(hook)
    opened = target.prepare(REQUEST, CANDIDATES, record(**fields), trial=trial)
    if reading is not None:
        opened.read = lambda: reading
    target.close(opened, outcome)
    assert target.open_holds == 0
    (told,) = hook.told
    return told


SOME = meter.read(None, lambda: 24, 100)
NONE = meter.read(None, lambda: 0, 100)
FULL = meter.read(TokenUsage(prompt_tokens=90, completion_tokens=40), lambda: 24, 100)
FAILED = UpstreamError("no")


@pytest.mark.parametrize(
    ("outcome", "reading", "fields", "row"),
    [
        (Outcome.COMPLETED, FULL, {}, ("settle", 200, None, 90, 40, Source.REPORTED)),
        (Outcome.COMPLETED, SOME, {}, ("settle", 200, None, 100, 6, Source.COUNTED)),
        (Outcome.COMPLETED, NONE, {}, ("settle", 200, None, 100, 0, Source.COUNTED)),
        (Outcome.CLIENT_ABORT, FULL, {}, ("settle", 499, "client_abort", 90, 40, Source.REPORTED)),
        (Outcome.CLIENT_ABORT, SOME, {}, ("settle", 499, "client_abort", 100, 6, Source.COUNTED)),
        (Outcome.CLIENT_ABORT, NONE, {}, ("settle", 499, "client_abort", 100, 0, Source.COUNTED)),
        (Outcome.CLIENT_ABORT, None, {}, ("settle", 499, "client_abort", 100, 0, Source.COUNTED)),
        (
            Outcome.UPSTREAM_ERROR,
            SOME,
            {"error": FAILED, "streamed": True},
            ("settle", 502, "upstream_error", 100, 6, Source.COUNTED),
        ),
        (
            Outcome.TRUNCATED,
            SOME,
            {"error": FAILED, "streamed": True},
            ("settle", 502, "upstream_error", 100, 6, Source.COUNTED),
        ),
        (
            Outcome.UPSTREAM_ERROR,
            NONE,
            {"error": FAILED, "streamed": True},
            ("release", 502, "upstream_error", 0, 0, Source.NONE),
        ),
        (
            Outcome.UPSTREAM_ERROR,
            None,
            {"error": UpstreamRateLimited("slow")},
            ("release", 429, "rate_limit_exceeded", 0, 0, Source.NONE),
        ),
        (
            Outcome.UPSTREAM_ERROR,  # a plain request: its client got nothing
            SOME,
            {"error": FAILED},
            ("release", 502, "upstream_error", 0, 0, Source.NONE),
        ),
        (
            Outcome.SHUTDOWN,
            SOME,
            {"error": GatewayShutdown("bye"), "streamed": True},
            ("settle", 503, "gateway_shutdown", 100, 6, Source.COUNTED),
        ),
        (
            Outcome.SHUTDOWN,
            None,
            {"error": GatewayShutdown("bye")},
            ("release", 503, "gateway_shutdown", 0, 0, Source.NONE),
        ),
    ],
)
def test_what_an_ending_costs(
    outcome: Outcome, reading: meter.Reading | None, fields: dict[str, Any], row: tuple[Any, ...]
) -> None:
    """M4.2, ending by ending."""
    told, settlement = end(outcome, reading, **fields)
    got = (
        told,
        settlement.status,
        settlement.error_code,
        settlement.prompt_tokens,
        settlement.completion_tokens,
        settlement.source,
    )
    assert got == row
    pays = told == "settle"
    cost = PRICE.cost_micro_usd(settlement.prompt_tokens, settlement.completion_tokens)
    assert settlement.cost_micro_usd == (cost if pays else 0)


def test_a_hang_up_before_anything_was_dialled_costs_nothing() -> None:
    hook = Hook()
    target = billing(hook)
    opened = target.prepare(REQUEST, CANDIDATES, record(provider=None), trial=False)
    target.close(opened, Outcome.CLIENT_ABORT, dialled=False)
    ((told, settlement),) = hook.told
    assert (told, settlement.status, settlement.cost_micro_usd) == ("release", 499, 0)


def test_a_trial_is_logged_and_not_debited() -> None:
    _, settlement = end(Outcome.COMPLETED, FULL, trial=True)
    assert settlement.cost_micro_usd > 0
    assert settlement.debit is False


def test_the_price_is_that_of_who_served() -> None:
    _, settlement = end(Outcome.COMPLETED, FULL, provider="dear")
    assert settlement.cost_micro_usd == 400


async def test_a_hold_covers_the_dearest_candidate() -> None:
    hook = Hook()
    target = billing(hook)
    await target.authorize(target.prepare(REQUEST, CANDIDATES, record(), trial=False))
    (hold,) = hook.held
    assert hold.prompt_tokens == 100
    assert hold.amount_micro_usd == 15 + 500


async def test_a_refusal_leaves_nothing_open_and_asks_nobody_further() -> None:
    refusing, asked_later = Hook(InsufficientCredits("no")), Hook()
    target = billing(refusing, asked_later)
    with pytest.raises(InsufficientCredits):
        await target.authorize(target.prepare(REQUEST, CANDIDATES, record(), trial=False))
    assert target.open_holds == 0
    assert asked_later.held == []


async def test_a_broken_hook_changes_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M4.3: it is logged, and the others are told."""
    broken, well = Hook(ZeroDivisionError()), Hook()
    target = billing(broken, well)
    opened = target.prepare(REQUEST, CANDIDATES, record(), trial=False)
    with caplog.at_level(logging.ERROR):
        await target.authorize(opened)
        opened.read = lambda: FULL
        target.close(opened, Outcome.COMPLETED)
    assert [told for told, _ in well.told] == ["settle"]
    assert "failed to authorize" in caplog.text
    assert "failed to settle" in caplog.text


async def test_a_hook_that_hangs_delays_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Hook):
        async def authorize(self, hold: Hold) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("relay.billing.AUTHORIZE_WAIT_S", 0.01)
    target = billing(Hanging())
    opened = target.prepare(REQUEST, CANDIDATES, record(), trial=False)
    await asyncio.wait_for(target.authorize(opened), 5)
    assert target.open_holds == 1  # the request goes on


def test_settling_twice_is_a_bug() -> None:
    target = billing(Hook())
    opened = target.prepare(REQUEST, CANDIDATES, record(), trial=False)
    target.close(opened, Outcome.COMPLETED)
    with pytest.raises(KeyError):
        target.close(opened, Outcome.COMPLETED)


HOLD = Hold(
    request_id="req_2",
    org="test",
    key_id="k",
    plane="decision",
    model="m",
    worker="w1",
    placed_at=0.0,
    amount_micro_usd=5,
    prompt_tokens=0,
    prompt_micro_usd=0,
)


def settled(**fields: Any) -> Settlement:
    values: dict[str, Any] = {
        "request_id": "req_2",
        "at": 0.0,
        "org": "test",
        "key_id": "k",
        "plane": "decision",
        "model": "m",
        "provider": None,
        "status": 200,
        "error_code": None,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "source": Source.REPORTED,
        "cost_micro_usd": 4,
        "duration_ms": 1,
    }
    return Settlement(**values | fields)


async def test_a_hold_of_another_plane_is_ended_once() -> None:
    hook = Hook()
    target = billing(hook)
    await target.place(HOLD)
    assert (hook.held, target.open_holds, target.progress()) == ([HOLD], 1, [])
    target.end(settled())
    assert target.open_holds == 0
    assert hook.told == [("settle", settled())]
    with pytest.raises(KeyError):
        target.end(settled())
    await target.place(HOLD)
    nothing = settled(source=Source.NONE, cost_micro_usd=0)
    target.end(nothing)
    assert hook.told[1:] == [("release", nothing)]


async def test_a_refused_hold_of_another_plane_leaves_nothing_to_end() -> None:
    hook = Hook(InsufficientCredits("no"))
    target = billing(hook)
    with pytest.raises(InsufficientCredits):
        await target.place(HOLD)
    assert target.open_holds == 0
    assert hook.told == []


def test_a_price_over_candidates_is_the_dearest() -> None:
    pairs = [("cheap", "m"), ("dear", "m")]
    price = billing().price("fast", pairs)
    assert price == dearest([PRICE, Price(completion_usd_per_mtok=Decimal(10))])
    assert billing().price("fast", []) == Price()


def test_progress_is_told_when_it_moved() -> None:
    target = billing(Hook())
    opened = target.prepare(REQUEST, CANDIDATES, record(), trial=False)
    assert target.progress() == []
    opened.read = lambda: SOME
    (told,) = target.progress()
    assert (told.request_id, told.completion_tokens, told.source) == ("req_1", 6, Source.COUNTED)
    assert told.cost_micro_usd == PRICE.cost_micro_usd(100, 6)
    assert target.progress() == []


# --- prices -----------------------------------------------------------------------------------


def test_configured_then_bundled_then_free_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """M4.4."""
    asked: list[str] = []

    def look_up(_: str, model: str) -> Price | None:
        asked.append(model)
        return PRICE if model == "known" else None

    mine = Price(prompt_usd_per_mtok=Decimal(1))
    book = PriceBook({"slug": mine}, {"p": "http://p"}, look_up, pairs={("p", "big"): mine})
    with caplog.at_level(logging.WARNING):
        book.warm_up([("slug", "p", "x"), ("other", "p", "known"), ("third", "p", "unknown")])
        assert caplog.text.count("counted as free") == 1
        assert "p/unknown:" in caplog.text
        assert book.price("slug", "p", "known") == mine
        assert book.price("other", "p", "known") == PRICE
        assert book.price("p/big", "p", "big") == mine  # around the slug that lists it
        assert book.price("other", "local", "anything") == Price()
        for name in ("unknown", "invented\nby a client"):
            assert book.price("other", "p", name) == book.price("other", "p", name) == Price()
    assert asked == ["", "known", "unknown", "invented\nby a client"]
    assert "invented" not in caplog.text  # a client's names are no business of the log's


def test_names_that_clients_invent_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.prices._CACHE_MAX", 10)
    book = PriceBook({}, {"p": "http://p"}, lambda _, __: None)
    for i in range(100):
        book.price("s", "p", f"m{i}")
        assert len(book._found) <= 10


def test_the_bundled_list_is_asked_by_address() -> None:
    found = bundled_price("https://api.openai.com/v1", "gpt-4o-mini")
    assert found is not None
    assert found.prompt_usd_per_mtok == Decimal("0.15")
    assert found.cached_usd_per_mtok is not None
    assert bundled_price("https://api.openai.com/v1", "no-such-model-x") is None
    assert bundled_price("http://127.0.0.1:9/v1", "gpt-4o-mini") is None


@given(st.integers(0, 10**6))
def test_tokens_of_characters_round_up(characters: int) -> None:
    assert (tokens_of(characters) - 1) * 4 < characters or characters == 0
    assert tokens_of(characters) * 4 >= characters
