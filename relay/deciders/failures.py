"""What a backend's failure is to the client that asked for a decision (D5.5, D5.6). [pure]

A client ends for good on what it takes for a fault of its own account: so a refusal of *our*
credential, a wrong URL and a server that is down are one thing to it, 503, and the message says
which. What the same request would meet again is not retryable.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError, error
from relay.errors import (
    ModelNotFound,
    ProviderCredentials,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnavailable,
    UpstreamUnreachable,
)

if TYPE_CHECKING:
    from encoders.decision_reply import UnusableReply
    from relay.errors import RelayError

LOADING_MS: Final = 1000

# In the words of llama.cpp, OpenAI, vLLM, Mistral, Groq, Anthropic, Google and Ollama.
_OVERFLOW: Final = re.compile(
    r"context.{0,3}(length|size|window)|maximum context|reduce the length|prompt is too long"
    r"|maximum number of (input )?tokens|too many (input )?tokens|exceed\w* the .{0,20}context",
    re.IGNORECASE,
)
_LOADING: Final = re.compile(r"\bloading\b", re.IGNORECASE)
_LOGPROBS: Final = re.compile("logprobs", re.IGNORECASE)


def timed_out(seconds: float) -> DecisionError:
    """The backend took too long."""
    return error("system_zero_timeout", f"the decision backend gave no answer within {seconds:g} s")


def unusable(problem: UnusableReply) -> DecisionError:
    """The backend's answer is none: another would hardly be better."""
    return unavailable(f"the decision backend's reply cannot be used: {problem}", retryable=False)


def unavailable(
    message: str, *, retryable: bool, retry_after_ms: int | None = None
) -> DecisionError:
    """The backend does not serve."""
    problem = error("system_zero_unavailable", message, retry_after_ms=retry_after_ms)
    return replace(problem, retryable=retryable)


def failure_of(failure: RelayError, *, wait_ms: int | None = None) -> DecisionError:
    """Return what the client is told of a failed request to a backend.

    Args:
        wait_ms: how long the backend asks to wait; None takes `failure.retry_after_s`.
    """
    if wait_ms is None and failure.retry_after_s is not None:
        wait_ms = failure.retry_after_s * 1000
    match failure:
        case UpstreamRefused():
            return _refused(failure)
        case ModelNotFound() | ProviderCredentials() | UpstreamProtocolError():
            return unavailable(failure.message, retryable=False)
        case UpstreamTimeout():
            return error("system_zero_timeout", failure.message)
        case UpstreamRateLimited():
            limited = error("capacity_exhausted", failure.message, retry_after_ms=wait_ms)
            return replace(limited, retryable=True)
        case UpstreamUnreachable() if wait_ms is not None:  # it is started, and will be up
            return error("starting", failure.message, retry_after_ms=wait_ms)
        case UpstreamUnavailable() if _LOADING.search(failure.message):
            return error("starting", failure.message, retry_after_ms=wait_ms or LOADING_MS)
        case _:
            return unavailable(failure.message, retryable=True, retry_after_ms=wait_ms)


def by_status(failure: UpstreamError, status: int | None) -> UpstreamError:
    """Return the failure, told apart further by its HTTP status where every plane but this one
    takes several for the same: a time-out, and an answer that another request would get too.
    """
    if status in (408, 504):
        return UpstreamTimeout(failure.message)
    if (
        type(failure) is UpstreamError
        and status is not None
        and (300 <= status < 500 or status == 501)
    ):
        return UpstreamProtocolError(f"{failure.message}; is its base_url right?")
    return failure


def _refused(failure: UpstreamRefused) -> DecisionError:
    """A 400, 404, 413 or 422: the state's size, the client's input, or a setting of ours."""
    said = f"{failure.message} {failure.code} {failure.type}".replace("_", " ")
    if failure.status == 413 or _OVERFLOW.search(said):
        return error(
            "state_too_large",
            f"the state is too large for the decision model: {failure.message}",
            param="state",
        )
    if failure.status == 404 or _LOGPROBS.search(said):
        return unavailable(failure.message, retryable=False)
    return error("invalid_request", f"the decision model refused the request: {failure.message}")
