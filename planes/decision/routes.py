"""`GET /v1/system-zero/stream`: an opening, checked in full before the upgrade (D1)."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from encoders.decision_errors import DecisionError, error
from planes.auth import presented
from planes.decision import http
from planes.decision.dispatch import Account
from planes.decision.frames import FrameReader
from planes.decision.opening import authenticate, check, handshake, refuse
from planes.decision.plane import DECISION
from planes.decision.stream import Stream
from planes.decision.wire import Wire
from planes.gateway import GATEWAY, RECORD
from relay.decisions.lease import Lease
from relay.decisions.session import DecisionSession
from relay.errors import GatewayDraining
from relay.lifecycle import Outcome
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from planes.auth import Principal
    from planes.decision.plane import DecisionPlane

STREAM: Final = "/v1/system-zero/stream"
_FULL_RETRY_MS: Final = 1000
_STORE_RETRY_MS: Final = 1000
# A client has eight tries: not all of them in one grace, nor a whole grace for one that is short.
_STOPPING_RETRY_MAX_MS: Final = 5000


def add_routes(app: web.Application) -> None:
    """Mount the plane."""
    app.router.add_route("*", STREAM, open_stream, expect_handler=expect_nothing)
    app.router.add_route("*", f"{STREAM}/", unknown, expect_handler=expect_nothing)
    http.add_routes(app)
    app.router.add_route("*", f"{http.DECIDE}/", unknown, expect_handler=expect_nothing)


def add_off_routes(app: web.Application) -> None:
    """Mount what says that nothing decides here (D6.5)."""
    for path in (STREAM, http.DECIDE):
        app.router.add_route("*", path, off, expect_handler=expect_nothing)


async def expect_nothing(_: web.Request) -> None:
    """No body is taken at these paths: none is asked for, whatever was expected."""


async def off(request: web.Request) -> web.Response:
    """A configuration of one's own has no decisions unless it names what decides."""
    return refuse(
        request,
        error("unknown_endpoint", "decisions are off here: `decision.backend` is not configured"),
    )


async def unknown(request: web.Request) -> web.Response:
    """A trailing slash is another path, and there is nothing at it (D1.2)."""
    return refuse(request, error("unknown_endpoint", f"there is nothing at {request.path}"))


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Open a stream, and stay until its connection is over."""
    if request.method != hdrs.METH_GET:
        response = refuse(request, error("method_not_allowed", f"{STREAM} takes GET"))
        response.headers[hdrs.ALLOW] = hdrs.METH_GET
        return response
    gateway, plane = request.app[GATEWAY], request.app[DECISION]
    problem = check(request)
    if problem is not None:
        return refuse(request, problem)
    principal = authenticate(gateway.keys, request)
    if isinstance(principal, DecisionError):
        return refuse(request, principal)
    record = request[RECORD]
    record.org, record.key_id = principal.org, principal.key_id
    with ExitStack() as held:
        try:
            held.enter_context(gateway.inflight.request())
        except GatewayDraining as stopping:
            wait_ms = min(1000 * (stopping.retry_after_s or 1), _STOPPING_RETRY_MAX_MS)
            response = refuse(request, _unavailable("the gateway is restarting", wait_ms))
            response.force_close()
            return response
        if plane.full:
            return refuse(request, _unavailable("all streams of this process are in use"))
        place = plane.take_place()
        held.callback(plane.free_place, place)
        return await _open(request, plane, principal, held, place)


async def _open(
    request: web.Request,
    plane: DecisionPlane,
    principal: Principal,
    held: ExitStack,
    place: object,
) -> web.StreamResponse:
    """Take the account's lease and upgrade; `held` is the stream's from then on."""
    services = plane.services
    limits = services.limits
    record = request[RECORD]
    stream_id = f"szws_{secrets.token_hex(16)}"
    lease = Lease(
        services.store,
        principal.org,
        stream_id,
        ttl_s=limits.lease_ttl_ms / 1000,
        renew_s=limits.lease_renew_interval_ms / 1000,
    )
    try:
        problem = await _lease(lease, plane.account_limit(principal.max_concurrent))
        if problem is None and services.inflight.draining:
            problem = _unavailable("the gateway is restarting")
        if problem is not None:
            await lease.release()
            return refuse(request, problem)
        account = Account(
            org=principal.org,
            request_id=record.request_id,
            stream_id=stream_id,
            current=lambda: authenticate(request.app[GATEWAY].keys, request),
            client_key=presented(request.headers),
        )
        wire = Wire(
            request,
            FrameReader(limits.max_message_bytes),
            stall_s=limits.write_progress_timeout_ms / 1000,
        )
        response = await wire.accept(handshake(request, record.request_id))
    except BaseException:
        await asyncio.shield(lease.release())
        raise
    session = DecisionSession(
        limits,
        stream_id=stream_id,
        request_id=record.request_id,
        now=asyncio.get_running_loop().time(),
    )
    stream = Stream(services, account, wire, session, lease)
    plane.add(stream)
    settled = held.pop_all()
    settled.callback(plane.discard, stream)
    stream.start(lambda: plane.free_place(place), settled)
    if services.inflight.draining:  # since a moment ago
        stream.drain()
    try:
        await stream.over.wait()
    finally:
        closed = stream.code is not None
        record.outcome = Outcome.COMPLETED if closed else Outcome.CLIENT_ABORT
    return response


async def _lease(lease: Lease, limit: int) -> DecisionError | None:
    try:
        wait_s = await lease.take(limit)
    except StoreError:
        return error(
            "limiter_unavailable",
            "the gateway cannot read its limits now",
            retry_after_ms=_STORE_RETRY_MS,
        )
    if wait_s is None:
        return None
    # Whole seconds, so that `Retry-After` is not rounded up to more than is left (D1.5).
    wait_ms = int(wait_s) * 1000 or max(1, int(wait_s * 1000))
    return error(
        "stream_limit_exceeded",
        f"the account has its {limit} open stream(s) already",
        retry_after_ms=wait_ms,
        details={"limit": limit},
    )


def _unavailable(message: str, wait_ms: int = _FULL_RETRY_MS) -> DecisionError:
    return error("service_unavailable", message, retry_after_ms=wait_ms)
