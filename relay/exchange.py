"""One chat request from admission to its settled end.

    admit → open (candidates in order) → commit → pump → finish → settle

The exchange owns the upstream connection and the stream's life; it hands the record over exactly
once, on every path, without awaiting (a second cancel must not lose it). See docs/spec/models.md,
"Life of a stream".
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders import openai
from encoders.json_text import loads
from encoders.openai_chunks import ChunkCollector, ChunkRewriter
from encoders.openai_whole import rewrite_whole
from encoders.usage import openai_usage
from relay.attempts import WHOLE_REPLY_BYTES_MAX, Opened, open_first, read_whole
from relay.comments import CommentedReply, tick_while_waiting
from relay.errors import ClientGone, RelayError
from relay.lifecycle import Lifecycle, Outcome, StreamInput
from relay.pump import Discard, Sink, pump
from relay.request import asks_usage
from relay.stream import StreamRelay, in_band_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from relay.inflight import InFlight
    from relay.record import RequestRecord
    from relay.request import RelayRequest
    from relay.routing import Candidate

PROCESSING_EVERY_S: Final = 10.0
COMMIT_WITHOUT_STATUS_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommentPolicy:
    """When comments are sent before the first upstream byte (M2.1); seconds."""

    commit_after_s: float = COMMIT_WITHOUT_STATUS_S
    every_s: float = PROCESSING_EVERY_S


class Exchange:
    """Runs one request.

    Args:
        request: what the client asks. candidates: who may serve it, in order.
        record: filled as the request runs. inflight: whose drain interrupts it.
    """

    def __init__(
        self,
        request: RelayRequest,
        candidates: tuple[Candidate, ...],
        record: RequestRecord,
        inflight: InFlight,
    ) -> None:
        self._request = request
        self._candidates = candidates
        self._record = record
        self._inflight = inflight
        self._lifecycle = Lifecycle()
        self._opened: Opened | None = None
        self._relay: StreamRelay | None = None
        record.model = request.slug
        record.stream = request.stream

    async def stream(self, sink: Sink, comments: CommentPolicy | None) -> None:
        """Serve a streaming request into `sink`.

        Raises:
            RelayError: it failed before the sink was committed; nothing was sent.
            ConnectionError, CancelledError: the client is gone, or the gateway stops.
        """
        with self._settled():
            try:
                async with self._inflight.interruptible():
                    await self._stream(sink, comments)
            except RelayError as error:
                ending = self._end(error)
                if not sink.committed:
                    raise
                if ending:
                    await sink.write(ending)
        with self._aborting():
            await sink.finish()
            await self._release()

    async def whole(self, respond: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve a plain request; `respond` sends the body of the reply (M1.1).

        Raises:
            RelayError: it failed.
            CancelledError: the client is gone, or the gateway stops.
        """
        with self._settled():
            try:
                async with self._inflight.interruptible():
                    body = await self._whole()
            except RelayError as error:
                self._end(error)
                raise
        with self._aborting():
            await respond(body)
            await self._release()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Whatever leaves this block has closed the stream's life and filled the record, and only
        a completed stream keeps its upstream connection.

        Nothing here awaits: a hang-up's cancellation runs through it (M4.1).
        """
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            self._end(ClientGone("the client closed the connection"))
            raise
        finally:
            record = self._record
            record.outcome = self._lifecycle.outcome
            if self._relay is not None:
                record.error = self._relay.error or record.error
                record.usage = self._relay.usage
            if self._opened is not None and record.outcome is not Outcome.COMPLETED:
                self._opened.abort()

    async def _release(self) -> None:
        """Give the upstream connection of a completed request back, or close it.

        Comes after the client's end was sent: nobody waits for it.
        """
        if self._opened is not None:
            await self._opened.reply.release()

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Whatever leaves this block holds no upstream connection."""
        try:
            yield
        finally:
            if self._opened is not None:
                self._opened.abort()

    def _end(self, error: RelayError) -> bytes:
        """Close the life by `error`, unless it is closed; return the in-band end of the stream."""
        if self._lifecycle.closed:
            return b""
        self._record.error = error
        if self._relay is not None:
            return self._relay.fail(error)
        self._lifecycle.advance(error.stream_input)
        return in_band_error(self._identity(), error)

    def _identity(self) -> openai.ChunkIdentity:
        """The identity of chunks that we make; an upstream's own id replaces ours when seen."""
        return openai.ChunkIdentity(
            model=self._request.slug,
            provider=self._record.provider or "",
            id=f"chatcmpl-{self._request.request_id}",
            created=self._request.created,
        )

    async def _open(self) -> Opened:
        self._lifecycle.advance(StreamInput.DIAL)
        return await open_first(self._candidates, self._request, self._record)

    async def _stream(self, sink: Sink, comments: CommentPolicy | None) -> None:
        async def comment() -> None:
            await sink.commit()
            await sink.write(openai.PROCESSING)

        if comments is None:
            opened = self._opened = await self._open()
        else:
            opened = self._opened = await tick_while_waiting(
                self._open(), comment, first_s=comments.commit_after_s, every_s=comments.every_s
            )
        self._lifecycle.advance(StreamInput.HEADERS)
        rewriter = ChunkRewriter(
            self._identity(),
            choices=self._request.choices,
            include_usage=self._request.include_usage,
            usage_is_ours=asks_usage(self._request, opened.candidate),
        )
        relay = self._relay_with(rewriter, opened.candidate)
        reply = opened.reply
        if comments is not None:
            if not sink.committed:
                await comment()
            reply = CommentedReply(reply, comment, comments.every_s)
        await sink.commit()
        await pump(reply, relay, sink, self._note_first_byte)

    async def _whole(self) -> bytes:
        opened = self._opened = await self._open()
        self._lifecycle.advance(StreamInput.HEADERS)
        candidate = opened.candidate
        if opened.whole:
            body = await read_whole(candidate, opened.reply)
            self._lifecycle.advance(StreamInput.TERMINAL)
            self._record.usage = openai_usage(loads(body).get("usage"))
            slug, provider = self._request.slug, candidate.provider.name
            return rewrite_whole(body, model=slug, provider=provider)
        collector = ChunkCollector(
            self._identity(), choices=self._request.choices, max_bytes=WHOLE_REPLY_BYTES_MAX
        )
        relay = self._relay_with(collector, candidate)
        await pump(opened.reply, relay, Discard(), self._note_first_byte)
        if relay.error is not None:
            raise relay.error
        return collector.result()

    def _relay_with(self, rewriter: ChunkRewriter, candidate: Candidate) -> StreamRelay:
        self._relay = StreamRelay(
            rewriter=rewriter,
            lifecycle=self._lifecycle,
            redactor=candidate.provider.redactor,
            max_event_bytes=candidate.provider.max_event_bytes,
        )
        return self._relay

    def _note_first_byte(self) -> None:
        self._record.first_byte = time.monotonic()
