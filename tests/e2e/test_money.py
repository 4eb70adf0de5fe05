"""M4.2: exactly one row for each request, on every path that a stream can end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest

from relay.money import Source
from relay.stores.base import Org, StoredKey
from tests.support.books import Books, books_of
from tests.support.checks import until
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, MODEL, GatewayProcess, config_for
from tests.support.script import DONE, Eof, Fin, Head, Rst, Send, Wait, chunk, json_answer, sse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# 2 USD and 8 USD for a million tokens: 2 and 8 micro-USD for one.
PRICE = {"prompt_usd_per_mtok": 2, "completion_usd_per_mtok": 8}
PROMPT = "p" * 400  # 100 tokens
BODY = {
    "model": MODEL,
    "stream": True,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": PROMPT}],
}
WORDS = ["abcd", "efgh", "\u4f60\u597d\u4f60\u597d", 'q"o\\', "\n\n\n\n", "last"]  # 4 each
USAGE = {"prompt_tokens": 90, "completion_tokens": 30, "total_tokens": 120}


def money_config(up: FakeUpstream, **overrides: Any) -> dict[str, Any]:
    config = config_for(up, **overrides)
    config["models"][MODEL]["price"] = PRICE
    return config


class Till:
    """A gateway, its fake provider and its books."""

    def __init__(self, up: FakeUpstream, gateway: GatewayProcess, books: Books) -> None:
        self.up = up
        self.gateway = gateway
        self.books = books

    async def post(self, body: dict[str, Any] | None = None, *, key: str | None = None) -> Any:
        """Send a request and read its answer to the end."""
        async with self.gateway.client() as client:
            auth = ("authorization", f"Bearer {key}") if key else AUTH
            await client.request("POST", "/v1/chat/completions", headers=[auth], json=body or BODY)
            await client.read_all(timeout=20)
            return client

    async def models(self, key: str) -> int:
        """Ask for the model list; return the status."""
        async with self.gateway.client() as client:
            await client.request("GET", "/v1/models", headers=[("x-api-key", key)])
            await client.read_all()
            return client.status

    async def hang_up_after(self, events: int) -> None:
        """Send a request, read so many events, reset the connection."""
        async with self.gateway.client() as client:
            await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=BODY)
            if events:
                await client.read_until(lambda c: len(c.events) >= events, timeout=10)
            else:
                await client.read_head(timeout=10)
            client.reset()


@pytest.fixture
async def till(tmp_path: Path) -> AsyncIterator[Till]:
    async with (
        FakeUpstream() as up,
        GatewayProcess(money_config(up), workdir=tmp_path) as gateway,
        books_of(tmp_path) as books,
    ):
        yield Till(up, gateway, books)


def stream(words: list[str], *end: Any, usage: dict[str, Any] | None = None) -> list[Any]:
    sends = [
        Send(sse(chunk(word, role="assistant" if not i else None))) for i, word in enumerate(words)
    ]
    if usage is not None:
        sends.append(Send(sse(json.dumps({"choices": [], "usage": usage}))))
    return [Head(), *sends, *end]


FINISH = Send(sse(chunk("", finish_reason="stop")))


async def test_a_completed_stream_is_billed_by_the_providers_usage(till: Till) -> None:
    till.up.script(*stream(WORDS, FINISH, usage=USAGE), Send(DONE), Eof())
    await till.post()
    (row,) = await till.books.rows(1)
    assert (row.status, row.error_code, row.source) == (200, None, Source.REPORTED)
    assert (row.prompt_tokens, row.completion_tokens) == (90, 30)
    assert row.cost_micro_usd == 90 * 2 + 30 * 8
    assert (row.org, row.plane, row.model, row.provider) == ("test", "models", MODEL, "fake")
    assert row.attempts[0].startswith("fake/upstream-model: ok")
    assert await till.books.balance() == 1_000_000_000 - row.cost_micro_usd


async def test_a_completed_stream_without_usage_is_counted(till: Till) -> None:
    till.up.script(*stream(WORDS, FINISH), Send(DONE), Eof())
    await till.post()
    (row,) = await till.books.rows(1)
    assert (row.source, row.prompt_tokens, row.completion_tokens) == (Source.COUNTED, 100, 6)


@pytest.mark.parametrize("usage", [USAGE, None], ids=["usage", "no-usage"])
async def test_a_whole_reply_is_billed_once(till: Till, usage: dict[str, Any] | None) -> None:
    message = {"role": "assistant", "content": "x" * 40}
    reply: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    till.up.script(*json_answer(reply | ({"usage": usage} if usage else {})))
    assert (await till.post({**BODY, "stream": False})).status == 200
    (row,) = await till.books.rows(1)
    expected = (90, 30, Source.REPORTED) if usage else (100, 10, Source.COUNTED)
    assert (row.prompt_tokens, row.completion_tokens, row.source) == expected


async def test_a_hang_up_at_every_event_is_billed_for_what_was_streamed(till: Till) -> None:
    """B32, B33: the prompt and the characters so far, status 499, one row each."""
    for events in range(len(WORDS) + 1):
        till.up.script(*stream(WORDS[:events], Wait(asyncio.Event())))
        await till.hang_up_after(events)
    rows = await till.books.rows(len(WORDS) + 1)
    for events, row in enumerate(rows):
        assert (row.status, row.error_code) == (499, "client_abort")
        assert (row.prompt_tokens, row.completion_tokens) == (100, events)
        assert row.cost_micro_usd == 100 * 2 + events * 8
        assert row.source is Source.COUNTED
    assert await till.books.balance() == 1_000_000_000 - sum(r.cost_micro_usd for r in rows)


async def test_a_hang_up_after_usage_is_billed_by_it(till: Till) -> None:
    """The last usage seen goes first; zero is a report (B27)."""
    zero = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    for usage in (USAGE, zero):
        # The usage comes before a last word, so that the client knows when it was seen.
        steps = stream(WORDS[:1], usage=usage)
        till.up.script(*steps, Send(sse(chunk("more"))), Wait(asyncio.Event()))
        await till.hang_up_after(2)
    reported, nothing = await till.books.rows(2)
    assert (reported.prompt_tokens, reported.completion_tokens) == (90, 30)
    assert (nothing.prompt_tokens, nothing.completion_tokens) == (0, 0)
    assert reported.source is nothing.source is Source.REPORTED


async def test_a_hang_up_before_the_upstream_answers_is_billed_for_the_prompt(till: Till) -> None:
    till.up.script(Wait(asyncio.Event()))
    async with till.gateway.client() as client:
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=BODY)
        await till.up.request()
        client.reset()
    (row,) = await till.books.rows(1)
    assert (row.status, row.prompt_tokens, row.completion_tokens) == (499, 100, 0)


@pytest.mark.parametrize("end", [Rst(), Fin(), Eof()], ids=["rst", "fin", "eof"])
async def test_an_upstream_that_dies_after_output_is_billed_as_streamed(
    till: Till, end: Any
) -> None:
    till.up.script(*stream(WORDS[:3], end))
    await till.post()
    (row,) = await till.books.rows(1)
    assert (row.status, row.error_code) == (502, "upstream_error")
    assert (row.prompt_tokens, row.completion_tokens, row.source) == (100, 3, Source.COUNTED)


@pytest.mark.parametrize(
    ("steps", "status", "code"),
    [
        (json_answer({"error": {"message": "no"}}, status=500), 502, "upstream_error"),
        (json_answer({"error": {"message": "no"}}, status=429), 429, "rate_limit_exceeded"),
        (json_answer({"error": {"message": "no"}}, status=400), 400, "invalid_request"),
        (json_answer({"error": {"message": "no"}}, status=401), 502, "provider_credentials"),
        ([Head(), Rst()], 502, "upstream_error"),
        ([Head(), Send(DONE), Eof()], 502, "upstream_error"),
    ],
)
async def test_a_failure_before_any_output_is_a_row_of_zero(
    till: Till, steps: list[Any], status: int, code: str
) -> None:
    for _ in range(2 if status == 400 else 1):  # M3.3: once more without our `stream_options`
        till.up.script(*steps)
    await till.post()
    (row,) = await till.books.rows(1)
    assert (row.status, row.error_code) == (status, code)
    assert (row.cost_micro_usd, row.source) == (0, Source.NONE)
    assert (row.prompt_tokens, row.completion_tokens) == (0, 0)
    assert await till.books.balance() == 1_000_000_000


async def test_what_is_refused_before_its_hold_has_no_row(till: Till) -> None:
    for body in ({"model": "nobody", "messages": [{}]}, {"model": MODEL}):
        assert (await till.post(body)).status in (400, 404)
    assert (await till.post(key="ozk_wrong")).status == 401
    till.up.script(*stream(["a"], FINISH), Send(DONE), Eof())
    await till.post()
    await till.books.rows(1)


async def test_a_shutdown_settles_what_was_streamed(tmp_path: Path) -> None:
    """M3.6."""
    async with FakeUpstream() as up:
        config = money_config(up, server={"shutdown_grace_s": 0.2})
        async with (
            GatewayProcess(config, workdir=tmp_path) as gateway,
            gateway.client() as client,
        ):
            up.script(*stream(WORDS[:2], Wait(asyncio.Event())))
            await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=BODY)
            await client.read_until(lambda c: len(c.events) == 2, timeout=10)
            gateway.terminate()
            await client.read_all(timeout=10)
            assert await gateway.wait() == 0
        async with books_of(tmp_path) as books:
            (row,) = await books.rows(1)
            assert (row.status, row.error_code) == (503, "gateway_shutdown")
            assert (row.prompt_tokens, row.completion_tokens) == (100, 2)


# --- balances ---------------------------------------------------------------------------------


async def test_a_balance_that_cannot_cover_a_request_refuses_it(tmp_path: Path) -> None:
    """402, and what is held counts: 100 prompt and 100 output tokens are 1000 micro-USD."""
    async with FakeUpstream() as up:
        config = money_config(up)
        config["keys"][0]["balance_usd"] = 0.0015
        async with (
            GatewayProcess(config, workdir=tmp_path) as gateway,
            books_of(tmp_path) as books,
        ):
            till = Till(up, gateway, books)
            up.script(*stream(WORDS[:1], Wait(asyncio.Event())))
            async with gateway.client() as first:
                await first.request("POST", "/v1/chat/completions", headers=[AUTH], json=BODY)
                await first.read_until(lambda c: c.events, timeout=10)
                refused = await till.post()
                assert refused.status == 402
                assert refused.json["error"]["code"] == "insufficient_credits"
                first.reset()
            (row,) = await books.rows(1)  # the refused one has none
            assert row.cost_micro_usd == 208
            up.script(*stream(WORDS[:1], FINISH), Send(DONE), Eof())
            assert (await till.post()).status == 200  # 1292 are left
            await books.rows(2)


async def test_a_trial_is_logged_and_never_debited(tmp_path: Path) -> None:
    async with FakeUpstream() as up:
        config = money_config(up)
        config["keys"][0] |= {"trial": True, "balance_usd": 0}
        async with (
            GatewayProcess(config, workdir=tmp_path) as gateway,
            books_of(tmp_path) as books,
        ):
            up.script(*stream(WORDS, FINISH, usage=USAGE), Send(DONE), Eof())
            assert (await Till(up, gateway, books).post()).status == 200
            (row,) = await books.rows(1)
            assert row.cost_micro_usd == 420
            assert await books.balance() == 0


# --- keys of the store ---------------------------------------------------------------------------


async def test_a_running_gateway_obeys_a_new_key_and_its_revocation_within_5_s(till: Till) -> None:
    """O2."""
    key = "ozk_made_while_it_runs"
    digest = hashlib.sha256(key.encode()).digest()
    org = await till.books.store.ensure_org(Org(id="later"))
    await till.books.store.create_key(
        StoredKey(id="key_1", digest=digest, org=org, name=None, status="active", created_at=1.0)
    )
    for status, change in ((200, None), (401, "key_1")):
        if change is not None:
            assert await till.books.store.revoke_key(change)
        latest = time.monotonic() + 5
        while (got := await till.models(key)) != status:
            assert time.monotonic() < latest, f"still {got}, not {status}"
            await asyncio.sleep(0.05)


# --- crashes ----------------------------------------------------------------------------------


async def test_a_kill_in_the_middle_of_100_streams_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    """kill -9, restart, sweep: one row for each, at its progress; two gateways, one sweep."""
    billing = {"sweep_interval_s": 0.2, "hold_ttl_s": 1}
    async with FakeUpstream() as up:
        for _ in range(100):
            up.script(*stream(WORDS[:3], Wait(asyncio.Event())))
        async with GatewayProcess(money_config(up, billing=billing), workdir=tmp_path) as gateway:
            clients = [gateway.client() for _ in range(100)]
            try:
                for client in clients:
                    await client.__aenter__()
                    await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=BODY)
                for client in clients:
                    await client.read_until(lambda c: len(c.events) == 3, timeout=20)
                await until(lambda: noted(tmp_path) == 100, 50, what="100 notes")  # every 5 s
                gateway.kill()
                await gateway.wait()
            finally:
                for client in clients:
                    await client.__aexit__(None, None, None)
        async with (
            GatewayProcess(money_config(up, billing=billing), workdir=tmp_path) as one,
            GatewayProcess(
                money_config(
                    up, billing=billing, store={"url": f"sqlite:///{tmp_path}/sluicegate.db"}
                )
            ) as two,
            books_of(tmp_path) as books,
        ):
            rows = await books.rows(100, timeout=60)  # the dead worker's lease ends after 15 s
            for row in rows:
                assert (row.error_code, row.source) == ("worker_lost", Source.COUNTED)
                assert (row.prompt_tokens, row.completion_tokens) == (100, 3)
                assert row.cost_micro_usd == 224
            assert await books.balance() == 1_000_000_000 - 100 * 224
            await asyncio.sleep(1)
            await books.rows(100)
            assert one.returncode is None
            assert two.returncode is None


def noted(workdir: Path) -> int:
    """How many holds tell how far their stream is, here three words."""
    with contextlib.closing(sqlite3.connect(workdir / "sluicegate.db")) as database:
        (count,) = database.execute(
            "SELECT count(*) FROM holds WHERE noted_completion_tokens = 3"
        ).fetchone()
    return int(count)


async def test_many_hang_ups_leave_no_hold_and_no_slot(till: Till) -> None:
    """200 at once; the soak has 10,000."""
    for _ in range(200):
        till.up.script(*stream(WORDS[:2], Wait(asyncio.Event())))
    await asyncio.gather(*(till.hang_up_after(index % 3) for index in range(200)))
    rows = await till.books.rows(200, timeout=30)
    assert {row.status for row in rows} == {499}
    assert sum(row.cost_micro_usd for row in rows) == 1_000_000_000 - await till.books.balance()
