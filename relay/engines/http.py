"""The engine `http`: a remote engine that speaks the same frames over SSE (W3.2).

POST {base_url}/execute ──▶ its frames ──────────┐
GET  stream_url of a streaming_started ──▶ text ─┼──▶ `relay.ordering` ──▶ Outlet
POST {base_url}/executions/{id}/cancel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from encoders.json_exact import place_of_infinity
from relay.engines.base import Checked, DocumentError, Failed, Problem
from relay.engines.embedded.building import NO_JSON, path_of
from relay.engines.remote.link import EngineLink, RemoteLimits
from relay.engines.remote.outline import outline
from relay.engines.remote.run import RemoteRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.engines.base import Ending, Envelope, Outlet


class HttpEngine:
    """A remote engine; see `relay.engines.base.Engine`.

    Args:
        base_url: without a trailing slash. api_key: sent as a bearer token; empty for none.
        allow_stream_origins: further origins whose sub-streams may be opened, without the key.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        allow_stream_origins: Sequence[str] = (),
        limits: RemoteLimits | None = None,
        user_agent: str = "sluicegate",
    ) -> None:
        self._link = EngineLink(
            base_url,
            api_key=api_key,
            allowed=tuple(allow_stream_origins),
            limits=limits or RemoteLimits(),
            user_agent=user_agent,
        )

    def check(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Checked:
        """Look at the size and the form of a document, and for numbers that would not reach the
        engine as they were sent; all else is the engine's to judge.
        """
        name, task_count = outline(document)
        place = place_of_infinity({"document": document, "inputs": inputs})
        if place is not None:
            path = path_of(place[1:] if place[0] == "document" else place)
            raise DocumentError([Problem(message=NO_JSON, path=path)])
        return Checked(name=name, task_count=task_count, inputs=inputs)

    async def run(self, envelope: Envelope, outlet: Outlet) -> Ending:
        """Have the engine work on a document; see `Engine.run`.

        A run that waited and is resumed is executed again under the same id, with the answers. One
        that was left by its process ends with `orphaned`, and the engine is told to cancel it: its
        frames went there, and to begin again would do its work twice.
        """
        if envelope.left:
            await self._link.cancel(envelope.execution_id)
            return Failed(
                code="orphaned",
                message="the gateway process that followed the engine's run is gone",
            )
        return await RemoteRun(self._link, envelope, outlet).work()

    async def cancelled(self, execution_id: str) -> None:
        """Tell the engine, also if its stream is dead: bounded, never raises."""
        await self._link.cancel(execution_id)

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        await self._link.close()
