"""An outbox: takes things at once and delivers them in order, as often as it takes.

`put` never blocks and never fails; a task of the outbox hands batches to `send` and tries again,
later each time, while that fails. What is still in it when the process dies is lost to the outbox,
not to the ledger: the hold of a lost settlement is swept (M4.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_log: Final = logging.getLogger("sluicegate.outbox")

BATCH_MAX: Final = 500
_RETRY_MIN_S: Final = 0.1
_RETRY_MAX_S: Final = 10.0


class Outbox(Generic[T]):
    """Delivers what is put into it.

    Args:
        name: for the log.
        send: delivers one batch, whole or not at all; it may be given a batch again.
        together_s: how long the first of a batch waits for others, unless somebody hurries.
        enough: so many do not wait for more.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[list[T]], Awaitable[None]],
        *,
        together_s: float = 0.0,
        enough: int = BATCH_MAX,
    ) -> None:
        self._name = name
        self._send = send
        self._together_s = together_s
        self._enough = enough
        self._hurried = asyncio.Event()
        self._waiting: deque[T] = deque()
        self._something = asyncio.Event()
        self._nothing = asyncio.Event()
        self._nothing.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def depth(self) -> int:
        """How much has not been delivered."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to deliver."""
        self._task = asyncio.create_task(self._run(), name=f"outbox {self._name}")

    def put(self, item: T) -> None:
        """Take one thing; synchronous."""
        self._waiting.append(item)
        self._nothing.clear()
        self._something.set()
        if len(self._waiting) >= self._enough:
            self._hurried.set()

    def hurry(self) -> None:
        """Have what is there handed to `send` in the next turn of the loop, unless a batch is under
        way.
        """
        self._hurried.set()

    async def close(self, wait_s: float) -> None:
        """Deliver what is there, for `wait_s` at most, then stop. Says what was left."""
        task, self._task = self._task, None
        if task is None:
            return
        self.hurry()
        try:
            waiting = asyncio.ensure_future(self._nothing.wait())
            await asyncio.wait({waiting, task}, timeout=wait_s, return_when="FIRST_COMPLETED")
            waiting.cancel()
        finally:
            task.cancel()
        await asyncio.wait({task})
        if self._waiting:
            _log.error("%s: %d could not be delivered at the stop", self._name, self.depth)

    async def _run(self) -> None:
        delay_s = _RETRY_MIN_S
        while True:
            await self._something.wait()
            if self._together_s:
                await self._gather()
            batch = [self._waiting[i] for i in range(min(len(self._waiting), BATCH_MAX))]
            try:
                await self._send(batch)
            except Exception as error:  # noqa: BLE001  whatever it is, it is tried again
                _log.warning(
                    "%s: %d wait; the next try is in %.1f s: %s",
                    *(self._name, self.depth, delay_s, error),
                )
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
                continue
            delay_s = _RETRY_MIN_S
            for _ in batch:
                self._waiting.popleft()
            if not self._waiting:
                self._something.clear()
                self._nothing.set()

    async def _gather(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._together_s, self._hurried.set)
        try:
            await self._hurried.wait()
        finally:
            timer.cancel()
        self._hurried.clear()
