"""Traces over OTLP/HTTP: one span for a request, one below it for each attempt (O3).

Made when the request has ended, of its record; sent in batches by a thread of the SDK's, which
drops what does not fit its queue. No content, no key and no error message is in a span: the
request id leads to the log line. What else can be set (sampling, headers, limits) is set by the
`OTEL_*` variables of the SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from planes.settings.notices import NO_OTEL
from planes.version import version
from relay.errors import UpstreamError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from planes.telemetry import Ended
    from relay.record import Attempt, RequestRecord

log = structlog.get_logger("sluicegate")

FLUSH_WAIT_S: Final = 3.0
_PATH: Final = "/v1/traces"
_METHODS: Final = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
)
_TRACE_CONTEXT: Final = ("traceparent", "tracestate")
_TEXT_MAX: Final = 256


class ExtraMissing(Exception):
    """The library for what is configured is not installed; the message says what to do."""


class Tracing:
    """Sends the spans of one gateway.

    Args:
        endpoint: base URL of an OTLP/HTTP collector; `/v1/traces` is appended to it.
    """

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint if endpoint.endswith(_PATH) else endpoint + _PATH
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None

    def start(self) -> None:
        """Begin to send.

        Raises:
            ExtraMissing: the SDK or its exporter is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ExtraMissing(f"telemetry.otlp_endpoint {NO_OTEL} ({error})") from None
        resource = Resource.create({"service.version": version()})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "sluicegate"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(self._url)))
        self._tracer = self._provider.get_tracer("sluicegate", version())

    async def close(self) -> None:
        """Send what is left, for FLUSH_WAIT_S at most. Idempotent."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is None:
            return
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        # Not of the loop's pool, whose threads the end of the process waits for.
        threading.Thread(target=flush, name="flush traces", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_WAIT_S):
                await sent.wait()
        except TimeoutError:
            log.warning("the last traces could not be sent", url=self._url)

    def ended(self, end: Ended) -> None:
        """Make the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if self._tracer is None:
            return
        record = end.record
        clock = _Clock(end.at)
        agent = record.agent
        name = f"{_method(end)} {end.route}" if end.route else _method(end)
        span = self._tracer.start_span(
            name if agent is None else f"invoke_agent {agent}",
            context=_parent(end),
            kind=SpanKind.SERVER if agent is None else SpanKind.INTERNAL,
            attributes=_request_attributes(end),
            start_time=clock.unix_ns(record.started),
        )
        if end.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for attempt in record.attempts:
            if attempt.asked:
                self._attempt(end, attempt, below, clock)
        span.end(clock.unix_ns(end.at))

    def _attempt(self, end: Ended, attempt: Attempt, parent: Context, clock: _Clock) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        assert self._tracer is not None
        answered = attempt.error_code is None
        span: Span = self._tracer.start_span(
            f"chat {_text(attempt.model)}",
            context=parent,
            kind=SpanKind.CLIENT,
            attributes=_attempt_attributes(end, attempt),
            start_time=clock.unix_ns(attempt.started),
        )
        failed = isinstance(end.record.error, UpstreamError) if answered else True
        if failed and attempt.error_code != "cancelled":
            span.set_status(Status(StatusCode.ERROR))
        at = end.at if answered else attempt.started + attempt.duration_ms / 1000
        span.end(clock.unix_ns(at))


class _Clock:
    """Turns times of the monotonic clock into Unix nanoseconds.

    Args:
        now: the monotonic time of about this moment.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._now_ns = time.time_ns()

    def unix_ns(self, at: float) -> int:
        return self._now_ns - int((self._now - at) * 1e9)


def _parent(end: Ended) -> Context:
    """The trace that the client continues (W3C Trace Context); an empty context without one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: end.headers[name] for name in _TRACE_CONTEXT if name in end.headers}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _request_attributes(end: Ended) -> dict[str, Any]:
    record, used = end.record, end.record.settlement
    return _present(
        {
            "http.request.method": _method(end) if record.agent is None else None,
            "http.route": end.route,
            "http.response.status_code": end.status if record.agent is None else None,
            "error.type": end.error_code,
            "sluicegate.request_id": record.request_id,
            "sluicegate.plane": end.plane or None,
            "sluicegate.outcome": str(record.outcome) if record.outcome else None,
            "sluicegate.cost_micro_usd": used.cost_micro_usd if used else None,
            "gen_ai.operation.name": _operation(record),
            "gen_ai.agent.id": record.agent,
            "gen_ai.request.model": record.model,
            "gen_ai.provider.name": record.provider,
        }
    )


def _attempt_attributes(end: Ended, attempt: Attempt) -> dict[str, Any]:
    record = end.record
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": attempt.provider,
        "gen_ai.request.model": attempt.model,
        "gen_ai.request.stream": record.stream,
        "error.type": attempt.error_code or end.error_code,
    }
    used = record.settlement
    if attempt.error_code is None and used is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": used.prompt_tokens,
            "gen_ai.usage.output_tokens": used.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": used.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": used.reasoning_tokens,
        }
    if attempt.error_code is None and record.stream and record.first_byte is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_byte - attempt.started
    return _present(attributes)


def _present(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _text(value) if isinstance(value, str) else value
        for key, value in attributes.items()
        if value is not None
    }


def _text(value: str) -> str:
    """What others chose, short and encodable: a lone surrogate would lose its whole batch."""
    return value[:_TEXT_MAX].encode("utf-8", "replace").decode()


def _operation(record: RequestRecord) -> str | None:
    if record.agent is not None:
        return "invoke_agent"
    return "chat" if record.model else None


def _method(end: Ended) -> str:
    return end.method if end.method in _METHODS else "_OTHER"
