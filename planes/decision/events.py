"""The reply of the decide API as events: `decision` or `error`, then `done` (D6.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from planes.gateway import GATEWAY, RECORD
from planes.sinks import SseSink
from relay.decisions.effects import Failed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from relay.decisions.effects import Decided

KEEPALIVE: Final = b": keepalive\n\n"
KEEPALIVE_EVERY_S: Final = 10.0
_DONE: Final = b"event: done\ndata: {}\n\n"


class Events:
    """One reply.

    Args:
        headers: of the answer, beside those of any event stream.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request_id = request[RECORD].request_id
        stall_s = request.app[GATEWAY].settings.server.write_stall_s
        self._sink = SseSink(request, self._request_id, write_stall_s=stall_s)
        self._sink.response.headers.update(headers)
        request[RECORD].stream = True
        self._record = request[RECORD]

    async def begin(self, task: asyncio.Task[Decided | Failed]) -> None:
        """Send the head at once, and comments until the work is over.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._commit()
        while not task.done():
            await asyncio.wait({task}, timeout=KEEPALIVE_EVERY_S)
            if not task.done():
                await self._sink.write(KEEPALIVE)

    async def end(self, result: Decided | Failed) -> web.StreamResponse:
        """Send the result and the end.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._commit()
        if isinstance(result, Failed):
            event = b"event: error\ndata: " + result.error.body(self._request_id)
        else:
            event = b"event: decision\ndata: " + result.reply
        await self._sink.write(event + b"\n\n" + _DONE)
        await self._sink.finish()
        return self._sink.response

    async def _commit(self) -> None:
        if not self._sink.committed:
            await self._sink.commit()
            self._record.streamed = True
