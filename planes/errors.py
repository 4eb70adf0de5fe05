"""Errors before the first byte, as the client sees them (M1.2); rendered here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from encoders.openai import error_body
from relay.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Mapping


class InvalidJson(RelayError):
    """The body is not JSON; the message has line and column."""

    status = 400
    code = "invalid_json"
    type = "invalid_request_error"


class PayloadTooLarge(RelayError):
    """The body is larger than `server.max_body_mb`."""

    status = 413
    code = "payload_too_large"
    type = "invalid_request_error"


class RequestTimeout(RelayError):
    """The client did not send its body in time."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class StoreUnavailable(RelayError):
    """The store cannot be read or written now; why stands in the log."""

    status = 503
    code = "store_unavailable"

    def __init__(self) -> None:
        super().__init__("the gateway's store does not answer now; try again", retry_after_s=1)


# What aiohttp itself refuses.
HTTP_CODES: Final[Mapping[int, str]] = {
    404: "not_found",
    405: "method_not_allowed",
    413: "payload_too_large",
}


def code_of_status(status: int) -> str:
    """Return the code of an error that has only a status."""
    return HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error")


def response_for(error: RelayError, request_id: str) -> web.Response:
    """Render a refusal."""
    headers = {"x-request-id": request_id}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    body = error_body(
        error.message, type_=error.type, code=error.code, param=error.param, details=error.details
    )
    return web.Response(
        status=error.status, body=body, headers=headers, content_type="application/json"
    )


# Of OpenAI's wire, and not served: an SDK has methods for them.
_NOT_SERVED: Final = frozenset(
    {"audio", "batches", "completions", "embeddings", "files", "images", "moderations", "responses"}
)


def _hint(request: web.Request) -> str:
    """Say what a path that is none may have meant: mostly a base URL is wrong."""
    path = request.path
    meant = (
        f"/v1{path}",
        path.replace("/v1/v1/", "/v1/", 1),
        path.removesuffix("/chat/completions"),
        path.removesuffix("/"),
    )
    known = {resource.canonical for resource in request.app.router.resources()}
    for other in meant:
        if other != path and other in known:
            return f"; did you mean {other}?"
    version, _, rest = path.removeprefix("/").partition("/")
    if version == "v1" and rest.partition("/")[0] in _NOT_SERVED:
        return "; of OpenAI's endpoints only chat completions and models are served"
    return ""


def response_for_http(
    error: web.HTTPException, request: web.Request, request_id: str
) -> web.Response:
    """Render what aiohttp raised (unknown path, wrong method, too large a body) in our envelope."""
    status = error.status
    code = code_of_status(status)
    message = error.reason
    if status == 404:
        message = f"there is nothing at {request.path}{_hint(request)}"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {error.method}"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "the request body is too large"
    elif isinstance(error, web.HTTPExpectationFailed):
        message = "`Expect` can be 100-continue, and nothing else"
    type_ = "invalid_request_error" if status < 500 else "server_error"
    response = web.Response(
        status=status,
        body=error_body(message, type_=type_, code=code, param=None),
        headers={"x-request-id": request_id},
        content_type="application/json",
    )
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def response_for_fault(request_id: str) -> web.Response:
    """Render a fault of ours; what it was stands in the log under the request id."""
    body = error_body(
        f"the gateway failed; the operator finds this under request id {request_id}",
        type_="server_error",
        code="internal_error",
        param=None,
    )
    return web.Response(
        status=500,
        body=body,
        headers={"x-request-id": request_id},
        content_type="application/json",
    )
