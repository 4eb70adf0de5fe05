"""Replies of an upstream with something before or around their bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from relay.errors import UpstreamStalled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.upstreams.base import UpstreamReply


class Wrapped:
    """A reply that is another reply but for its `read`."""

    def __init__(self, reply: UpstreamReply) -> None:
        self._reply = reply

    @property
    def status(self) -> int:
        return self._reply.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._reply.headers

    async def read(self) -> bytes:
        """Return the next bytes; see `UpstreamReply.read`."""
        return await self._reply.read()

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """Push what arrives; see `UpstreamReply.forward`."""
        await self._reply.forward(push)

    def abort(self) -> None:
        self._reply.abort()

    async def release(self) -> None:
        await self._reply.release()


class Resumed(Wrapped):
    """A reply whose first bytes were read already: they come first, and no others are lost.

    Args:
        held: the bytes.
    """

    def __init__(self, reply: UpstreamReply, held: bytes) -> None:
        super().__init__(reply)
        self._held = held

    async def read(self) -> bytes:
        held, self._held = self._held, b""
        self.read = self._reply.read  # type: ignore[method-assign]
        return held or await self._reply.read()

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        if not self._held:  # else `read` comes first
            await self._reply.forward(push)


class Watched(Wrapped):
    """A reply that may be silent for so long and no longer (M3.3, `idle_timeout_s`).

    Whatever its upstream sends ends a silence, also comments: they say that it is at work. The
    time that a client takes to read is not silence.

    Args:
        provider: for the error. idle_timeout_s: from one read to the next.
    """

    def __init__(self, reply: UpstreamReply, provider: str, idle_timeout_s: float) -> None:
        super().__init__(reply)
        self._provider = provider
        self._idle_timeout_s = idle_timeout_s
        self._stalled = False

    async def read(self) -> bytes:
        """Return the next bytes.

        Raises:
            UpstreamStalled: there were none in time; the connection is closed.
            UpstreamTruncated: the connection died.
        """
        if not self._stalled:
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    return await self._reply.read()
            except TimeoutError:
                self._stalled = True
        self._reply.abort()
        raise UpstreamStalled(f"{self._provider} sent nothing for {self._idle_timeout_s:g} s")

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """Push what arrives until there is a silence; `read` then raises."""
        clock = asyncio.get_running_loop().time
        silence = asyncio.timeout(self._idle_timeout_s)
        ended = False

        def heard(data: bytes) -> bool:
            nonlocal ended
            if silence.expired():  # by a hair: what came all the same is no silence
                ended = True
                push(data)
                return False
            silence.reschedule(clock() + self._idle_timeout_s)
            return push(data)

        try:
            async with silence:
                await self._reply.forward(heard)
        except TimeoutError:
            self._stalled = not ended
