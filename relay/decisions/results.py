"""What the result of a decide means to its stream. [pure] D5.3, D5.5, D5.6, D3.7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from encoders.decision_errors import error
from relay.decisions.effects import Failed
from relay.decisions.outlet import Ending

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError
    from relay.decisions.dispatch import Dispatch, Dispatcher
    from relay.decisions.effects import Decided
    from relay.decisions.limits import DecisionLimits
    from relay.decisions.outlet import Outlet

_FATAL_CODES: Final = frozenset(
    {"invalid_api_key", "auth_error", "account_suspended", "unknown_endpoint"}
)


class Teller:
    """Tells results to the peer of one stream."""

    def __init__(self, limits: DecisionLimits, outlet: Outlet, dispatcher: Dispatcher) -> None:
        self._limits = limits
        self._outlet = outlet
        self._dispatcher = dispatcher

    def decided(self, dispatch: Dispatch, result: Decided, now: float) -> bool:
        """Send the decision; False if an error went out, its frame being too large (D2.5)."""
        self._dispatcher.forget_failures()
        frame = self._outlet.frames.decision(
            result.reply,
            version=dispatch.version,
            covered=dispatch.batch,
            request_id=result.request_id,
            server_timing=result.server_timing,
            latency_ms=result.latency_ms,
            rate_limit=result.rate_limit,
            queue_ms=_ms(dispatch.started_at - dispatch.queued_at),
            decide_ms=_ms(now - dispatch.started_at),
            max_bytes=self._limits.max_send_queue_bytes,
        )
        if frame is not None:
            self._outlet.send(frame)
            return True
        failure = Failed(
            error=error("questions_too_large", "the reply is too large for a frame"),
            request_id=result.request_id,
            server_timing=result.server_timing,
            rate_limit=result.rate_limit,
        )
        self._tell(dispatch, failure, fatal=False)
        return False

    def failed(
        self,
        dispatch: Dispatch,
        result: Failed,
        now: float,
        *,
        may_retry: bool,
        lifetime_end: float,
    ) -> Ending | None:
        """Tell a failure, and have it tried again where D5.5 says so.

        Args:
            may_retry: the mode is `on_change` and the stream is not about to close.

        Returns:
            The end of the stream, or None if it goes on.
        """
        problem = result.error
        if problem.code == "maintenance":
            self._dispatcher.give_back(dispatch.batch)
            return Ending(1013, "maintenance", self._limits.maintenance_retry_after_ms)
        if problem.code in _FATAL_CODES:
            self._tell(dispatch, result, fatal=True)
            return Ending(1008, "auth")
        if not (may_retry and _retries(problem)):
            self._dispatcher.forget_failures()
            self._tell(dispatch, result, fatal=False)
            return None
        delay_ms = problem.retry_after_ms
        if delay_ms is None:
            delay_ms = self._limits.retry_delay_ms
        last = self._dispatcher.failed(dispatch.version)
        fatal = last or now + delay_ms / 1000 >= lifetime_end
        self._tell(dispatch, result, fatal=fatal)
        if fatal:
            return Ending(1013, "overload", delay_ms)
        self._dispatcher.retry(delay_ms / 1000, now)
        return None

    def _tell(self, dispatch: Dispatch, result: Failed, *, fatal: bool) -> None:
        self._dispatcher.give_back(dispatch.batch)
        self._outlet.send(
            self._outlet.frames.error(
                result.error,
                phase="decide",
                version=dispatch.version,
                event_id=None,
                covered=dispatch.batch,
                request_id=result.request_id,
                rate_limit=result.rate_limit,
                server_timing=result.server_timing,
                fatal=fatal,
            )
        )


def _retries(problem: DecisionError) -> bool:
    """Whether `on_change` tries again by itself."""
    if problem.status == 409:
        return problem.retryable and problem.code == "idempotency_conflict"
    return problem.retryable and problem.status in (429, 503)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
