"""Requests that run, and how a stop reaches them (M3.6).

Each request runs in a scope that the drain can end from outside. `asyncio.timeout(None)` is that
scope: rescheduling it to now raises inside the request wherever it waits, and cannot be mistaken
for a hang-up's cancellation.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from relay.errors import GatewayDraining, GatewayShutdown

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

# After the grace: time to write the end of every stream to clients that read.
FAREWELL_S: Final = 2.0


class InFlight:
    """Counts running requests and drains them.

    Attributes:
        scopes: what the end of the grace interrupts. interrupted: whether it has come.
    """

    def __init__(self) -> None:
        self._running = 0
        self.scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop_at: float | None = None  # loop time; None while serving
        self.interrupted = False
        self._listeners: list[Callable[[], None]] = []

    def on_drain(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when a drain begins, for what never ends by itself (D3.6)."""
        self._listeners.append(tell)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._stop_at is not None

    @property
    def running(self) -> int:
        """Requests that have entered and not left."""
        return self._running

    def request(self) -> AbstractContextManager[None]:
        """Admit one request.

        Raises:
            GatewayDraining: on entering: the gateway is stopping; says when to come back.
        """
        return _Admitted(self)

    def enter(self) -> None:
        """See `request`."""
        if self._stop_at is not None:
            left = self._stop_at - asyncio.get_running_loop().time()
            raise GatewayDraining(
                "the gateway is restarting; try again", retry_after_s=max(1, math.ceil(left))
            )
        self._running += 1
        self._idle.clear()

    def leave(self) -> None:
        """See `request`."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    def interruptible(self) -> AbstractAsyncContextManager[None]:
        """The part of a request that the end of the grace interrupts.

        Raises:
            GatewayShutdown: the grace is over.
        """
        return _Interruptible(self)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, give running ones `grace_s`, then interrupt them.

        Returns when all have ended, or FAREWELL_S after the interruption.
        """
        loop = asyncio.get_running_loop()
        self._stop_at = loop.time() + grace_s
        for tell in self._listeners:
            tell()
        if await self._wait_idle(grace_s):
            return
        self.interrupted = True
        for scope in list(self.scopes):
            scope.reschedule(loop.time())
        await self._wait_idle(FAREWELL_S)

    async def _wait_idle(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class _Admitted:
    """See `InFlight.request`; a class, as each request enters it and generators are dear."""

    __slots__ = ("_inflight",)

    def __init__(self, inflight: InFlight) -> None:
        self._inflight = inflight

    def __enter__(self) -> None:
        self._inflight.enter()

    def __exit__(self, *_: object) -> None:
        self._inflight.leave()


class _Interruptible:
    """See `InFlight.interruptible`."""

    __slots__ = ("_inflight", "_scope")

    def __init__(self, inflight: InFlight) -> None:
        self._inflight = inflight
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        if self._inflight.interrupted:
            raise _shutdown()
        await self._scope.__aenter__()
        self._inflight.scopes.add(self._scope)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = self._scope
        self._inflight.scopes.discard(scope)
        try:
            await scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise _shutdown() from None
        if isinstance(error, TimeoutError) and scope.expired():
            raise _shutdown() from None


def _shutdown() -> GatewayShutdown:
    return GatewayShutdown("the gateway is shutting down; try again", retry_after_s=1)
