"""D5.7, D6.2, D6.7: a gateway that is killed under load, clients that hang up at any moment. Each
key has one answer, billed once."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.books import books_of
from tests.support.decisions import (
    MODEL,
    QUESTIONS,
    auth,
    config,
    decides,
    fresh_key,
    gateway,
)
from tests.support.gateway import KEY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.gateway import GatewayProcess

DECIDE = "/v1/system-zero/decide"
BILLED = 110  # micro-USD of a call with one question and no text price
BUSY = ("idempotency_conflict", "concurrency_limit_exceeded")
CLIENTS = 16
ANSWERS = 200


class Load:
    """Clients that decide one thing after the other, each under a key of its own."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key or fresh_key()
        self.asked: set[str] = set()
        self.answers: dict[str, bytes] = {}
        self.enough = asyncio.Event()

    async def ask(
        self, process: GatewayProcess, name: str, *, patience_s: float = 20.0
    ) -> tuple[int, Any]:
        """Status, and the client that has read the answer; 0 if none came in time."""
        self.asked.add(name)
        what = {"model": MODEL, "state": name, "questions": QUESTIONS}
        headers = [auth(self.key), ("idempotency-key", name)]
        try:
            async with process.client() as client:
                await client.request("POST", DECIDE, headers=headers, json=what)
                await client.read_all(timeout=patience_s)
                return (client.status if client.complete else 0), client
        except OSError:
            return 0, None

    async def work(self, process: GatewayProcess, number: int) -> None:
        for turn in range(10_000):
            name = f"{number}-{turn}"
            status, client = await self.ask(process, name)
            if status != 200:
                return
            self.answers[name] = client.body
            if len(self.answers) >= ANSWERS:
                self.enough.set()

    async def again(self, process: GatewayProcess, name: str) -> None:
        """Ask until there is an answer; one that was given before is the same."""
        async with asyncio.timeout(30):
            while True:
                status, client = await self.ask(process, name)
                if status == 200:
                    break
                assert client.json["error"]["code"] in BUSY
                assert name not in self.answers
                await asyncio.sleep(int(client.header("retry-after-ms")) / 1000)
        if name in self.answers:
            assert client.body == self.answers[name]
            assert client.header("x-rightnow-idempotent-replay") == "true"


@pytest.mark.slow
async def test_a_kill_under_load(tmp_path: Path) -> None:
    over = config(limits={"idempotency_lease_ms": 2000, "idempotency_renew_interval_ms": 500})
    over["billing"] = {"hold_ttl_s": 1, "sweep_interval_s": 0.5}
    load = Load()
    async with gateway(over, workdir=tmp_path) as process:
        clients = [asyncio.create_task(load.work(process, i)) for i in range(CLIENTS)]
        await asyncio.wait_for(load.enough.wait(), 60)
        process.kill()
        await process.wait()
        await asyncio.gather(*clients)
    assert len(load.answers) < len(load.asked)  # some were in flight
    async with gateway(over, workdir=tmp_path) as process, books_of(tmp_path) as books:
        await asyncio.gather(*(load.again(process, name) for name in [*load.asked]))
        rows = await books.settled(timeout=60)  # the sweep waits for the lost worker's lease
        billed = [row for row in rows if row.cost_micro_usd]
        assert {row.cost_micro_usd for row in billed} == {BILLED}
        assert len(billed) == len(load.asked)


async def test_hang_ups_at_any_moment() -> None:
    """Three tries of each key at once, most of which leave; all slots and holds are free after."""
    chance = random.Random(7)
    async with gateway(config()) as process, books_of(process.workdir) as books:
        load = Load(KEY)  # four requests at once
        names = [f"!delay=0.05 {i}" for i in range(50)]
        for name in names:
            patience = [chance.uniform(0, 0.15) for _ in range(3)]
            tries = (load.ask(process, name, patience_s=each) for each in patience)
            for status, client in await asyncio.gather(*tries):
                if status == 200:
                    assert load.answers.setdefault(name, client.body) == client.body
        for name in names:
            await load.again(process, name)
        rows = await books.settled()
        assert [row.cost_micro_usd for row in rows if row.cost_micro_usd] == [BILLED] * len(names)
        calls = [call["state"] for call in decides(process, "ended")]
        assert len(calls) == len(set(calls)) == len(names)
        at_once = [load.ask(process, f"!delay=0.5 last {i}") for i in range(4)]
        assert [status for status, _ in await asyncio.gather(*at_once)] == [200] * 4
