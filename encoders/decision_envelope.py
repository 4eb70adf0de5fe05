"""The error of a compatible service, as its client's client is told it (D1.6, D5.6). [pure]"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from encoders.decision_errors import DecisionError, error
from encoders.json_text import loads

if TYPE_CHECKING:
    from collections.abc import Mapping

STARTING_MS: Final = 1000

_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")
_LONGEST_MESSAGE: Final = 2000
# Of our account with the service, and not of the client's with us. The words are those by which
# clients know that they cannot go on.
_OURS: Final = re.compile("spend|budget|monthly_cap|payment|credit|auth|api_key")
_OUR_STATUSES: Final = (401, 402, 403)
_NOT_OURS: Final = ("media_unpriced",)  # a 403 that is about the input
_WRONG_URL: Final = ("unknown_endpoint", "method_not_allowed", "https_required")
_KEPT_503: Final = ("maintenance", "starting")


def read_failure(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    wait_ms: int | None,
    own_credential: bool,
) -> DecisionError:
    """Return what a client is told of an answer that is no success.

    Its code is kept where it speaks of the client's request. What it says of the credential is
    told on only if the credential was the client's.

    Args:
        headers: case-insensitive or lower-case.
        wait_ms: of its `Retry-After-Ms` or `Retry-After`.
        own_credential: whether the gateway's own credential was sent.
    """
    said = _error(body)
    given = said.get("code")
    code = given if isinstance(given, str) and _CODE.fullmatch(given) else None
    text = said.get("message")
    message = text[:_LONGEST_MESSAGE] if isinstance(text, str) and text else f"status {status}"
    retryable = _retryable(said.get("retryable"), headers.get("x-should-retry", ""))
    if code is None or status < 400 or code in _WRONG_URL:
        return _unnamed(status, message, retryable=retryable, wait_ms=wait_ms)
    if own_credential and code not in _NOT_OURS:
        if status == 429:
            return _limited(message, retryable=retryable, wait_ms=wait_ms)
        if status in _OUR_STATUSES or _OURS.search(code):
            return _unavailable(
                f"the decision service refused the gateway's own credential ({code}); "
                "the operator must mend that",
                retryable=False,
            )
    if status >= 500 and code not in _KEPT_503:
        return _unnamed(status, message, retryable=retryable, wait_ms=wait_ms)
    if code == "starting" and wait_ms is None:
        wait_ms = STARTING_MS  # clients wait for it only if it names a time
    param, details = said.get("param"), said.get("details")
    return DecisionError(
        code=code,
        message=message,
        status=status,
        param=param if isinstance(param, str) else None,
        retryable=retryable or code == "starting",
        retry_after_ms=wait_ms,
        details=details if isinstance(details, dict) else None,
    )


def _unnamed(status: int, message: str, *, retryable: bool, wait_ms: int | None) -> DecisionError:
    """An answer whose status alone says what it is: a proxy's, or a failure of the service."""
    if status == 429:
        return _limited(message, retryable=True, wait_ms=wait_ms)
    if status in (408, 504):
        return error("system_zero_timeout", f"the decision service timed out: {message}")
    if status == 413:
        return error("payload_too_large", f"the decision service refused the size: {message}")
    if status in (400, 422):
        return error("invalid_request", f"the decision service refused the request: {message}")
    failed = status >= 500 and status != 501
    return _unavailable(
        f"the decision service failed: {message}"
        if failed
        else f"the decision service answered {status}: {message}; is its base_url right?",
        retryable=failed or retryable,
        wait_ms=wait_ms,
    )


def _limited(message: str, *, retryable: bool, wait_ms: int | None) -> DecisionError:
    return DecisionError(
        code="capacity_exhausted",
        message=f"the decision service is at its limit: {message}",
        status=429,
        retryable=retryable,
        retry_after_ms=wait_ms,
    )


def _unavailable(message: str, *, retryable: bool, wait_ms: int | None = None) -> DecisionError:
    return DecisionError(
        code="system_zero_unavailable",
        message=message,
        status=503,
        retryable=retryable,
        retry_after_ms=wait_ms if retryable else None,
    )


def _retryable(said: object, header: str) -> bool:
    """D5.5: one of them says so, and neither says no."""
    hint = header.strip().lower()
    return (said is True or hint == "true") and said is not False and hint != "false"


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        parsed = loads(body)
    except ValueError:
        return {}
    found = parsed.get("error") if isinstance(parsed, dict) else None
    return found if isinstance(found, dict) else {"message": found}
