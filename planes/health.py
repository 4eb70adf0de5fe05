"""Liveness, readiness and metrics (O3). No key is asked for."""

from __future__ import annotations

from aiohttp import web

from encoders.json_text import dumps
from planes.gateway import GATEWAY

routes = web.RouteTableDef()
metrics_routes = web.RouteTableDef()  # of a gateway whose metrics are on


@routes.get("/health")
async def health(_: web.Request) -> web.Response:
    """The process answers."""
    return _reply(200, {"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """New requests are welcome: started, and not shutting down (M3.6)."""
    gateway = request.app[GATEWAY]
    if gateway.inflight.draining:
        return _reply(503, {"status": "draining"})
    if not gateway.ready:
        return _reply(503, {"status": "starting"})
    return _reply(200, {"status": "ready"})


@metrics_routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Everything that is counted, in the Prometheus text format; also during a drain."""
    counted = request.app[GATEWAY].telemetry.metrics
    assert counted is not None, "mounted without metrics"
    response = web.Response(body=await counted.scrape())
    response.headers["Content-Type"] = counted.content_type
    response.enable_compression()
    return response


def _reply(status: int, document: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=dumps(document), content_type="application/json")
