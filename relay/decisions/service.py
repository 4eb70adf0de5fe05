"""Runs one decide: what is served, a slot of the account, the backend (D4.4, D5.4, D5.6, D6.5)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError, error
from encoders.decision_served import check_served
from relay.decisions.effects import Decided, Failed
from relay.errors import ConcurrencyExceeded

if TYPE_CHECKING:
    from encoders.decision_served import Served
    from relay.deciders.base import DecisionBackend, DecisionReply
    from relay.decisions.effects import StartDecide
    from relay.slots import Slots

_log: Final = logging.getLogger("sluicegate.decisions")

# D6.1: the client gives up at 150 s.
DECIDE_S: Final = 140.0
# A backend has the deadline and ends by itself; this is for one that does not.
_OVERTIME_S: Final = 1.0
_SLOT_RETRY_MS: Final = 1000


class DecideService:
    """Decides for accounts.

    Args:
        served: what is refused before the backend is asked.
        slots: where an account's concurrent requests are counted, on every plane.
    """

    def __init__(self, backend: DecisionBackend, served: Served, slots: Slots) -> None:
        self._backend = backend
        self._served = served
        self._slots = slots

    async def decide(
        self, org: str, asked: StartDecide, *, max_concurrent: int | None
    ) -> Decided | Failed:
        """Decide once; a failure is an answer too, nothing is raised.

        Args:
            max_concurrent: the account's limit, None for none.
        """
        loop = asyncio.get_running_loop()
        request_id = f"req_{secrets.token_hex(12)}"
        started = loop.time()
        result: DecisionReply | DecisionError | None = check_served(asked.subject, self._served)
        if result is None:
            try:
                with self._slots.hold(org, request_id, max_concurrent):
                    result = await self._ask(org, asked, started + DECIDE_S)
            except ConcurrencyExceeded as full:
                result = error(
                    "concurrency_limit_exceeded",
                    full.message,
                    retry_after_ms=_SLOT_RETRY_MS,
                    details={"cause": "account_concurrency"},
                )
        if isinstance(result, DecisionError):
            return Failed(error=result, request_id=request_id)
        return Decided(
            reply=result.body,
            request_id=request_id,
            server_timing=result.server_timing,
            latency_ms=round((loop.time() - started) * 1000, 3),
        )

    async def _ask(
        self, org: str, asked: StartDecide, deadline: float
    ) -> DecisionReply | DecisionError:
        key = None if asked.idempotency_key is None else _derived(org, asked.idempotency_key)
        try:
            async with asyncio.timeout_at(deadline + _OVERTIME_S):
                return await self._backend.decide(
                    asked.body, idempotency_key=key, deadline=deadline
                )
        except TimeoutError:
            return error("system_zero_timeout", f"no decision within {DECIDE_S:g} s")
        except Exception:  # noqa: BLE001  the last border of a backend
            _log.exception("a decision backend failed")
            return error("internal_error", "the gateway failed")


def _derived(org: str, key: str) -> str:
    """The key that a backend sees: two accounts never share an answer (D6.2)."""
    return hashlib.sha256(f"{len(org)}:{org}{key}".encode()).hexdigest()
