"""What the gateway is measured against: aiohttp on both sides, one write for each read, no more.

python -m bench.passthrough --upstream 9100 --port 9200
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import aiohttp
import uvloop
from aiohttp import web

from bench.process import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("session")
UPSTREAM: web.AppKey[str] = web.AppKey("upstream")
_SSE: Final = {"content-type": "text/event-stream"}


async def relay(request: web.Request) -> web.StreamResponse:
    """Pass a request on and its answer back."""
    response = web.StreamResponse(headers=_SSE)
    async with request.app[SESSION].post(
        request.app[UPSTREAM],
        data=await request.read(),
        headers={"content-type": "application/json"},
    ) as upstream:
        await response.prepare(request)
        async for data in upstream.content.iter_any():
            await response.write(data)
    await response.write_eof()
    return response


async def session(app: web.Application) -> AsyncIterator[None]:
    """The pool of connections to the upstream."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as opened:
        app[SESSION] = opened
        yield


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.passthrough", description=__doc__)
    parser.add_argument("--upstream", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    raise_file_limit()
    app = web.Application()
    app[UPSTREAM] = f"http://127.0.0.1:{options.upstream}/v1/chat/completions"
    app.cleanup_ctx.append(session)
    app.router.add_post("/v1/chat/completions", relay)
    web.run_app(
        app,
        host="127.0.0.1",
        port=options.port,
        access_log=None,
        print=None,
        backlog=4096,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
