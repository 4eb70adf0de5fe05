"""A thing that is done again and again, by one owned task that survives its failures."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log: Final = logging.getLogger("sluicegate.periodic")


class Periodic:
    """Calls `work` every so many seconds until it is closed.

    Args:
        name: for the log. work: what to do; an exception is logged once for each new message.
        every_s: seconds between the end of one call and the start of the next.
        at_once: whether the first call comes at the start, not after `every_s`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        every_s: float,
        *,
        at_once: bool = False,
    ) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def close(self) -> None:
        """Stop; a call that runs is cancelled. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        if not self._at_once:
            await asyncio.sleep(self._every_s)
        while True:
            try:
                await self._work()
                self._complaint = ""
            except Exception as error:  # noqa: BLE001  the next call may do better
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.exception("%s failed; it goes on every %g s", self._name, self._every_s)
            await asyncio.sleep(self._every_s)
