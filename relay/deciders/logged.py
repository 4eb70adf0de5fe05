"""Tells the operator what a backend's clients are told of it: most of it is theirs to mend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError

if TYPE_CHECKING:
    from relay.deciders.base import DecisionBackend, DecisionReply

_log: Final = logging.getLogger("sluicegate.decisions")


class LoggedBackend:
    """Another backend, whose failures are lines of the log; what is the client's fault is none."""

    def __init__(self, backend: DecisionBackend) -> None:
        self._backend = backend

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """See `DecisionBackend`."""
        found = await self._backend.decide(body, idempotency_key=idempotency_key, deadline=deadline)
        if isinstance(found, DecisionError) and (found.status == 429 or found.status >= 500):
            _log.warning(
                "the decision backend failed: %s %s: %s", found.status, found.code, found.message
            )
        return found

    async def close(self) -> None:
        """See `DecisionBackend`."""
        await self._backend.close()
