"""Builds and runs what knows of money: the store, orgs and keys, the ledger, the webhook (M4)."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

import structlog

from planes.price_list import price_book
from relay.billing import Billing, BillingHook
from relay.custody import Custody
from relay.ledger import Ledger
from relay.periodic import Periodic
from relay.stores.base import Org
from relay.stores.sqlite import SqliteStore
from relay.webhook import Webhook, notice_of

if TYPE_CHECKING:
    from planes.auth import KeyRing
    from planes.settings import Settings
    from relay.money import Settlement
    from relay.routing import Router

log = structlog.get_logger("sluicegate")

# A revoked key is refused within 5 s (O2), and nobody wants to wait for a new one.
_KEYS_EVERY_S: Final = 0.5


class Accounts:
    """The money side of one gateway.

    Args:
        settings: the whole configuration. keys: gets the store's keys.

    Attributes:
        billing: places and settles the hold of every request.
        store: open between `start` and `close`.
    """

    def __init__(self, settings: Settings, keys: KeyRing) -> None:
        self._settings = settings
        self._keys = keys
        self._keys_version = -1
        self._opened = False
        hook = settings.billing.webhook
        self.store = SqliteStore(
            settings.store.sqlite_path, notice_of=notice_of if hook is not None else None
        )
        self._ledger = Ledger(self.store)
        self._webhook: Webhook | None = None
        if hook is not None:
            self._webhook = Webhook(
                self.store,
                url=hook.url,
                secret=hook.secret.get_secret_value(),
                timeout_s=hook.timeout_s,
                authorize=hook.authorize,
            )
        self._prices = price_book(settings)
        worker = f"worker_{secrets.token_hex(8)}"
        hooks: tuple[BillingHook, ...] = (self._ledger,)
        if self._webhook is not None:
            hooks = (self._webhook, self._ledger)
        self.billing = Billing(
            hooks,
            self._prices,
            worker=worker,
            hold_output_tokens=settings.billing.hold_output_tokens,
        )
        self._custody = Custody(
            self.store,
            self.billing,
            worker=worker,
            sweep_interval_s=settings.billing.sweep_interval_s,
            hold_ttl_s=settings.billing.hold_ttl_s,
        )
        self._refresher = Periodic("refresh the keys", self._refresh_keys, _KEYS_EVERY_S)

    @property
    def unsettled(self) -> int:
        """Settlements that are not in the store yet."""
        return self._ledger.depth

    async def start(self, router: Router) -> None:
        """Open the store and begin.

        Raises:
            StoreError: the store cannot be used; the message says what to do.
        """
        await self.store.open()
        self._opened = True
        for org in _orgs(self._settings):
            await self.store.ensure_org(org)
        await self._refresh_keys()
        await asyncio.to_thread(self._look_up_prices, router)
        await self._custody.start()
        self._ledger.start()
        self._refresher.start()
        if self._webhook is not None:
            await self._webhook.start()

    async def sweep_run(self, execution_id: str) -> list[Settlement]:
        """See `Custody.sweep_run`."""
        return await self._custody.sweep_run(execution_id)

    async def close(self) -> None:
        """Write what is settled, give up the lease, close the store. Idempotent."""
        if not self._opened:
            return
        self._opened = False
        await self._refresher.close()
        await self._ledger.close()
        if self._webhook is not None:
            await self._webhook.close()
        await self._custody.close()
        await self.store.close()

    async def _refresh_keys(self) -> None:
        version = await self.store.keys_version()
        if version != self._keys_version:
            self._keys.set_stored(await self.store.list_keys())
            self._keys_version = version

    def _look_up_prices(self, router: Router) -> None:
        self._prices.warm_up(
            (slug, candidate.provider.name, candidate.model)
            for slug, candidates in router.routes()
            for candidate in candidates
        )


def _orgs(settings: Settings) -> list[Org]:
    """The orgs of the configuration's keys; the first balance that a key names is the org's."""
    orgs: dict[str, Org] = {}
    for key in settings.keys:
        known = orgs.get(key.org)
        if known is not None and known.balance_micro_usd is not None:
            continue
        balance = None if key.balance_usd is None else round(key.balance_usd * 1_000_000)
        orgs[key.org] = Org(
            id=key.org,
            balance_micro_usd=balance,
            trial=key.trial,
            max_concurrent=key.max_concurrent,
        )
    return list(orgs.values())
