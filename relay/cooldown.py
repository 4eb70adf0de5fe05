"""Which candidate is tried next: one that failed goes behind the others for a while. [pure]

    failed ─▶ cooling ──(its time is over)──▶ on trial ──succeeded──▶ forgotten
                 ▲                               │
                 └────────────failed─────────────┘

Rule M3.3, "circuit". A candidate is only ever put behind: where all are cooling, the one that is
ready first is tried first. When its time is over one request tries it, and the others pass it by
until that one has ended or TRIAL_S are over: a provider that hangs shall not hang every request
that meets the end of its cool-down. Times are seconds of a monotonic clock, given as `now`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relay.errors import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.errors import UpstreamError
    from relay.routing import Candidate

FIRST_S: Final = 30.0
LONGEST_S: Final = 300.0  # of the doubling; a provider's own Retry-After may be longer
TRIAL_S: Final = 5.0
# A failure that is so long over says nothing about the next one.
_FORGOTTEN_AFTER_S: Final = 300.0
# Clients make up models of a provider as they like; what is configured is far less.
ENTRIES_MAX: Final = 1024

_Key = tuple[str, str | None]


@dataclass(slots=True)
class _Entry:
    """What is known against one model, or against all of a provider.

    Attributes:
        failed_at: the last time. ready_at: the end of the cool-down.
        failures: in a row, each after the cool-down of the one before.
        trial_until: who tries it now has so long before another may.
    """

    failed_at: float
    ready_at: float
    failures: int = 1
    trial_until: float = 0.0


class CoolDown:
    """What one worker knows of its candidates. Bounded: ENTRIES_MAX entries."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def pick(self, candidates: Sequence[Candidate], now: float) -> int:
        """Return the position of the candidate to try now: the first that is not cooling, else the
        one that is ready first. It is on trial from here on, if its last attempt failed.

        Args:
            candidates: at least one.
        """
        waits = [self.wait_s(candidate, now) for candidate in candidates]
        position = waits.index(min(waits))
        if not waits[position]:
            for entry in self._of(candidates[position]):
                entry.trial_until = now + TRIAL_S
        return position

    def wait_s(self, candidate: Candidate, now: float) -> float:
        """Return how long the candidate stays behind others; 0 if it does not."""
        until = (max(entry.ready_at, entry.trial_until) for entry in self._of(candidate))
        return max(0.0, max(until, default=now) - now)

    def failed(
        self, candidate: Candidate, error: UpstreamError, *, began: float, now: float
    ) -> None:
        """Note a failure, unless it says nothing about the candidate.

        Args:
            began: when the attempt did. Attempts that run side by side fail together, and count
                as one failure.
        """
        if error.cools is Scope.NOTHING:
            return
        name = candidate.provider.name
        key = (name, None if error.cools is Scope.PROVIDER else candidate.model)
        entry = self._entries.get(key)
        if entry is None or now - entry.ready_at > _FORGOTTEN_AFTER_S:
            self._make_room(key, now)
            entry = self._entries[key] = _Entry(failed_at=now, ready_at=now)
        elif began >= entry.ready_at:
            entry.failures += 1
        pause = float(error.retry_after_s) if error.retry_after_s is not None else None
        if pause is None:
            pause = min(FIRST_S * 2.0 ** min(entry.failures - 1, 16), LONGEST_S)
        entry.failed_at = now
        entry.ready_at = max(entry.ready_at, now + pause)
        entry.trial_until = 0.0

    def succeeded(self, candidate: Candidate, *, began: float) -> None:
        """Forget what is held against the candidate, but for what came after `began`: an answer
        that was long under way proves nothing about later refusals.
        """
        for key in _keys(candidate):
            entry = self._entries.get(key)
            if entry is not None and entry.failed_at <= began:
                del self._entries[key]

    def _of(self, candidate: Candidate) -> list[_Entry]:
        return [self._entries[key] for key in _keys(candidate) if key in self._entries]

    def _make_room(self, key: _Key, now: float) -> None:
        """Drop what is forgotten; if that is not enough, what would be forgotten next."""
        self._entries.pop(key, None)
        if len(self._entries) < ENTRIES_MAX:
            return
        for old, entry in list(self._entries.items()):
            if now - entry.ready_at > _FORGOTTEN_AFTER_S:
                del self._entries[old]
        if len(self._entries) >= ENTRIES_MAX:
            del self._entries[min(self._entries, key=lambda k: self._entries[k].ready_at)]


def _keys(candidate: Candidate) -> tuple[_Key, _Key]:
    return (candidate.provider.name, None), (candidate.provider.name, candidate.model)
