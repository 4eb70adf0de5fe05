"""The envelope of the decision plane (D1.6) and its limits (D1.7, D3)."""

from __future__ import annotations

import json

import pytest

from encoders.decision_errors import STATUS, DecisionError, error
from planes.settings.decision import Decision
from relay.decisions.limits import ADVERTISED, DecisionLimits

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "api_error",
}


@pytest.mark.parametrize("code", sorted(STATUS))
def test_d1_6_the_type_follows_from_the_status(code: str) -> None:
    wanted = TYPES.get(STATUS[code], "invalid_request_error")
    if code == "media_unpriced":
        wanted = "invalid_request_error"
    assert error(code, "x").type == wanted


def test_d1_6_the_envelope() -> None:
    problem = error(
        "stream_limit_exceeded", "full", retry_after_ms=1200, details={"limit": 1}, param=None
    )
    assert json.loads(problem.body("req_1")) == {
        "error": {
            "message": "full",
            "type": "rate_limit_error",
            "param": None,
            "code": "stream_limit_exceeded",
            "retryable": True,
            "details": {"limit": 1},
        },
        "request_id": "req_1",
    }
    assert list(problem.envelope("r")["error"]) == [
        "message", "type", "param", "code", "retryable", "details",
    ]  # fmt: skip


def test_d1_6_no_details_no_member() -> None:
    assert "details" not in error("invalid_request", "x").envelope("r")["error"]


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, "0"), (1, "1"), (1000, "1"), (1001, "2"), (300_000, "300")]
)
def test_d1_6_retry_headers_agree(milliseconds: int, seconds: str) -> None:
    problem = error("service_unavailable", "x", retry_after_ms=milliseconds)
    assert problem.headers() == {
        "x-should-retry": "true",
        "Retry-After": seconds,
        "Retry-After-Ms": str(milliseconds),
    }
    assert problem.retryable


def test_d1_6_without_a_wait() -> None:
    assert error("invalid_api_key", "x").headers() == {"x-should-retry": "false"}
    patient = DecisionError("starting", "x", 503, retryable=True)
    assert patient.retry_after is None
    assert patient.headers() == {
        "x-should-retry": "true",
        "Retry-After": "1",
        "Retry-After-Ms": "1000",
    }


def test_limits_have_the_advertised_ones_first() -> None:
    assert len(DecisionLimits().advertised()) == ADVERTISED == 24


def test_limits_are_replaced_by_name() -> None:
    limits = DecisionLimits.of({"max_streams_per_process": 4, "min_interval_ms": 0})
    assert limits.advertised()["max_streams_per_process"] == 4
    assert limits.idle_timeout_ms == 120_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_stream": 1}, "no limit 'max_stream'"),
        ({"max_events": 0}, "max_events must be more than 0"),
        ({"idle_timeout_ms": 1.5}, "idle_timeout_ms must be a whole number"),
        ({"retry_delay_ms": -1}, "retry_delay_ms must be more than 0"),
    ],
)
def test_limits_that_make_no_sense(overrides: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecisionLimits.of(overrides)


def test_limits_come_from_the_configuration() -> None:
    settings = Decision.model_validate(
        {"limits": {"event_burst": 20.0, "max_events_per_second": 2.5}}
    )
    limits = DecisionLimits.of(settings.limits)
    assert (limits.event_burst, limits.max_events_per_second) == (20, 2.5)
    assert type(limits.event_burst) is int
