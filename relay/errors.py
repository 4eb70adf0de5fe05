"""Every way a request can fail, decided once, on the class.

    RelayError
    ├── BadRequest            400 invalid_request      (client's fault; names the param)
    ├── ModelNotFound         404 model_not_found
    ├── ConcurrencyExceeded   429 concurrency_limit_exceeded
    ├── GatewayDraining       503 gateway_shutdown     (before the first byte, M3.6)
    ├── GatewayShutdown       in-band gateway_shutdown (after it)
    ├── ClientGone            499 client_abort         (never rendered)
    ├── GatewayFault          500 internal_error       (a bug of ours, after the first byte)
    └── UpstreamError         502 upstream_error
        ├── UpstreamRefused         the provider's own 4xx, status and code kept (M1.2)
        ├── RequestUntranslatable   400 invalid_request      (what its shape cannot say, M5)
        ├── ProviderCredentials     502 provider_credentials
        ├── UpstreamRateLimited     429 rate_limit_exceeded
        ├── UpstreamUnavailable     503 upstream_unavailable
        │   └── UpstreamUnreachable
        ├── UpstreamTimeout         504 upstream_timeout
        ├── UpstreamTruncated       the body or connection ended too early
        │   └── UpstreamStalled     nothing came for `idle_timeout_s`
        ├── UpstreamProtocolError   bytes that are not the provider's protocol
        └── EventTooLarge           one event over `max_event_bytes` (M3.1)

Each class fixes the HTTP status, the error code and type of M1.2, what it is to a stream's life
(`stream_input`, whose table gives the Outcome), whether another candidate may be tried before the
first byte, and what it tells against (M3.3). Planes render them and decide nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

from relay.lifecycle import StreamInput

if TYPE_CHECKING:
    from collections.abc import Mapping


class Scope(Enum):
    """What a failure tells against, and so what is put behind others for a while (M3.3)."""

    NOTHING = auto()  # the client's own fault, or a bound of ours
    MODEL = auto()  # this model of the provider
    PROVIDER = auto()  # all of the provider's models


class RelayError(Exception):
    """Base of all.

    Args:
        message: for the client; never holds a secret.
        param: the request field at fault, or None.
        retry_after_s: whole seconds for a `Retry-After` header, or None.

    Attributes:
        details: what the message says, for machines; None for most.
    """

    status: int = 500
    code: str = "internal_error"
    type: str = "server_error"
    stream_input: ClassVar[StreamInput] = StreamInput.UPSTREAM_ERROR
    fails_over: bool = False
    cools: Scope = Scope.NOTHING
    details: Mapping[str, Any] | None = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(RelayError):
    """The request itself is wrong; `param` names the field."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class ModelNotFound(RelayError):
    """No `models:` entry and no provider of that name serves the slug."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class ConcurrencyExceeded(RelayError):
    """The org has `max_concurrent` requests in flight already."""

    status = 429
    code = "concurrency_limit_exceeded"
    type = "rate_limit_error"


class GatewayDraining(RelayError):
    """A new request during shutdown (M3.6)."""

    status = 503
    code = "gateway_shutdown"
    stream_input = StreamInput.SHUTDOWN


class GatewayShutdown(RelayError):
    """The grace of a running stream is over (M3.6)."""

    status = 503
    code = "gateway_shutdown"
    stream_input = StreamInput.SHUTDOWN


class ClientGone(RelayError):
    """The client hung up or takes nothing; there is nobody to tell (M4.1, M3.5)."""

    status = 499
    code = "client_abort"
    stream_input = StreamInput.CLIENT_GONE


class GatewayFault(RelayError):
    """A bug of ours after the first byte: it too ends in-band (M2.1). `__cause__` is the bug."""


class UpstreamError(RelayError):
    """The provider failed.

    Args:
        raw: what the provider said, for `metadata.raw` of M3.4; redacted by who raises.
    """

    status = 502
    code = "upstream_error"
    type = "upstream_error"
    fails_over = True
    cools = Scope.MODEL

    def __init__(
        self,
        message: str,
        *,
        raw: object = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.raw = raw


class UpstreamRefused(UpstreamError):
    """A 400, 404, 413 or 422 that is the client's own fault: status, message, code kept (M1.2)."""

    type = "invalid_request_error"
    code = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        type_: str | None = None,
        raw: object = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, raw=raw, param=param)
        self.status = status
        self.code = code or ("model_not_found" if status == 404 else "invalid_request")
        self.type = type_ or "invalid_request_error"
        self.fails_over = status == 404
        self.cools = Scope.MODEL if status == 404 else Scope.NOTHING


class RequestUntranslatable(UpstreamError):
    """The candidate's shape has no words for something in the request; another's may (M5)."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"
    cools = Scope.NOTHING


class ProviderCredentials(UpstreamError):
    """The provider refused *our* key (401, 402, 403); the client can do nothing about it."""

    code = "provider_credentials"
    cools = Scope.PROVIDER


class UpstreamRateLimited(UpstreamError):
    """429 of the provider, with its Retry-After."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class UpstreamUnavailable(UpstreamError):
    """Connect or name failure, or the provider's 503 or 529, with its Retry-After."""

    status = 503
    code = "upstream_unavailable"


class UpstreamUnreachable(UpstreamUnavailable):
    """There was no connection at all."""

    cools = Scope.PROVIDER


class UpstreamTimeout(UpstreamError):
    """No response headers within `header_timeout_s`, or no body within `first_byte_timeout_s`."""

    status = 504
    code = "upstream_timeout"


class UpstreamTruncated(UpstreamError):
    """The connection died, or the body ended before the answer did (M3.4)."""


class UpstreamStalled(UpstreamTruncated):
    """Nothing came for `idle_timeout_s`: as good as a connection that died."""


class UpstreamProtocolError(UpstreamError):
    """The provider sent bytes that are not its protocol."""


class EventTooLarge(UpstreamError):
    """One event is larger than the bound of M3.1."""

    cools = Scope.NOTHING
