"""The connections to a remote engine, and to other origins without its key (W3.2)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders.json_text import dumps, loads
from encoders.openai_whole import error_of
from relay.errors import UpstreamError, UpstreamProtocolError
from relay.redact import Redactor
from relay.refusals import excerpt
from relay.upstreams.http import HttpUpstream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from relay.ordering import Offer
    from relay.upstreams.base import UpstreamReply

_log: Final = logging.getLogger("sluicegate.engines")
_EVENTS: Final = {"Accept": "text/event-stream"}
_CANCEL_S: Final = 5.0
_REFUSAL_S: Final = 5.0
_REFUSAL_BYTES_MAX: Final = 64 * 1024
_SAID_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLimits:
    """Times, in seconds.

    Attributes:
        connect_s, header_s: to the engine or to a sub-stream.
        idle_s: of silence of the engine. stream_idle_s: of a sub-stream.
        finish_s: see `OrderingLimits.finish_s`.
    """

    connect_s: float = 10.0
    header_s: float = 60.0
    idle_s: float = 600.0
    stream_idle_s: float = 60.0
    finish_s: float = 30.0


class EngineLink:
    """One engine, as it is reached.

    Args:
        base_url: without a trailing slash. api_key: empty for none.
        allowed: further origins whose sub-streams may be opened.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str,
        allowed: tuple[str, ...],
        limits: RemoteLimits,
        user_agent: str,
    ) -> None:
        self.base_url = base_url
        self.allowed = allowed
        self.limits = limits
        self.redactor = Redactor((api_key,) if api_key else ())
        self._engine, self._others = (
            HttpUpstream(
                name,
                base_url,
                api_key=key,
                connect_timeout_s=limits.connect_s,
                header_timeout_s=limits.header_s,
                user_agent=user_agent,
            )
            for name, key in (("the engine", api_key), ("the sub-stream", ""))
        )
        self._started = False

    async def execute(self, request: Mapping[str, Any]) -> UpstreamReply:
        """Start a run; the reply is its stream of frames.

        Raises:
            UpstreamError: it was not started.
        """
        await self._start()
        reply = await self._engine.post(f"{self.base_url}/execute", dumps(request), _EVENTS)
        if 200 <= reply.status < 300 and _is_event_stream(reply):
            return reply
        try:
            said = await self._said(reply)
        finally:
            reply.abort()
        if 200 <= reply.status < 300:
            raise UpstreamProtocolError(f"the engine's answer is no event stream{said}")
        raise UpstreamError(f"the engine refused the run with status {reply.status}{said}")

    async def open(self, offer: Offer) -> UpstreamReply:
        """Open a sub-stream.

        Raises:
            UpstreamError: there is none.
        """
        upstream = self._engine if offer.ours else self._others
        reply = await upstream.get_stream(offer.url, _EVENTS)
        if reply.status == 200 and _is_event_stream(reply):
            return reply
        reply.abort()
        if reply.status != 200:
            raise UpstreamError(f"the sub-stream was refused with status {reply.status}")
        raise UpstreamProtocolError("the sub-stream's answer is no event stream")

    async def cancel(self, execution_id: str) -> None:
        """Tell the engine to cancel a run, as well as can be done. Never raises."""
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._start()
                url = f"{self.base_url}/executions/{execution_id}/cancel"
                reply = await self._engine.post(url, b"{}", {"Accept": "application/json"})
                await reply.release()
        except (UpstreamError, TimeoutError) as error:
            _log.warning("run %s: the engine was not told to cancel: %s", execution_id, error)
            return
        if not 200 <= reply.status < 300:
            _log.warning("run %s: the engine answered its cancel %s", execution_id, reply.status)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._engine.close()
        await self._others.close()

    async def _start(self) -> None:
        # Not where it is made: a pool belongs to a running loop.
        if not self._started:
            self._started = True
            await self._engine.start()
            await self._others.start()

    async def _said(self, reply: UpstreamReply) -> str:
        """What a refusal says, for a message: redacted, then cut."""
        body = bytearray()
        try:
            async with asyncio.timeout(_REFUSAL_S):
                while len(body) < _REFUSAL_BYTES_MAX and (data := await reply.read()):
                    body += data
        except (UpstreamError, TimeoutError):
            pass
        try:
            error = error_of(self.redactor.value(loads(bytes(body))))
        except (ValueError, RecursionError):
            error = None
        said = error.message if error else excerpt(bytes(body), self.redactor, _SAID_MAX)
        said = " ".join(said.split())[:_SAID_MAX]
        return f": {said}" if said else ""


def _is_event_stream(reply: UpstreamReply) -> bool:
    kind = str(reply.headers.get("content-type") or "").partition(";")[0]
    return kind.strip().lower() == "text/event-stream"
