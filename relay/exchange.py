"""One chat request from admission to its settled end.

    admit → open (candidates in order) → commit → pump → finish → settle

The exchange owns the upstream connection and the stream's life; it hands the record over exactly
once, on every path, without awaiting (a second cancel must not lose it). See docs/spec/models.md,
"Life of a stream".
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders import openai
from encoders.translator import ReplyTooLarge
from relay import meter
from relay.attempts import WHOLE_REPLY_BYTES_MAX, Dialler, Opened
from relay.billing import Billing, InsufficientCredits
from relay.comments import CommentedReply, tick_while_waiting
from relay.errors import ClientGone, GatewayFault, RelayError, UpstreamProtocolError
from relay.lifecycle import Lifecycle, Outcome, StreamInput
from relay.observe import UNOBSERVED
from relay.pump import Discard, Sink, pump
from relay.replies import Watched
from relay.request import stream_wants
from relay.stream import StreamRelay, in_band_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from encoders.translator import StreamWants, Translator
    from encoders.usage import TokenUsage
    from relay.billing import OpenHold
    from relay.inflight import InFlight
    from relay.observe import Observer
    from relay.record import RequestRecord
    from relay.request import RelayRequest
    from relay.routing import Candidate
    from relay.upstreams.base import UpstreamReply

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
        dialler: opens one of the candidates, and is told how it ended.
        billing: places its hold and settles it, once. trial: it is never debited.
        slot: entered before anything is dialled, left when the client has its end (M1.2).
        observer: told of the stream while it runs.
    """

    def __init__(
        self,
        request: RelayRequest,
        candidates: tuple[Candidate, ...],
        record: RequestRecord,
        inflight: InFlight,
        dialler: Dialler,
        slot: AbstractContextManager[None],
        billing: Billing,
        *,
        trial: bool,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._request = request
        self._observer = observer
        self._candidates = candidates
        self._record = record
        self._inflight = inflight
        self._dialler = dialler
        self._billing = billing
        self._trial = trial
        self._hold: OpenHold | None = None
        self._dialled = False
        self._slot = slot
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
        try:
            with self._slot:
                await self._stream_to_its_end(sink, comments)
                await sink.finish()
            await self._release()
        finally:
            self._abort()

    async def whole(self, respond: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve a plain request; `respond` sends the body of the reply (M1.1).

        Raises:
            RelayError: it failed.
            CancelledError: the client is gone, or the gateway stops.
        """
        try:
            with self._slot:
                await respond(await self._whole_to_its_end())
            await self._release()
        finally:
            self._abort()

    async def _stream_to_its_end(self, sink: Sink, comments: CommentPolicy | None) -> None:
        try:
            try:
                async with self._inflight.interruptible():
                    await self._stream(sink, comments)
            except RelayError as error:
                ending = self._end(error)
                if not sink.committed:
                    raise
                if ending:
                    await sink.write(ending)
            except ConnectionError:
                raise
            except Exception as bug:  # the middleware tells of it
                if not sink.committed:
                    raise
                await sink.write(self._end(_fault(bug)))
        except BaseException as error:
            self._left_by(error)
            raise
        finally:
            self._settle()

    async def _whole_to_its_end(self) -> bytes:
        try:
            async with self._inflight.interruptible():
                return await self._whole()
        except BaseException as error:
            self._left_by(error)
            raise
        finally:
            self._settle()

    def _left_by(self, error: BaseException) -> None:
        """Close the stream's life: a hang-up, a refusal or a bug leaves the request."""
        if isinstance(error, asyncio.CancelledError | ConnectionError):
            self._end(ClientGone("the client closed the connection"))
        elif isinstance(error, RelayError):
            self._end(error)
        elif isinstance(error, Exception):
            self._end(_fault(error))

    def _settle(self) -> None:
        """Fill the record, settle or release the hold. Only a completed stream keeps its upstream
        connection. Once, on every path.

        Nothing here awaits: a hang-up's cancellation runs through it (M4.1).
        """
        record, outcome = self._record, self._lifecycle.outcome
        assert outcome is not None, "every path out of a request closes its life"
        record.outcome = outcome
        if self._relay is not None:
            record.error = self._relay.error or record.error
            record.usage = self._relay.usage
        if self._opened is not None:
            completed = outcome is Outcome.COMPLETED
            if not completed:
                self._opened.abort()
            self._dialler.ended(self._opened, None if completed else record.error)
        if self._hold is not None:
            record.settlement = self._billing.close(self._hold, outcome, dialled=self._dialled)

    async def _release(self) -> None:
        """Give the upstream connection of a completed request back, or close it.

        Comes after the client's end was sent and its slot was freed: nobody waits for it.
        """
        if self._opened is not None:
            await self._opened.reply.release()

    def _abort(self) -> None:
        """Hold no upstream connection any more, if one was not given back."""
        if self._opened is not None:
            self._opened.abort()

    def _end(self, error: RelayError) -> bytes:
        """Close the life by `error`, unless it is closed; return the in-band end of the stream."""
        if self._lifecycle.closed:
            return b""
        self._record.error = error
        self._abort()  # at once: writing the end to a slow client takes its time
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
        return await self._dialler.open_first(
            self._candidates, self._request, self._record, dialling=self._dialling
        )

    def _dialling(self) -> None:
        self._lifecycle.advance(StreamInput.DIAL)
        self._dialled = True

    async def _stream(self, sink: Sink, comments: CommentPolicy | None) -> None:
        async def commit() -> None:
            await sink.commit()
            self._record.streamed = True

        async def comment() -> None:
            await commit()
            await sink.write(openai.PROCESSING)

        await self._place_hold()
        if comments is None:
            opened = self._opened = await self._open()
        else:
            opened = self._opened = await tick_while_waiting(
                self._open(), comment, first_s=comments.commit_after_s, every_s=comments.every_s
            )
        self._lifecycle.advance(StreamInput.HEADERS)
        wants = stream_wants(self._request, opened.candidate, stream_options=opened.stream_options)
        relay = self._relay_with(self._translator(opened.candidate, wants), opened.candidate)
        reply = _watched(opened)
        if comments is not None:
            if not sink.committed:
                await comment()
            reply = CommentedReply(reply, comment, comments.every_s)
        await commit()
        with self._observer.streaming(self._record) as on_frames:
            await pump(reply, relay, sink, self._note_first_byte, on_frames=on_frames)

    async def _place_hold(self) -> None:
        hold = self._hold = self._billing.prepare(
            self._request, self._candidates, self._record, trial=self._trial
        )
        try:
            await self._billing.authorize(hold)
        except InsufficientCredits:
            self._hold = None
            raise

    async def _whole(self) -> bytes:
        await self._place_hold()
        opened = self._opened = await self._open()
        self._lifecycle.advance(StreamInput.HEADERS)
        candidate = opened.candidate
        wants = stream_wants(
            self._request,
            candidate,
            stream_options=opened.stream_options,
            collect_bytes_max=WHOLE_REPLY_BYTES_MAX,
        )
        if opened.whole is not None:
            data, parsed = opened.whole
            self._lifecycle.advance(StreamInput.TERMINAL)
            try:
                whole = candidate.provider.shape.whole(data, parsed, self._identity(), wants)
            except ReplyTooLarge as error:
                raise UpstreamProtocolError(f"{candidate.provider.name}: {error}") from None
            self._record.usage = whole.usage
            self._meter(lambda: whole.usage, lambda: whole.characters)
            return whole.body
        translator = self._translator(candidate, wants)
        relay = self._relay_with(translator, candidate)
        await pump(_watched(opened), relay, Discard(), self._note_first_byte)
        if relay.error is not None:
            raise relay.error
        return translator.result()

    def _translator(self, candidate: Candidate, wants: StreamWants) -> Translator:
        return candidate.provider.shape.translator(self._identity(), wants)

    def _meter(self, usage: Callable[[], TokenUsage | None], characters: Callable[[], int]) -> None:
        """From here on the hold can be read: usage as reported, and characters that came out."""
        if self._hold is not None:
            prompt = self._hold.hold.prompt_tokens
            self._hold.read = lambda: meter.read(usage(), characters, prompt)

    def _relay_with(self, translator: Translator, candidate: Candidate) -> StreamRelay:
        self._relay = StreamRelay(
            translator=translator,
            lifecycle=self._lifecycle,
            redactor=candidate.provider.redactor,
            max_event_bytes=candidate.provider.max_event_bytes,
        )
        self._meter(lambda: translator.usage, lambda: translator.characters)
        return self._relay

    def _note_first_byte(self) -> None:
        self._record.first_byte = time.monotonic()


def _watched(opened: Opened) -> UpstreamReply:
    """The reply, with an end to its silence if its provider says so (M3.3)."""
    provider = opened.candidate.provider
    if provider.idle_timeout_s is None:
        return opened.reply
    return Watched(opened.reply, provider.name, provider.idle_timeout_s)


def _fault(bug: Exception) -> GatewayFault:
    fault = GatewayFault("the gateway failed; its operator can see why")
    fault.__cause__ = bug
    return fault
