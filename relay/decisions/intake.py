"""What client messages do to a stream: versions, keys, refusals. [pure] D2.3, D4, D5.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from encoders.decision_errors import DecisionError, error
from encoders.decision_messages import Decide, Malformed, Pong, Refused, Start
from relay.decisions.outlet import Ending
from relay.decisions.state import StateDocument

if TYPE_CHECKING:
    from encoders.decision_messages import Append, AppendAttachments, Incoming, Replace
    from relay.decisions.budgets import Budgets
    from relay.decisions.clocks import Clocks
    from relay.decisions.dispatch import Dispatcher
    from relay.decisions.limits import DecisionLimits
    from relay.decisions.outlet import Outlet

_POLICY = Ending(1008, "policy")


class Intake:
    """Takes checked messages in order; the state, its version and its key live here.

    Args:
        request_id: of the opening; refusals name it.
    """

    def __init__(
        self,
        limits: DecisionLimits,
        *,
        stream_id: str,
        request_id: str,
        outlet: Outlet,
        budgets: Budgets,
        clocks: Clocks,
        dispatcher: Dispatcher,
    ) -> None:
        self._limits = limits
        self._stream_id = stream_id
        self._request_id = request_id
        self._outlet = outlet
        self._budgets = budgets
        self._clocks = clocks
        self._dispatcher = dispatcher
        self._settling: Ending | None = None
        self.document: StateDocument | None = None
        self.on_change = False
        self.key: str | None = None
        self.version = 0

    def settle(self, ending: Ending) -> None:
        """The stream is about to end: mutations still count, no decide starts (D3.6)."""
        self._settling = ending
        self._dispatcher.drop()

    def take(self, message: Incoming, now: float) -> Ending | None:
        """Take one message.

        Returns:
            The end of the stream, or None if it goes on.
        """
        if not self._budgets.message(now, is_mutation=message.is_mutation):
            return _POLICY
        if not isinstance(message, Pong):
            self._clocks.active(now)
        match message:
            case Malformed():
                return Ending(1007, None)
            case Refused():
                return self._refuse(message.error, message.event_id, now)
            case Pong():
                if self._clocks.json_probes.answered(message.nonce):
                    return None
                refusal = error("stream_invalid_message", "no such ping is out", param="nonce")
                return self._refuse(refusal, None, now)
            case Decide():
                return self._decide(message, now)
            case Start():
                return self._start(message, now)
            case _:
                return self._mutate(message, now)

    def _start(self, message: Start, now: float) -> Ending | None:
        if self.document is not None:
            refusal = error("stream_already_started", "the stream has started already")
            return self._refuse(refusal, message.event_id, now)
        document = StateDocument(message, self._stream_id)
        refused = self._out_of_order(message.event_id) or message.refusal
        refused = refused or document.check(self._limits.max_decide_body_bytes)
        if refused is not None:
            return self._refuse(refused, message.event_id, now)
        self.document = document
        self.on_change = message.decision_mode == "on_change"
        self._dispatcher.min_interval_s = (
            max(message.min_interval_ms, self._limits.min_interval_ms) / 1000
        )
        self._accept(document, message.event_id, message.idempotency_key, now)
        return None

    def _mutate(self, message: Append | AppendAttachments | Replace, now: float) -> Ending | None:
        document = self.document
        if document is None:
            return self._refuse(_not_started(), message.event_id, now)
        refused = self._out_of_order(message.event_id)
        if refused is not None:
            return self._refuse(refused, message.event_id, now)
        change = document.prepare(message, self._limits.max_decide_body_bytes)
        if isinstance(change, DecisionError):
            return self._refuse(change, message.event_id, now)
        if self.version >= self._limits.max_events:
            return _POLICY
        if self._dispatcher.uncovered >= self._limits.max_pending_events:
            return Ending(1009, None)
        document.commit(change)
        self._accept(document, message.event_id, message.idempotency_key, now)
        return None

    def _out_of_order(self, event_id: str) -> DecisionError | None:
        wanted = f"evt_{self.version + 1}"
        if event_id == wanted:
            return None
        return error("stream_event_order", f"the next event is {wanted}", param="event_id")

    def _accept(self, document: StateDocument, event_id: str, key: str | None, now: float) -> None:
        self.version += 1
        self.key = key
        self._dispatcher.accepted(event_id)
        if self.on_change and self._settling is None:
            self._dispatcher.want(now)
        self._outlet.send(
            self._outlet.frames.ack(
                event_id,
                version=self.version,
                state_bytes=document.state_bytes,
                body_bytes=document.body_bytes,
                scheduled=self._dispatcher.waiting,
            )
        )

    def _decide(self, message: Decide, now: float) -> Ending | None:
        refusal: DecisionError | None = None
        if self.document is None:
            refusal = _not_started()
        elif self._settling is not None:
            refusal = error(
                "service_unavailable",
                "the stream is about to close",
                retry_after_ms=self._settling.retry_after_ms,
            )
        elif message.state_version != self.version:
            refusal = error(
                "stream_version_mismatch",
                f"the current version is {self.version}",
                param="state_version",
            )
        if refusal is not None:
            return self._refuse(refusal, None, now)
        running = self._dispatcher.in_flight is not None
        self._dispatcher.want(now)
        self._outlet.send(self._outlet.frames.scheduled(version=self.version, in_flight=running))
        return None

    def _refuse(self, refusal: DecisionError, event_id: str | None, now: float) -> Ending | None:
        """Refuse a message; the last refusal that the window allows ends the stream (D2.3)."""
        fatal = self._settling is None and self._budgets.refusal(now)
        self._outlet.send(
            self._outlet.frames.error(
                refusal,
                phase="protocol",
                version=self.version,
                event_id=event_id,
                covered=(),
                request_id=self._request_id,
                rate_limit=None,
                server_timing=None,
                fatal=fatal,
            )
        )
        return _POLICY if fatal else None


def _not_started() -> DecisionError:
    return error("stream_not_started", "the stream has not started")
