"""The clocks of a stream: start, idle, lifetime, heartbeats. [pure] D3.1 to D3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.decisions.limits import DecisionLimits


class Probes:
    """Heartbeats of one kind, JSON or native, with nonces 1, 2, 3 … (D3.2, D3.3)

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


class Clocks:
    """All of them, for one stream that was opened at `now`."""

    def __init__(self, limits: DecisionLimits, now: float) -> None:
        self._idle_s = limits.idle_timeout_ms / 1000
        self._active_at = now
        self.start_by = now + limits.start_timeout_ms / 1000
        self.lifetime_end = now + limits.max_duration_ms / 1000
        self.json_probes = _probes(limits, limits.heartbeat_interval_ms, now)
        self.native_probes = _probes(limits, limits.native_heartbeat_interval_ms, now)

    def active(self, now: float) -> None:
        """An application message came, or a decide was settled: the idle clock starts again."""
        self._active_at = now

    @property
    def idle_at(self) -> float:
        """When the stream is idle if nothing holds the clock (D3.4)."""
        return self._active_at + self._idle_s

    def missed(self, now: float) -> bool:
        """Whether the answer to a probe of either kind is late."""
        return self.json_probes.missed(now) or self.native_probes.missed(now)


def _probes(limits: DecisionLimits, interval_ms: int, now: float) -> Probes:
    return Probes(
        now,
        interval_s=interval_ms / 1000,
        timeout_s=limits.pong_timeout_ms / 1000,
        most=limits.max_pending_probes,
    )
