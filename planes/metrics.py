"""Metrics of one gateway, in the Prometheus text format (O3 `telemetry.metrics`).

Made of finished records, but for the gap between chunks. The label `model` is bounded: slugs of
the configuration, a number of names that a provider has served, and `other`.
"""

from __future__ import annotations

import asyncio
import platform
from time import monotonic
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from planes.errors import HTTP_CODES
from planes.instruments import LAG_EVERY_S, Instruments
from planes.series import Labels, Names
from planes.version import version
from relay.errors import RelayError, UpstreamError
from relay.lifecycle import Outcome
from relay.periodic import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from planes.telemetry import Ended, State
    from relay.record import RequestRecord

UNLISTED_MODELS_MAX: Final = 50
FOREIGN_CODES_MAX: Final = 30
CANCELLED: Final = "cancelled"  # an attempt that a hang-up or a stop ended

_CHAT: Final = "chat"  # gen_ai.operation.name


class Metrics:
    """Counts what happens and renders it.

    Args:
        slugs: models that always have a label value of their own.
        state: read by the gauges.

    Attributes:
        content_type: of what `scrape` returns.
        instruments: every metric but those of the process.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, slugs: Iterable[str], state: State) -> None:
        self._models = Names(slugs, UNLISTED_MODELS_MAX)
        self._codes = Names({*_codes(RelayError), *HTTP_CODES.values()}, FOREIGN_CODES_MAX)
        self._streams: dict[Labels, float] = {}
        self._slept_at = 0.0
        self._sampler = Periodic("sample the event loop's lag", self._sample_lag, LAG_EVERY_S)
        self.instruments = Instruments()
        self._add_gauges(state)
        self._registry = CollectorRegistry()
        for series in self.instruments.all:
            self._registry.register(series)
        ProcessCollector(registry=self._registry)
        self._rendering: asyncio.Task[bytes] | None = None

    def _add_gauges(self, state: State) -> None:
        def one(read: Callable[[], float]) -> Callable[[], dict[Labels, float]]:
            return lambda: {(): read()}

        gauge, inflight = self.instruments.gauge, state.inflight
        gauge(
            "sluicegate_active_streams",
            "Streams whose provider has answered and which have not ended.",
            lambda: self._streams,
            ("model", "provider"),
        )
        gauge(
            "sluicegate_requests_in_flight",
            "Requests that have entered a plane and not left.",
            one(lambda: inflight.running),
        )
        gauge(
            "sluicegate_settlements_pending",
            "Settlements that wait to be written to the store.",
            one(state.unsettled),
        )
        gauge("sluicegate_open_holds", "Requests that hold money.", one(state.open_holds))
        gauge("sluicegate_runs", "Runs that work in this process.", one(state.runs))
        gauge("sluicegate_run_followers", "Clients that follow them live.", one(state.followers))
        gauge(
            "sluicegate_draining",
            "1 from the signal to stop on, else 0.",
            one(lambda: int(inflight.draining)),
        )
        build = (version(), platform.python_version())
        gauge(
            "sluicegate_build_info",
            "Always 1; what runs.",
            lambda: {build: 1},
            ("version", "python_version"),
        )

    def start(self) -> None:
        """Begin to sample the event loop."""
        self._slept_at = monotonic()
        self._sampler.start()

    async def close(self) -> None:
        """Stop. Idempotent."""
        await self._sampler.close()
        if self._rendering is not None:
            await asyncio.wait({self._rendering})

    async def scrape(self) -> bytes:
        """Return everything as text. Scrapes that come while one is rendered get the same."""
        if self._rendering is None:
            # A thousand lines take milliseconds, which streams must not wait for.
            rendering = asyncio.to_thread(generate_latest, self._registry)
            self._rendering = asyncio.create_task(rendering, name="render metrics")
            self._rendering.add_done_callback(self._rendered)
        return await asyncio.shield(self._rendering)

    def _rendered(self, _: asyncio.Task[bytes]) -> None:
        self._rendering = None

    def streaming(self, record: RequestRecord) -> AbstractContextManager[Callable[[], None]]:
        """See `relay.observe.Observer`."""
        model, provider = self._models.learn(record.model or ""), record.provider or ""
        lap = self.instruments.gaps.stopwatch((_CHAT, provider, model))
        return _Streaming(self._streams, (model, provider), lap)

    def ended(self, end: Ended) -> None:
        """Count a request that has ended."""
        record, to = end.record, self.instruments
        model = self._model(record)
        error = self._codes.learn(end.error_code) if end.error_code is not None else ""
        outcome = _outcome(end)
        served = (end.plane, model, record.provider or "")
        to.requests.add((*served, outcome, f"{end.status // 100}xx", error))
        if outcome is Outcome.CLIENT_ABORT:
            stage = "before_output" if record.first_byte is None else "after_output"
            to.aborts.add((*served, stage))
        if record.model is None:
            return
        call = (_CHAT, record.provider or "", model)
        to.duration.observe((*call, error), end.at - record.started)
        if record.stream and record.first_byte is not None:
            to.first_token.observe(call, record.first_byte - record.started)
        self._count_attempts(end, model, error)
        self._count_usage(record, call, served)

    def _model(self, record: RequestRecord) -> str:
        """The label of the record's slug. Only what a provider has served gets a new one."""
        if record.model is None:
            return ""
        was_served = any(attempt.error_code is None for attempt in record.attempts)
        return self._models.learn(record.model) if was_served else self._models.get(record.model)

    def _count_attempts(self, end: Ended, model: str, request_error: str) -> None:
        record, to = end.record, self.instruments
        for attempt in record.attempts:
            if not attempt.asked:
                continue
            call = (_CHAT, attempt.provider, model)
            if attempt.error_code is not None:
                error = self._codes.learn(attempt.error_code)
                to.calls.observe((*call, error), attempt.duration_ms / 1000)
                if error != CANCELLED:
                    to.upstream_errors.add((model, attempt.provider, error, "dial"))
                continue
            to.calls.observe((*call, request_error), end.at - attempt.started)
            if isinstance(record.error, UpstreamError):
                to.upstream_errors.add((model, attempt.provider, request_error, "body"))
            if record.stream and record.first_byte is not None:
                to.first_chunk.observe(call, record.first_byte - attempt.started)

    def _count_usage(self, record: RequestRecord, call: Labels, served: Labels) -> None:
        used, to = record.settlement, self.instruments
        if used is None:
            return
        labels = (*call, str(used.source))
        for counter, tokens in (
            (to.tokens_in, used.prompt_tokens),
            (to.tokens_out, used.completion_tokens),
            (to.tokens_cached, used.cached_tokens),
            (to.tokens_reasoning, used.reasoning_tokens),
        ):
            if tokens:
                counter.add(labels, tokens)
        if used.cost_micro_usd:
            to.cost.add(served, used.cost_micro_usd)

    async def _sample_lag(self) -> None:
        now = monotonic()
        self.instruments.lag.observe((), max(0.0, now - self._slept_at - LAG_EVERY_S))
        self._slept_at = now


class _Streaming:
    """See `Metrics.streaming`; a class, as each stream enters it and generators are dear."""

    __slots__ = ("_labels", "_lap", "_streams")

    def __init__(
        self, streams: dict[Labels, float], labels: Labels, lap: Callable[[], None]
    ) -> None:
        self._streams = streams
        self._labels = labels
        self._lap = lap

    def __enter__(self) -> Callable[[], None]:
        self._streams[self._labels] = self._streams.get(self._labels, 0) + 1
        return self._lap

    def __exit__(self, *_: object) -> None:
        self._streams[self._labels] -= 1


def _outcome(end: Ended) -> Outcome:
    """How a request ended, also one that never reached its exchange."""
    if end.record.outcome is not None:
        return end.record.outcome
    if end.status < 400:
        return Outcome.COMPLETED
    return Outcome.CLIENT_ABORT if end.status == 499 else Outcome.REJECTED


def _codes(error: type[RelayError]) -> Iterator[str]:
    yield error.code
    for kind in error.__subclasses__():
        yield from _codes(kind)
    yield CANCELLED
