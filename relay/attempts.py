"""Dialling: candidates in order, until one answers (M3.3). Nothing is streamed before that."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.json_text import loads
from encoders.shape import Untranslatable
from relay.errors import (
    RequestUntranslatable,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTruncated,
)
from relay.record import Attempt, RequestRecord
from relay.refusals import error_in_success, excerpt, refusal
from relay.request import RelayRequest, upstream_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.routing import Candidate
    from relay.upstreams.base import UpstreamReply

# A whole reply is held in memory; an error body only as far as a message needs it.
WHOLE_REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
ERROR_BODY_BYTES_MAX: Final = 64 * 1024
ERROR_BODY_WAIT_S: Final = 10.0
_RAW_BYTES_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A candidate that answered with success; its body is still to be read.

    Attributes:
        whole: the body is one JSON document (a plain request to a provider that takes them).
    """

    candidate: Candidate
    reply: UpstreamReply
    whole: bool

    def abort(self) -> None:
        """Close the connection at once."""
        self.reply.abort()


async def open_first(
    candidates: tuple[Candidate, ...],
    request: RelayRequest,
    record: RequestRecord,
) -> Opened:
    """Dial the candidates in order and return the first that answers with success.

    Each attempt is noted in `record`; `record.provider` is who was tried last.

    Raises:
        UpstreamError: the last error, or the first that another candidate would not mend.
    """
    for position, candidate in enumerate(candidates):
        record.provider = candidate.provider.name
        record.upstream_model = candidate.model
        started = time.monotonic()
        error_code: str | None = "cancelled"  # by a hang-up or a shutdown, unless it ends otherwise
        try:
            opened = await _attempt(candidate, request)
            error_code = None
            return opened
        except UpstreamError as failure:
            error_code = failure.code
            if not failure.fails_over or position == len(candidates) - 1:
                raise
        finally:
            attempt = Attempt(
                provider=candidate.provider.name,
                model=candidate.model,
                error_code=error_code,
                started=started,
                duration_ms=(time.monotonic() - started) * 1000,
            )
            record.attempts.append(attempt)
    raise AssertionError("a route has at least one candidate")


async def _attempt(candidate: Candidate, request: RelayRequest) -> Opened:
    """Dial one candidate.

    Raises:
        UpstreamError: no connection, no status, a refusal, or an error body with status 200.
        RequestUntranslatable: the candidate's shape has no words for the request.
    """
    try:
        asked = upstream_request(request, candidate)
    except Untranslatable as error:
        raise RequestUntranslatable(str(error), param=error.param) from None
    reply = await candidate.provider.upstream.open(asked)
    try:
        if not 200 <= reply.status < 300:
            raise await _refused(candidate, reply)
        kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not asked.stream:
            return Opened(candidate=candidate, reply=reply, whole=True)
        if kind == "application/json" or kind.endswith("+json"):
            reply = await _stream_of_whole(candidate, reply)
        elif kind.startswith("text/") and kind not in ("text/event-stream", "text/plain"):
            raise UpstreamProtocolError(f"{candidate.provider.name} answered with {kind}")
        return Opened(candidate=candidate, reply=reply, whole=False)
    except BaseException:
        reply.abort()
        raise


async def _refused(candidate: Candidate, reply: UpstreamReply) -> UpstreamError:
    """Read the body of a refusal, as far and as long as is sensible."""
    body = bytearray()
    try:
        async with asyncio.timeout(ERROR_BODY_WAIT_S):
            while len(body) < ERROR_BODY_BYTES_MAX and (data := await reply.read()):
                body += data
    except (TimeoutError, UpstreamTruncated):
        pass  # the status alone decides
    return refusal(
        candidate.provider.name,
        reply.status,
        reply.headers,
        bytes(body[:ERROR_BODY_BYTES_MAX]),
        redactor=candidate.provider.redactor,
        now=time.time(),
    )


async def read_whole(candidate: Candidate, reply: UpstreamReply) -> tuple[bytes, Any]:
    """Read a whole JSON reply; return it as it came, and parsed.

    Raises:
        UpstreamError: it is an error, not JSON, too large, or cut short.
    """
    provider = candidate.provider
    body = bytearray()
    while data := await reply.read():
        body += data
        if len(body) > WHOLE_REPLY_BYTES_MAX:
            raise UpstreamProtocolError(f"{provider.name} sent a reply that is too large")
    whole = bytes(body)
    if not _is_utf8(whole):
        whole = whole.decode("utf-8", "replace").encode()  # as the events of a stream
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


async def _stream_of_whole(candidate: Candidate, reply: UpstreamReply) -> UpstreamReply:
    """An upstream answered a streaming request with one JSON document: an error (M3.2), or a
    reply that is passed on as a stream.
    """
    _, parsed = await read_whole(candidate, reply)
    events = candidate.provider.shape.events_of(parsed)
    return _Told(reply, b"".join(map(openai.event, events)))


class _Told:
    """A reply whose body is known already."""

    def __init__(self, reply: UpstreamReply, body: bytes) -> None:
        self._reply = reply
        self._body = body

    @property
    def status(self) -> int:
        return self._reply.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._reply.headers

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """Nothing arrives any more."""

    def abort(self) -> None:
        self._reply.abort()

    async def release(self) -> None:
        await self._reply.release()
