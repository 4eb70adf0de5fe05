"""`POST /v1/system-zero/decide`: one decide over HTTP, as JSON or as events (D6.1)."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import HttpVersion11, hdrs, web

from encoders.decision_errors import DecisionError, error
from encoders.decision_messages import decode_body
from encoders.decision_request import idempotency_key
from planes.auth import presented
from planes.decision.dispatch import caller_of, decide_as
from planes.decision.events import Events
from planes.decision.opening import Refusal, authenticate, refuse
from planes.decision.plane import DECISION
from planes.gateway import GATEWAY, RECORD
from planes.middleware import observe
from planes.sinks import send_whole
from relay.decisions.effects import Decided, Failed
from relay.decisions.service import Asked
from relay.decisions.state import StateDocument
from relay.errors import ClientGone, GatewayDraining, GatewayShutdown
from relay.lifecycle import Outcome

if TYPE_CHECKING:
    from planes.auth import Principal
    from planes.decision.plane import DecisionPlane
    from relay.decisions.service import Run

log = structlog.get_logger("sluicegate")

DECIDE: Final = "/v1/system-zero/decide"
_BODY_LIMIT_S: Final = 300.0
_READ_HERE_MAX: Final = 16 * 1024  # as the socket's messages
_STOPPING_RETRY_MAX_MS: Final = 5000
_TRACE: Final = re.compile(r"[!-~]{1,255}")
_MODEL_LOGGED_MAX: Final = 512


def add_routes(app: web.Application) -> None:
    """Mount the API."""
    app.router.add_route("*", DECIDE, decide, expect_handler=expect_continue)


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue`: a request that its head refuses is not asked for its body."""
    if request.version < HttpVersion11:  # RFC 9110 §10.1.1: it knows no interim answers
        return None
    expected = request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
    problem = None if expected else error("invalid_request", "there is no such Expect")
    if problem is None:
        checked = check(request)
        problem = checked if isinstance(checked, DecisionError) else None
        if problem is None and request.app[GATEWAY].inflight.draining:
            problem = _stopping(1)
    if problem is not None:
        refused = problem
        return await observe(request, lambda r: _refused(r, refused))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the answer, which has not begun
    return None


async def decide(request: web.Request) -> web.StreamResponse:
    """Answer one decide, and stay until it is answered or the client is gone."""
    principal = check(request)
    if isinstance(principal, DecisionError):
        return await _refused(request, principal)
    inflight = request.app[GATEWAY].inflight
    with ExitStack() as held, ExitStack() as work:
        try:
            held.enter_context(inflight.request())  # until the answer is sent
            work.enter_context(inflight.request())  # until the decide is settled
        except GatewayDraining as stopping:
            return await _refused(request, _stopping(stopping.retry_after_s or 1))
        plane = request.app[DECISION]
        asked = await _read(request, plane)
        if isinstance(asked, DecisionError):
            return await _refused(request, asked)
        request[RECORD].model = asked.subject.model[:_MODEL_LOGGED_MAX]
        started = asyncio.Event()
        run = plane.services.decider.begin(
            caller_of(principal),
            asked,
            request_id=request[RECORD].request_id,
            on_start=started.set,
        )
        # It goes on for a while when the client has gone (D5.7).
        services = plane.services
        deciding = decide_as(services, presented(request.headers), run)
        task = plane.runs.start(deciding, work.pop_all().close)
        try:
            return await _answer(request, principal, run, task, started)
        finally:
            plane.runs.leave(task)
            request[RECORD].settlement = run.settlement


def check(request: web.Request) -> Principal | DecisionError:
    """Return who asks, or why the head alone refuses it; the key comes first."""
    if request.method != hdrs.METH_POST:
        return error("method_not_allowed", f"{DECIDE} takes POST")
    principal = authenticate(request.app[GATEWAY].keys, request)
    if isinstance(principal, DecisionError):
        return principal
    record = request.get(RECORD)
    if record is not None:
        record.org, record.key_id = principal.org, principal.key_id
    return _wrong_head(request) or principal


def _wrong_head(request: web.Request) -> DecisionError | None:
    headers = request.headers
    if hdrs.CONTENT_ENCODING in headers and _coding(request) not in ("", "identity"):
        return error("invalid_request", "a compressed request body is not taken")
    trace = headers.getall("X-Client-Request-Id", [])
    if trace and (len(trace) > 1 or _TRACE.fullmatch(trace[0].strip(" ")) is None):
        return error(
            "invalid_trace_header",
            "X-Client-Request-Id must have 1 to 255 visible ASCII characters",
            param="X-Client-Request-Id",
        )
    keys = headers.getall("Idempotency-Key", [])
    if keys and (len(keys) > 1 or idempotency_key(keys[0]) is None):
        return error(
            "invalid_idempotency_key",
            "Idempotency-Key must have 1 to 255 printable ASCII characters",
            param="Idempotency-Key",
        )
    limit = request.app[DECISION].services.limits.max_decide_body_bytes
    if request.content_length is not None and request.content_length > limit:
        return _too_large(limit)
    return None


def _coding(request: web.Request) -> str:
    return request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()


async def _read(request: web.Request, plane: DecisionPlane) -> Asked | DecisionError:
    """Read and check the body."""
    services = plane.services
    limit = services.limits.max_decide_body_bytes
    data = bytearray()
    try:
        async with services.inflight.interruptible(), asyncio.timeout(_BODY_LIMIT_S):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > limit:
                    return _too_large(limit)
    except TimeoutError:
        return error("invalid_request", f"the body did not arrive within {_BODY_LIMIT_S:g} s")
    except web.RequestPayloadError:
        return error("invalid_request", "the body cannot be read")
    except GatewayShutdown:
        return _stopping(1)
    key = request.headers.get("Idempotency-Key")
    given = None if key is None else idempotency_key(key)
    body = bytes(data)
    if len(body) <= _READ_HERE_MAX:
        return _asked(body, given, limit)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(services.decoder, _asked, body, given, limit)


