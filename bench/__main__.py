"""What relaying costs: the gateway with everything on beside a plain pass-through and its peers.

    python -m bench                 what is installed
    python -m bench --peers         with LiteLLM, which is installed into .venv-peers first
    python -m bench --check         exit code 1 if a target is missed

All targets run at the same time before one upstream and are measured in turns, so that a noisy
machine troubles all alike; a figure is the median of the rounds. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench import report, targets
from bench.process import ROOT, rss_kib, settled_cpu_s, started, upstream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.report import Figures
    from bench.targets import Target

# Memory of an open stream is read when the allocators have come to rest.
_REST_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """One way to ask; the options of `bench.client`."""

    streams: int
    at_once: int
    chunks: int
    gap_ms: float = 0
    ramp_s: float = 0
    one_write: bool = False

    def arguments(self) -> list[str]:
        """The command line of `bench.client`."""
        return [
            *("--streams", str(self.streams), "--at-once", str(self.at_once)),
            *("--chunks", str(self.chunks), "--gap-ms", str(self.gap_ms)),
            *("--ramp-s", str(self.ramp_s)),
            *(("--one-write",) if self.one_write else ()),
        ]


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What a target gets in a round, before the first round, and for its memory."""

    warm_up: Load
    paced: Load
    burst: Load
    flood: Load
    short: Load
    idle: Load


def _idle(streams: int) -> Load:
    return Load(streams=streams, at_once=1, chunks=2, gap_ms=3_600_000)


# The ramp of `paced` spreads the streams over their gap: 50 clocks, not one.
FULL: Final = Loads(
    warm_up=Load(streams=200, at_once=20, chunks=200),
    paced=Load(streams=200, at_once=50, chunks=200, gap_ms=20, ramp_s=1.03),
    burst=Load(streams=2000, at_once=50, chunks=200),
    flood=Load(streams=200, at_once=20, chunks=2000, one_write=True),
    short=Load(streams=2000, at_once=20, chunks=1),
    idle=_idle(400),
)
# A target that needs a millisecond for a chunk is saturated by the streams above.
SLOW: Final = Loads(
    warm_up=Load(streams=10, at_once=5, chunks=50),
    paced=Load(streams=20, at_once=10, chunks=200, gap_ms=20, ramp_s=1.03),
    burst=Load(streams=20, at_once=10, chunks=200),
    flood=Load(streams=8, at_once=4, chunks=500, one_write=True),
    short=Load(streams=60, at_once=4, chunks=1),
    idle=_idle(50),
)
QUICK: Final = Loads(
    warm_up=Load(streams=4, at_once=2, chunks=20),
    paced=Load(streams=10, at_once=10, chunks=20, gap_ms=20, ramp_s=0.03),
    burst=Load(streams=20, at_once=5, chunks=200),
    flood=Load(streams=10, at_once=5, chunks=1000, one_write=True),
    short=Load(streams=50, at_once=5, chunks=1),
    idle=_idle(20),
)


class Bench:
    """Puts loads on targets and keeps what they cost."""

    def __init__(self, *, quick: bool) -> None:
        self._quick = quick
        self.figures: dict[str, Figures] = {}

    def begin(self, target: Target) -> None:
        """Warm a target up and measure its idle streams, while its memory is young."""
        loads = self._loads(target)
        self._run(target, "warm-up", loads.warm_up)
        figures = self.figures[target.name] = report.Figures(slow=target.slow)
        figures.add("idle_kib", self._idle_kib(target, loads.idle))

    def round(self, among: Sequence[Target]) -> None:
        """Measure each target once, load by load."""
        for name in ("paced", "burst", "flood", "short"):
            for target in among:
                load: Load = getattr(self._loads(target), name)
                before = settled_cpu_s(target.pid)
                seen = self._run(target, name, load)
                cost_s = settled_cpu_s(target.pid) - before
                figures = self.figures[target.name]
                if name == "short":
                    figures.add("request_ms", cost_s / load.streams * 1000)
                    continue
                figures.add(f"{name}_cpu_s", cost_s / seen["chunks"] * 1e6)
                if name == "paced":
                    for percent, value in seen["ttft_ms"].items():
                        figures.add(f"ttft_p{percent}_ms", value)
                elif name == "flood":
                    figures.add("flood_rate", seen["chunks"] / seen["elapsed_s"])

    def _loads(self, target: Target) -> Loads:
        if self._quick:
            return QUICK
        return SLOW if target.slow else FULL

    def _run(self, target: Target, name: str, load: Load) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, *_client(target, load)], cwd=ROOT, stdout=subprocess.PIPE, check=False
        )
        if not done.stdout:
            raise SystemExit(f"{target.name}, {name}: the client died")
        seen: dict[str, Any] = json.loads(done.stdout)
        if done.returncode:
            raise SystemExit(f"{target.name}, {name}: {seen['wrong']}")
        return seen

    def _idle_kib(self, target: Target, load: Load) -> float:
        """Resident memory of one open stream on which nothing moves."""
        time.sleep(_REST_S if not self._quick else 0)
        before = rss_kib(target.pid)
        with started(*_client(target, load), "--hold") as client:
            assert client.stdout is not None
            client.stdout.readline()
            time.sleep(_REST_S if not self._quick else 0.1)
            return (rss_kib(target.pid) - before) / load.streams


def _client(target: Target, load: Load) -> list[str]:
    common = ["--port", str(target.port), "--model", targets.MODEL, "--key", targets.KEY]
    return ["-m", "bench.client", *common, *load.arguments()]


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="make .venv-peers if it is not there")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="tries the bench, measures nothing")
    parser.add_argument(
        "--targets",
        type=lambda text: text.split(","),
        default=list(targets.ALL),
        metavar="NAME,…",
        help=f"some of {', '.join(targets.ALL)}",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.targets) - targets.ALL.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def main() -> int:
    """Measure, print the table and the targets."""
    options = parse_options()
    if options.peers:
        targets.make_peers()
    bench = Bench(quick=options.quick)
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        port = stack.enter_context(upstream())
        running = []
        for name in targets.ALL:
            if name not in options.targets:
                left_out[name] = "not asked for"
                continue
            try:
                running.append(stack.enter_context(targets.ALL[name](port)))
            except targets.LeftOut as why:
                left_out[name] = str(why)
        for target in running:
            bench.begin(target)
        for number in range(options.rounds):
            _say(f"round {number + 1} of {options.rounds}")
            bench.round(running)
    print(report.heading(rounds=options.rounds, quick=options.quick, left_out=left_out))
    print(report.table(bench.figures))
    verdicts = report.verdicts(bench.figures)
    print(report.verdict_lines(verdicts))
    missed = any(verdict.holds is False for verdict in verdicts)
    return 1 if options.check and missed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
