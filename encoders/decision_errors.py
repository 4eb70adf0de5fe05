"""Refusals and failures of the decision plane: one value, its envelope, its headers (D1.6, D5.5).

The same value is an HTTP answer, an `error` frame and what a backend returns. Its type follows
from status and code, and `error.retryable`, `x-should-retry` and `retry.should_retry` are one flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSAID_WAIT_MS: Final = 1000  # a frame says null for it, which D5.5 reads as this
# Codes whose type is not the one of their status.
_TYPE_BY_CODE: Final[Mapping[str, str]] = {"media_unpriced": "invalid_request_error"}
_TYPE_BY_STATUS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    500: "api_error",
    502: "api_error",
    504: "api_error",
}
STATUS: Final[Mapping[str, int]] = {
    "account_suspended": 403,
    "audio_not_available": 404,
    "auth_error": 403,
    "capacity_exhausted": 429,
    "committee_not_available": 404,
    "concurrency_limit_exceeded": 429,
    "deliberate_not_available": 404,
    "document_not_available": 404,
    "idempotency_conflict": 409,
    "idempotency_key_reuse": 400,
    "idempotency_replay_unavailable": 409,
    "idempotency_unavailable": 503,
    "image_not_available": 404,
    "insufficient_credits": 402,
    "internal_error": 500,
    "invalid_api_key": 401,
    "invalid_criteria": 422,
    "invalid_idempotency_key": 400,
    "invalid_request": 400,
    "invalid_trace_header": 400,
    "limiter_unavailable": 503,
    "maintenance": 503,
    "media_decode_failed": 422,
    "media_too_large": 413,
    "media_unpriced": 403,
    "media_unsupported": 400,
    "method_not_allowed": 405,
    "model_not_found": 404,
    "payload_too_large": 413,
    "questions_too_large": 413,
    "rate_limit_exceeded": 429,
    "service_unavailable": 503,
    "starting": 503,
    "state_too_large": 413,
    "stream_already_started": 409,
    "stream_event_order": 409,
    "stream_invalid_message": 400,
    "stream_limit_exceeded": 429,
    "stream_not_started": 400,
    "stream_state_type": 400,
    "stream_upgrade_required": 426,
    "stream_version_mismatch": 409,
    "system_zero_timeout": 504,
    "system_zero_unavailable": 503,
    "unknown_endpoint": 404,
    "video_not_available": 404,
}


@dataclass(frozen=True, slots=True)
class DecisionError:
    """One refusal or failure.

    Attributes:
        code: the public code.
        message: for the client; never holds a secret.
        status: HTTP status, 400 to 599.
        param: the field at fault, or None.
        retryable: may the same be sent again? The flag of D1.6.
        retry_after_ms: the wait in whole milliseconds, `Retry-After-Ms` before `Retry-After`;
            None if there is none.
        details: more for a program, or None.
    """

    code: str
    message: str
    status: int
    param: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None
    details: Mapping[str, Any] | None = None

    @property
    def type(self) -> str:
        """The `error.type` of D1.6."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        return _TYPE_BY_CODE.get(self.code) or _TYPE_BY_STATUS.get(self.status, default)

    @property
    def retry_after(self) -> str | None:
        """`Retry-After`: whole seconds, rounded up; None if there is no wait."""
        return None if self.retry_after_ms is None else _seconds(self.retry_after_ms)

    def envelope(self, request_id: str) -> dict[str, Any]:
        """The body of D1.6; `details` only where there are any."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "retryable": self.retryable,
        }
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"error": error, "request_id": request_id}

    def body(self, request_id: str) -> bytes:
        """The envelope as JSON."""
        return dumps(self.envelope(request_id))

    def headers(self) -> dict[str, str]:
        """The retry headers of an HTTP answer (D1.6): what may be tried again says when."""
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        wait_ms = self.retry_after_ms
        if wait_ms is None and self.retryable:
            wait_ms = _UNSAID_WAIT_MS
        if wait_ms is not None:
            headers["Retry-After"] = _seconds(wait_ms)
            headers["Retry-After-Ms"] = str(wait_ms)
        return headers


def error(
    code: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_ms: int | None = None,
    details: Mapping[str, Any] | None = None,
) -> DecisionError:
    """An error of a known code, with the status of `STATUS`; retryable if it names a wait.

    Raises:
        KeyError: the code is not in the table.
    """
    return DecisionError(
        code=code,
        message=message,
        status=STATUS[code],
        param=param,
        retryable=retry_after_ms is not None,
        retry_after_ms=retry_after_ms,
        details=details,
    )


def _seconds(wait_ms: int) -> str:
    return str(-(-wait_ms // 1000))
