"""Every metric of the gateway but those of its process: name, meaning, labels, buckets.

Names of OpenTelemetry's GenAI conventions (v0.1.0) where they have one, in their Prometheus
spelling. docs/metrics.md is the same list for its readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planes.series import Counters, Gauges, Histograms, Labels, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LAG_EVERY_S: Final = 0.5

_CALL: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_ENDED_CALL: Final = (*_CALL, "error_type")
_TOKENS: Final = (*_CALL, "source")
_SERVED: Final = ("plane", "model", "provider")
# The bounds that the conventions recommend, and a few more on the side where we need them.
_DURATIONS: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68),
)
_GAPS: Final = (0.001, 0.0025, 0.005, *_DURATIONS[:14])
_FIRST_TOKENS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0),
)
_LAGS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_USAGE: Final = "gen_ai_client_inference_usage"


class Instruments:
    """The metrics, empty.

    Attributes:
        all: every one of them, in the order in which they are written.
    """

    def __init__(self) -> None:
        self.all: list[Series] = []
        self._requests()
        self._calls()
        self._tokens()
        self.lag = self._histogram(
            "sluicegate_event_loop_lag_seconds",
            f"How late the event loop was, sampled each {LAG_EVERY_S:g} s.",
            _LAGS,
        )

    def gauge(
        self,
        name: str,
        text: str,
        read: Callable[[], Mapping[Labels, float]],
        labels: tuple[str, ...] = (),
    ) -> None:
        """Add a gauge; `read` is called in a thread of its own."""
        self.all.append(Gauges(name, text, read, labels))

    def _requests(self) -> None:
        self.requests = self._counter(
            "sluicegate_requests_total",
            "Requests that have ended, probes and scrapes left out.",
            (*_SERVED, "outcome", "status_class", "error_code"),
        )
        self.duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's head to its end.",
            _DURATIONS,
            _ENDED_CALL,
        )
        self.first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a streaming request's head to the first bytes of its answer.",
            _FIRST_TOKENS,
            _CALL,
        )
        self.aborts = self._counter(
            "sluicegate_client_aborts_total",
            "Requests whose client hung up, before or after the first bytes of the answer.",
            (*_SERVED, "stage"),
        )
        self.cost = self._counter(
            "sluicegate_cost_micro_usd_total",
            "Cost of settled requests in millionths of a US dollar, trials included.",
            _SERVED,
        )

    def _calls(self) -> None:
        self.calls = self._histogram(
            "gen_ai_client_inference_duration_seconds",
            "One attempt at a provider, from dialling to its failure or the request's end.",
            _DURATIONS,
            _ENDED_CALL,
        )
        self.first_chunk = self._histogram(
            "gen_ai_client_inference_time_to_first_chunk_seconds",
            "Of a stream, from dialling the provider that answered to its first bytes.",
            _FIRST_TOKENS,
            _CALL,
        )
        self.gaps = self._histogram(
            "gen_ai_client_inference_time_per_output_chunk_seconds",
            "Of a stream, between reads that gave output; chunks of one read are one.",
            _GAPS,
            _CALL,
        )
        self.upstream_errors = self._counter(
            "sluicegate_upstream_errors_total",
            "Attempts that a provider failed, while dialled or in the body of its answer.",
            ("model", "provider", "error_code", "stage"),
        )

    def _tokens(self) -> None:
        # `source` is ours: whether the provider reported the count or it is characters / 4.
        self.tokens_in = self._counter(
            f"{_USAGE}_input_tokens_total", "Prompt tokens, cached ones included.", _TOKENS
        )
        self.tokens_out = self._counter(
            f"{_USAGE}_output_tokens_total",
            "Completion tokens, those of reasoning included.",
            _TOKENS,
        )
        self.tokens_cached = self._counter(
            f"{_USAGE}_cache_read_input_tokens_total",
            "Prompt tokens that the provider read from its cache.",
            _TOKENS,
        )
        self.tokens_reasoning = self._counter(
            f"{_USAGE}_reasoning_output_tokens_total",
            "Completion tokens of reasoning.",
            _TOKENS,
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counters:
        made = Counters(name, text, labels)
        self.all.append(made)
        return made

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histograms:
        made = Histograms(name, text, bounds, labels)
        self.all.append(made)
        return made
