"""What `GET /metrics` says, parsed by prometheus_client's own parser."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from tests.support.gateway import GatewayProcess


class Scrape:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.families, f"{family.name} comes twice"
            self.families[family.name] = family

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The samples of that name, summed by these labels."""
        found: dict[tuple[str, ...], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name:
                    key = tuple(sample.labels.get(label, "") for label in labels)
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name with these labels; 0 if there is none."""
        wanted = tuple(labels.values())
        return self.values(name, *labels).get(wanted, 0.0)

    def label_values(self, label: str) -> set[str]:
        """Every value of a label, of any metric."""
        return {
            sample.labels[label]
            for family in self.families.values()
            for sample in family.samples
            if label in sample.labels
        }


async def scrape(gateway: GatewayProcess) -> Scrape:
    """Ask as Prometheus does: without a key."""
    async with gateway.client() as client:
        await client.request("GET", "/metrics")
        await client.read_all(timeout=20)
        assert client.status == 200, client.body
        return Scrape(client.body.decode())


async def scrape_until(
    gateway: GatewayProcess, holds: Callable[[Scrape], object], *, timeout: float = 10.0
) -> Scrape:
    """Scrape until the condition holds: what is counted comes after the client's last byte."""
    until = time.monotonic() + timeout
    while True:
        seen = await scrape(gateway)
        if holds(seen):
            return seen
        assert time.monotonic() < until, seen.text
        await asyncio.sleep(0.02)


async def scrape_after(gateway: GatewayProcess, requests: int) -> Scrape:
    """Scrape when so many requests have ended; more of them fail the test."""
    seen = await scrape_until(gateway, lambda s: s.value("sluicegate_requests_total") >= requests)
    assert seen.value("sluicegate_requests_total") == requests, seen.text
    return seen


def increasing(values: Iterable[float]) -> bool:
    """Whether no value is below the one before it."""
    listed = list(values)
    return listed == sorted(listed)
