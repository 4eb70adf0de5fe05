"""One client that follows one run: a cursor over the journal, live where it can be.

    cursor ─▶ replay, page by page ─▶ live: the hub's groups, in the call that made them
                    ▲                   │ the client takes no more: they are queued
                    │                   │ the queue is over its bound: it is dropped
                    └─ it takes more ───┤
                                        └ it took nothing for `lag_s`: `stream_reset`, closed

Rules W2.6, J2.1, J2.2, J2.4, J2.5; hazards B81, B84, B92 to B96. A follower that falls behind costs
the others nothing: what it misses lies in the journal, and is read from there as fast as it takes
it. It never touches the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from encoders import workflow
from encoders.json_text import dumps, loads
from relay.runs.groups import FrameItem, TextStream, TokenItem

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.runs.groups import Group, Wire
    from relay.runs.hub import Hub
    from relay.stores.runs import JournalPage, RunStore

_log: Final = logging.getLogger("sluicegate.runs")
QUEUE_FRAMES_MAX: Final = 256
QUEUE_BYTES_MAX: Final = 1024 * 1024
LAG_S: Final = 2.0
PAGE: Final = 128
POLL_S: Final = 0.5
CHECK_EVERY_S: Final = 15.0
# A run that is cancelled leaves its texts open: its outcome is the last of them too.
_LAST_OF_TEXTS: Final = workflow.TEXT_ENDS | {"workflow_error"}


class FollowerSink(Protocol):
    """The client's end; see `relay.pump.Sink`."""

    def push(self, data: bytes) -> bool:
        """Send at once; whether more may be sent."""

    def last(self, data: bytes) -> bool:
        """As `push`, if nothing follows: it may leave with the end of the response."""

    async def drain(self) -> None:
        """Wait until more may be sent."""

    def waiting(self) -> int:
        """A number of bytes that falls as the client takes any, in its kernel too: ours has room
        again long after that.
        """


