"""A run as an event stream (W1.5, W2). The client is only an observer: it may leave at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planes.gateway import GATEWAY, RECORD
from planes.runs.access import RUNS, may_still
from planes.sinks import SseSink
from relay.errors import GatewayShutdown
from relay.lifecycle import Outcome
from relay.runs.follower import LAG_S, Follower

if TYPE_CHECKING:
    from aiohttp import web

    from relay.runs.groups import Wire


class RunStream:
    """One answer that follows one run.

    Attributes:
        headers: of the answer; they leave with `serve`.

    Args:
        after, one_leg, keepalive, keepalive_s, lag_s: as for `relay.runs.follower.Follower`.
    """

    def __init__(
        self,
        request: web.Request,
        execution_id: str,
        workflow_id: str,
        wire: Wire,
        *,
        after: int | None = None,
        one_leg: bool = False,
        keepalive: bytes = b"",
        keepalive_s: float = 15.0,
        lag_s: float = LAG_S,
    ) -> None:
        self._wire = wire
        self._gateway = request.app[GATEWAY]
        self._record = request[RECORD]
        runs = request.app[RUNS]
        self._sink = SseSink(
            request,
            self._record.request_id,
            write_stall_s=self._gateway.settings.server.write_stall_s,
        )
        headers = self.headers = self._sink.response.headers
        headers["Cache-Control"] = "no-cache"
        headers["x-execution-id"] = execution_id
        headers["x-workflow-id"] = workflow_id
        self._record.stream = True
        self._record.execution_id = execution_id
        self.follower = Follower(
            runs.store,
            execution_id,
            lambda: runs.hub(execution_id),
            self._sink,
            wire,
            after=after,
            one_leg=one_leg,
            keepalive=keepalive,
            keepalive_s=keepalive_s,
            lag_s=lag_s,
            allowed=lambda: may_still(request),
        )

    async def serve(self) -> web.StreamResponse:
        """Send the head at once, then follow to the end.

        Raises:
            ConnectionError, CancelledError: the client is gone.
        """
        await self._sink.commit()
        self._record.streamed = True
        try:
            async with self._gateway.inflight.interruptible():
                await self.follower.serve()
        except GatewayShutdown:  # the run goes on in the next process
            told = self._wire.cut("the gateway is restarting")
            if told and not self.follower.at_end:
                await self._sink.write(told)
        await self._sink.finish()
        self._record.outcome = Outcome.COMPLETED
        return self._sink.response
