"""The one runner of production and tests.

`handler_cancellation=True`: a handler must learn that its client left (M4.1), which aiohttp does
not tell it by default. And a request that is not even HTTP gets our envelope and `x-request-id`
(M1.2), where aiohttp would answer in plain text and log a traceback; its hooks for that are not
public, which the upper bound of the dependency and `tests/e2e/test_error_envelopes.py` cover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import web

from encoders.openai import error_body
from planes.middleware import observe_expectations
from planes.request_id import new_request_id
from planes.sinks import ClientConnection

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest

log = structlog.get_logger("sluicegate")

# After a drain nothing runs any more that could end well; this is for what cannot be written.
_CLEANUP_WAIT_S: Final = 0.2
_KEEPALIVE_S: Final = 75.0
_PIPELINE_WAIT_S: Final = 1.0


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner of an application."""
    return _Runner(
        app,
        handler_cancellation=True,
        access_log=None,  # one line of ours for each request
        auto_decompress=False,  # `admit` refuses it: 3 KB may unpack to 2 GB, key or no key
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_CLEANUP_WAIT_S,
    )


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            observe_expectations(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __call__(self) -> ClientConnection:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Handler(ClientConnection):
    __slots__ = ()

    def _pause_reading_for_buffer(self) -> None:
        """More requests came than aiohttp keeps behind the one that runs. It now stops reading, and
        with that it stops noticing that the client leaves (M4.1).
        """
        super()._pause_reading_for_buffer()
        if not self._upgraded:
            self._loop.call_later(_PIPELINE_WAIT_S, self._cut_if_behind, self._current_request)

    def _cut_if_behind(self, request: BaseRequest | None) -> None:
        """Cut a client that still pipelines behind the same request."""
        if self._buffer_paused and self._current_request is request and self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Let an upgraded connection say whether it stays open for our side: aiohttp closes it,
        and what came just before the client's FIN could not be answered (D2.2).
        """
        half_closed = getattr(self._payload_parser, "half_closed", None)
        return None if half_closed is None else bool(half_closed())

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never became a request; the connection ends."""
        if isinstance(exc, ConnectionError):
            raise exc  # a client that left in the middle of an answer; `observe` has told of it
        request_id = new_request_id()
        reason = (message or "").partition("\n")[0].rstrip(": ") or type(exc).__name__
        fields = {"request_id": request_id, "status": status, "reason": reason}
        if status >= 500:
            log.error("fault", **fields, exc_info=exc)
        else:
            log.info("unreadable request", **fields)
        if request.writer.output_size:
            raise ConnectionError("a response has begun already")
        client = status < 500
        response = web.Response(
            status=status,
            body=error_body(
                f"this is not a request that can be read: {reason}"
                if client
                else "the gateway failed",
                type_="invalid_request_error" if client else "server_error",
                code="invalid_request" if client else "internal_error",
                param=None,
            ),
            headers={"x-request-id": request_id, "Server": "sluicegate"},
            content_type="application/json",
        )
        response.force_close()
        return response
