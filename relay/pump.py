"""Moves one stream: awaits the upstream, feeds the relay, writes to the client.

Everything that is decided is decided in `relay.stream`; this only awaits and writes. One write for
what one read gave, no queue, no task of its own: a client that does not read stops the next read
(M3.5).

While both sides keep up, the bytes of an upstream go to the client in the call that read them
(`push`) and this coroutine sleeps. It wakes for whatever needs waiting: a slow client, the end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from relay.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.stream import StreamRelay
    from relay.upstreams.base import UpstreamReply

# How long usage and `[DONE]` may keep a client waiting whose answer is complete.
FINISH_GRACE_S: Final = 10.0
# Reads that find data waiting do not give way, and a compressed body can hold a lot of it: then
# others have their turn, and a hang-up is seen.
_READS_A_TURN: Final = 4


class Sink(Protocol):
    """The client's end of a stream."""

    @property
    def committed(self) -> bool:
        """Whether the status line has left."""

    async def commit(self) -> None:
        """Send status and headers now (M1.3). Idempotent."""

    async def write(self, data: bytes) -> None:
        """Send whole events; returns when the client may be sent more (M3.5).

        Raises:
            ConnectionError: the client is gone.
        """

    def push(self, data: bytes) -> bool:
        """Send whole events at once; return whether the client may be sent more now (M3.5).

        Raises:
            ConnectionError: the client is gone.
        """

    def last(self, data: bytes) -> bool:
        """As `push`, for the last events of a stream: they may wait for `finish`."""

    async def drain(self) -> None:
        """Wait until the client may be sent more.

        Raises:
            ConnectionError: the client is gone.
        """

    async def finish(self) -> None:
        """End the response.

        Raises:
            ConnectionError: the client is gone.
        """


class Discard:
    """A sink that keeps nothing: for replies that are collected, not streamed."""

    committed = False

    async def commit(self) -> None:
        """Nothing to send."""

    async def write(self, data: bytes) -> None:
        """Nothing to keep."""

    def push(self, data: bytes) -> bool:
        """Nothing to keep."""
        return True

    def last(self, data: bytes) -> bool:
        """Nothing to keep."""
        return True

    async def drain(self) -> None:
        """Nothing waits."""

    async def finish(self) -> None:
        """Nothing to end."""


async def pump(
    reply: UpstreamReply,
    relay: StreamRelay,
    sink: Sink,
    on_first_frames: Callable[[], None],
    *,
    on_frames: Callable[[], None] | None = None,
    finish_grace_s: float = FINISH_GRACE_S,
) -> None:
    """Relay until the stream is closed.

    Args:
        on_first_frames: called once, when the first bytes for the client are there.
        on_frames: called for each read that gave bytes for the client, before they are sent.
        finish_grace_s: how long an upstream may take to end once the answer is complete.

    Raises:
        ConnectionError: the client is gone.
        CancelledError: the client is gone, or the gateway stops.
    """
    finish = _Finish(relay, finish_grace_s)
    push = _pusher(relay, sink, finish, on_frames)
    first = True
    reads = 0
    while not relay.closed:
        reads += 1
        if reads % _READS_A_TURN == 0:
            await asyncio.sleep(0)
        try:
            data = await finish.read(reply) if relay.finishing else await reply.read()
        except UpstreamError as error:
            frames = relay.fail(error)
        else:
            frames = relay.feed(data) if data else relay.eof()
        if frames:
            if first:
                first = False
                on_first_frames()
            if on_frames is not None:
                on_frames()
            writing = _write(sink, frames, last=relay.closed)
            data = frames = b""  # what is not sent waits in the transport, not here too (M3.5)
            await writing
        if not first and not relay.closed:
            await finish.forward(reply, push)
            await sink.drain()


def _pusher(
    relay: StreamRelay, sink: Sink, finish: _Finish, on_frames: Callable[[], None] | None
) -> Callable[[bytes], bool]:
    """Return what takes the bytes of an upstream while both sides keep up."""

    def push(data: bytes) -> bool:
        frames = relay.feed(data)
        if relay.flowing:
            if on_frames is not None:
                on_frames()
            return sink.push(frames)
        if frames and on_frames is not None:
            on_frames()
        if relay.closed:
            if frames:
                sink.last(frames)
            return False
        if relay.finishing:
            finish.limit()
        return sink.push(frames) if frames else True

    return push


async def _write(sink: Sink, data: bytes, *, last: bool) -> None:
    if not last:
        writing = sink.write(data)
        del data
        await writing
    elif not sink.last(data):
        del data
        await sink.drain()


class _Finish:
    """Once the answer is complete, an upstream that does not end within a grace has ended: neither
    silence nor comments keep the client waiting.
    """

    __slots__ = ("_grace_s", "_loop", "_relay", "_scope", "_until")

    def __init__(self, relay: StreamRelay, grace_s: float) -> None:
        self._relay = relay
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._scope: asyncio.Timeout | None = None
        self._until: float | None = None  # loop time; None while the answer is not complete

    def limit(self) -> float:
        """The answer is complete: return the end of the grace, which begins with the first call."""
        if self._until is None:
            self._until = self._loop.time() + self._grace_s
            if self._scope is not None:
                self._scope.reschedule(self._until)
        return self._until

    async def read(self, reply: UpstreamReply) -> bytes:
        """Read what follows the answer; nothing, if it did not come in time."""
        until = self.limit()
        if self._loop.time() >= until:
            return b""  # data that is always there would never let the timeout come
        try:
            async with asyncio.timeout_at(until):
                return await reply.read()
        except TimeoutError:
            return b""

    async def forward(self, reply: UpstreamReply, push: Callable[[bytes], bool]) -> None:
        """As `reply.forward`, no longer than the grace."""
        scope = self._scope = asyncio.timeout_at(self._until)
        try:
            async with scope:
                if self._relay.finishing:
                    self.limit()
                await reply.forward(push)
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scope = None
