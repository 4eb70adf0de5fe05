"""M1.2, M3.2: errors in Google's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relay.redact import Redactor
from relay.refusals import error_in_stream, error_in_success, refusal

NOW = 1_800_000_000.0
TYPE = "type.googleapis.com/google.rpc."


def body(code: int, status: str, *details: dict[str, Any]) -> dict[str, Any]:
    error = {"code": code, "message": "Said by Google.", "status": status}
    return {"error": error | ({"details": list(details)} if details else {})}


def info(reason: str) -> dict[str, Any]:
    return {"@type": f"{TYPE}ErrorInfo", "reason": reason, "domain": "googleapis.com"}


def retry(delay: Any) -> dict[str, Any]:
    return {"@type": f"{TYPE}RetryInfo", "retryDelay": delay}


def refuse(status: int, answer: Any, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = json.dumps(answer).encode()
    return refusal("google", status, named, data, redactor=Redactor(), now=NOW)


@pytest.mark.parametrize("wrapped", [False, True], ids=["object", "list of one"])
@pytest.mark.parametrize(
    ("status", "name"), [(400, "INVALID_ARGUMENT"), (404, "NOT_FOUND"), (400, "OUT_OF_RANGE")]
)
def test_the_clients_own_fault_keeps_googles_name_of_it(
    status: int, name: str, wrapped: bool
) -> None:
    answer = body(status, name)
    error = refuse(status, [answer] if wrapped else answer)
    assert (error.status, error.code, error.message) == (status, name, "Said by Google.")


@pytest.mark.parametrize("reason", ["API_KEY_INVALID", "API_KEY_SERVICE_BLOCKED"])
@pytest.mark.parametrize("status", [400, 403])
def test_a_bad_key_is_the_operators_to_mend(status: int, reason: str) -> None:
    """Google says 400; another candidate may do better."""
    help_ = {"@type": f"{TYPE}Help", "links": []}
    message = {"@type": f"{TYPE}LocalizedMessage", "message": "API key not valid."}
    error = refuse(status, body(status, "INVALID_ARGUMENT", help_, info(reason), message))
    assert (error.status, error.code, error.fails_over) == (502, "provider_credentials", True)


def test_a_place_that_google_does_not_serve_is_the_operators_too() -> None:
    answer = body(400, "FAILED_PRECONDITION")
    assert refuse(400, answer).code == "FAILED_PRECONDITION"  # as for a file that is not ready
    answer["error"]["message"] = "User location is not supported for the API use."
    assert refuse(400, answer).code == "provider_credentials"


def test_another_reason_is_not_about_the_key() -> None:
    error = refuse(400, body(400, "INVALID_ARGUMENT", info("FIELD_INVALID")))
    assert (error.status, error.fails_over) == (400, False)


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [("30s", 30), ("37.82626638s", 38), ("0s", 0), ("soon", None), (30, None), ("", None)],
)
@pytest.mark.parametrize("status", [429, 503])
def test_the_wait_stands_in_the_body(status: int, delay: Any, seconds: int | None) -> None:
    """B56: where no header says it."""
    quota = {"@type": f"{TYPE}QuotaFailure", "violations": [{"quotaValue": "20"}]}
    answer = body(status, "RESOURCE_EXHAUSTED", quota, retry(delay))
    assert refuse(status, answer).retry_after_s == seconds
    assert refuse(status, answer, retry_after="7").retry_after_s == 7


@pytest.mark.parametrize("details", [7, [7], {}, [{"reason": 7, "retryDelay": None}]])
def test_odd_details_are_tolerated(details: Any) -> None:
    answer = body(429, "RESOURCE_EXHAUSTED")
    answer["error"]["details"] = details
    error = refuse(429, answer)
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", None)


def test_an_error_with_status_200() -> None:
    """M3.2: the status that it names is the one that it should have had."""
    answer = json.dumps([body(429, "RESOURCE_EXHAUSTED", retry("5s"))]).encode()
    error = error_in_success("google", answer, redactor=Redactor())
    assert error is not None
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert getattr(error, "retry_after_s", None) == 5
    reply = b'[{"candidates":[{"finishReason":"STOP"}]}]'
    assert error_in_success("google", reply, redactor=Redactor()) is None


def test_an_error_in_a_stream() -> None:
    data = json.dumps(body(503, "UNAVAILABLE")).encode()
    error = error_in_stream("google", data, redactor=Redactor())
    assert error.message == "google failed: Said by Google."
    assert error.code == "upstream_error"
