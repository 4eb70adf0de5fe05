"""How many runs work in this process, and how many of an org (M1.2)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from relay.errors import RelayError

if TYPE_CHECKING:
    from relay.slots import Slots


class RunsFull(RelayError):
    """This process works on as many runs as it may."""

    status = 503
    code = "overloaded"


class Places:
    """What a run holds while it works: one of the process's places, and a slot of its org.

    It is taken before the run's row is written, so that runs that begin together are counted.

    Args:
        slots: of the orgs. most: runs at once.
    """

    def __init__(self, slots: Slots, most: int) -> None:
        self._slots = slots
        self._most = most
        self._taken = 0

    @property
    def free(self) -> int:
        """How many more runs may begin."""
        return max(0, self._most - self._taken)

    def take(self, org: str, execution_id: str, limit: int | None) -> ExitStack:
        """Take a place for a run; whoever gets the stack closes it.

        Args:
            limit: the org's `max_concurrent`.

        Raises:
            RunsFull, ConcurrencyExceeded: there is none.
        """
        if not self.free:
            raise RunsFull(f"all {self._most} runs of this gateway are in use", retry_after_s=5)
        return self.take_over(org, execution_id, limit)

    def take_over(self, org: str, execution_id: str, limit: int | None = None) -> ExitStack:
        """As `take`, for a run that is here already, whether there is a place or not."""
        stack = ExitStack()
        stack.enter_context(self._slots.hold(org, execution_id, limit))
        self._taken += 1
        stack.callback(self._leave)
        return stack

    def _leave(self) -> None:
        self._taken -= 1