def _asked(data: bytes, key: str | None, limit: int) -> Asked | DecisionError:
    start = decode_body(data)
    if isinstance(start, DecisionError):
        return start
    if start.refusal is not None:
        return start.refusal
    document = StateDocument(start, None)
    return document.check(limit) or Asked(
        body=document.body(),
        subject=document.subject(),
        idempotency_key=key,
        digest=hashlib.sha256(data).digest(),
    )


# -- the answer -----------------------------------------------------------------------------------


async def _answer(
    request: web.Request,
    principal: Principal,
    run: Run,
    task: asyncio.Task[Decided | Failed],
    started: asyncio.Event,
) -> web.StreamResponse:
    """Wait for the result and send it; raises what a client that is gone raises."""
    record = request[RECORD]
    inflight = request.app[GATEWAY].inflight
    events: Events | None = None
    try:
        try:
            async with inflight.interruptible():
                if _wants_events(request) and await _first(task, started):
                    events = Events(request, _headers(request, principal))
                    await events.begin(task)
                result = await _result(request, task)
        except GatewayShutdown:
            result = Failed(error=_stopping(1), request_id=record.request_id)
            run.cancelled = (result.error.status, result.error.code)
            task.cancel()
        _tell(request, run, result)
        if events is not None or (_wants_events(request) and isinstance(result, Decided)):
            events = events or Events(request, _headers(request, principal, result))
            return await events.end(result)
        return await _whole(request, principal, result)
    except (asyncio.CancelledError, ConnectionError):
        if record.outcome is not Outcome.COMPLETED:
            record.outcome = Outcome.CLIENT_ABORT
            record.error = ClientGone("the client closed the connection")
        raise


async def _result(request: web.Request, task: asyncio.Task[Decided | Failed]) -> Decided | Failed:
    try:
        return await asyncio.shield(task)
    except Exception as bug:  # a fault of ours has the envelope of D1.6 too
        record = request[RECORD]
        log.error("fault", request_id=record.request_id, path=request.path, exc_info=bug)
        return Failed(
            error=error("internal_error", "the gateway failed"), request_id=record.request_id
        )


async def _first(task: asyncio.Task[Decided | Failed], started: asyncio.Event) -> bool:
    """Wait until the work starts or it is over before that; whether it has started."""
    starting = asyncio.ensure_future(started.wait())
    try:
        await asyncio.wait({task, starting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        starting.cancel()
    return started.is_set()


def _tell(request: web.Request, run: Run, result: Decided | Failed) -> None:
    """Fill the record; what was refused before the work has no outcome."""
    record = request[RECORD]
    if isinstance(result, Failed):
        record.error = Refusal(result.error)
        if run.settlement is not None:
            record.outcome = Outcome.UPSTREAM_ERROR
    else:
        record.outcome = Outcome.COMPLETED


async def _whole(
    request: web.Request, principal: Principal, result: Decided | Failed
) -> web.Response:
    if isinstance(result, Failed):
        response = refuse(request, result.error)
        if request.app[GATEWAY].inflight.draining:
            response.force_close()
    else:
        response = web.Response(body=result.reply, content_type="application/json")
    response.headers.update(_headers(request, principal, result))
    stall_s = request.app[GATEWAY].settings.server.write_stall_s
    await send_whole(request, response, write_stall_s=stall_s)
    return response


def _headers(
    request: web.Request, principal: Principal, result: Decided | Failed | None = None
) -> dict[str, str]:
    """The headers of D6.1; for events that begin before there is a result, those that are known.

    The rate limit is the account's `max_concurrent`, which a decide over HTTP has a place of.
    """
    headers = {"x-request-id": request[RECORD].request_id} | _traced(request)
    if principal.max_concurrent is not None:
        in_use = request.app[GATEWAY].slots.in_use(principal.org)
        headers["x-ratelimit-limit"] = str(principal.max_concurrent)
        headers["x-ratelimit-remaining"] = str(max(0, principal.max_concurrent - in_use))
        headers["x-ratelimit-reset"] = str(int(time.time()) + 1)
    if isinstance(result, Decided):
        headers["x-latency-ms"] = f"{result.latency_ms or 0:g}"
        headers["server-timing"] = result.server_timing or f"decide;dur={result.latency_ms or 0:g}"
        if result.replayed:
            headers["x-rightnow-idempotent-replay"] = "true"
    return headers


def _traced(request: web.Request) -> dict[str, str]:
    trace = request.headers.get("X-Client-Request-Id", "").strip(" ")
    return {"x-client-request-id": trace} if _TRACE.fullmatch(trace) else {}


def _wants_events(request: web.Request) -> bool:
    accepted = ",".join(request.headers.getall(hdrs.ACCEPT, []))
    kinds = [kind.partition(";")[0].strip().lower() for kind in accepted.split(",")]
    return "text/event-stream" in kinds


async def _refused(request: web.Request, problem: DecisionError) -> web.Response:
    response = refuse(request, problem)
    response.headers.update(_traced(request))
    if problem.status == 405:
        response.headers[hdrs.ALLOW] = hdrs.METH_POST
    if request.app[GATEWAY].inflight.draining:
        response.force_close()
    return response


def _too_large(limit: int) -> DecisionError:
    return error("payload_too_large", f"the body has more than {limit} bytes")


def _stopping(retry_after_s: int) -> DecisionError:
    wait_ms = min(1000 * retry_after_s, _STOPPING_RETRY_MAX_MS)
    return error("service_unavailable", "the gateway is restarting", retry_after_ms=wait_ms)
