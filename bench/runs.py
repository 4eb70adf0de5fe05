"""What runs cost: tokens on the workflows and agents planes beside chunks on the models plane.

    python -m bench.runs [--rounds 3] [--quick]

tokens      CPU of the gateway for 1 M pieces of text, streamed by 50 clients at once: on
            /v1/chat/completions, /v1/workflows/execute-stream and /v1/agents/…/execute, in turns
batch       one run of 1,000 items, 50 at once: memory, and transactions of the journal
followers   2,000 clients that follow one run from its middle to its end
idle        500 agent streams whose provider is silent, with keepalives: share of a core

All before the upstream of `bench.upstream`. Ratios are of one run, medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import uvloop
import yaml

from bench.ports import free_port
from bench.process import (
    cpu_s,
    raise_file_limit,
    rss_kib,
    settled_cpu_s,
    started,
    upstream,
    wait_until_it_serves,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY: Final = "ozk_bench_0123456789abcdef"
MODEL: Final = "bench/model"
PLANES: Final = ("models", "workflows", "agents")
WORKFLOW_AND_AGENT_MAX: Final = 2.0
BATCH_MIB_MAX: Final = 200
IDLE_SHARE_MAX: Final = 0.05
_SILENT_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is asked."""

    streams: int = 400
    paced_streams: int = 100
    at_once: int = 50
    chunks: int = 200
    items: int = 1000
    followers: int = 2000
    idle: int = 500
    idle_s: float = 60.0
    slow_ms: float = 8000


FULL: Final = Sizes()
QUICK: Final = Sizes(
    streams=10,
    paced_streams=4,
    at_once=4,
    chunks=20,
    items=20,
    followers=20,
    idle=10,
    idle_s=1,
    slow_ms=200,
)


@contextmanager
def gateway(upstream_port: int, sizes: Sizes) -> Iterator[tuple[int, int, Path]]:
    """Run the gateway; yields its port, its process id and its database."""
    port = free_port()

    def agent(gap_ms: float, chunks: int = sizes.chunks) -> dict[str, Any]:
        return {"model": MODEL, "parameters": {"bench": {"chunks": chunks, "gap_ms": gap_ms}}}

    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        config = {
            "server": {"host": "127.0.0.1"},
            "store": {"url": f"sqlite:///{folder}/bench.db"},
            "keys": [{"key": KEY, "org": "bench"}],
            "providers": {
                "bench": {
                    "shape": "openai",
                    "base_url": f"http://127.0.0.1:{upstream_port}/v1",
                    "api_key": "sk-b",
                }
            },
            "models": {MODEL: {"candidates": [{"provider": "bench", "model": "bench"}]}},
            "agents": {
                "burst": agent(0),
                "paced": agent(20),
                "silent": agent(_SILENT_MS),
                "slow": agent(sizes.slow_ms, 3),
            },
            "telemetry": {"log": "json"},
        }
        file = folder / "sluicegate.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = ("-m", "planes.cli", "serve", "--config", str(file), "--port", str(port))
        log = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
        with started(*serve, **log) as process:
            wait_until_it_serves(port)
            yield port, process.pid, folder / "bench.db"


