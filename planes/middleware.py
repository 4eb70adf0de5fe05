"""What happens around every request: an id, one envelope for errors, one log line at the end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import HttpVersion11, hdrs, web

from planes.errors import (
    PayloadTooLarge,
    RequestTimeout,
    StoreUnavailable,
    code_of_status,
    response_for,
    response_for_fault,
    response_for_http,
)
from planes.gateway import GATEWAY, RECORD
from planes.logs import request_line
from planes.request_id import new_request_id
from planes.telemetry import Ended
from relay.errors import BadRequest, ClientGone, GatewayFault, RelayError
from relay.lifecycle import Outcome
from relay.record import RequestRecord
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.web_request import BaseRequest

    from planes.auth import Principal
    from planes.gateway import Gateway

log = structlog.get_logger("sluicegate")

BODY_LIMIT_S: Final = 300.0
_QUIET: Final = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds


@web.middleware
async def observe(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Run one request; outermost middleware.

    `x-request-id` is on every answer (M1.2). A client that hangs up is one line at info, never a
    traceback.
    """
    record = request[RECORD] = RequestRecord(request_id=new_request_id(), started=time.monotonic())
    status = 500
    try:
        response = await _guarded(request, handler, record)
        status = response.status
    except (asyncio.CancelledError, ConnectionError):
        status = _status_of_the_gone(record)
        raise
    finally:
        _tell(request, record, status)
    if not response.prepared:
        response.headers["x-request-id"] = record.request_id
    return response


async def _guarded(
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    record: RequestRecord,
) -> web.StreamResponse:
    try:
        response = await handler(request)
        if isinstance(record.error, GatewayFault):
            _log_fault(request, record, record.error.__cause__)
        return response
    except RelayError as error:
        record.error = record.error or error
        return _refusal(request, error, record)
    except web.HTTPException as error:
        return response_for_http(error, request, record.request_id)
    except StoreError as error:
        log.warning("store", request_id=record.request_id, path=request.path, reason=str(error))
        if request.writer.output_size:
            raise ConnectionError("a response has begun already") from error
        record.error = StoreUnavailable()
        return _refusal(request, record.error, record)
    except ConnectionError:
        raise  # aiohttp ends the connection
    except Exception as bug:  # the last border: whatever it was, the client gets an answer
        _log_fault(request, record, bug)
        if request.writer.output_size:
            raise ConnectionError("a response has begun already") from bug
        return response_for_fault(record.request_id)


def _log_fault(request: web.Request, record: RequestRecord, bug: BaseException | None) -> None:
    log.error("fault", request_id=record.request_id, path=request.path, exc_info=bug)


def _status_of_the_gone(record: RequestRecord) -> int:
    """Tell a client that left (or a request that was ended with the process) from one that had its
    whole answer already and only closed the connection before we were done with it.
    """
    if record.error is None and record.outcome is not Outcome.COMPLETED:
        record.error = ClientGone("the client closed the connection")
    return record.error.status if record.error is not None else 200


def _refusal(request: web.Request, error: RelayError, record: RequestRecord) -> web.Response:
    response = response_for(error, record.request_id)
    if request.app[GATEWAY].inflight.draining:
        response.force_close()
    return response


def _tell(request: web.Request, record: RequestRecord, status: int) -> None:
    """Write the line of a request that has ended, and count it. Awaits nothing, never raises."""
    if request.path in _QUIET and status < 400:
        return
    if record.outcome is not None and record.error is not None and status < 400:
        status = record.error.status  # of a stream that failed after its 200
    now = time.monotonic()
    code = record.error.code if record.error is not None else None
    fields = {"method": request.method, "path": request.path, "status": status}
    fields |= record.fields(now)
    if code is None and status >= 400:
        fields["error_code"] = code = code_of_status(status)
    request_line("warning" if status >= 500 else "info", fields)
    resource = request.match_info.route.resource
    request.app[GATEWAY].telemetry.ended(
        Ended(
            record=record,
            at=now,
            method=request.method,
            route=resource.canonical if resource is not None else None,
            status=status,
            error_code=code,
            headers=request.headers,
        )
    )


def admit(request: web.Request) -> Principal:
    """Decide on the head alone whether a request's body may be read: the key, the size (M1.1).

    Raises:
        InvalidKey, AccountSuspended, PayloadTooLarge, BadRequest.
    """
    gateway = request.app[GATEWAY]
    principal = gateway.keys.authenticate(request.headers)
    record = request.get(RECORD)
    if record is not None:
        record.org, record.key_id = principal.org, principal.key_id
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if coding not in ("", "identity"):
        raise BadRequest("a compressed request body is not taken; send it without Content-Encoding")
    limit = gateway.settings.server.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise PayloadTooLarge(
            f"the request body has {request.content_length} bytes; this gateway takes {limit}"
        )
    return principal


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: only a request that may be served is asked for its body.

    aiohttp calls this before any middleware, so a refusal passes through `observe` here.
    """
    if request.version < HttpVersion11:  # RFC 9110 §10.1.1: it knows no interim answers
        return None
    try:
        if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
            raise web.HTTPExpectationFailed
        admit(request)
        gateway: Gateway = request.app[GATEWAY]
        with gateway.inflight.request():
            pass
    except (RelayError, web.HTTPException) as error:
        refused = error

        async def refuse(_: web.Request) -> web.StreamResponse:
            raise refused

        return await observe(request, refuse)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the answer, which has not begun
    return None


def observe_expectations(
    handler: Callable[[BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[BaseRequest], Awaitable[web.StreamResponse]]:
    """Return the handler of all requests with `observe` around what aiohttp refuses before any
    middleware: an `Expect` of another thing, on a path that has no handler for it or is none.
    """

    async def observed(request: BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPExpectationFailed as error:
            refused = error

        async def refuse(_: web.Request) -> web.StreamResponse:
            raise refused

        assert isinstance(request, web.Request)
        return await observe(request, refuse)

    def handle(request: BaseRequest) -> Awaitable[web.StreamResponse]:
        return observed(request) if hdrs.EXPECT in request.headers else handler(request)

    return handle


def wants_comments(request: web.Request, principal: Principal) -> bool:
    """Whether a stream may carry comments: key and request may switch them off (M1.4)."""
    refused = request.headers.get("X-No-Comments", "").strip().lower() in ("true", "1", "yes")
    return principal.comments and not refused


async def read_body(request: web.Request) -> bytes:
    """Read a request's body.

    Raises:
        PayloadTooLarge: it passed the limit while it came.
        web.HTTPException: it is not readable HTTP.
        RequestTimeout: it took longer than `BODY_LIMIT_S`.
        GatewayShutdown: the grace of a stop was over first.
    """
    try:
        if request.content.is_eof():  # all of it is here: there is nothing to wait for
            return await request.read()
        async with (
            request.app[GATEWAY].inflight.interruptible(),
            asyncio.timeout(BODY_LIMIT_S),
        ):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {BODY_LIMIT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[GATEWAY].settings.server.max_body_bytes
        raise PayloadTooLarge(
            f"the request body has more than the {limit} bytes that this gateway takes"
        ) from None
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(reason="the request body cannot be read") from error
