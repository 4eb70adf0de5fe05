"""A socket's place among those of its account, held in the shared store (D1.5, D3.8)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from enum import Enum
from typing import TYPE_CHECKING, Final

from relay.stores.base import StoreError

if TYPE_CHECKING:
    from relay.stores.base import Store

# The client gives an opening ten seconds.
_TAKE_WAIT_S: Final = 5.0
_TRY_AGAIN_S: Final = 1.0
# A lease that could not be renewed is given up so long before another socket may take its place.
_MARGIN_S: Final = 1.0
# A Close must not wait for a store that hangs; the lease then runs out by itself.
_RELEASE_WAIT_S: Final = 1.0


class LeaseEnd(Enum):
    """Why a lease is no longer held."""

    LOST = "lease_lost"
    STORE_GONE = "store_unavailable"


class Lease:
    """One lease.

    Args:
        ttl_s: how long it holds without being renewed. renew_s: how often that is done.
    """

    def __init__(
        self, store: Store, org: str, stream_id: str, *, ttl_s: float, renew_s: float
    ) -> None:
        self._store = store
        self._org = org
        self._stream_id = stream_id
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._until = 0.0  # of the loop's clock
        self._held = False

    async def take(self, limit: int) -> float | None:
        """Take a place among the account's `limit`; None: taken. Else all are, and one may be free
        in so many seconds.

        Raises:
            StoreError: the store did not answer, or not in time.
        """
        asked, now = asyncio.get_running_loop().time(), time.time()
        self._held = True  # a call that is cut off may still be done
        try:
            async with asyncio.timeout(min(_TAKE_WAIT_S, self._ttl_s)):
                first_end = await self._store.lease_stream(
                    self._org, self._stream_id, limit=limit, now=now, until=now + self._ttl_s
                )
        except TimeoutError:
            raise StoreError("the store did not answer in time") from None
        if first_end is not None:
            self._held = False
            return max(0.0, first_end - time.time())
        self._until = asked + self._ttl_s
        return None

    async def keep(self) -> LeaseEnd:
        """Renew it again and again; returns when it is no longer held."""
        loop = asyncio.get_running_loop()
        pause_s = self._renew_s
        while True:
            await asyncio.sleep(pause_s)
            asked, now = loop.time(), time.time()
            give_up = self._until - min(_MARGIN_S, self._ttl_s / 10)
            try:
                async with asyncio.timeout_at(give_up):
                    kept = await self._store.renew_stream(
                        self._stream_id, now=now, until=now + self._ttl_s
                    )
            except (StoreError, TimeoutError):
                if loop.time() >= give_up:
                    return LeaseEnd.STORE_GONE
                pause_s = min(_TRY_AGAIN_S, self._renew_s, give_up - loop.time())
                continue
            if not kept:
                return LeaseEnd.LOST
            self._until, pause_s = asked + self._ttl_s, self._renew_s

    async def release(self) -> None:
        """Give it up, so that the next socket finds the place free. Idempotent."""
        if not self._held:
            return
        self._held = False
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_RELEASE_WAIT_S):
                await self._store.release_stream(self._stream_id)
