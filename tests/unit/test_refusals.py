"""M1.2, M3.2: what a provider's refusal becomes."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import pytest

from encoders.openai_whole import error_of
from relay.redact import Redactor
from relay.refusals import error_in_success, refusal
from relay.retry_after import retry_after_s

SECRET = "sk-upstream-secret"
NOW = 1_800_000_000.0


def refuse(status: int, body: Any = b"", headers: dict[str, str] | None = None) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return refusal("fake", status, headers or {}, data, redactor=Redactor((SECRET,)), now=NOW)


@pytest.mark.parametrize(
    ("upstream", "status", "code", "fails_over"),
    [
        (400, 400, "invalid_request", False),
        (404, 404, "model_not_found", True),
        (413, 413, "invalid_request", False),
        (422, 422, "invalid_request", False),
        (401, 502, "provider_credentials", True),
        (402, 502, "provider_credentials", True),
        (403, 502, "provider_credentials", True),
        (408, 502, "upstream_error", True),
        (409, 502, "upstream_error", True),
        (425, 502, "upstream_error", True),
        (500, 502, "upstream_error", True),
        (502, 502, "upstream_error", True),
        (504, 502, "upstream_error", True),
        (302, 502, "upstream_error", True),
        (418, 502, "upstream_error", True),
        (429, 429, "rate_limit_exceeded", True),
        (503, 503, "upstream_unavailable", True),
        (529, 503, "upstream_unavailable", True),
    ],
)
def test_statuses(upstream: int, status: int, code: str, fails_over: bool) -> None:
    error = refuse(upstream)
    assert (error.status, error.code, error.fails_over) == (status, code, fails_over)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_the_clients_own_fault_keeps_message_code_type_and_param(status: int) -> None:
    body = {"error": {"message": "bad n", "code": "n_bad", "type": "t_x", "param": "n"}}
    error = refuse(status, body)
    assert (error.message, error.code, error.type, error.param) == ("bad n", "n_bad", "t_x", "n")


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_what_the_provider_says_is_told_without_our_secrets(status: int) -> None:
    error = refuse(status, {"error": {"message": f"you sent {SECRET}"}})
    assert "you sent ***" in error.message
    assert SECRET not in json.dumps(error.raw)
    assert SECRET not in json.dumps(refuse(status, f"<html>{SECRET}".encode()).raw)


def test_a_refused_credential_is_not_the_clients_business() -> None:
    assert "sk-" not in refuse(401, {"error": {"message": "Incorrect key: sk-ab**cd"}}).message


ANTHROPIC = {"type": "error", "request_id": "req_1"}


@pytest.mark.parametrize(
    ("status", "kind", "message", "told"),
    [
        (400, "invalid_request_error", "messages: at least one", (400, "invalid_request")),
        (413, "request_too_large", "Request exceeds the maximum size", (413, "invalid_request")),
        (404, "not_found_error", "model: x", (404, "model_not_found")),
        (401, "authentication_error", "invalid x-api-key", (502, "provider_credentials")),
        (402, "billing_error", "pay", (502, "provider_credentials")),
        (403, "permission_error", "no", (502, "provider_credentials")),
        (429, "rate_limit_error", "slow down", (429, "rate_limit_exceeded")),
        (500, "api_error", "Internal server error", (502, "upstream_error")),
        (504, "timeout_error", "took too long", (502, "upstream_error")),
        (529, "overloaded_error", "Overloaded", (503, "upstream_unavailable")),
    ],
)
def test_errors_of_anthropics(status: int, kind: str, message: str, told: tuple[int, str]) -> None:
    """M1.2, M3.2: in its envelope, also where it comes with status 200."""
    body = {**ANTHROPIC, "error": {"type": kind, "message": message}}
    error = refuse(status, body)
    assert (error.status, error.code) == told
    assert (message in error.message) is (told[1] != "provider_credentials")
    assert error.raw == body
    if status < 500 and told[1] != "provider_credentials" and status != 429:
        assert error.type == kind
    late = error_in_success("fake", json.dumps(body).encode(), redactor=Redactor())
    assert late is not None
    assert (late.status, late.code) == told


@pytest.mark.parametrize(
    "message",
    [
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing",
        "You have reached your specified API usage limits. You will regain access on 2026-12-01",
        "This organization has been disabled.",
    ],
)
def test_an_account_that_cannot_pay_is_not_the_clients_fault(message: str) -> None:
    """M1.2: Anthropic says 400 to it; another candidate may serve."""
    error = refuse(
        400, {**ANTHROPIC, "error": {"type": "invalid_request_error", "message": message}}
    )
    assert (error.status, error.code, error.fails_over) == (502, "provider_credentials", True)
    assert message not in error.message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "30"}, 30),
        ({"retry-after": "1.2"}, 2),
        ({"retry-after": formatdate(NOW + 42, usegmt=True)}, 42),
        ({"retry-after": formatdate(NOW - 42, usegmt=True)}, 0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 2),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9),
        ({"retry-after": "1e9"}, 86_400),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: int | None) -> None:
    """B56: all forms, on 429 and 503."""
    assert retry_after_s(headers, NOW) == seconds
    assert refuse(429, headers=headers).retry_after_s == seconds
    assert refuse(503, headers=headers).retry_after_s == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "m"}}, "m"),
        ({"error": "m"}, "m"),
        ([{"error": {"message": "m"}}], "m"),
        ({"object": "error", "message": "m", "code": 40303}, "m"),
        ({"detail": "m"}, "m"),
        ({"message": "m"}, "m"),
        ({"error": {"msg": "m"}}, "m"),
        ({"detail": [{"loc": ["body"], "msg": "m"}]}, '[{"loc":["body"],"msg":"m"}]'),
    ],
)
def test_spellings_of_errors(body: Any, message: str) -> None:
    error = error_of(body)
    assert error is not None
    assert error.message == message


@pytest.mark.parametrize(
    "body", [{"choices": []}, {"error": None, "choices": []}, {}, [], "x", None, {"id": "x"}]
)
def test_what_is_no_error(body: Any) -> None:
    assert error_of(body) is None


def test_a_success_that_carries_an_error_has_the_status_it_should_have_had() -> None:
    """M3.2; OpenRouter puts the status into `code`."""
    body = json.dumps({"error": {"message": "slow down", "code": 429}}).encode()
    error = error_in_success("fake", body, redactor=Redactor())
    assert error is not None
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    body = b'{"error":{"message":"no","code":"server_error"}}'
    error = error_in_success("fake", body, redactor=Redactor())
    assert error is not None
    assert (error.status, error.code) == (502, "upstream_error")
    assert error_in_success("fake", b'{"choices":[]}', redactor=Redactor()) is None
