"""The gateway over a backend that answers at once; its replies tell how long they took to begin.

python -m bench.decision_gateway serve --config FILE --port N

The `id` of a reply ends in the nanoseconds from the last message that the session was given to the
call of the backend.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planes import cli
from planes.decision import backends
from relay.deciders.base import DecisionReply
from relay.deciders.instant import InstantBackend
from relay.decisions.session import DecisionSession

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError

_received_ns = 0


class TimedBackend:
    """Answers at once and tells since when the message was there."""

    def __init__(self) -> None:
        self._instant = InstantBackend()

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        took_ns = time.perf_counter_ns() - _received_ns
        reply = await self._instant.decide(body, idempotency_key=idempotency_key, deadline=deadline)
        if isinstance(reply, DecisionReply):
            head, _, rest = reply.body.partition(b'"szd_')
            return replace(reply, body=b'%s"szd_%032d%s' % (head, took_ns, rest[32:]))
        return reply

    async def close(self) -> None:
        """Nothing is held."""


def main() -> int:
    """Serve."""
    receive = DecisionSession.receive

    def timed(session: DecisionSession, message: Any, now: float) -> None:
        global _received_ns
        _received_ns = time.perf_counter_ns()
        receive(session, message, now)

    DecisionSession.receive = timed  # type: ignore[method-assign, assignment]
    backend = TimedBackend()
    backends.backend_of = lambda settings, **parts: backend
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
