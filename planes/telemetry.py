"""Who is told of finished requests and running streams: metrics and traces (O3 `telemetry`).

Both are made of the finished record, in one place. Neither is imported unless it is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from relay.observe import UNOBSERVED, Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from planes.metrics import Metrics
    from planes.settings import Settings
    from planes.tracing import Tracing
    from relay.inflight import InFlight
    from relay.record import RequestRecord

log = structlog.get_logger("sluicegate")

# The plane of a route by how it begins; what is none of these is of no plane.
_PLANES: Final = (("/v1/", "models"), ("/api/v1/", "models"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One request, or one call of a model by an agent, that has ended.

    Attributes:
        record: all that is known of it.
        at: when it ended, of the monotonic clock as `record.started`.
        status: as logged: of a stream that failed, that of its error.
        error_code: why it failed; None if it did not.
        method: None of an agent's call of a model, which is no HTTP request.
        route: the path with its parameters' names; None where nothing is mounted.
        headers: of the request; for its trace context alone.
    """

    record: RequestRecord
    at: float
    method: str | None
    route: str | None
    status: int
    error_code: str | None
    headers: Mapping[str, str]

    @property
    def plane(self) -> str:
        """The plane that was asked; empty for none. Of an agent's call, that of its run."""
        if self.record.agent is not None:
            return self.record.plane
        route = self.route or ""
        return next((plane for start, plane in _PLANES if route.startswith(start)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the gauges read, from a thread of their own.

    Attributes:
        unsettled: settlements that are not in the store yet. open_holds: of this process.
        runs, followers: runs that work in this process, and clients that follow them live.
    """

    inflight: InFlight
    unsettled: Callable[[], int]
    open_holds: Callable[[], int]
    runs: Callable[[], int]
    followers: Callable[[], int]


class _Listener(Protocol):
    def ended(self, end: Ended) -> None:
        """Take note; must not block."""


class Telemetry:
    """Metrics and traces of one gateway, as far as they are on.

    Args:
        settings: the whole configuration. state: read by the gauges.
    """

    def __init__(self, settings: Settings, state: State) -> None:
        self.metrics: Metrics | None = None
        self._tracing: Tracing | None = None
        self._listeners: list[_Listener] = []
        self._observer: Observer = UNOBSERVED
        if settings.telemetry.metrics:
            from planes.metrics import Metrics  # 40 ms that nobody waits for who has them off

            self.metrics = self._observer = Metrics(settings.models, state)
            self._listeners.append(self.metrics)
        if settings.telemetry.otlp_endpoint is not None:
            from planes.tracing import Tracing

            self._tracing = Tracing(settings.telemetry.otlp_endpoint)
            self._listeners.append(self._tracing)

    async def start(self) -> None:
        """Begin.

        Raises:
            ExtraMissing: traces are asked for and their library is not installed.
        """
        if self._tracing is not None:
            self._tracing.start()
        if self.metrics is not None:
            self.metrics.start()

    async def close(self) -> None:
        """Stop; sends what is left of the traces, for a bounded time. Idempotent."""
        if self.metrics is not None:
            await self.metrics.close()
        if self._tracing is not None:
            await self._tracing.close()

    def streaming(self, record: RequestRecord) -> AbstractContextManager[Callable[[], None] | None]:
        """See `relay.observe.Observer`."""
        return self._observer.streaming(record)

    def ended(self, end: Ended) -> None:
        """Note a request that has ended. Never raises: what is measured must not suffer."""
        for listener in self._listeners:
            try:
                listener.ended(end)
            except Exception:  # a hang-up's cancellation may pass through here
                log.exception("fault", request_id=end.record.request_id, path=end.route)
