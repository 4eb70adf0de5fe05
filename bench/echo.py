"""A plain aiohttp WebSocket echo, to have something to compare with.

python -m bench.echo --port N
"""

from __future__ import annotations

import argparse

from aiohttp import WSMsgType, web

from bench.process import raise_file_limit


async def echo(request: web.Request) -> web.WebSocketResponse:
    """Send every message back."""
    socket = web.WebSocketResponse(compress=False)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
    return socket


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.echo")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    raise_file_limit()
    import uvloop

    app = web.Application()
    app.router.add_get("/", echo)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
