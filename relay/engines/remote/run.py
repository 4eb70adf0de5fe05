"""Drives one run of a remote engine: reads it and its sub-streams, says what `Ordering` lets go.

Everything that is decided is decided in pure code: `relay.ordering` what goes when, `frames` and
`substream` what the bytes mean. Here bytes are awaited, and one thing is bounded: who is read while
there is no room, nobody (M3.5).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from encoders.sse import SseDecoder, SseEventTooLarge
from relay.engines.base import Failed
from relay.engines.remote.frames import FrameReader, Inline, ending_of, whole
from relay.engines.remote.substream import text_reader
from relay.engines.remote.texts import Texts
from relay.errors import UpstreamError, UpstreamProtocolError
from relay.ordering import GiveUp, Open, Ordering, OrderingLimits, Say, Token
from relay.replies import Watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from encoders.sse import SseEvent
    from relay.engines.base import Ending, Envelope, Outlet
    from relay.engines.remote.link import EngineLink
    from relay.ordering import Effect
    from relay.upstreams.base import UpstreamReply

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
# How long a sub-stream whose text is complete may take to end.
_FINISHING_S: Final = 5.0
# How long an engine's connection may take to go back to the pool.
_RELEASE_S: Final = 0.2

_log: Final = logging.getLogger("sluicegate.engines")


class RemoteRun:
    """One run, from `POST /execute` to its ending."""

    def __init__(self, link: EngineLink, envelope: Envelope, outlet: Outlet) -> None:
        self._link = link
        self._envelope = envelope
        self._outlet = outlet
        self._ordering = Ordering(OrderingLimits(finish_s=link.limits.finish_s))
        self._reader = FrameReader(link.base_url, link.allowed, link.redactor)
        self._texts = Texts()
        self._clock = asyncio.get_running_loop().time
        self._drains: dict[int, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()
        self._closing = False
        self._problem = "the engine ended its stream without an outcome"

    async def work(self) -> Ending:
        """Work until all is said; a cancellation closes every connection and propagates."""
        reader = asyncio.create_task(self._read_engine(), name="remote engine")
        reader.add_done_callback(lambda _: self._wake())
        try:
            while not self._ordering.done:
                await self._next()
                if reader.done():
                    reader.result()  # a bug of ours is no end of the engine
            await asyncio.wait({reader}, timeout=_RELEASE_S)
        finally:
            self._closing = True
            tasks = {reader, *self._drains.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._tell()
        return self._ending()

    async def _next(self) -> None:
        """Wait until something has happened, or is due."""
        moved, deadline = self._moved, self._ordering.next_deadline
        try:
            async with asyncio.timeout_at(deadline):
                await moved.wait()
        except TimeoutError:
            pass
        now = self._clock()
        if deadline is not None and deadline <= now:
            self._do(self._ordering.due(now))
            self._wake()

    def _wake(self) -> None:
        """Wake whoever waits for room or for the end; each looks again, and waits for the next."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # --- the engine ------------------------------------------------------------------------------

    async def _read_engine(self) -> None:
        reply: UpstreamReply | None = None
        try:
            reply = await self._link.execute(self._request())
            await self._read_frames(Watched(reply, "the engine", self._link.limits.idle_s))
            if not self._ordering.complete:
                self._do(self._ordering.eof(self._clock()))
                self._wake()
            else:
                await reply.release()
        except UpstreamError as error:
            self._problem = error.message
            self._do(self._ordering.eof(self._clock()))
            self._wake()
        finally:
            if reply is not None:
                reply.abort()

    async def _read_frames(self, reply: UpstreamReply) -> None:
        """Read until the engine has said its last word, or says no more."""
        decoder = SseDecoder(FRAME_BYTES_MAX)
        while not self._ordering.complete:
            while self._ordering.full:
                await self._moved.wait()
            data = await reply.read()
            try:
                self._take(decoder.feed(data) if data else whole(decoder.finish()))
            except SseEventTooLarge as error:
                self._take(error.events)
                raise UpstreamProtocolError(f"the engine sent {error}") from None
            if not data:
                return
            await self._outlet.ready()
            await asyncio.sleep(0)  # a read that finds data waiting does not give way

    def _take(self, events: Sequence[SseEvent]) -> None:
        for event in events:
            said = self._reader.read(event)
            if isinstance(said, Inline):
                if not self._texts.room(said.task_id):
                    raise UpstreamProtocolError("the engine sent a text that is too large to keep")
                self._do(self._ordering.inline(said.task_id, said.raw))
            elif said is not None:
                self._do(self._ordering.frame(said, self._clock()))
        self._wake()
        for complaint in self._reader.complaints:
            self._warn("ignored %s", complaint)
        self._reader.complaints.clear()

    def _request(self) -> dict[str, object]:
        """The body of W3.2; `answers` only for a run that is resumed."""
        envelope = self._envelope
        request: dict[str, object] = {
            "workflow": envelope.document,
            "inputs": dict(envelope.inputs),
            "workflow_id": envelope.workflow_id,
            "execution_id": envelope.execution_id,
        }
        if envelope.past.answers:
            request["answers"] = dict(envelope.past.answers)
        return request

    # --- its sub-streams -------------------------------------------------------------------------

    async def _drain(self, what: Open) -> None:
        """Read one sub-stream to its end. Whatever happens to it, the run goes on."""
        problem = ""
        try:
            problem = await self._read_stream(what)
        except UpstreamError as error:
            problem = error.message
        except Exception:  # noqa: BLE001  a bug of ours ends one text, not the run
            _log.exception("run %s: a sub-stream failed", self._envelope.execution_id)
        if problem:
            self._warn("the text of %s is not complete: %s", what.task_id[:100], problem)

    def _drained(self, stream: int, _: asyncio.Task[None]) -> None:
        """A sub-stream is over, also one that was cancelled before it began."""
        del self._drains[stream]
        self._do(self._ordering.ended(stream, self._clock()))
        self._wake()

    async def _read_stream(self, what: Open) -> str:
        """Read until it ends; return why that was too early, "" if it was not."""
        reply = await self._link.open(what.offer)
        watched = Watched(reply, "the sub-stream", self._link.limits.stream_idle_s)
        text = text_reader(what.offer.shape, self._link.redactor)
        finish_at: float | None = None
        try:
            while not text.ended:
                while not self._ordering.room(what.stream):
                    await self._moved.wait()
                if text.finishing and finish_at is None:
                    finish_at = self._clock() + _FINISHING_S
                data = await _read_until(watched, finish_at)
                self._say_text(what.stream, text.feed(data) if data else text.eof())
                if not self._texts.room(what.task_id):
                    return "it is too large to keep"
                await self._outlet.ready()
                await asyncio.sleep(0)
            if not text.problem:
                await reply.release()
            return text.problem
        finally:
            reply.abort()

    def _say_text(self, stream: int, raw: bytes) -> None:
        if raw:
            self._do(self._ordering.token(stream, raw))

    # --- what is to be done ----------------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> None:
        """Do it, in order."""
        if self._closing:
            return
        for effect in effects:
            match effect:
                case Say(name, frame, task_id):
                    steps = self._texts.said(effect)
                    self._outlet.frame(name, frame, task_id or "", steps=steps)
                case Token(task_id, raw):
                    self._texts.token(task_id, raw)
                    self._outlet.token(task_id, raw)
                case Open():
                    drain = asyncio.create_task(self._drain(effect), name="sub-stream")
                    self._drains[effect.stream] = drain
                    drain.add_done_callback(partial(self._drained, effect.stream))
                case GiveUp(stream, task_id):
                    self._warn(
                        "the sub-stream of %s did not finish within %g s of its end frame",
                        task_id[:100],
                        self._link.limits.finish_s,
                    )
                    self._drains[stream].cancel()

    def _ending(self) -> Ending:
        ending = ending_of(self._ordering.finals)
        if ending is not None:
            return ending
        if self._ordering.dropped["result"]:
            self._problem = "the engine sent workflow_result without an outcome"
        return Failed(code="engine_error", message=self._problem)

    def _tell(self) -> None:
        """Log what was not let through."""
        if self._ordering.dropped:
            dropped = ", ".join(f"{n} {what}" for what, n in self._ordering.dropped.items())
            self._warn("dropped of what the engine said: %s", dropped)

    def _warn(self, message: str, *details: object) -> None:
        _log.warning("run %s: " + message, self._envelope.execution_id, *details)


async def _read_until(reply: UpstreamReply, until: float | None) -> bytes:
    """Read; at `until` (loop time) the body has ended."""
    if until is not None and asyncio.get_running_loop().time() >= until:
        return b""  # data that is always there would never let the timeout come
    try:
        async with asyncio.timeout_at(until):
            return await reply.read()
    except TimeoutError:
        return b""
