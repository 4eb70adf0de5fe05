"""What one dispatch asks of others: the account's budget, the account itself, the decide (D5)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError
from relay.deciders.base import CLIENT_KEY
from relay.decisions.effects import Failed
from relay.decisions.service import Asked, Caller
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from planes.auth import Principal
    from relay.decisions.effects import Decided, StartDecide
    from relay.decisions.limits import DecisionLimits
    from relay.decisions.service import DecideService, Run
    from relay.inflight import InFlight
    from relay.stores.base import Store

_STORE_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Who a stream is of.

    Attributes:
        request_id: of the opening.
        current: who it is now; a key may be revoked while its stream is open (D5.6).
        client_key: the text of its key, for a backend that is asked with it.
    """

    org: str
    request_id: str
    stream_id: str
    current: Callable[[], Principal | DecisionError]
    client_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What all streams share.

    Attributes:
        decoder: where large messages are decoded; one thread, as two would only fight for the
            interpreter that the loop needs too.
    """

    limits: DecisionLimits
    store: Store
    decider: DecideService
    inflight: InFlight
    decoder: Executor


async def take_start(services: Services, account: Account) -> int:
    """Ask the account's budget for one start (D5.4): 0, or in how many milliseconds to ask again,
    which is so too where the store does not tell.
    """
    try:
        wait_s = await services.store.start_decision(
            account.org,
            now=time.time(),
            per_minute=services.limits.account_decisions_per_minute,
            burst=services.limits.account_decision_burst,
        )
    except StoreError:
        return _STORE_RETRY_MS
    return math.ceil(wait_s * 1000)


async def decide(services: Services, account: Account, asked: StartDecide) -> Decided | Failed:
    """Decide for the account as it is now."""
    principal = account.current()
    if isinstance(principal, DecisionError):
        return Failed(error=principal, request_id=account.request_id)
    run = services.decider.begin(
        caller_of(principal),
        Asked(body=asked.body, subject=asked.subject, idempotency_key=asked.idempotency_key),
    )
    return await decide_as(services, account.client_key, run)


async def decide_as(services: Services, client_key: str | None, run: Run) -> Decided | Failed:
    """Decide in a task of its own, for the client with that key."""
    CLIENT_KEY.set(client_key)
    return await services.decider.decide(run)


def caller_of(principal: Principal) -> Caller:
    """Whose decide it is."""
    return Caller(
        org=principal.org,
        key_id=principal.key_id,
        max_concurrent=principal.max_concurrent,
        trial=principal.trial,
    )
