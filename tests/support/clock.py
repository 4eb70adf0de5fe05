"""An event loop whose time is its own: it jumps to the next timer when nothing else is to do."""

from __future__ import annotations

import asyncio
import functools
import selectors
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self.loop.threads or timeout is None:
            return super().select(0.05 if self.loop.threads else 5)
        self.loop.skip(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 1000 s. Work in threads takes no time."""

    def __init__(self) -> None:
        self._seconds = 1000.0
        self.threads = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._seconds

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._seconds += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        self.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, future: object) -> None:
        self.threads -= 1


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of its own; no task may be left behind."""

    async def whole() -> T:
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(whole())


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """For tests that wait and measure, and have neither sockets nor async fixtures."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtually(test(*args, **kwargs))

    return run
