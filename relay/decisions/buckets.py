"""Token buckets and the window of refusals. [pure] D2.3, D2.4."""

from __future__ import annotations

from collections import deque
from typing import Final

_ROUNDING: Final = 1e-6  # a peer that sends exactly at the rate is never told off for rounding


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


class RefusalWindow:
    """Counts refusals within the last `window_s` seconds (D2.3)."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._at: deque[float] = deque(maxlen=limit)

    def add(self, now: float) -> bool:
        """Count one; True if it is one too many."""
        self._at.append(now)
        return len(self._at) == self._limit and now - self._at[0] <= self._window_s
