"""The limits of a decision stream, with their units in their names. [pure] D1.7, D2, D3.

The first 24 are told in `hello`, in this order; the others are the gateway's own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ADVERTISED: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLimits:
    """Limits of one stream; the defaults are those of the newer edition.

    `max_streams_per_process` was 4 in the older edition.
    """

    max_duration_ms: int = 3_600_000
    idle_timeout_ms: int = 120_000
    start_timeout_ms: int = 10_000
    heartbeat_interval_ms: int = 30_000
    native_heartbeat_interval_ms: int = 10_000
    receipt_timeout_ms: int = 240_000
    max_control_queue_frames: int = 2
    pong_timeout_ms: int = 10_000
    max_message_bytes: int = 4_194_304
    max_decide_body_bytes: int = 3_665_920
    max_pending_events: int = 4_096
    max_events: int = 100_000
    max_events_per_second: float = 5
    max_send_queue_bytes: int = 4_194_304
    max_send_queue_frames: int = 64
    min_interval_ms: int = 0
    event_burst: int = 10
    max_messages_per_second: float = 40
    message_burst: int = 80
    max_streams_per_process: int = 16
    max_native_control_frames_per_second: float = 8
    native_control_frame_burst: int = 16
    max_native_control_bytes_per_second: float = 512
    native_control_byte_burst: int = 1_024

    max_pending_probes: int = 2
    write_progress_timeout_ms: int = 5_000
    decision_settlement_timeout_ms: int = 5_000
    close_handshake_timeout_ms: int = 5_000
    consecutive_retryable_failures: int = 3
    protocol_refusal_limit: int = 3
    protocol_refusal_window_ms: int = 60_000
    account_decision_burst: int = 5
    account_decisions_per_minute: float = 60
    lease_ttl_ms: int = 15_000
    lease_renew_interval_ms: int = 5_000
    retry_delay_ms: int = 1_000
    slow_reader_retry_after_ms: int = 1_000
    shutdown_retry_after_ms: int = 500
    maintenance_retry_after_ms: int = 300_000
    idempotency_lease_ms: int = 30_000
    idempotency_renew_interval_ms: int = 10_000
    idempotency_answer_ms: int = 86_400_000
    idempotency_tombstone_ms: int = 2_592_000_000

    @classmethod
    def of(cls, overrides: Mapping[str, float]) -> DecisionLimits:
        """The defaults with some of them replaced.

        Raises:
            ValueError: an unknown name, zero where a limit of zero stops everything, or a fraction
                where there are only whole numbers; the message names it.
        """
        known = {field.name: field.type for field in fields(cls)}
        values: dict[str, float] = {}
        for name, value in overrides.items():
            if name not in known:
                raise ValueError(f"there is no limit {name!r}")
            if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ValueError(f"{name} must be more than 0")
            whole = known[name] == "int"
            if whole and value != int(value):
                raise ValueError(f"{name} must be a whole number")
            values[name] = int(value) if whole else value
        return cls(**values)  # type: ignore[arg-type]  # checked above, field by field

    def advertised(self) -> dict[str, float]:
        """The 24 limits of `hello`, in order (D1.7)."""
        names = [field.name for field in fields(self)[:ADVERTISED]]
        return {name: getattr(self, name) for name in names}


_MAY_BE_ZERO: Final = frozenset(
    {
        "min_interval_ms",
        "retry_delay_ms",
        "slow_reader_retry_after_ms",
        "shutdown_retry_after_ms",
        "maintenance_retry_after_ms",
        "decision_settlement_timeout_ms",
    }
)
