"""A collector of OTLP traces over HTTP: what a backend would have got.

async with Collector() as collector:
    ...                                     # a gateway with `otlp_endpoint: collector.url`
    spans = await collector.spans(3)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan


class Span:
    """One span as it came.

    Attributes:
        kind: as in the protocol: 2 is SERVER, 3 is CLIENT.
        parent_id: empty for a root.
        start, end: Unix seconds.
        failed: whether its status is ERROR.
    """

    def __init__(self, wire: WireSpan, resource: dict[str, Any]) -> None:
        self.name = wire.name
        self.kind = int(wire.kind)
        self.trace_id = wire.trace_id.hex()
        self.span_id = wire.span_id.hex()
        self.parent_id = wire.parent_span_id.hex()
        self.trace_state = wire.trace_state
        self.start = wire.start_time_unix_nano / 1e9
        self.end = wire.end_time_unix_nano / 1e9
        self.failed = wire.status.code == 2
        self.attributes = _values(wire.attributes)
        self.resource = resource


class Collector:
    """Takes every batch."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.received: list[Span] = []
        self.url = ""
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def spans(self, count: int, *, timeout: float = 10.0) -> list[Span]:
        """Wait for so many spans, and return them as they began; more of them fail the test."""
        async with asyncio.timeout(timeout):
            while len(self.received) < count:
                await asyncio.sleep(0.01)
        assert len(self.received) == count, [span.name for span in self.received]
        return sorted(self.received, key=lambda span: span.start)

    async def _take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        self.raw.append(body)
        batch = ExportTraceServiceRequest.FromString(body)
        for of_resource in batch.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.received += [Span(span, resource) for span in of_scope.spans]
        return web.Response(content_type="application/x-protobuf")


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
