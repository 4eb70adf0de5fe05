"""What a decision stream costs: the gateway and a plain aiohttp echo, side by side.

    python -m bench.decision [--events 2000] [--sockets 200]

accepted to dispatch   from the message's being given to the session to the backend's call: the
                       budget in the store, its commit, the slot and the tasks between (on_change)
append to ack          1 KiB there and an ack back, against an echo of 1 KiB
idle socket            resident memory of an open stream that has started and rests
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import yaml

from bench.ports import free_port
from bench.process import rss_kib, started, wait_until_it_serves
from encoders.json_text import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY: Final = "ozk_bench_0123456789abcdef"
PATH: Final = "/v1/system-zero/stream"
PROTOCOL: Final = "system-zero.stream.v1"
NO_LIMIT: Final = 1_000_000_000
TEXT: Final = "x" * 1000


@contextmanager
def gateway() -> Iterator[tuple[int, int]]:
    """Run the gateway; yields its port and process id."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        names = [
            *("max_events_per_second", "event_burst", "max_messages_per_second", "message_burst"),
            *("account_decisions_per_minute", "account_decision_burst", "max_streams_per_process"),
        ]
        config = {
            "store": {"url": f"sqlite:///{folder}/bench.db"},
            "keys": [{"key": KEY, "org": "bench"}],
            "decision": {
                "backend": {"kind": "system-zero", "base_url": "http://127.0.0.1:9/v1"},
                "account_streams": NO_LIMIT,
                "limits": dict.fromkeys(names, NO_LIMIT),
            },
        }
        file = folder / "sluicegate.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = ("-m", "bench.decision_gateway", "serve", "--config", str(file))
        log = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
        with started(*serve, "--port", str(port), **log) as process:
            wait_until_it_serves(port)
            yield port, process.pid


@contextmanager
def echo() -> Iterator[tuple[int, int]]:
    """Run the echo; yields its port and process id."""
    port = free_port()
    with started("-m", "bench.echo", "--port", str(port)) as process:
        wait_until_it_serves(port)
        yield port, process.pid


class Client:
    """Opens streams or echo sockets."""

    def __init__(self, session: aiohttp.ClientSession, port: int, *, stream: bool) -> None:
        self._session = session
        self._url = f"ws://127.0.0.1:{port}{PATH if stream else '/'}"
        self._stream = stream

    async def open(self, mode: str = "on_request") -> aiohttp.ClientWebSocketResponse:
        """Open one; a stream is started."""
        if not self._stream:
            return await self._session.ws_connect(self._url, compress=0)
        socket = await self._session.ws_connect(
            self._url,
            protocols=(PROTOCOL,),
            headers={"Authorization": f"Bearer {KEY}"},
            compress=0,
            max_msg_size=0,
        )
        await expect(socket, "hello")
        question = {"type": "boolean", "instructions": "Is it ready?"}
        request = {"model": "rightnow-decision", "state": "", "questions": {"ready": question}}
        await say(socket, type="start", event_id="evt_1", decision_mode=mode, request=request)
        await expect(socket, "ack")
        if mode == "on_change":
            await expect(socket, "decision")
        return socket


async def say(socket: aiohttp.ClientWebSocketResponse, **message: Any) -> None:
    """Send one message."""
    await socket.send_str(dumps(message).decode())


async def expect(socket: aiohttp.ClientWebSocketResponse, kind: str) -> dict[str, Any]:
    """The next message but pings, which must be of this kind."""
    while True:
        message: dict[str, Any] = loads(await socket.receive_str())
        if message["type"] == "ping":
            await say(socket, type="pong", nonce=message["nonce"])
        elif message["type"] == kind:
            return message
        else:
            raise SystemExit(f"not a {kind}: {message}")


async def dispatches(client: Client, events: int) -> list[float]:
    """Milliseconds from an event to its dispatch, as the backend saw it."""
    found: list[float] = []
    socket = await client.open("on_change")
    for version in range(2, events + 2):
        replace = {"state": TEXT, "type": "replace", "event_id": f"evt_{version}"}
        await say(socket, **replace)
        await expect(socket, "ack")
        decision = await expect(socket, "decision")
        found.append(int(decision["reply"]["id"][4:]) / 1e6)
    await socket.close()
    return found


async def acks(client: Client, events: int) -> list[float]:
    """Milliseconds from an append to its ack."""
    found: list[float] = []
    socket = await client.open()
    for version in range(2, events + 2):
        begun = time.perf_counter()
        await say(socket, type="append_text", event_id=f"evt_{version}", text=TEXT)
        await expect(socket, "ack")
        found.append((time.perf_counter() - begun) * 1000)
    await socket.close()
    return found


async def echoes(client: Client, events: int) -> list[float]:
    """Milliseconds from a message to its echo."""
    found: list[float] = []
    socket = await client.open()
    for version in range(2, events + 2):
        begun = time.perf_counter()
        await say(socket, type="append_text", event_id=f"evt_{version}", text=TEXT)
        await socket.receive_str()
        found.append((time.perf_counter() - begun) * 1000)
    await socket.close()
    return found


async def idle_kib(client: Client, pid: int, sockets: int) -> float:
    """Resident memory of one open socket."""
    async with AsyncExitStack() as stack:
        for _ in range(20):  # what the first ones need once
            stack.push_async_callback((await client.open()).close)
        before = rss_kib(pid)
        for _ in range(sockets):
            stack.push_async_callback((await client.open()).close)
        await asyncio.sleep(0.5)
        return (rss_kib(pid) - before) / sockets


async def measure(events: int, sockets: int) -> None:
    """Measure and print."""
    connector = aiohttp.TCPConnector(limit=0)
    with gateway() as (port, pid), echo() as (echo_port, echo_pid):
        async with aiohttp.ClientSession(connector=connector) as session:
            ours = Client(session, port, stream=True)
            theirs = Client(session, echo_port, stream=False)
            for warm_up in (dispatches(ours, 200), acks(ours, 200), echoes(theirs, 200)):
                await warm_up
            dispatched = await dispatches(ours, events)
            acked, echoed = await acks(ours, events), await echoes(theirs, events)
            idle = await idle_kib(ours, pid, sockets), await idle_kib(theirs, echo_pid, sockets)
    print(f"{'':30} {'gateway':>9} {'echo':>9}")
    for name, at in (("p50", 50), ("p99", 99)):
        print(f"accepted to dispatch, {name} ms {_at(dispatched, at):13.3f}")
        print(f"append to ack, {name} ms {_at(acked, at):20.3f} {_at(echoed, at):9.3f}")
    print(f"idle socket, KiB {idle[0]:23.1f} {idle[1]:9.1f}")


def _at(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.decision", description=__doc__)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--sockets", type=int, default=200)
    options = parser.parse_args()
    asyncio.run(measure(options.events, options.sockets))


if __name__ == "__main__":
    main()
