"""Dialling: one candidate after the other until one answers (M3.3); nothing is sent before."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.json_text import loads
from encoders.shape import Untranslatable
from relay.cooldown import CoolDown
from relay.errors import (
    RequestUntranslatable,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamTruncated,
    UpstreamUnavailable,
)
from relay.peek import peek
from relay.record import Attempt, RequestRecord
from relay.refusals import error_in_success, excerpt, refusal
from relay.replies import Resumed
from relay.request import RelayRequest, names_stream_options, upstream_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.errors import RelayError
    from relay.routing import Candidate, Provider
    from relay.upstreams.base import UpstreamReply, UpstreamRequest

# A whole reply is held in memory; an error body only as far as a message needs it.
WHOLE_REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
ERROR_BODY_BYTES_MAX: Final = 64 * 1024
ERROR_BODY_WAIT_S: Final = 10.0
_RAW_BYTES_MAX: Final = 500
_REFUSALS_KEPT_MAX: Final = 1024
_STREAM_OPTIONS: Final = re.compile("stream_options|include_usage", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A candidate that answered with success; its body is still to be read.

    Attributes:
        began: when it was dialled, in seconds of the dialler's clock.
        stream_options: whether it was sent `stream_options`, if its shape has them.
        whole: a plain reply, as it came and parsed: then there is no more to read.
    """

    candidate: Candidate
    reply: UpstreamReply
    began: float
    stream_options: bool
    whole: tuple[bytes, Any] | None

    def abort(self) -> None:
        """Close the connection at once."""
        self.reply.abort()


def _nothing() -> None:
    """Nobody is told."""


