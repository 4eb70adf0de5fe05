"""Frames of a decision stream as JSON bytes, each with a fixed order of members (D1.7, D2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from encoders.decision_errors import DecisionError

PROTOCOL: Final = "system-zero.stream.v1"


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A snapshot of the account's budget; `reset_epoch_seconds` is Unix time."""

    limit: int
    remaining: int
    reset_epoch_seconds: int

    def fields(self) -> dict[str, int]:
        """Its JSON members."""
        return {
            "limit": self.limit,
            "remaining": self.remaining,
            "reset_epoch_seconds": self.reset_epoch_seconds,
        }


class FrameWriter:
    """Writes the frames of one stream; each takes the next `seq` (D2.1)."""

    def __init__(self, stream_id: str) -> None:
        self._stream_id = stream_id
        self._seq = 0

    def _head(self, kind: str) -> dict[str, Any]:
        self._seq += 1
        return {"type": kind, "stream_id": self._stream_id, "seq": self._seq}

    def hello(
        self, request_id: str, limits: Mapping[str, float], rate_limit: RateLimit | None
    ) -> bytes:
        """The first frame."""
        frame = self._head("hello")
        frame["protocol"] = PROTOCOL
        frame["request_id"] = request_id
        frame["limits"] = dict(limits)
        frame["rate_limit"] = _snapshot(rate_limit)
        return dumps(frame)

    def ack(
        self, event_id: str, *, version: int, state_bytes: int, body_bytes: int, scheduled: bool
    ) -> bytes:
        """An accepted mutation."""
        frame = self._head("ack")
        frame["event_id"] = event_id
        frame["state_version"] = version
        frame["state_bytes"] = state_bytes
        frame["synthesized_body_bytes"] = body_bytes
        frame["scheduled"] = scheduled
        return dumps(frame)

    def scheduled(self, *, version: int, in_flight: bool) -> bytes:
        """An accepted `decide`."""
        frame = self._head("scheduled")
        frame["state_version"] = version
        frame["in_flight"] = in_flight
        return dumps(frame)

    def ping(self, nonce: int) -> bytes:
        """A JSON heartbeat."""
        frame = self._head("ping")
        frame["nonce"] = nonce
        return dumps(frame)

    def decision(
        self,
        reply: bytes,
        *,
        version: int,
        covered: Sequence[str],
        request_id: str,
        server_timing: str | None,
        latency_ms: float | None,
        rate_limit: RateLimit | None,
        queue_ms: int,
        decide_ms: int,
        max_bytes: int,
    ) -> bytes | None:
        """An answer around the bytes of `reply`; None, and no `seq` used, if it is too large."""
        head = {"type": "decision", "stream_id": self._stream_id, "seq": self._seq + 1}
        head["state_version"] = version
        head["covered_event_ids"] = list(covered)
        tail = {
            "request_id": request_id,
            "http_status": 200,
            "server_timing": server_timing,
            "latency_ms": latency_ms,
            "rate_limit": _snapshot(rate_limit),
            "queue_ms": queue_ms,
            "decide_ms": decide_ms,
        }
        frame = b'%s,"reply":%s,%s' % (dumps(head)[:-1], reply, dumps(tail)[1:])
        if len(frame) > max_bytes:
            return None
        self._seq += 1
        return frame

    def error(
        self,
        error: DecisionError,
        *,
        phase: str,
        version: int,
        event_id: str | None,
        covered: Sequence[str],
        request_id: str,
        rate_limit: RateLimit | None,
        server_timing: str | None,
        fatal: bool,
    ) -> bytes:
        """A refusal or a failed decide (D2.3, D5.5)."""
        frame = self._head("error")
        frame["phase"] = phase
        frame["state_version"] = version
        frame["event_id"] = event_id
        frame["covered_event_ids"] = list(covered)
        frame["http_status"] = error.status
        frame["envelope"] = error.envelope(request_id)
        frame["retry"] = {
            "should_retry": error.retryable,
            "retry_after_ms": error.retry_after_ms,
            "retry_after": error.retry_after,
        }
        frame["rate_limit"] = _snapshot(rate_limit)
        frame["server_timing"] = server_timing
        frame["fatal"] = fatal
        return dumps(frame)

    def goodbye(
        self, reason: str | None, *, version: int, last_decision: int, retry_after_ms: int
    ) -> bytes:
        """The last frame (D3.10)."""
        frame = self._head("goodbye")
        frame["reason"] = reason
        frame["state_version"] = version
        frame["last_decision_state_version"] = last_decision
        frame["resume"] = {
            "supported": False,
            "action": "reconnect_and_replay",
            "retry_after_ms": retry_after_ms,
        }
        return dumps(frame)


def _snapshot(rate_limit: RateLimit | None) -> dict[str, int] | None:
    return None if rate_limit is None else rate_limit.fields()
