"""A thousand streams at once, each whole and in order (M2.1, M3.5; B81, B84).

The upstream and the client are processes of their own, those of `bench/`, so that three event loops
share the machine and none of them is the test's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import pytest

from bench.client import WrongStream, check
from bench.process import upstream
from bench.upstream import events
from tests.support.checks import until
from tests.support.gateway import KEY, ROOT, GatewayProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAMS: Final = 1000
CHUNKS: Final = 20
MODEL: Final = "bench/model"


@asynccontextmanager
async def gateway() -> AsyncIterator[GatewayProcess]:
    with upstream() as port:
        provider = {"shape": "openai", "base_url": f"http://127.0.0.1:{port}/v1"}
        config = {
            "server": {"host": "127.0.0.1"},
            "keys": [{"key": KEY, "org": "test"}],
            "providers": {"bench": provider},
        }
        async with GatewayProcess(config) as process:
            yield process


async def load(port: int, **options: float) -> dict[str, Any]:
    """Runs the client and returns its report."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.client", "--port", str(port), "--model", MODEL),
        *("--key", KEY, *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await asyncio.wait_for(client.communicate(), 60)
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    report: dict[str, Any] = json.loads(out)
    print(report)
    return report


def test_the_check_sees_what_is_wrong() -> None:
    """A load that checks nothing proves nothing."""
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    role, *numbered, finish, done = events(3, usage=False)
    good = [role, *numbered, finish, done]
    wrong = {
        "a chunk is missing": [role, *numbered[1:], finish, done],
        "out of order": [role, *reversed(numbered), finish, done],
        "a chunk is doubled": [role, *numbered, numbered[-1], finish, done],
        "[DONE] is missing": [role, *numbered, finish, b"0\r\n\r\n"],
        "[DONE] is doubled": [role, *numbered, finish, done.removesuffix(b"0\r\n\r\n"), done],
        "the body is cut": [role, *numbered, finish],
    }
    check(head + b"".join(good), 3)
    for parts in wrong.values():
        with pytest.raises((WrongStream, ValueError)):
            check(head + b"".join(parts), 3)
    with pytest.raises(WrongStream):
        check(head.replace(b"200", b"503") + b"".join(good), 3)


def at_once(lines: list[dict[str, Any]]) -> int:
    """How many requests ran at the same time, at most."""
    changes = []
    for line in lines:
        end = datetime.fromisoformat(line["timestamp"]).timestamp()
        changes += [(end - line["duration_ms"] / 1000, 1), (end, -1)]
    return max(accumulate(change for _, change in sorted(changes)))


def request_lines(process: GatewayProcess) -> list[dict[str, Any]]:
    """The log lines of requests that have ended."""
    return [line for line in process.log_lines() if line["event"] == "request"]


async def test_a_thousand_streams_at_once() -> None:
    """M2.1: every chunk of each, in order, and exactly one `[DONE]`; M1.2: one log line each."""
    async with gateway() as process:
        sockets = process.open_sockets()
        # So slow that the first has not ended when the last begins.
        report = await load(
            process.port, streams=STREAMS, at_once=STREAMS, chunks=CHUNKS, gap_ms=200
        )
        assert report["wrong"] == []
        assert report["good"] == STREAMS
        # A line is written after the client has its last byte.
        await until(lambda: len(request_lines(process)) >= STREAMS, 20, what="a line for each")
        lines = request_lines(process)
        assert Counter(line["outcome"] for line in lines) == {"completed": STREAMS}
        assert at_once(lines) > STREAMS // 4, "this machine is too slow to tell anything"
        # What is left is the pool of connections to the upstream.
        await until(lambda: process.open_sockets() <= sockets + STREAMS, what="the clients' end")


async def test_bursts_are_whole_and_in_order() -> None:
    """M2.1, M3.5: as fast as it can, with more streams than buffers could hold."""
    async with gateway() as process:
        report = await load(process.port, streams=100, at_once=50, chunks=1000)
        assert report["wrong"] == []
        assert report["good"] == 100