class Dialler:
    """Dials the candidates of requests and remembers what came of it (M3.3). One for a worker.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cooldown = CoolDown()
        self._refuses_options: dict[tuple[str, str], None] = {}  # in the order of their refusals

    async def open_first(
        self,
        candidates: tuple[Candidate, ...],
        request: RelayRequest,
        record: RequestRecord,
        *,
        dialling: Callable[[], object] = _nothing,
    ) -> Opened:
        """Dial the candidates, each at most once, and return the first that answers with success.

        Their order is the configured one, but for those that failed lately: they come last. Each
        attempt is noted in `record`; `record.provider` is who serves, or whose error is told.

        Args:
            dialling: told before each dial; never, if no shape has words for the request.

        Raises:
            UpstreamError: the last error, or the first that another candidate would not mend.
        """
        record.cooling = self._cooling(candidates)
        left = list(candidates)
        failures: list[tuple[Candidate, UpstreamError]] = []
        while left:
            candidate = left.pop(self._cooldown.pick(left, self._clock()))
            _name(record, candidate)
            try:
                return await self._open(candidate, request, record, dialling, last=not left)
            except UpstreamError as failure:
                if not failure.fails_over:
                    raise
                failures.append((candidate, failure))
        candidate, verdict = _verdict(failures)
        _name(record, candidate)
        raise verdict

    def ended(self, opened: Opened, error: RelayError | None) -> None:
        """Note how an answered attempt ended: a provider that dies in the middle has failed too.

        Args:
            error: None if the answer was complete.
        """
        if error is None:
            self._cooldown.succeeded(opened.candidate, began=opened.began)
        elif isinstance(error, UpstreamError):
            self._cooldown.failed(opened.candidate, error, began=opened.began, now=self._clock())

    async def _open(
        self,
        candidate: Candidate,
        request: RelayRequest,
        record: RequestRecord,
        dialling: Callable[[], object],
        *,
        last: bool,
    ) -> Opened:
        """Dial one candidate; once more, if it may be only our own `stream_options` that it
        refuses (M3.3).
        """
        ours = not names_stream_options(request)
        key = (candidate.provider.name, candidate.model)
        options = candidate.provider.stream_options and not (ours and key in self._refuses_options)
        asked: UpstreamRequest | None = None
        try:
            with _Noted(self._cooldown, self._clock, candidate, record) as attempt:
                asked = _asked(request, candidate, stream_options=options)
                dialling()
                return await self._dial(candidate, asked, attempt, last=last)
        except UpstreamRefused as refused:
            if asked is None or "stream_options" not in asked.body or not ours:
                raise
            about_options = _STREAM_OPTIONS.search(f"{refused.message} {refused.param}") is not None
            if refused.status != 400 and not (refused.status == 422 and about_options):
                raise
        with _Noted(self._cooldown, self._clock, candidate, record) as attempt:
            asked = _asked(request, candidate, stream_options=False)
            dialling()
            opened = await self._dial(candidate, asked, attempt, last=last)
        if about_options:  # else it was a guess, and one lucky answer does not prove it
            self._refuses_options[key] = None
            if len(self._refuses_options) > _REFUSALS_KEPT_MAX:
                del self._refuses_options[next(iter(self._refuses_options))]
        return opened

    async def _dial(
        self, candidate: Candidate, asked: UpstreamRequest, attempt: Attempt, *, last: bool
    ) -> Opened:
        """Dial, and wait for what shows that the candidate serves.

        Args:
            last: there is no other left to try: it has all the time that it needs.

        Raises:
            UpstreamError: no connection, no status, a refusal, an error body with status 200, or
                what `peek` finds.
        """
        provider = candidate.provider
        limit_s = provider.first_byte_timeout_s if asked.stream and not last else None
        began = self._clock()
        if limit_s is None:
            reply, whole = await _answered(provider, asked, attempt, None)
        else:
            first_byte = asyncio.timeout(limit_s)
            try:
                async with first_byte:
                    reply, whole = await _answered(provider, asked, attempt, first_byte)
            except TimeoutError:
                if not first_byte.expired():
                    raise
                raise UpstreamTimeout(
                    f"{provider.name} sent no first byte within {limit_s:g} s"
                ) from None
        return Opened(
            candidate=candidate,
            reply=reply,
            began=began,
            stream_options="stream_options" in asked.body,
            whole=whole,
        )

    def _cooling(self, candidates: tuple[Candidate, ...]) -> list[str]:
        if not self._cooldown:
            return []
        now = self._clock()
        waits = ((candidate, self._cooldown.wait_s(candidate, now)) for candidate in candidates)
        return [f"{c.provider.name}/{c.model}: {wait:.1f} s" for c, wait in waits if wait]


def _asked(request: RelayRequest, candidate: Candidate, *, stream_options: bool) -> UpstreamRequest:
    """Return what the candidate is asked.

    Raises:
        RequestUntranslatable: its shape has no words for the request.
    """
    try:
        return upstream_request(request, candidate, stream_options=stream_options)
    except Untranslatable as error:
        raise RequestUntranslatable(str(error), param=error.param) from None


class _Noted:
    """One attempt, noted in the record; its failure is held against the candidate.

    A class, as each request enters it and generators are dear.
    """

    __slots__ = ("_attempt", "_candidate", "_clock", "_cooldown")

    def __init__(
        self,
        cooldown: CoolDown,
        clock: Callable[[], float],
        candidate: Candidate,
        record: RequestRecord,
    ) -> None:
        self._cooldown = cooldown
        self._clock = clock
        self._candidate = candidate
        self._attempt = Attempt(
            provider=candidate.provider.name, model=candidate.model, started=clock()
        )
        record.attempts.append(self._attempt)

    def __enter__(self) -> Attempt:
        return self._attempt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        attempt, now = self._attempt, self._clock()
        attempt.duration_ms = (now - attempt.started) * 1000
        if kind is None:
            attempt.error_code = None
        elif isinstance(error, UpstreamError):
            attempt.error_code = error.code
            attempt.asked = not isinstance(error, RequestUntranslatable)
            self._cooldown.failed(self._candidate, error, began=attempt.started, now=now)


async def _answered(
    provider: Provider,
    asked: UpstreamRequest,
    attempt: Attempt,
    first_byte: asyncio.Timeout | None,
) -> tuple[UpstreamReply, tuple[bytes, Any] | None]:
    """Dial; see `_serving`."""
    reply = await provider.upstream.open(asked)
    attempt.status = reply.status
    try:
        return await _serving(provider, reply, asked, first_byte)
    except BaseException:
        reply.abort()
        raise


async def _serving(
    provider: Provider,
    reply: UpstreamReply,
    asked: UpstreamRequest,
    first_byte: asyncio.Timeout | None,
) -> tuple[UpstreamReply, tuple[bytes, Any] | None]:
    """Return an answered reply that may be committed, and a plain one's document.

    Args:
        first_byte: the limit that is running, if there is one; switched off by what decides.
    """
    if not 200 <= reply.status < 300:
        if first_byte is not None:  # the status decides, however long its body takes
            first_byte.reschedule(None)
        raise await _refused(provider, reply)
    if not asked.stream:
        return reply, await _read_whole(provider, reply)
    kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        # An error (M3.2), or a reply that is passed on as a stream.
        _, parsed = await _read_whole(provider, reply, first_byte)
        events = provider.shape.events_of(parsed)
        return Resumed(reply, b"".join(map(openai.event, events))), None
    if kind.startswith("text/") and kind not in ("text/event-stream", "text/plain"):
        raise UpstreamProtocolError(f"{provider.name} answered with {kind}")
    return await peek(provider, reply, first_byte), None


def _name(record: RequestRecord, candidate: Candidate) -> None:
    record.provider = candidate.provider.name
    record.upstream_model = candidate.model


def _verdict(failures: list[tuple[Candidate, UpstreamError]]) -> tuple[Candidate, UpstreamError]:
    """Return the error that a client is told when no candidate served, and whose it is: the last
    one, but for those that were never asked; if all are limited, with the shortest wait (B56).
    """
    asked = [said for said in failures if not isinstance(said[1], RequestUntranslatable)]
    candidate, last = (asked or failures)[-1]
    waits = [error.retry_after_s for _, error in asked if error.retry_after_s is not None]
    if waits and all(isinstance(e, UpstreamRateLimited | UpstreamUnavailable) for _, e in asked):
        last.retry_after_s = min(waits)
    return candidate, last


async def _refused(provider: Provider, reply: UpstreamReply) -> UpstreamError:
    """Read the body of a refusal, as far and as long as is sensible."""
    body = bytearray()
    try:
        async with asyncio.timeout(ERROR_BODY_WAIT_S):
            while len(body) < ERROR_BODY_BYTES_MAX and (data := await reply.read()):
                body += data
    except (TimeoutError, UpstreamTruncated):
        pass  # the status alone decides
    return refusal(
        provider.name,
        reply.status,
        reply.headers,
        bytes(body[:ERROR_BODY_BYTES_MAX]),
        redactor=provider.redactor,
        now=time.time(),
    )


async def _read_whole(
    provider: Provider, reply: UpstreamReply, first_byte: asyncio.Timeout | None = None
) -> tuple[bytes, Any]:
    """Read a whole JSON reply; return it as it came, and parsed.

    Args:
        first_byte: switched off when there is one.

    Raises:
        UpstreamError: it is an error, not JSON, too large, or cut short.
    """
    body = bytearray()
    while data := await reply.read():
        if first_byte is not None:
            first_byte.reschedule(None)
        body += data
        if len(body) > WHOLE_REPLY_BYTES_MAX:
            raise UpstreamProtocolError(f"{provider.name} sent a reply that is too large")
    whole = bytes(body)
    if not _is_utf8(whole):
        whole = whole.decode("utf-8", "replace").encode()  # as the events of a stream
    if b'"error"' in whole:
        whole = provider.redactor.data(whole)
    error = error_in_success(provider.name, whole, redactor=provider.redactor)
    if error is not None:
        raise error
    try:
        parsed = loads(whole)
    except ValueError:
        parsed = None
    if not provider.shape.is_reply(parsed):
        raw = excerpt(whole, provider.redactor, _RAW_BYTES_MAX)
        raise UpstreamProtocolError(f"{provider.name} sent no chat completion", raw=raw)
    return whole, parsed


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
