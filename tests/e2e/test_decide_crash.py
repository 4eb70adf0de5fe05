"""D6.2, D6.7: a gateway that is killed under load. Each key has one answer, billed once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.support.books import books_of
from tests.support.decisions import MODEL, QUESTIONS, auth, config, fresh_key, gateway

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.gateway import GatewayProcess

DECIDE = "/v1/system-zero/decide"
BILLED = 110  # micro-USD of a call with one question and no text price
CLIENTS = 16
ANSWERS = 200


class Load:
    """Clients that decide one thing after the other, each under a key of its own."""

    def __init__(self) -> None:
        self.key = fresh_key()
        self.asked: set[str] = set()
        self.answers: dict[str, bytes] = {}
        self.enough = asyncio.Event()

    async def ask(self, process: GatewayProcess, name: str) -> tuple[int, Any]:
        """Status, and the client that has read the answer; 0 if none came."""
        self.asked.add(name)
        what = {"model": MODEL, "state": name, "questions": QUESTIONS}
        headers = [auth(self.key), ("idempotency-key", name)]
        try:
            async with process.client() as client:
                await client.request("POST", DECIDE, headers=headers, json=what)
                await client.read_all()
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
                assert client.json["error"]["code"] == "idempotency_conflict"
                assert name not in self.answers
                await asyncio.sleep(int(client.header("retry-after-ms")) / 1000)
        if name in self.answers:
            assert client.body == self.answers[name]
            assert client.header("x-rightnow-idempotent-replay") == "true"


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
