"""The ledger: the default billing hook, over a store (M4.2, M4.3)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from relay.billing import InsufficientCredits
from relay.outbox import Outbox

if TYPE_CHECKING:
    from relay.money import Hold, Settlement
    from relay.stores.base import Store

# At a stop: long enough for a slow disk, short enough for an orchestrator's patience.
_FLUSH_WAIT_S: Final = 5.0
# Nobody waits for a settlement, and to write one costs as much as to write ten: most of it is the
# pages of the database, which they share. Many at once would keep a hold waiting.
_TOGETHER_S: Final = 0.1
_ENOUGH: Final = 64


class Ledger:
    """Holds and rows in a store.

    `authorize` waits for the store; `settle` and `release` go through an outbox.

    Args:
        store: open already.
    """

    name = "ledger"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._outbox: Outbox[Settlement] = Outbox(
            "ledger", self._write, together_s=_TOGETHER_S, enough=_ENOUGH
        )

    @property
    def depth(self) -> int:
        """Settlements that are not in the store yet."""
        return self._outbox.depth

    def start(self) -> None:
        """Begin to write."""
        self._outbox.start()

    async def close(self) -> None:
        """Write what is settled, then stop."""
        await self._outbox.close(_FLUSH_WAIT_S)

    async def authorize(self, hold: Hold) -> None:
        placed = await self._store.place_hold(hold)
        if not placed and self._outbox.depth:
            # What was settled before is free again: it goes first, in the same transaction.
            self._outbox.hurry()
            await asyncio.sleep(0)
            placed = await self._store.place_hold(hold)
        if not placed:
            raise InsufficientCredits(
                f"this request may cost up to {hold.amount_micro_usd / 1e6:.6f} USD, more than is "
                "left of the organisation's balance; lower max_tokens or add credits"
            )

    def settle(self, settlement: Settlement) -> None:
        self._outbox.put(settlement)

    def release(self, settlement: Settlement) -> None:
        self._outbox.put(settlement)

    async def _write(self, batch: list[Settlement]) -> None:
        await self._store.settle(batch)
