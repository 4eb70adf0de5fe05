"""Heartbeats: when a probe is due, and whether its answer is late. [pure] D3.2, D3.3."""

from __future__ import annotations


class Probes:
    """Probes of one kind, JSON or native, with nonces 1, 2, 3 …

    Args:
        interval_s: between two probes.
        timeout_s: from the moment that a probe was written to its answer.
        most: probes that may be out at once; another waits for the next interval.
    """

    def __init__(self, now: float, *, interval_s: float, timeout_s: float, most: int) -> None:
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._most = most
        self._next_at = now + interval_s
        self._last = 0
        self._late_at: dict[int, float | None] = {}  # None until written

    def due(self, now: float) -> int | None:
        """The nonce of a probe to send now, or None."""
        if now < self._next_at:
            return None
        self._next_at += self._interval_s
        if self._next_at <= now:  # woken late: no burst of probes
            self._next_at = now + self._interval_s
        if len(self._late_at) >= self._most:
            return None
        self._last += 1
        self._late_at[self._last] = None
        return self._last

    def written(self, nonce: int, now: float) -> None:
        """The probe has left: its clock starts."""
        if nonce in self._late_at:
            self._late_at[nonce] = now + self._timeout_s

    def answered(self, nonce: int) -> bool:
        """Take an answer; False if no such probe is out."""
        known = nonce in self._late_at
        self._late_at.pop(nonce, None)
        return known

    def answered_up_to(self, nonce: int) -> None:
        """Take a native pong, which answers earlier pings as well (RFC 6455 §5.5.3)."""
        if nonce in self._late_at:
            self._late_at = {out: at for out, at in self._late_at.items() if out > nonce}

    def missed(self, now: float) -> bool:
        """Whether an answer is late."""
        return any(at is not None and now >= at for at in self._late_at.values())

    def next_deadline(self) -> float:
        """When to look again."""
        late = [at for at in self._late_at.values() if at is not None]
        return min([self._next_at, *late])
