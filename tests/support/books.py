"""Reads the books of a gateway: what its store says, beside the running process."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from relay.money import Settlement


class Books:
    """The store of a gateway, opened a second time."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store

    async def rows(self, count: int, *, timeout: float = 10.0) -> list[Settlement]:
        """Wait until there are so many rows and no open hold, and return the rows.

        Raises:
            AssertionError: there are more, or they did not come in time.
        """
        until = time.monotonic() + timeout
        while True:
            rows = await self.store.usage()
            holds = await self.store.open_holds()
            if len(rows) >= count and not holds:
                assert len(rows) == count, f"{len(rows)} rows, not {count}"
                assert len({row.request_id for row in rows}) == count
                return rows
            assert time.monotonic() < until, f"{len(rows)} rows, {len(holds)} holds, not {count}"
            await asyncio.sleep(0.02)

    async def settled(self, *, timeout: float = 10.0) -> list[Settlement]:
        """Wait until no hold is open, and return the rows."""
        until = time.monotonic() + timeout
        while holds := await self.store.open_holds():
            assert time.monotonic() < until, f"{len(holds)} holds are left"
            await asyncio.sleep(0.05)
        return await self.store.usage()

    async def usage(self, count: int, *, timeout: float = 10.0) -> list[Settlement]:
        """Wait until there are so many rows, whatever is held, and return them."""
        until = time.monotonic() + timeout
        while len(rows := await self.store.usage()) < count:
            assert time.monotonic() < until, f"{len(rows)} rows, not {count}"
            await asyncio.sleep(0.02)
        return rows

    async def balance(self, org: str = "test") -> int:
        """What is left of an org's balance, in micro-USD."""
        found = await self.store.get_org(org)
        assert found is not None
        assert found.balance_micro_usd is not None
        return found.balance_micro_usd


@asynccontextmanager
async def books_of(workdir: Path, name: str = "sluicegate.db") -> AsyncIterator[Books]:
    """Open the books of the gateway whose database has that name in `workdir`."""
    store = SqliteStore(workdir / name)
    await store.open()
    try:
        yield Books(store)
    finally:
        await store.close()
