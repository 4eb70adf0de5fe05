"""Tasks of the loop that live and end together, and the reason why they are stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from relay.engines.embedded.failures import TaskFailed

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence


class Guard:
    """Something that may stop what runs under it: a time limit, a sibling's failure.

    A stop is a cancellation; the guards tell it from a cancellation of the whole run, which says
    nothing (`why` is None).

    Attributes:
        timeout: the time limit, if this is one. reason: why all under it stops.
    """

    __slots__ = ("_parent", "reason", "timeout")

    def __init__(
        self,
        parent: Guard | None,
        *,
        reason: TaskFailed | None = None,
        timeout: asyncio.Timeout | None = None,
    ) -> None:
        self._parent = parent
        self.reason = reason
        self.timeout = timeout

    @property
    def stopped(self) -> bool:
        """Whether this guard itself stops what is under it."""
        if self.timeout is not None:
            return self.timeout.expired()
        return self.reason is not None

    def why(self) -> TaskFailed | None:
        """The reason of the nearest guard that stops; None if none does."""
        guard: Guard | None = self
        while guard is not None:
            if guard.stopped:
                return guard.reason
            guard = guard._parent
        return None


async def run_group(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first exception cancels the others. All have ended when this ends.

    Raises:
        CancelledError: this was cancelled, also if a work failed then: a `TaskGroup` of Python
            3.11 would lose it.
        BaseException: the first one that is not a task's failure, else the first.
    """
    if not works:
        return
    tasks = [asyncio.create_task(work) for work in works]
    pending = set(tasks)
    cancelled: asyncio.CancelledError | None = None
    try:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    while pending := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error  # raised below; nothing that runs is left behind
    raised = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled is not None:
        raise cancelled
    failures = [failure for failure in raised if failure is not None]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, TaskFailed)):
        raise failure
    if any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError
