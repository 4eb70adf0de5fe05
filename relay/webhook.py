"""The webhook: the second billing hook (M4.3). At least once, signed, with an idempotency key.

A notice is stored in the transaction that writes its row, so neither a crash nor a full disk can
separate them; a task of this hook delivers what is due and tries again, later each time. Signed as
the Standard Webhooks specification says: HMAC-SHA256 over `id.timestamp.body`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from encoders.json_text import dumps
from relay.billing import InsufficientCredits
from relay.money import Source
from relay.periodic import Periodic
from relay.stores.base import Notice

if TYPE_CHECKING:
    from relay.money import Hold, Settlement
    from relay.stores.base import Store

LOOK_EVERY_S: Final = 1.0
BATCH: Final = 16
_BACKOFF_MIN_S: Final = 2.0
_BACKOFF_MAX_S: Final = 3600.0
_REFUSED: Final = 402


def notice_of(settlement: Settlement) -> Notice:
    """Return the notice of a row. The same row gives the same id and the same bytes."""
    released = settlement.source is Source.NONE
    row: dict[str, Any] = asdict(settlement)
    document = {
        "type": "request.released" if released else "request.settled",
        "timestamp": datetime.fromtimestamp(settlement.at, UTC).isoformat(),
        "data": row,
    }
    return Notice(id=settlement.request_id, payload=dumps(document), due_at=settlement.at)


def signature(secret: str, notice_id: str, timestamp: int, payload: bytes) -> str:
    """Return the `webhook-signature` of a body.

    Args:
        secret: of the configuration; with the prefix `whsec_` it is base64.
        timestamp: Unix seconds, as in `webhook-timestamp`.
    """
    key = secret.encode()
    if secret.startswith("whsec_"):
        key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{notice_id}.{timestamp}.".encode() + payload
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


class Webhook:
    """Tells a URL of every row.

    Args:
        store: open already; keeps what is not delivered yet.
        url, secret: of the configuration. timeout_s: for one call.
        authorize: whether the URL is also asked before each request; 402 refuses it, anything
            else, silence included, allows it.
    """

    name = "webhook"

    def __init__(
        self, store: Store, *, url: str, secret: str, timeout_s: float, authorize: bool
    ) -> None:
        self._store = store
        self._url = url
        self._secret = secret
        self._timeout_s = timeout_s
        self._asks = authorize
        self._session: aiohttp.ClientSession | None = None
        self._deliverer = Periodic("deliver to the webhook", self.deliver_due, LOOK_EVERY_S)

    async def start(self) -> None:
        """Begin to deliver."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._deliverer.start()

    async def close(self) -> None:
        """Stop; what is not delivered waits in the store."""
        await self._deliverer.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def authorize(self, hold: Hold) -> None:
        if not self._asks:
            return
        document = {
            "type": "request.authorize",
            "timestamp": datetime.fromtimestamp(hold.placed_at, UTC).isoformat(),
            "data": asdict(hold),
        }
        if await self._post(f"{hold.request_id}.authorize", dumps(document)) == _REFUSED:
            raise InsufficientCredits("the operator's billing refused this request")

    def settle(self, settlement: Settlement) -> None:
        """Nothing to do: the notice was stored with the row."""

    def release(self, settlement: Settlement) -> None:
        """Nothing to do: the notice was stored with the row."""

    async def deliver_due(self) -> None:
        """Try every notice that is due, a few at once."""
        while notices := await self._store.due_notices(time.time(), BATCH):
            await asyncio.gather(*(self._deliver(notice) for notice in notices))
            if len(notices) < BATCH:
                return

    async def _deliver(self, notice: Notice) -> None:
        status = await self._post(notice.id, notice.payload)
        if status is not None and 200 <= status < 300:
            await self._store.notice_delivered(notice.id)
            return
        wait_s = min(_BACKOFF_MIN_S * 2 ** min(notice.tries, 20), _BACKOFF_MAX_S)
        # Jitter: a receiver that comes back is not met by everything at once.
        await self._store.postpone_notice(notice.id, time.time() + wait_s * random.uniform(0.5, 1))

    async def _post(self, notice_id: str, payload: bytes) -> int | None:
        """Send one body; return the status, None if there was no answer."""
        assert self._session is not None, "deliver before start"
        timestamp = int(time.time())
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": notice_id,
            "webhook-id": notice_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._secret, notice_id, timestamp, payload),
        }
        try:
            async with self._session.post(
                self._url, data=payload, headers=headers, allow_redirects=False
            ) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
