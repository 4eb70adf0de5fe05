"""Idempotency keys of decides: taken, kept alive, answered or left (D6.2)."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from typing import TYPE_CHECKING, Final, TypeVar

from encoders.decision_errors import DecisionError, error
from relay.periodic import Periodic
from relay.stores.base import KeyState, KeyUse, StoreError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from relay.decisions.limits import DecisionLimits
    from relay.money import Progress
    from relay.stores.base import Store

_T = TypeVar("_T")
_log: Final = logging.getLogger("sluicegate.decisions")

_STORE_RETRY_MS: Final = 1000
# While it cannot be told whether the other try lives: so often a lease's length is asked again.
# The real client has five waits: after four of these it is told the end of a lost lease.
_ASKS_IN_A_LEASE: Final = 10
_ERASE_EVERY_S: Final = 60.0


class Keys:
    """The keys of all accounts.

    Args:
        store: where they are. limits: how long leases, answers and tombstones last.
    """

    def __init__(self, store: Store, limits: DecisionLimits) -> None:
        self._store = store
        self.lease_s = limits.idempotency_lease_ms / 1000
        self.renew_s = min(limits.idempotency_renew_interval_ms / 1000, self.lease_s / 2)
        self.answer_s = limits.idempotency_answer_ms / 1000
        self.tombstone_s = limits.idempotency_tombstone_ms / 1000
        self._eraser = Periodic("erase old answers", self._erase, _ERASE_EVERY_S, at_once=True)

    def start(self) -> None:
        """Begin to erase what is old."""
        self._eraser.start()

    async def close(self) -> None:
        """Stop erasing. Idempotent."""
        await self._eraser.close()

    async def take(self, org: str, key: str, digest: bytes) -> TakenKey | bytes | DecisionError:
        """Take a key for one try.

        Returns:
            The key; or the answer that it has already; or why it cannot be used.
        """
        use = KeyUse(org=org, key=key, digest=digest, owner=secrets.token_hex(16))
        now = time.time()
        try:
            found = await self._store.claim_key(use, now=now, until=now + self.lease_s)
        except StoreError:
            return unavailable()
        except asyncio.CancelledError:
            await to_its_end(_left(self._store, use))  # it may have been taken all the same
            raise
        match found.state:
            case KeyState.CLAIMED:
                return TakenKey(self, self._store, use)
            case KeyState.ANSWERED:
                return found.answer
            case KeyState.RUNNING:
                return conflict(self._wait_ms(found.until - now))
            case KeyState.EXPIRED:
                return error(
                    "idempotency_replay_unavailable",
                    "the answer under this Idempotency-Key is not kept any more; use a new key",
                )
            case KeyState.REUSED:
                return error(
                    "idempotency_key_reuse",
                    "this Idempotency-Key belongs to another request body; use a new key",
                )

    def _wait_ms(self, left_s: float) -> int:
        # Who lives renews in time: once less is left than that, the lease is lost and free then.
        lost = left_s < self.lease_s - self.renew_s
        wait_s = left_s if lost else min(left_s, self.lease_s / _ASKS_IN_A_LEASE)
        return max(1, math.ceil(wait_s * 1000))

    async def _erase(self) -> None:
        await self._store.erase_answers(time.time())


class TakenKey:
    """A key that this try has, renewed until it is kept or left."""

    def __init__(self, keys: Keys, store: Store, use: KeyUse) -> None:
        self._keys = keys
        self._store = store
        self._use = use
        self._renewal = Periodic("renew an idempotency key", self._renew, keys.renew_s)
        self._renewal.start()

    async def keep(self, answer: bytes, progress: Progress | None) -> DecisionError | None:
        """End the try with its answer.

        Args:
            progress: see `Store.keep_answer`.

        Returns:
            Why the answer was not kept, and then nobody may be given or billed it: another try
            has the key since, or the store does not answer.
        """
        now = time.time()
        until = now + self._keys.answer_s
        try:
            kept = await self._store.keep_answer(
                self._use,
                answer,
                until=until,
                forget_at=until + self._keys.tombstone_s,
                progress=progress,
            )
        except StoreError:
            _log.exception("an answer could not be stored under its key")
            return unavailable()
        finally:
            await self._renewal.close()
        return None if kept else conflict(_STORE_RETRY_MS)

    async def leave(self) -> None:
        """End the try without an answer; another one may begin."""
        await self._renewal.close()
        await _left(self._store, self._use)

    async def _renew(self) -> None:
        await self._store.renew_key(self._use, until=time.time() + self._keys.lease_s)


async def to_its_end(work: Coroutine[object, object, _T]) -> _T:
    """Run what must not be cut in two; a cancellation meanwhile is dropped, so end soon after."""
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise


async def _left(store: Store, use: KeyUse) -> None:
    try:
        await store.leave_key(use)
    except StoreError:
        _log.exception("an idempotency key could not be freed; it is when its lease ends")


def unavailable() -> DecisionError:
    """The store of the keys does not answer."""
    return error(
        "idempotency_unavailable",
        "the gateway cannot read its idempotency keys now",
        retry_after_ms=_STORE_RETRY_MS,
    )


def conflict(wait_ms: int) -> DecisionError:
    """Another try has the key."""
    return error(
        "idempotency_conflict",
        "a request with this Idempotency-Key is running",
        retry_after_ms=wait_ms,
    )
