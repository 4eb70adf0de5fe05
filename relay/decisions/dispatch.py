"""One decide in flight, one intent that waits, and the events each covers. [pure] D5.1 to D5.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A decide in flight.

    Attributes:
        batch: the events frozen into it, in order.
        queued_at: when its intent came up. started_at: when it was dispatched.
    """

    ticket: int
    version: int
    batch: tuple[str, ...]
    queued_at: float
    started_at: float


class Dispatcher:
    """Decides when the next decide may start.

    Args:
        max_failures: consecutive retryable failures of one version that end the stream.

    Attributes:
        min_interval_s: from one start to the next.
    """

    def __init__(self, *, max_failures: int) -> None:
        self.min_interval_s = 0.0
        self._max_failures = max_failures
        self._intent_since: float | None = None
        self._gate = 0.0
        self._not_before = 0.0
        self._asked = False
        self._tickets = 0
        self._uncovered: list[str] = []
        self._failed_version = 0
        self._failures = 0
        self.in_flight: Dispatch | None = None

    @property
    def waiting(self) -> bool:
        """Whether an intent waits; it covers every version until it is dispatched."""
        return self._intent_since is not None

    @property
    def uncovered(self) -> int:
        """Events that no decision covers yet, those in flight too (D4.8)."""
        return len(self._uncovered) + (len(self.in_flight.batch) if self.in_flight else 0)

    def accepted(self, event_id: str) -> None:
        """An event is part of the state now."""
        self._uncovered.append(event_id)

    def want(self, now: float) -> None:
        """Have an intent; one that waits already stands for it too."""
        if self._intent_since is None:
            self._intent_since = now

    def drop(self) -> None:
        """Nothing more is to be started."""
        self._intent_since = None

    def next_deadline(self) -> float | None:
        """When `ask` will say yes, None if nothing but another input can bring it about."""
        if self._intent_since is None or self.in_flight is not None or self._asked:
            return None
        return max(self._intent_since, self._gate, self._not_before)

    def ask(self, now: float) -> bool:
        """Whether the account is to be asked for a start now (D5.4); says yes once."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return False
        self._asked = True
        return True

    def refused(self, wait_s: float, now: float) -> None:
        """The account has no start left; ask again later."""
        self._asked = False
        self._not_before = max(self._not_before, now + wait_s)

    def start(self, version: int, now: float) -> Dispatch | None:
        """The account has given a start: freeze the batch; None if nothing is wanted any more."""
        wanted = self._asked and self._intent_since is not None
        self._asked = False
        if not wanted or self._intent_since is None:
            return None
        self._tickets += 1
        batch = tuple(self._uncovered)
        self._uncovered.clear()
        self.in_flight = Dispatch(self._tickets, version, batch, self._intent_since, now)
        self._intent_since = None
        self._gate = now + self.min_interval_s
        return self.in_flight

    def settle(self, ticket: int) -> Dispatch | None:
        """End the decide in flight; None if it is another one."""
        if self.in_flight is None or self.in_flight.ticket != ticket:
            return None
        dispatch, self.in_flight = self.in_flight, None
        return dispatch

    def give_back(self, batch: Sequence[str]) -> None:
        """A dispatch failed: the next one covers its events again (D5.3)."""
        self._uncovered[:0] = batch

    def forget_failures(self) -> None:
        """Failures are no longer consecutive."""
        self._failures = 0

    def failed(self, version: int) -> bool:
        """Count a retryable failure; True if it is the last one of this version (D5.5)."""
        if version != self._failed_version:
            self._failures = 0
        self._failed_version = version
        self._failures += 1
        return self._failures >= self._max_failures

    def retry(self, delay_s: float, now: float) -> None:
        """Try again after a delay, whatever comes in between."""
        self.want(now)
        self._not_before = now + delay_s
