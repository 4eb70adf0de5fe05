"""The process around the application: loop, socket, signals, drain (O2, M3.6)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import structlog

from planes import logs
from planes.app import make_app
from planes.banner import banner
from planes.gateway import GATEWAY
from planes.listener import Listener
from planes.runner import make_runner
from planes.settings import notices, risks
from planes.tracing import ExtraMissing
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from planes.settings import Settings

log = structlog.get_logger("sluicegate")

_OK, _FAILED = 0, 1


def run(settings: Settings, *, embedded: bool) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    logs.configure(settings.telemetry.log)
    _raise_file_limit()
    for notice in notices(settings):
        log.info(notice)
    for risk in risks(settings):
        log.warning(risk)
    try:
        sock = _listen(settings.server.host, settings.server.port)
    except OSError as error:
        print(_cannot_listen(settings, error), file=sys.stderr)
        return _FAILED
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, sock, embedded=embedded))


async def _serve(settings: Settings, sock: socket.socket, *, embedded: bool) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    app = make_app(settings, replay_if_no_local=embedded)
    runner = make_runner(app)
    listener: Listener | None = None
    try:
        starting = asyncio.ensure_future(runner.setup())
        await _first(starting, stop)
        if stop.is_set():
            return _OK
        assert runner.server is not None
        listener = Listener(sock, runner.server)
        listener.start()
        host, port = sock.getsockname()[:2]
        _settle_memory()
        log.info("serving", host=host, port=port)
        print(banner(settings, host, port, app[GATEWAY].router, embedded=embedded), flush=True)
        await stop.wait()
        grace_s = settings.server.shutdown_grace_s
        inflight = app[GATEWAY].inflight
        hint = "a second signal stops at once"
        log.info("draining", running=inflight.running, grace_s=grace_s, hint=hint)
        await inflight.drain(grace_s)
    except (StoreError, ExtraMissing) as error:
        print(f"sluicegate: {error}", file=sys.stderr)
        return _FAILED
    finally:
        if listener is not None:
            await listener.close()
        await runner.cleanup()
        sock.close()
    log.info("stopped")
    return _OK


def _settle_memory() -> None:
    """What the start made lives until the end: the collector need not walk it again and again.

    A stream and a run free what they used by themselves, so the collector may come less often than
    by default: not each time that some dozens begin at once. Not seldom, for hang-ups leave cycles;
    and what it walks at once stays small enough that nobody notices (some milliseconds).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


async def _first(starting: asyncio.Future[None], stop: asyncio.Event) -> None:
    """Wait for the start, or for a signal that makes it needless."""
    both: set[asyncio.Future[Any]] = {starting, asyncio.ensure_future(stop.wait())}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first signal drains, the second stops at once with exit code 1 (O2)."""

    def on_signal() -> None:
        if stop.is_set():
            log.warning("stopped at once by a second signal")
            os._exit(_FAILED)  # children follow by PR_SET_PDEATHSIG; nothing else outlives us
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before anything is started, so that a port in use is told at once."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _cannot_listen(settings: Settings, error: OSError) -> str:
    where = f"{settings.server.host}:{settings.server.port}"
    return (
        f"sluicegate: cannot listen on {where}: {error.strerror or error}; "
        "choose another with --host and --port, or server.host and server.port"
    )


def _raise_file_limit() -> None:
    """A stream needs two descriptors; take as many as the system lets us have."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return None
    return uvloop.Loop
