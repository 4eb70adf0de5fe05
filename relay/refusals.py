"""What a provider's refusal becomes, decided in one place. [pure] Rules M1.2, M3.2, M3.3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import loads
from encoders.openai_whole import ErrorBody, error_of
from relay.errors import (
    ProviderCredentials,
    Scope,
    UpstreamError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamUnavailable,
)
from relay.retry_after import retry_after_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.redact import Redactor

_CLIENT_FAULT: Final = frozenset({400, 404, 413, 422})
_AT_ONCE: Final = _CLIENT_FAULT - {404}  # another candidate, and another minute, mend nothing
_OUR_CREDENTIAL: Final = frozenset({401, 402, 403})
_BUSY: Final = frozenset({503, 529})
_RAW_BYTES_MAX: Final = 2000
# A 400 that is the operator's to mend: Anthropic and Google have no code of its own for these.
_ACCOUNT_FAULTS: Final = (
    "credit balance is too low",
    "reached your specified api usage limits",
    "organization has been disabled",
    "user location is not supported",
    "free tier is not available",
)


def refusal(
    provider: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    redactor: Redactor,
    now: float,
) -> UpstreamError:
    """Return the error for a reply that is not a success.

    Args:
        provider: its canonical id. status: its HTTP status.
        headers: case-insensitive or lower-case. body: as far as it was read.
        now: Unix seconds.
    """
    error, raw = _read(body, redactor)
    said = error.message if error else ""
    if status == 400 and any(fault in said.lower() for fault in _ACCOUNT_FAULTS):
        status = 402
    if status in _OUR_CREDENTIAL or (error and error.bad_credential):
        refused = ProviderCredentials(
            f"{provider} refused the gateway's own credential (status {status}); "
            "the operator must fix that provider's api_key or account",
            raw=raw,
        )
        if status == 403:  # more often of one model, or of what is asked of it, than of the key
            refused.cools = Scope.MODEL
        return refused
    if status in _CLIENT_FAULT:
        hint = "; is its base_url right?" if status == 404 else ""
        return UpstreamRefused(
            said or f"{provider} refused the request with status {status}{hint}",
            status=status,
            code=error.code if error else None,
            type_=error.type if error else None,
            param=error.param if error else None,
            raw=raw,
        )
    wait = retry_after_s(headers, now)
    if wait is None and error and error.retry_after:
        wait = retry_after_s({"retry-after": error.retry_after}, now)
    message = f"{provider} answered {status}" + (f": {said}" if said else "")
    if status == 429:
        return UpstreamRateLimited(message, raw=raw, retry_after_s=wait)
    if status in _BUSY:
        return UpstreamUnavailable(message, raw=raw, retry_after_s=wait)
    return UpstreamError(message, raw=raw)


def error_in_success(provider: str, body: bytes, *, redactor: Redactor) -> UpstreamError | None:
    """Return the error that a 200 with a JSON body carries, None if it carries none (M3.2)."""
    try:
        if error_of(loads(body)) is None:
            return None
    except ValueError:
        return None
    error, raw = _read(body, redactor)
    if error is None:
        return None
    if error.status is not None:  # the status that this reply should have had
        return refusal(provider, error.status, {}, body, redactor=redactor, now=0.0)
    return UpstreamError(f"{provider} failed: {error.message}", raw=raw)


def error_in_stream(provider: str, data: bytes, *, redactor: Redactor) -> UpstreamError:
    """Return the error that an error event of a stream carries; after the first byte its code is
    `upstream_error`, whatever status the provider means by it (M3.4).
    """
    error, raw = _read(data, redactor)
    message = f"{provider} failed: {error.message}" if error else f"{provider} sent an error event"
    failure = UpstreamError(message, raw=raw)
    if error is not None and error.status in _AT_ONCE:
        failure.cools = Scope.NOTHING
    return failure


def error_in_first_event(provider: str, data: bytes, *, redactor: Redactor) -> UpstreamError:
    """Return the error that the first event of a stream carries while nothing has been sent: what
    a reply with the status that it names would have been (M3.3).
    """
    error, _ = _read(data, redactor)
    if error is not None and error.status is not None:
        return refusal(provider, error.status, {}, data, redactor=redactor, now=0.0)
    return error_in_stream(provider, data, redactor=redactor)


def _read(body: bytes, redactor: Redactor) -> tuple[ErrorBody | None, Any]:
    """Return the error in `body`, if there is one, and what may stand in `metadata.raw`; both
    without our secrets.
    """
    try:
        parsed = redactor.value(loads(body))
    except (ValueError, RecursionError):
        return None, excerpt(body, redactor, _RAW_BYTES_MAX) or None
    raw = parsed if len(body) <= _RAW_BYTES_MAX else excerpt(body, redactor, _RAW_BYTES_MAX)
    return error_of(parsed), raw


def excerpt(data: bytes, redactor: Redactor, size: int) -> str:
    """Return the beginning of what a provider sent, without our secrets."""
    return redactor.data(data)[:size].decode("utf-8", "replace")
