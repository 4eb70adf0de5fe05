"""The decision plane of one gateway: what its streams share, and all of them (D1.5, D3.6)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from aiohttp import web

from encoders.decision_served import ModelLimits, Served
from planes.decision import backends
from planes.decision.dispatch import Services
from relay.decisions.limits import DecisionLimits
from relay.decisions.service import DecideService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planes.decision.stream import Stream
    from planes.settings import Decision
    from relay.inflight import InFlight
    from relay.slots import Slots
    from relay.stores.base import Store

_NO_LIMIT: Final = 2**31


class DecisionPlane:
    """The streams of this process.

    Args:
        settings: their backend is served (`make_plane`).

    Attributes:
        services: what all streams share.
    """

    def __init__(self, settings: Decision, services: Services) -> None:
        self._settings = settings
        self.services = services
        self._places: set[object] = set()
        self._streams: set[Stream] = set()
        services.inflight.on_drain(self._drain)

    @property
    def full(self) -> bool:
        """Whether `max_streams_per_process` sockets are open or being opened."""
        return len(self._places) >= self.services.limits.max_streams_per_process

    def account_limit(self, max_concurrent: int | None) -> int:
        """How many sockets an account may have (D1.5)."""
        policy = self._settings.account_streams
        if isinstance(policy, int):
            return policy
        return _NO_LIMIT if max_concurrent is None else max(1, max_concurrent // 2)

    def take_place(self) -> object:
        """Count one more socket, until `free_place`."""
        place = object()
        self._places.add(place)
        return place

    def free_place(self, place: object) -> None:
        """Idempotent."""
        self._places.discard(place)

    def add(self, stream: Stream) -> None:
        """Have the stream told of a drain, until `discard`."""
        self._streams.add(stream)

    def discard(self, stream: Stream) -> None:
        """Idempotent."""
        self._streams.discard(stream)

    def __iter__(self) -> Iterator[Stream]:
        return iter([*self._streams])

    async def close(self) -> None:
        """End what still runs after the drain."""
        await asyncio.gather(*(stream.close() for stream in self))
        self.services.decoder.shutdown(wait=False, cancel_futures=True)

    def _drain(self) -> None:
        for stream in self:
            stream.drain()


DECISION: web.AppKey[DecisionPlane] = web.AppKey("decision")


def make_plane(
    settings: Decision, *, store: Store, slots: Slots, inflight: InFlight
) -> DecisionPlane | None:
    """Return the plane, None if it is off."""
    backend = backends.backend_of(settings)
    if backend is None:
        return None
    services = Services(
        limits=DecisionLimits.of(settings.limits),
        store=store,
        decider=DecideService(backend, _served(settings), slots),
        inflight=inflight,
        decoder=ThreadPoolExecutor(1, thread_name_prefix="decision-decoder"),
    )
    return DecisionPlane(settings, services)


def _served(settings: Decision) -> Served:
    limits = {
        name: ModelLimits(**{key: int(most) for key, most in model.limits.items()})
        for model in settings.models
        for name in (model.id, *model.aliases)
    }
    return Served(models=limits, media=settings.media)