class Follower:
    """Serves one client.

    Args:
        store: of the journal. execution_id: the run.
        hub: returns the run's live end in this process, None if it works elsewhere or has ended.
        wire: how it is written. allowed: whether the client may still follow (J2.4).
        after: the position of the last frame that the client has; None: it begins with the run,
            whose hub it has to `join` before anything is said.
        one_leg: whether it ends at the first `workflow_result`, though the run may be resumed.
        keepalive: sent after each `keepalive_s` seconds of silence (A1.3); b"" for none.
    """

    def __init__(
        self,
        store: RunStore,
        execution_id: str,
        hub: Callable[[], Hub | None],
        sink: FollowerSink,
        wire: Wire,
        *,
        after: int | None = None,
        allowed: Callable[[], bool] = lambda: True,
        one_leg: bool = False,
        keepalive: bytes = b"",
        keepalive_s: float = CHECK_EVERY_S,
        lag_s: float = LAG_S,
        frames_max: int = QUEUE_FRAMES_MAX,
        bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self._store = store
        self._execution_id = execution_id
        self._hub = hub
        self._sink = sink
        self._wire = wire
        self._allowed = allowed
        self._one_leg = one_leg
        self._keepalive = keepalive
        self._keepalive_s = keepalive_s
        self._lag_s = lag_s
        self._frames_max = frames_max
        self._bytes_max = bytes_max
        self._position = after or 0  # of the last frame that the client has
        # Of each text that is open there: where it began, and how many characters the client has.
        self._sent: dict[str, tuple[int, int]] = {}
        self._looked_up = after is None  # whether `_sent` is known
        self._joined: Hub | None = None
        self._live = False
        self._ready = False  # the client may be sent more; not before `serve`
        self._over = False
        self._gone: ConnectionError | None = None
        self._wake = asyncio.Event()
        self._behind = False  # it missed what is live, until it is live again
        self._lag: asyncio.Timeout | None = None  # around the wait for the client
        self._queue: deque[Group] = deque()
        self._frames = self._bytes = 0
        self._now = asyncio.get_running_loop().time
        self._pushed_at = self._now()
        self._check_at = self._now() + CHECK_EVERY_S
        self.was_reset = False

    # -- the hub's side: plain calls ------------------------------------------------------------

    def join(self, hub: Hub) -> None:
        """Go live: from here on everything is offered."""
        self._joined, self._live, self._over, self._behind = hub, True, False, False
        hub.join(self)

    def offer(self, group: Group) -> None:
        if not self._live:
            return
        if self._ready:
            self._deliver(group)
            if not self._ready:
                self._wake.set()
            return
        self._queue.append(group)
        self._frames += len(group)
        self._bytes += len(group.encoded(self._wire))
        if self._frames > self._frames_max or self._bytes > self._bytes_max:
            self._fall_behind()

    def over(self) -> None:
        self._over = True
        self._wake.set()

    def _deliver(self, group: Group) -> None:
        data = group.encoded(self._wire)
        if data:
            self._push(data, final=group.final)
        if group.last:
            self._position = group.last

    def _push(self, data: bytes, *, final: bool = False) -> None:
        self._pushed_at = self._now()
        try:
            self._ready = self._sink.last(data) if final else self._sink.push(data)
        except ConnectionError as error:
            self._ready = self._live = False
            self._gone = error
            self._wake.set()

    def _fall_behind(self) -> None:
        """Drop the queue; the journal has what was in it."""
        self._stop_living()
        self._behind = True
        self._queue.clear()
        self._frames = self._bytes = 0
        if self._lag is not None:
            self._lag.reschedule(self._now() + self._lag_s)

    def _stop_living(self) -> None:
        """Note what the client has of each text that is open: all before the first queued piece."""
        assert self._joined is not None
        self._sent = {
            task_id: (stream.start, stream.chars)
            for task_id, stream in self._joined.streams.items()
        }
        for group in reversed(self._queue):
            for item in reversed(group.items):
                stream = item.stream
                if isinstance(item, FrameItem):
                    if stream is not None:  # its end: until then it had all of it
                        self._sent[stream.task_id] = (stream.start, stream.chars)
                else:
                    self._sent[item.stream.task_id] = (item.stream.start, item.offset)
        self._live = False

    # -- the client's side ----------------------------------------------------------------------

    @property
    def at_end(self) -> bool:
        """Whether the client was told how it ended: nothing may follow."""
        return self._wire.ends(self._position)

    async def serve(self) -> None:
        """Follow until the run or its leg ends, the client is reset, or may not follow any more.

        Raises:
            ConnectionError, CancelledError: the client is gone, or the gateway stops.
            StoreError: the journal cannot be read.
        """
        try:
            while await self._step():
                if self._gone is not None:
                    raise self._gone
        finally:
            if self._joined is not None:
                self._joined.leave(self)

    async def _step(self) -> bool:
        """Do what is to be done next; False at the end."""
        if self.at_end:
            return False
        if self._now() >= self._check_at:
            self._check_at = self._now() + CHECK_EVERY_S
            if not self._allowed():
                self._push_all([self._wire.cut("the API key is not good for this any more")])
                return False
        if not self._ready:
            return await self._drain()
        if not self._live:
            return await self._replay()
        if self._over:
            if self._joined is not None and self._joined.complete:
                return False
            self._stop_living()  # what follows is somebody else's
            return True
        await self._idle()
        return True

    async def _idle(self) -> None:
        """Sleep until something has to be done."""
        until = self._check_at
        if self._keepalive:
            until = min(until, self._pushed_at + self._keepalive_s)
        try:
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        except TimeoutError:
            self._keep_alive()
        else:
            self._wake.clear()

    def _keep_alive(self) -> None:
        """Send the keepalive, unless something was sent meanwhile."""
        if self._keepalive and self._now() >= self._pushed_at + self._keepalive_s:
            self._push(self._keepalive)

    async def _drain(self) -> bool:
        """Wait until the client takes more, then send what is queued; False: it was reset."""
        if self._gone is not None:
            raise self._gone
        waiting = self._sink.waiting()
        lag = self._lag = asyncio.timeout(self._lag_s if self._behind else None)
        try:
            async with lag:
                await self._sink.drain()
        except TimeoutError:
            if not lag.expired():
                raise
            if self._sink.waiting() < waiting:
                return True  # it is slow, no more: a page of the journal may be 1 MiB and a text
            self._reset()
            return False
        finally:
            self._lag = None
        self._ready = True
        while self._queue and self._ready and self._live:
            group = self._queue.popleft()
            self._frames -= len(group)
            self._bytes -= len(group.encoded(self._wire))
            self._deliver(group)
        return True

    def _reset(self) -> None:
        """Tell a client that takes nothing to begin again (J2.2)."""
        self.was_reset = True
        _log.info("run %s: a client that fell behind is told to follow again", self._execution_id)
        self._push(self._wire.reset(self._execution_id, self._position))

    # -- replay -----------------------------------------------------------------------------------

    async def _replay(self) -> bool:
        """Send what the journal has after the cursor, or join the hub; False at the end."""
        if not self._looked_up:
            self._looked_up = True
            self._push_all(await self._open_texts())
            return True
        hub = self._hub()
        if hub is not None and hub.closed:
            hub = None
        # No further than what the hub has shown: by then a text that has ended is whole in the
        # store, and nothing is sent again when it is joined.
        shown = hub.head if hub is not None else None
        page = await self._store.read(self._execution_id, after=self._position, limit=PAGE)
        if page is None:
            return False
        events = [e for e in page.events if shown is None or e.position <= shown]
        if events:
            return await self._send_page(page, len(events))
        if hub is not None and not hub.closed:
            return await self._join_if_level(hub)
        if page.state != "running" and not page.events:
            return False
        self._push_all(await self._open_texts())
        await asyncio.sleep(POLL_S)
        self._keep_alive()
        return True

    async def _join_if_level(self, hub: Hub) -> bool:
        if hub.head != self._position or self._is_ahead_of(hub):
            await asyncio.sleep(0)
            return True
        rest = [
            self._rest(task_id, stream.start, stream.raw, stream.chars)
            for task_id, stream in hub.streams.items()
        ]
        self.join(hub)
        self._push_all(rest)
        return True

    def _is_ahead_of(self, hub: Hub) -> bool:
        """Whether the client has text that the hub has not shown: what is durable is read before
        its commit is told here, and would be offered again.
        """
        for task_id, stream in hub.streams.items():
            start, had = self._sent.get(task_id, (0, 0))
            if start == stream.start and had > stream.chars:
                return True
        return False

    async def _send_page(self, page: JournalPage, count: int) -> bool:
        """Send events, and texts at their places; False at the end of the one leg."""
        events = page.events[:count]
        first, last = events[0].position, events[-1].position
        out: list[bytes] = []
        if any(event.name in _LAST_OF_TEXTS for event in events):
            out += await self._open_texts()  # of texts that began before, and may end here
        found = await self._store.texts(
            self._execution_id, first=first, last=last, bytes_max=self._bytes_max
        )
        texts = {text.position: text for text in found}
        # What is over the bound is read again when this was taken.
        size = sum(len(text.raw) for text in found)
        if size >= self._bytes_max:
            last = found[-1].position
            events = [event for event in events if event.position <= last]
        ended = False
        for event in events:
            out.append(self._wire.encode(FrameItem(event.position, event.name, event.frame)))
            if event.name in workflow.TEXT_ENDS:
                self._sent.pop(event.task_id, None)
            text = texts.get(event.position)
            if text is not None:
                out.append(self._rest(text.task_id, text.position, text.raw, text.chars))
            if self._one_leg and event.name == "workflow_result":
                ended = True
                last = event.position
                break
        self._position = last
        self._push_all(out)
        return not ended

    async def _open_texts(self) -> list[bytes]:
        """What the client lacks of texts that are open at its cursor, as far as it is durable."""
        texts = await self._store.open_texts(self._execution_id, at=self._position)
        return [self._rest(t.task_id, t.position, t.raw, t.chars) for t in texts]

    def _rest(self, task_id: str, start: int, raw: bytes, chars: int) -> bytes:
        """One token frame of what the client lacks of a text; b"" if it has all of it (W2.6)."""
        began, had = self._sent.get(task_id, (start, 0))
        if began != start:
            had = 0
        if chars <= had:
            return b""
        self._sent[task_id] = (start, chars)
        if had:
            raw = dumps(loads(b'"' + raw + b'"')[had:])[1:-1]
        return self._wire.encode(TokenItem(TextStream(task_id, start), raw, had))

    def _push_all(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        if data:
            self._push(data)
