"""What a measurement found, as a table and as verdicts on the targets."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from bench.targets import LITELLM, OURS, PASS_THROUGH

if TYPE_CHECKING:
    from collections.abc import Mapping

# Name of a figure, heading of its column, digits behind the point.
COLUMNS: Final = (
    ("paced_cpu_s", "CPU s for 1 M chunks, paced", 1),
    ("burst_cpu_s", "CPU s for 1 M chunks, burst", 1),
    ("flood_cpu_s", "CPU s for 1 M chunks, flood", 1),
    ("flood_rate", "flood chunks/s", 0),
    ("request_ms", "CPU ms a request", 2),
    ("ttft_p50_ms", "TTFT p50 ms", 1),
    ("ttft_p99_ms", "TTFT p99 ms", 1),
    ("idle_kib", "KiB an idle stream", 1),
)


@dataclass(eq=False)
class Figures:
    """What was measured of one target, a value for each round."""

    slow: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Note the value of one round."""
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.values[name])


@dataclass(frozen=True)
class Verdict:
    """One target, and whether it holds; None if it was not measured."""

    text: str
    holds: bool | None


def heading(*, rounds: int, quick: bool, left_out: Mapping[str, str]) -> str:
    """What was measured on, and what was not."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "uvloop", "orjson"))
    lines = [
        f"{rounds} rounds, medians; {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"{libraries}"
    ]
    if quick:
        lines.append("--quick: far too short to tell anything but that the bench works")
    lines += [f"left out: {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines) + "\n"


def table(figures: Mapping[str, Figures]) -> str:
    """A Markdown table, a line for each target."""
    lines = [
        "| target | " + " | ".join(heading for _, heading, _ in COLUMNS) + " |",
        "|---|" + "--:|" * len(COLUMNS),
    ]
    for name, found in figures.items():
        cells = [f"{found.median(key):,.{digits}f}" for key, _, digits in COLUMNS]
        mark = "*" if found.slow else ""
        lines.append(f"| {name}{mark} | " + " | ".join(cells) + " |")
    if any(found.slow for found in figures.values()):
        lines += ["", "\\* with fewer streams and chunks: the others' load saturates it"]
    return "\n".join(lines) + "\n"


def verdicts(figures: Mapping[str, Figures]) -> list[Verdict]:
    """What the gateway is judged by, against what was measured (docs/performance.md)."""
    out = []
    for what, key in (("paced", "paced_cpu_s"), ("burst", "burst_cpu_s")):
        out.append(_ratio(figures, what, key, PASS_THROUGH, 1.3))
    for what, key in (("paced", "paced_cpu_s"), ("burst", "burst_cpu_s")):
        out.append(_ratio(figures, what, key, LITELLM, 0.1))
    text = f"KiB an idle stream: at most 64 above {PASS_THROUGH}"
    if OURS in figures and PASS_THROUGH in figures:
        above = figures[OURS].median("idle_kib") - figures[PASS_THROUGH].median("idle_kib")
        out.append(Verdict(f"{text}: {above:.1f} above", above <= 64))
    else:
        out.append(Verdict(text, None))
    return out


def _ratio(
    figures: Mapping[str, Figures], what: str, key: str, other: str, limit: float
) -> Verdict:
    text = f"CPU, {what}: at most {limit:g} of {other}"
    if OURS not in figures or other not in figures:
        return Verdict(text, None)
    theirs = figures[other].median(key)
    if not theirs:  # less than one tick of the clock
        return Verdict(f"{text}: too little was measured", None)
    ratio = figures[OURS].median(key) / theirs
    return Verdict(f"{text}: {ratio:.3g}", ratio <= limit)


def verdict_lines(found: list[Verdict]) -> str:
    """One line for each target."""
    words = {True: "holds", False: "MISSED", None: "not measured"}
    return "\n".join(f"{words[verdict.holds]:12} {verdict.text}" for verdict in found)
