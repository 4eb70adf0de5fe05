"""Comments that keep a client's connection alive while an upstream is slow (M2.1, M1.4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from relay.replies import Wrapped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from relay.upstreams.base import UpstreamReply


T = TypeVar("T")


async def tick_while_waiting(
    work: Coroutine[Any, Any, T],
    tick: Callable[[], Awaitable[None]],
    *,
    first_s: float,
    every_s: float,
) -> T:
    """Await `work`, and `tick` after `first_s` and then each `every_s` until it is done.

    `work` is owned: if this is cancelled or a tick fails, it is cancelled and has ended when this
    does, and what it had already produced is aborted.
    """
    task = asyncio.ensure_future(work)
    delay = first_s
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=delay)
            if done:
                return task.result()
            await tick()
            delay = every_s
    except BaseException:
        task.cancel()
        task.add_done_callback(_discard)
        await asyncio.wait({task})
        raise


class CommentedReply(Wrapped):
    """An upstream's reply whose first read is accompanied by comments (M2.1).

    From the first byte on it is the reply itself: `read` is then the reply's own.
    """

    def __init__(
        self, reply: UpstreamReply, tick: Callable[[], Awaitable[None]], every_s: float
    ) -> None:
        super().__init__(reply)
        self._tick = tick
        self._every_s = every_s

    async def read(self) -> bytes:
        first = tick_while_waiting(
            self._reply.read(), self._tick, first_s=self._every_s, every_s=self._every_s
        )
        data = await first
        self.read = self._reply.read  # type: ignore[method-assign]
        return data


def _discard(task: asyncio.Future[Any]) -> None:
    """Close what an abandoned wait produced; its error is nobody's."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if hasattr(result, "abort"):
        result.abort()
