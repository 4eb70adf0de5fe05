"""Counters, gauges and histograms over label values, for the Prometheus text format.

prometheus_client writes the text. Its own instruments are not used: they take a lock for each
update, which one event loop does not need, and add a `_created` series to each of theirs.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Labels = tuple[str, ...]

OTHER: Final = "other"
_NAME_CHARACTERS_MAX: Final = 200


class Names:
    """Values of one label whose names others choose: a bounded number of them, then `other`.

    Args:
        known: those that always have their own name.
        more_max: how many others may get theirs, in the order they come.
    """

    def __init__(self, known: Iterable[str], more_max: int) -> None:
        self._names = {name: _clean(name) for name in known}
        self._names_max = len(self._names) + more_max

    def learn(self, name: str) -> str:
        """Return the value for `name`, which gets its own from now on if there is room."""
        found = self._names.get(name)
        if found is not None:
            return found
        if len(self._names) >= self._names_max or len(name) > _NAME_CHARACTERS_MAX:
            return OTHER
        self._names[name] = _clean(name)
        return self._names[name]

    def get(self, name: str) -> str:
        """Return the value for `name`; one that was never learned is `other`."""
        return self._names.get(name, OTHER)


def _clean(name: str) -> str:
    return name.encode("utf-8", "replace").decode()  # a lone surrogate would end every scrape


class Series(Collector):
    """One metric.

    Args:
        name: as it is written, `_total` of a counter included.
        text: what it means. labels: their names.
    """

    kind: str

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)


class Counters(Series):
    """Sums that only grow."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        assert name.endswith("_total")
        super().__init__(name, text, labels)
        self._values: dict[Labels, int] = {}

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Add to the sum of `labels`."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class Gauges(Series):
    """Values of this moment.

    Args:
        read: returns them by labels; called in a thread of its own.
    """

    kind = "gauge"

    def __init__(
        self,
        name: str,
        text: str,
        read: Callable[[], Mapping[Labels, float]],
        labels: Sequence[str] = (),
    ) -> None:
        super().__init__(name, text, labels)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in list(self._read().items()):
            family.add_metric(labels, value)
        yield family


class Histograms(Series):
    """Distributions.

    Args:
        bounds: upper bounds of the buckets, ascending, without +Inf.
    """

    kind = "histogram"

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        super().__init__(name, text, labels)
        self._bounds = tuple(bounds)
        self._le = [*map(floatToGoString, self._bounds), "+Inf"]
        # By labels: how many fell into each bucket, and behind them the sum. One list, so that a
        # copy of it is of one moment.
        self._cells: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """Count one value."""
        cell = self._cell(labels)
        cell[bisect_left(self._bounds, value)] += 1
        cell[-1] += value

    def stopwatch(self, labels: Labels) -> Callable[[], None]:
        """Return what counts the seconds between its calls. It costs a fifth of a microsecond."""
        cell, bounds = self._cell(labels), self._bounds
        last: float | None = None

        def lap() -> None:
            nonlocal last
            now = monotonic()
            if last is not None:
                gap = now - last
                cell[bisect_left(bounds, gap)] += 1
                cell[-1] += gap
            last = now

        return lap

    def _cell(self, labels: Labels) -> list[float]:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = [0] * len(self._le) + [0.0]
        return cell

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, cell in list(self._cells.items()):
            *counts, total = cell.copy()
            below = 0.0
            buckets: list[tuple[str, float]] = []
            for le, count in zip(self._le, counts, strict=True):
                below += count
                buckets.append((le, below))
            family.add_metric(labels, buckets, total)
        yield family
