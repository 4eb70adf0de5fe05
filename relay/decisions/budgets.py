"""How much a peer may send and be refused: token buckets and a window. [pure] D2.3, D2.4."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from relay.decisions.limits import DecisionLimits

_ROUNDING: Final = 1e-6  # a peer that sends exactly at the rate is never told off for rounding
_CONTROL_OVERHEAD: Final = 6  # header and mask of a control frame


class TokenBucket:
    """`rate` tokens a second, at most `burst` of them; full at first."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        """Take tokens; False, and nothing taken, if there are too few."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
        if amount > self._tokens + _ROUNDING:
            return False
        self._tokens -= amount
        return True


class Budgets:
    """The budgets of one stream."""

    def __init__(self, limits: DecisionLimits, now: float) -> None:
        self._messages = TokenBucket(limits.max_messages_per_second, limits.message_burst, now)
        self._mutations = TokenBucket(limits.max_events_per_second, limits.event_burst, now)
        self._control_frames = TokenBucket(
            limits.max_native_control_frames_per_second, limits.native_control_frame_burst, now
        )
        self._control_bytes = TokenBucket(
            limits.max_native_control_bytes_per_second, limits.native_control_byte_burst, now
        )
        self._window_s = limits.protocol_refusal_window_ms / 1000
        self._refusals: deque[float] = deque(maxlen=limits.protocol_refusal_limit)

    def message(self, now: float, *, is_mutation: bool) -> bool:
        """Count an application message, valid or not; False: over the budget."""
        fits = self._messages.take(1, now)
        return fits and (not is_mutation or self._mutations.take(1, now))

    def control(self, size: int, now: float) -> bool:
        """Count a native control frame with `size` bytes of payload; False: over the budget."""
        fits = self._control_frames.take(1, now)
        return fits and self._control_bytes.take(size + _CONTROL_OVERHEAD, now)

    def refusal(self, now: float) -> bool:
        """Count a refusal; True if it is the last one within the window."""
        self._refusals.append(now)
        full = len(self._refusals) == self._refusals.maxlen
        return full and now - self._refusals[0] <= self._window_s
