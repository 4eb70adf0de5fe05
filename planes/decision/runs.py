"""The decides of HTTP requests: tasks that outlive a client that hangs up (D5.7)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from relay.decisions.effects import Decided, Failed

_CLOSING_S: Final = 5.0


class Runs:
    """Owns the tasks.

    Args:
        settle_s: how long a decide goes on whose client is gone.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._tasks: set[asyncio.Task[Decided | Failed]] = set()

    def start(
        self, work: Coroutine[None, None, Decided | Failed], on_end: Callable[[], None]
    ) -> asyncio.Task[Decided | Failed]:
        """Run a decide.

        Args:
            on_end: called when it has ended, whoever still waits for it.
        """
        task = asyncio.create_task(work, name="decide")
        self._tasks.add(task)

        def ended(task: asyncio.Task[Decided | Failed]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # whoever waits is told; nobody may
            on_end()

        task.add_done_callback(ended)
        return task

    def leave(self, task: asyncio.Task[Decided | Failed]) -> None:
        """Nobody waits for it any more: it has some seconds to be settled."""
        if not task.done():
            timer = asyncio.get_running_loop().call_later(self._settle_s, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_S)