def _asked(plane: str, agent: str, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    if plane == "models":
        gap_ms = 20 if agent == "paced" else 0
        body = {
            "model": MODEL,
            "stream": True,
            "messages": [{"role": "user", "content": "Count."}],
            "bench": {"chunks": sizes.chunks, "gap_ms": gap_ms},
        }
        return "/v1/chat/completions", body
    if plane == "agents":
        return f"/v1/agents/{agent}/execute", {"prompt": "Count.", "stream": True}
    task = {"type": "task", "id": "t", "agent": agent, "prompt": "Count."}
    return "/v1/workflows/execute-stream", {"workflow": {"name": "w", "tasks": [task]}}


class Bench:
    """Asks one gateway."""

    def __init__(self, http: aiohttp.ClientSession, pid: int, database: Path, sizes: Sizes) -> None:
        self._http = http
        self._pid = pid
        self._database = database
        self._sizes = sizes

    async def tokens(self, plane: str, agent: str) -> float:
        """CPU seconds for 1 M pieces of text."""
        sizes = self._sizes
        count = sizes.paced_streams if agent == "paced" else sizes.streams
        path, body = _asked(plane, agent, sizes)
        left = iter(range(count))
        before = await asyncio.to_thread(settled_cpu_s, self._pid)

        async def client() -> None:
            for _ in left:
                async with self._http.post(path, json=body) as response:
                    data = await response.read()
                assert data.count(b"%06d x" % (sizes.chunks - 1)) >= 1, data[-300:]

        await asyncio.gather(*(client() for _ in range(sizes.at_once)))
        cost = await asyncio.to_thread(settled_cpu_s, self._pid) - before
        return cost / (count * sizes.chunks) * 1e6

    async def batch(self) -> dict[str, float]:
        """One run of many items."""
        items = self._sizes.items
        task = {"type": "task", "id": "it", "agent": "burst", "prompt": "{{ item }}"}
        batch = {
            "type": "batch", "id": "b", "items": list(range(items)), "concurrency": 50,
            "task": task,
        }  # fmt: skip
        rows_before = self._rows()
        before, began = rss_kib(self._pid), time.monotonic()
        body = {"workflow": {"name": "w", "tasks": [batch]}}
        async with self._http.post("/v1/workflows/execute-stream", json=body) as response:
            size = peak = 0
            async for data in response.content.iter_any():
                size += len(data)
                if size // 1_000_000 != (size - len(data)) // 1_000_000:
                    peak = max(peak, rss_kib(self._pid))
            run = response.headers["x-execution-id"]
        took_s = time.monotonic() - began
        peak = max(peak, rss_kib(self._pid))
        texts, events = (now - had for now, had in zip(self._rows(), rows_before, strict=True))
        async with self._http.get(f"/v1/workflows/executions/{run}") as response:
            assert (await response.json())["execution_summary"]["completed"] == items + 1
        return {
            "seconds": took_s,
            "peak_mib": peak / 1024,
            "grown_mib": (peak - before) / 1024,
            "tokens": items * self._sizes.chunks,
            "text_rows": texts,
            "event_rows": events,
        }

    def _rows(self) -> tuple[int, int]:
        """Of texts and of events, so far."""
        with sqlite3.connect(self._database) as database:
            (texts,) = database.execute("SELECT count(*) FROM texts").fetchone()
            (events,) = database.execute("SELECT count(*) FROM events").fetchone()
        return texts, events

    async def followers(self) -> dict[str, float]:
        """Many who follow one run to its end."""
        path, body = _asked("workflows", "slow", self._sizes)
        async with self._http.post(path.replace("-stream", ""), json=body) as response:
            run = (await response.json())["execution_id"]
        before = rss_kib(self._pid)
        events = f"/v1/workflows/executions/{run}/events"
        opened = [await self._http.get(events) for _ in range(self._sizes.followers)]
        cpu, began = cpu_s(self._pid), time.monotonic()
        memory = rss_kib(self._pid) - before
        bodies = await asyncio.gather(*(response.read() for response in opened))
        assert len(set(bodies)) <= 3, "followers differ in where their first token was cut"
        assert all(b"event: workflow_result" in body for body in bodies)
        return {
            "kib_each": memory / self._sizes.followers,
            "cpu_s": cpu_s(self._pid) - cpu,
            "seconds": time.monotonic() - began,
        }

    async def idle(self) -> dict[str, float]:
        """Agent streams on which nothing but keepalives comes."""
        path, body = _asked("agents", "silent", self._sizes)
        opened = [await self._http.post(path, json=body) for _ in range(self._sizes.idle)]
        await asyncio.sleep(min(2, self._sizes.idle_s))
        before = cpu_s(self._pid)
        await asyncio.sleep(self._sizes.idle_s)
        share = (cpu_s(self._pid) - before) / self._sizes.idle_s
        memory = rss_kib(self._pid)
        for response in opened:
            run = response.headers["X-Execution-Id"]
            response.close()
            async with self._http.post(f"/v1/workflows/executions/{run}/cancel"):
                pass
        return {"share_of_a_core": share, "rss_mib": memory / 1024}


async def measure(port: int, pid: int, database: Path, sizes: Sizes, rounds: int) -> None:
    """Print all figures."""
    headers = {"authorization": f"Bearer {KEY}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", headers=headers, connector=connector,
        timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20,
    ) as http:  # fmt: skip
        bench = Bench(http, pid, database, sizes)
        await bench.tokens("workflows", "burst")  # warm-up
        for agent in ("burst", "paced"):
            costs: dict[str, list[float]] = {plane: [] for plane in PLANES}
            for _ in range(rounds):
                for plane in PLANES:
                    costs[plane].append(await bench.tokens(plane, agent))
            base = statistics.median(costs["models"])
            for plane in PLANES:
                cost = statistics.median(costs[plane])
                ratio = cost / base if base else 0.0
                print(f"tokens {agent:6} {plane:10} {cost:8.2f} CPU s / 1 M  {ratio:5.2f} x models")
                if plane != "models":
                    _verdict(f"{plane} {agent}", ratio, WORKFLOW_AND_AGENT_MAX)
        batch = await bench.batch()
        print("batch     ", _line(batch))
        _verdict("batch memory, MiB", batch["peak_mib"], BATCH_MIB_MAX)
        _verdict("rows of text for a token", batch["text_rows"] / batch["tokens"], 0.1)
        print("followers ", _line(await bench.followers()))
        idle = await bench.idle()
        print("idle      ", _line(idle))
        _verdict("idle agent streams", idle["share_of_a_core"], IDLE_SHARE_MAX)


def _line(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.3g}" for name, value in figures.items())


def _verdict(what: str, value: float, limit: float) -> None:
    print(f"{'holds ' if value <= limit else 'MISSED'} {what}: {value:.3g} <= {limit:g}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tries the bench, measures nothing")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    raise_file_limit()
    with upstream() as upstream_port, gateway(upstream_port, sizes) as (port, pid, database):
        uvloop.run(measure(port, pid, database, sizes, options.rounds))


if __name__ == "__main__":
    main()
