"""The outbox of the ledger, and what a hold may count on (M4.2)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from relay.ledger import Ledger
from relay.outbox import Outbox
from relay.stores.base import Org
from relay.stores.sqlite import SqliteStore
from tests.contract.values import hold, row

if TYPE_CHECKING:
    from pathlib import Path


class Sent:
    """Takes what an outbox sends."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, batch: list[int]) -> None:
        self.batches.append(batch)
        await self.gate.wait()


async def test_what_comes_soon_after_goes_together() -> None:
    sent = Sent()
    outbox = Outbox("t", sent, together_s=0.05)
    outbox.start()
    for n in range(3):
        outbox.put(n)
        await asyncio.sleep(0)
    assert sent.batches == []
    async with asyncio.timeout(10):
        while outbox.depth:
            await asyncio.sleep(0.001)
    assert sent.batches == [[0, 1, 2]]
    await outbox.close(1)


async def test_enough_do_not_wait_for_more() -> None:
    sent = Sent()
    outbox = Outbox("t", sent, together_s=3600, enough=3)
    outbox.start()
    outbox.put(0)
    outbox.put(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert sent.batches == []
    outbox.put(2)
    async with asyncio.timeout(10):
        while outbox.depth:
            await asyncio.sleep(0.001)
    assert sent.batches == [[0, 1, 2]]
    await outbox.close(1)


async def test_who_hurries_has_it_sent_in_the_next_turn() -> None:
    """Also what came while a batch was under way, once that is done."""
    sent = Sent()
    outbox = Outbox("t", sent, together_s=3600)
    outbox.start()
    await asyncio.sleep(0)  # it waits for something
    outbox.put(0)
    await asyncio.sleep(0)  # it waits for others
    sent.gate.clear()
    outbox.hurry()
    await asyncio.sleep(0)
    assert sent.batches == [[0]]
    outbox.put(1)
    outbox.hurry()
    sent.gate.set()
    async with asyncio.timeout(10):
        while outbox.depth:
            await asyncio.sleep(0)
    assert sent.batches == [[0], [1]]
    await outbox.close(1)


async def test_a_close_waits_for_no_others() -> None:
    sent = Sent()
    outbox = Outbox("t", sent, together_s=3600)
    outbox.start()
    outbox.put(7)
    async with asyncio.timeout(10):
        await outbox.close(5)
    assert sent.batches == [[7]]


async def test_a_hold_sees_what_was_settled_before_it(tmp_path: Path) -> None:
    """A balance that is enough for one request at a time serves one after the other."""
    store = SqliteStore(tmp_path / "t.db")
    await store.open()
    await store.put_org(Org(id="acme", balance_micro_usd=100))
    ledger = Ledger(store)
    ledger.start()
    await asyncio.sleep(0)
    try:
        for n in range(20):
            await ledger.authorize(hold(f"req_{n}", 60))
            ledger.settle(row(f"req_{n}", 1))
            await asyncio.sleep(0)  # the client reads the end and comes again
    finally:
        await ledger.close()
        assert len(await store.usage()) == 20
        await store.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_nothing_is_sent_twice(turns: int) -> None:
    sent = Sent()
    outbox = Outbox("t", sent, together_s=0.001)
    outbox.start()
    for n in range(50):
        outbox.put(n)
        if n % 7 == 0:
            outbox.hurry()
        for _ in range(turns):
            await asyncio.sleep(0)
    await outbox.close(5)
    assert [n for batch in sent.batches for n in batch] == list(range(50))
