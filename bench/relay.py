"""What relaying costs: the gateway with everything on, and a plain pass-through, side by side.

    python -m bench.relay [--rounds 3]

Both are processes of their own before the same upstream, measured in turns so that a noisy machine
troubles both alike. CPU seconds of the target's process for a million chunks is the figure to steer
by; ratios compare between machines, the figures themselves do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from bench.process import ROOT, cpu_s, free_port, rss_kib, started, upstream, wait_until_it_serves

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY: Final = "ozk_bench_0123456789abcdef"
MODEL: Final = "bench/model"
IDLE_STREAMS: Final = 400


@dataclass(frozen=True, kw_only=True)
class Load:
    """One way to ask."""

    name: str
    streams: int
    at_once: int
    chunks: int
    gap_ms: float = 0

    def arguments(self) -> list[str]:
        """Options of `bench.client`."""
        return [
            *("--streams", str(self.streams), "--at-once", str(self.at_once)),
            *("--chunks", str(self.chunks), "--gap-ms", str(self.gap_ms)),
        ]


WARM_UP: Final = Load(name="warm-up", streams=20, at_once=10, chunks=200)
LOADS: Final = (
    Load(name="paced", streams=100, at_once=50, chunks=200, gap_ms=20),
    Load(name="burst", streams=200, at_once=20, chunks=2000),
)


@dataclass(frozen=True)
class Target:
    """A running server."""

    name: str
    port: int
    pid: int

    def run(self, load: Load) -> tuple[float, dict[str, Any]]:
        """Put a load on it; return its CPU seconds for a million chunks and the client's report."""
        before = cpu_s(self.pid)
        done = subprocess.run(
            [sys.executable, *self._client(load)], cwd=ROOT, stdout=subprocess.PIPE, check=False
        )
        report: dict[str, Any] = json.loads(done.stdout)
        if done.returncode:
            raise SystemExit(f"{self.name}, {load.name}: {report['wrong']}")
        return (cpu_s(self.pid) - before) / report["chunks"] * 1e6, report

    def idle_kib(self) -> float:
        """Resident memory of one open stream on which nothing moves."""
        before = rss_kib(self.pid)
        load = Load(name="idle", streams=IDLE_STREAMS, at_once=1, chunks=2, gap_ms=3_600_000)
        with started(*self._client(load), "--hold") as client:
            assert client.stdout is not None
            client.stdout.readline()
            time.sleep(0.5)
            return (rss_kib(self.pid) - before) / IDLE_STREAMS

    def _client(self, load: Load) -> list[str]:
        common = ["--port", str(self.port), "--model", MODEL, "--key", KEY]
        return ["-m", "bench.client", *common, *load.arguments()]


@contextmanager
def gateway(upstream_port: int) -> Iterator[Target]:
    """Run the gateway: keys, balances, log and metrics as in production."""
    port = free_port()
    base_url = f"http://127.0.0.1:{upstream_port}/v1"
    with tempfile.TemporaryDirectory(prefix="sluicegate-bench-") as name:
        folder = Path(name)
        config = {
            "server": {"host": "127.0.0.1"},
            "store": {"url": f"sqlite:///{folder}/bench.db"},
            "keys": [{"key": KEY, "org": "bench", "balance_usd": 1000}],
            "providers": {"bench": {"shape": "openai", "base_url": base_url, "api_key": "sk-b"}},
            "models": {MODEL: {"candidates": [{"provider": "bench", "model": "bench"}]}},
        }
        file = folder / "sluicegate.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = ("-m", "planes.cli", "serve", "--config", str(file), "--port", str(port))
        log = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
        with started(*serve, **log) as process:
            wait_until_it_serves(port)
            yield Target("gateway", port, process.pid)


@contextmanager
def passthrough(upstream_port: int) -> Iterator[Target]:
    """Run the plain pass-through."""
    port = free_port()
    arguments = ("-m", "bench.passthrough", "--upstream", str(upstream_port), "--port", str(port))
    with started(*arguments) as process:
        wait_until_it_serves(port)
        yield Target("pass-through", port, process.pid)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        port = stack.enter_context(upstream())
        targets = [stack.enter_context(start(port)) for start in (gateway, passthrough)]
        idle = {}
        for target in targets:
            target.run(WARM_UP)
            idle[target.name] = target.idle_kib()
        costs: dict[tuple[str, str], list[float]] = {}
        ttft: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.rounds):
            for load in LOADS:
                for target in targets:
                    cost, report = target.run(load)
                    costs.setdefault((target.name, load.name), []).append(cost)
                    ttft.setdefault((target.name, load.name), []).append(report["ttft_ms"]["99"])
    print(f"{'':24} {'gateway':>10} {'pass-thr.':>10} {'ratio':>7}")
    for load in LOADS:
        _line(f"CPU s / 1M chunks, {load.name}", costs, load.name)
    _line("TTFT p99 ms, paced", ttft, "paced")
    _row("KiB an idle stream", idle["gateway"], idle["pass-through"])


def _line(label: str, found: dict[tuple[str, str], list[float]], load: str) -> None:
    ours, theirs = (statistics.median(found[name, load]) for name in ("gateway", "pass-through"))
    _row(label, ours, theirs)


def _row(label: str, ours: float, theirs: float) -> None:
    print(f"{label:24} {ours:10.1f} {theirs:10.1f} {ours / theirs:7.2f}")


if __name__ == "__main__":
    main()
