"""A provider that could not be started: every request to it says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from relay.errors import UpstreamUnreachable

if TYPE_CHECKING:
    from relay.upstreams.base import UpstreamRequest


class UnavailableUpstream:
    """Stands in for a provider that did not start; the gateway serves the others.

    Args:
        name: its canonical id. why: what its start said.
    """

    def __init__(self, name: str, why: str) -> None:
        self._name = name
        self._why = why

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Nothing to start."""

    async def open(self, request: UpstreamRequest) -> NoReturn:
        raise UpstreamUnreachable(f"the provider {self._name} could not be started: {self._why}")

    async def close(self) -> None:
        """Nothing to free."""
