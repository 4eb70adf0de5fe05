"""D5.5, D5.6: what a backend's failure is to a client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from encoders.decision_envelope import read_failure
from encoders.decision_reply import UnusableReply
from relay.deciders.failures import by_status, failure_of, timed_out, unusable
from relay.errors import (
    ModelNotFound,
    RelayError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamTruncated,
    UpstreamUnreachable,
)
from relay.redact import Redactor
from relay.refusals import refusal
from relay.retry_after import retry_after_ms, retry_after_s

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError

# By these the published client ends for good (D5.6).
ENDS = ("spend", "budget", "monthly_cap", "payment", "credit", "auth", "api_key")


def facts(found: DecisionError) -> tuple[str, int, bool, int | None]:
    return found.code, found.status, found.retryable, found.retry_after_ms


def upstream(status: int, error: Any = "no", **headers: str) -> RelayError:
    body = json.dumps({"error": error}).encode()
    return refusal("p", status, headers, body, redactor=Redactor(), now=0.0)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (upstream(401), ("system_zero_unavailable", 503, False, None)),
        (upstream(402), ("system_zero_unavailable", 503, False, None)),
        (upstream(403), ("system_zero_unavailable", 503, False, None)),
        (upstream(404), ("system_zero_unavailable", 503, False, None)),
        (upstream(429), ("capacity_exhausted", 429, True, None)),
        (upstream(429, **{"retry-after": "7"}), ("capacity_exhausted", 429, True, 7000)),
        (upstream(500), ("system_zero_unavailable", 503, True, None)),
        (upstream(503), ("system_zero_unavailable", 503, True, None)),
        (
            upstream(503, **{"retry-after": "2"}),
            ("system_zero_unavailable", 503, True, 2000),
        ),
        (upstream(503, {"message": "Loading model"}), ("starting", 503, True, 1000)),
        (upstream(503, {"message": "Loading model"}, **{"retry-after": "4"}),
         ("starting", 503, True, 4000)),
        (UpstreamUnreachable("refused"), ("system_zero_unavailable", 503, True, None)),
        (UpstreamUnreachable("starts", retry_after_s=1), ("starting", 503, True, 1000)),
        (UpstreamTruncated("cut"), ("system_zero_unavailable", 503, True, None)),
        (UpstreamTimeout("slow"), ("system_zero_timeout", 504, False, None)),
        (ModelNotFound("the provider x is off"), ("system_zero_unavailable", 503, False, None)),
        (upstream(400), ("invalid_request", 400, False, None)),
        (upstream(422), ("invalid_request", 400, False, None)),
        (upstream(413), ("state_too_large", 413, False, None)),
        (upstream(400, "this model does not support logprobs"),
         ("system_zero_unavailable", 503, False, None)),
    ],
)  # fmt: skip
def test_d5_6_a_failed_request(failure: RelayError, expected: tuple[Any, ...]) -> None:
    assert facts(failure_of(failure)) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (301, ("system_zero_unavailable", 503, False, None)),
        (405, ("system_zero_unavailable", 503, False, None)),
        (408, ("system_zero_timeout", 504, False, None)),
        (429, ("capacity_exhausted", 429, True, None)),
        (500, ("system_zero_unavailable", 503, True, None)),
        (501, ("system_zero_unavailable", 503, False, None)),
        (502, ("system_zero_unavailable", 503, True, None)),
        (504, ("system_zero_timeout", 504, False, None)),
    ],
)
def test_d5_6_statuses_that_the_models_plane_does_not_tell_apart(
    status: int, expected: tuple[Any, ...]
) -> None:
    failure = upstream(status)
    assert isinstance(failure, UpstreamError)
    assert facts(failure_of(by_status(failure, status))) == expected


def test_d5_6_an_error_in_a_success_and_no_answer_at_all_may_pass() -> None:
    for status in (200, None):
        found = failure_of(by_status(UpstreamError("it failed"), status))
        assert facts(found) == ("system_zero_unavailable", 503, True, None)


@pytest.mark.parametrize(
    "error",
    [
        # llama.cpp, OpenAI, vLLM, Mistral, Groq, Anthropic
        {"message": "request (20031 tokens) exceeds the available context size (2048 tokens), try "
                    "increasing it", "type": "exceed_context_size_error"},
        {"message": "no", "code": "context_length_exceeded"},
        "This model's maximum context length is 4096 tokens.",
        "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
        "Please reduce the length of the messages or completion.",
        "prompt is too long: 208310 tokens > 200000 maximum",
    ],
)  # fmt: skip
def test_d6_5_an_overflow_of_the_context_is_a_state_that_is_too_large(error: Any) -> None:
    found = failure_of(upstream(400, error))
    assert (found.code, found.status, found.param) == ("state_too_large", 413, "state")


def test_other_failures() -> None:
    assert facts(timed_out(1.5)) == ("system_zero_timeout", 504, False, None)
    assert facts(unusable(UnusableReply("x"))) == ("system_zero_unavailable", 503, False, None)
    assert facts(failure_of(upstream(429), wait_ms=250)) == ("capacity_exhausted", 429, True, 250)


def service(
    status: int,
    code: str | None = None,
    *,
    own: bool = True,
    wait_ms: int | None = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> DecisionError:
    body = json.dumps({"error": {"code": code, "message": "said"} | more, "request_id": "r"})
    return read_failure(status, headers or {}, body.encode(), wait_ms=wait_ms, own_credential=own)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "invalid_api_key"), (403, "auth_error"), (403, "account_suspended"),
        (402, "insufficient_credits"), (403, "https_required"),
    ],
)  # fmt: skip
def test_d5_6_a_refused_credential_of_ours_is_not_the_clients(status: int, code: str) -> None:
    found = service(status, code)
    assert facts(found) == ("system_zero_unavailable", 503, False, None)
    if code != "https_required":  # about the URL, whoever's the credential is
        assert facts(service(status, code, own=False)) == (code, status, False, None)


def test_d5_6_limits_of_our_account_are_not_the_clients() -> None:
    found = service(429, "monthly_cap_reached", retryable=False, wait_ms=5)
    assert facts(found) == ("capacity_exhausted", 429, False, 5)
    found = service(429, "rate_limit_exceeded", retryable=True, wait_ms=250)
    assert facts(found) == ("capacity_exhausted", 429, True, 250)
    details = {"cause": "key_rate"}
    found = service(
        429, "rate_limit_exceeded", own=False, retryable=True, wait_ms=250, details=details
    )
    assert facts(found) == ("rate_limit_exceeded", 429, True, 250)
    assert found.details == details


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_request"), (403, "media_unpriced"), (404, "model_not_found"),
        (404, "audio_not_available"), (413, "state_too_large"), (413, "payload_too_large"),
        (422, "invalid_criteria"), (422, "injection_suspected"), (400, "idempotency_key_reuse"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("own", [True, False])
def test_d5_6_what_is_about_the_request_is_told_as_it_is(status: int, code: str, own: bool) -> None:
    found = service(status, code, own=own, param="questions.q")
    assert facts(found) == (code, status, False, None)
    assert (found.param, found.message) == ("questions.q", "said")


def test_d5_5_it_may_be_tried_again_if_one_says_so_and_none_says_no() -> None:
    conflict = ("idempotency_conflict", 409)
    yes, no = {"x-should-retry": "true"}, {"x-should-retry": "false"}
    for retryable, headers, expected in (
        (True, {}, True),
        (None, yes, True),
        (True, no, False),
        (False, yes, False),
        (None, {}, False),
    ):
        found = service(
            409, "idempotency_conflict", headers=headers, retryable=retryable, wait_ms=900
        )
        assert facts(found) == (*conflict, expected, 900)


def test_d5_6_failures_of_the_service() -> None:
    assert facts(service(503, "maintenance", wait_ms=300_000))[:2] == ("maintenance", 503)
    assert facts(service(503, "starting", wait_ms=2000)) == ("starting", 503, True, 2000)
    assert facts(service(503, "starting")) == ("starting", 503, True, 1000)
    assert facts(service(503, "service_unavailable", wait_ms=70)) == (
        "system_zero_unavailable", 503, True, 70,
    )  # fmt: skip
    assert facts(service(500, "internal_error"))[:3] == ("system_zero_unavailable", 503, True)
    assert facts(service(504, "system_zero_timeout")) == ("system_zero_timeout", 504, False, None)
    assert facts(service(404, "unknown_endpoint")) == ("system_zero_unavailable", 503, False, None)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (301, ("system_zero_unavailable", 503, False, None)),
        (400, ("invalid_request", 400, False, None)),
        (401, ("system_zero_unavailable", 503, False, None)),
        (404, ("system_zero_unavailable", 503, False, None)),
        (413, ("payload_too_large", 413, False, None)),
        (429, ("capacity_exhausted", 429, True, 40)),
        (501, ("system_zero_unavailable", 503, False, None)),
        (502, ("system_zero_unavailable", 503, True, 40)),
        (503, ("system_zero_unavailable", 503, True, 40)),
        (504, ("system_zero_timeout", 504, False, None)),
    ],
)
def test_an_answer_that_is_no_envelope(status: int, expected: tuple[Any, ...]) -> None:
    """A proxy's page, or a server of another kind: the status alone says what it is."""
    for body in (b"<html>", b"[]", b'{"error":"text"}', b'{"error":{"code":"No Code"}}'):
        for own in (True, False):
            found = read_failure(status, {}, body, wait_ms=40, own_credential=own)
            assert facts(found) == expected, body


@pytest.mark.parametrize("status", [*range(300, 309), *range(400, 430), 500, 501, 502, 503, 504])
def test_d5_6_no_failure_with_our_credential_ends_the_client(status: int) -> None:
    for code in (None, "invalid_api_key", "auth_error", "monthly_cap_reached", "x"):
        found = service(status, code)
        assert not any(word in found.code for word in ENDS)
        assert found.status not in (401, 402, 403)


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2000),
        ({"retry-after": "0.25"}, 250),
        ({"retry-after-ms": "40.2", "retry-after": "9"}, 41),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9000),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:30 GMT"}, 20_000),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:03 GMT"}, 0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "999999"}, 86_400_000),
    ],
)
def test_d5_5_the_wait_that_a_backend_names(headers: dict[str, str], wait_ms: int | None) -> None:
    assert retry_after_ms(headers, 10.0) == wait_ms
    seconds = retry_after_s(headers, 10.0)
    assert seconds == (None if wait_ms is None else -(-wait_ms // 1000))
