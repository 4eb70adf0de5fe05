"""Keeps holds from being lost with their process: leases, progress, the sweep (M4.2)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from relay.periodic import Periodic

if TYPE_CHECKING:
    from relay.billing import Billing
    from relay.money import Settlement
    from relay.stores.base import Store

_log: Final = logging.getLogger("sluicegate.custody")

LEASE_S: Final = 15.0
RENEW_EVERY_S: Final = 5.0
PROGRESS_EVERY_S: Final = 5.0


class Custody:
    """One worker's part in the keeping of holds.

    Args:
        store: open already. billing: whose open holds are noted. worker: this process.
        sweep_interval_s, hold_ttl_s: of the configuration.
    """

    def __init__(
        self,
        store: Store,
        billing: Billing,
        *,
        worker: str,
        sweep_interval_s: float,
        hold_ttl_s: float,
    ) -> None:
        self._store = store
        self._billing = billing
        self._worker = worker
        self._hold_ttl_s = hold_ttl_s
        self._tasks = (
            Periodic("renew the lease", self._renew, RENEW_EVERY_S),
            Periodic("note the progress", self._note, PROGRESS_EVERY_S),
            Periodic("sweep lost holds", self._sweep, sweep_interval_s, at_once=True),
        )

    async def start(self) -> None:
        """Take the lease; no hold of this worker exists before it."""
        await self._renew()
        for task in self._tasks:
            task.start()

    async def close(self) -> None:
        """Give the lease up. Comes after the ledger was written."""
        for task in self._tasks:
            await task.close()
        await self._store.end_lease(self._worker)

    async def _renew(self) -> None:
        await self._store.renew_lease(self._worker, time.time() + LEASE_S)

    async def _note(self) -> None:
        moved = self._billing.progress()
        if moved:
            await self._store.write_progress(moved)

    async def _sweep(self) -> None:
        # First: after a pause of this process or a jump of the clock its own lease may have run
        # out, and its own streams are not lost. Of one moment: a pause may come between the two.
        now = time.time()
        await self._store.renew_lease(self._worker, now + LEASE_S)
        for row in await self._store.sweep(now, self._hold_ttl_s):
            _tell(row)

    async def sweep_run(self, execution_id: str) -> list[Settlement]:
        """Settle what a run's calls hold that were lost with their worker, however young: what is
        called anew for them needs the balance. Return all rows of its calls.
        """
        now = time.time()
        await self._store.renew_lease(self._worker, now + LEASE_S)
        rows = await self._store.sweep_run(execution_id, now)
        for row in rows:
            if row.error_code == "worker_lost" and row.at == now:
                _tell(row)
        return rows


def _tell(lost: Settlement) -> None:
    _log.warning(
        "request %s of %s was lost with its worker; settled at %d micro-USD",
        *(lost.request_id, lost.org, lost.cost_micro_usd),
    )
