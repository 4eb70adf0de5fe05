"""One request to a model in an agent's name: an exchange of the models plane, without a client.

The same failover, cool-down, metering, billing and bounds (W3.4); what a client would be sent is
read back as text in the call that read it from the provider.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.deltas import DeltaReader
from encoders.translator import ReplyTooLarge
from relay.agents.base import AgentError
from relay.engines.base import Usage
from relay.errors import (
    EventTooLarge,
    GatewayFault,
    GatewayShutdown,
    ProviderCredentials,
    RelayError,
    UpstreamProtocolError,
)
from relay.exchange import Exchange
from relay.money import Source
from relay.observe import UNOBSERVED
from relay.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from encoders.translator import NotAChunk
    from relay.agents.base import AgentCall, AgentSink
    from relay.attempts import Dialler
    from relay.billing import Billing
    from relay.inflight import InFlight
    from relay.observe import Observer
    from relay.request import RelayRequest
    from relay.routing import Candidate

TEXT_BYTES_MAX: Final = 16 * 1024 * 1024
_RETRYABLE_4XX: Final = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who is asked.

    Attributes:
        slug: for the row. listed: whether the slug is what is served, whichever candidate does.
    """

    slug: str
    candidates: tuple[Candidate, ...]
    listed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said.

    Attributes:
        raw: its text, as `AgentSink.text` was given it.
        message: what else it said, as an assistant's message; only if it was offered tools.
        model: the slug that served. reported: whether its provider told the usage.
    """

    raw: bytes
    finish_reason: str
    message: dict[str, Any]
    usage: Usage
    model: str
    provider: str
    reported: bool


class Asker:
    """Asks models.

    Args:
        dialler, billing, inflight, observer: of the models plane.
        ended: told of each record once, when nothing of it will change; must not block or raise.
    """

    def __init__(
        self,
        *,
        dialler: Dialler,
        billing: Billing,
        inflight: InFlight,
        ended: Callable[[RequestRecord], None],
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._dialler = dialler
        self._billing = billing
        self._inflight = inflight
        self._ended = ended
        self._observer = observer

    def interruptible(self) -> AbstractAsyncContextManager[None]:
        """What else of a call the end of the grace interrupts, with GatewayShutdown (M3.6)."""
        return self._inflight.interruptible()

    async def ask(
        self,
        request: RelayRequest,
        target: Target,
        call: AgentCall,
        sink: AgentSink,
        *,
        started: Callable[[str, str], None],
    ) -> Answer:
        """Ask once.

        Args:
            started: told the slug and the provider when one has answered.

        Raises:
            AgentError: it failed; `usage` is that of this request.
            GatewayShutdown: the gateway stops.
        """
        payer = call.payer
        record = RequestRecord(
            request_id=request.request_id,
            started=time.monotonic(),
            plane=call.plane,
            agent=call.agent,
            execution_id=call.execution_id,
            org=payer.org,
            key_id=payer.key_id,
        )
        exchange = Exchange(
            request,
            target.candidates,
            record,
            self._inflight,
            self._dialler,
            nullcontext(),  # the run has a slot
            self._billing,
            trial=payer.trial,
            observer=self._observer,
        )
        text = _TextSink(
            sink,
            lambda: started(served(record, target), record.provider or ""),
            collect="tools" in request.body,
        )
        try:
            await exchange.stream(text, None)
        except RelayError as refused:
            if isinstance(refused, GatewayShutdown):
                sink.interrupted(_used(record))
            raise _failure(refused, record) from None
        except asyncio.CancelledError:
            sink.interrupted(_used(record))
            raise
        finally:
            self._ended(record)
        error = record.error or text.failure
        if isinstance(error, GatewayShutdown):
            sink.interrupted(_used(record))
        if isinstance(error, RelayError):
            raise _failure(error, record)
        if error is not None:
            raise error
        paid = record.settlement
        return Answer(
            raw=bytes(text.raw),
            finish_reason=text.reader.finish_reason or "stop",
            message=text.reader.message() if "tools" in request.body else {},
            usage=_used(record),
            model=served(record, target),
            provider=record.provider or "",
            reported=paid is not None and paid.source is Source.REPORTED,
        )


class _TextSink:
    """What an exchange takes for its client; hands on the text. See `relay.pump.Sink`.

    Attributes:
        raw: the text so far.
        failure: what `push` raised, a bug of the sink's too; None if it did not. An exchange that
            had its provider's end in the same read knows nothing of it.
    """

    def __init__(self, sink: AgentSink, started: Callable[[], None], *, collect: bool) -> None:
        self.reader = DeltaReader(collect=collect)
        self.raw = bytearray()
        self.committed = False
        self._sink = sink
        self._started = started
        self._ready = True
        self.failure: Exception | None = None

    async def commit(self) -> None:
        if not self.committed:
            self.committed = True
            self._started()

    async def write(self, data: bytes) -> None:
        if not self.push(data):
            await self.drain()

    def push(self, data: bytes) -> bool:
        raw = self.reader.feed(data)
        if self.failure is not None:
            return self._ready  # the end, which nobody reads
        try:
            if raw:
                self._hand_on(raw)
            if self.reader.fault is not None:
                raise _fault_of(self.reader.fault)
        except Exception as error:
            self.failure = error
            raise
        return self._ready

    def _hand_on(self, raw: bytes) -> None:
        self.raw += raw
        if len(self.raw) > TEXT_BYTES_MAX:
            raise EventTooLarge(f"the reply has more than {TEXT_BYTES_MAX} bytes of text")
        if not self._sink.text(raw):
            self._ready = False

    def last(self, data: bytes) -> bool:
        return self.push(data)

    async def drain(self) -> None:
        if not self._ready:
            await self._sink.ready()
            self._ready = True

    async def finish(self) -> None:
        """There is no client to tell."""


def _fault_of(fault: NotAChunk | ReplyTooLarge) -> RelayError:
    if isinstance(fault, ReplyTooLarge):
        return EventTooLarge(str(fault))
    return UpstreamProtocolError("the provider sent a chunk that is not JSON")


def served(record: RequestRecord, target: Target) -> str:
    """Return the slug that serves."""
    if target.listed or record.provider is None:
        return target.slug
    return f"{record.provider}/{record.upstream_model}"


def _used(record: RequestRecord) -> Usage:
    paid = record.settlement
    if paid is None:
        return Usage()
    return Usage(
        prompt_tokens=paid.prompt_tokens,
        completion_tokens=paid.completion_tokens,
        cost_micro_usd=paid.cost_micro_usd,
    )


def _failure(error: RelayError, record: RequestRecord) -> BaseException:
    """Return what a failed request means to who called the agent."""
    if isinstance(error, GatewayShutdown):
        return error
    if isinstance(error, GatewayFault) and error.__cause__ is not None:
        return error.__cause__
    return AgentError(
        error.code,
        error.message,
        retryable=is_retryable(error),
        usage=_used(record),
        retry_after_s=error.retry_after_s,
    )


def is_retryable(error: RelayError) -> bool:
    """Whether the same call may do better. One that our own key or a bound of ours refused will
    not.
    """
    if isinstance(error, ProviderCredentials | EventTooLarge):
        return False
    return error.status >= 500 or error.status in _RETRYABLE_4XX
