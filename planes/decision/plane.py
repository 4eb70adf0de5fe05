"""The decision plane of one gateway: what its streams share, and all of them (D1.5, D3.6)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from encoders.decision_models import model_document
from planes.decision import backends
from planes.decision.dispatch import Services
from planes.decision.runs import Runs
from planes.settings import ChatLogprobsBackend
from relay.decisions.keys import Keys
from relay.decisions.limits import DecisionLimits
from relay.decisions.service import DecideService
from relay.decisions.tariff import Tariff
from relay.money import Price

if TYPE_CHECKING:
    from collections.abc import Iterator

    from encoders.decision_served import Served
    from planes.decision.stream import Stream
    from planes.gateway import Gateway
    from planes.settings import Decision
    from planes.settings.catalog import Price as TextPrice
    from relay.deciders.base import DecisionBackend
    from relay.stores.base import Store

_NO_LIMIT: Final = 2**31


class DecisionPlane:
    """The streams of this process.

    Args:
        settings: their backend is served (`make_plane`).
        backend: closed with the plane. served: what it lets clients ask.

    Attributes:
        services: what all streams share. runs: the decides of HTTP requests.
    """

    def __init__(
        self, settings: Decision, services: Services, backend: DecisionBackend, served: Served
    ) -> None:
        self._settings = settings
        self._served = served
        self._backend = backend
        self.services = services
        self.runs = Runs(services.limits.decision_settlement_timeout_ms / 1000)
        self._places: set[object] = set()
        self._streams: set[Stream] = set()
        services.inflight.on_drain(self._drain)

    @property
    def full(self) -> bool:
        """Whether `max_streams_per_process` sockets are open or being opened."""
        return len(self._places) >= self.services.limits.max_streams_per_process

    def models(self, created: int) -> list[dict[str, Any]]:
        """Return the entries of `GET /v1/models` (D6.3).

        Args:
            created: Unix seconds.
        """
        return [
            model_document(
                name,
                self._served,
                alias_for=None if name == model.id else model.id,
                body_bytes=self.services.limits.max_decide_body_bytes,
                created=created,
            )
            for model in self._settings.models
            for name in (model.id, *model.aliases)
        ]

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

    def start(self) -> None:
        """Begin; the store is open."""
        self.services.decider.start()

    async def close(self) -> None:
        """End what still runs after the drain."""
        await asyncio.gather(*(stream.close() for stream in self))
        await self.runs.close()
        await self.services.decider.close()
        self.services.decoder.shutdown(wait=False, cancel_futures=True)
        await self._backend.close()

    def _drain(self) -> None:
        for stream in self:
            stream.drain()


DECISION: web.AppKey[DecisionPlane] = web.AppKey("decision")


def make_plane(gateway: Gateway, *, store: Store) -> DecisionPlane | None:
    """Return the plane, None if it is off."""
    settings = gateway.settings.decision
    backend = backends.backend_of(
        gateway.settings, router=lambda: gateway.router, dialler=gateway.dialler
    )
    if backend is None:
        return None
    limits = DecisionLimits.of(settings.limits)
    served = backends.served_of(gateway.settings)
    services = Services(
        limits=limits,
        store=store,
        decider=DecideService(
            backend,
            served,
            gateway.slots,
            billing=gateway.billing,
            tariff=_tariff(gateway),
            keys=Keys(store, limits),
            provider=settings.backend.kind if settings.backend is not None else "",
        ),
        inflight=gateway.inflight,
        decoder=ThreadPoolExecutor(1, thread_name_prefix="decision-decoder"),
    )
    return DecisionPlane(settings, services, backend, served)


def _tariff(gateway: Gateway) -> Tariff:
    """Text costs what the model's own price says, else what the chat model behind it costs."""
    settings, backend = gateway.settings.decision, gateway.settings.decision.backend
    behind = Price()
    if isinstance(backend, ChatLogprobsBackend):
        candidates = gateway.settings.candidates_of(backend.model)
        pairs = [(candidate.provider, candidate.model) for candidate in candidates]
        behind = gateway.billing.price(backend.model, pairs)
    text = {
        name: behind if model.price is None else _price(model.price)
        for model in settings.models
        for name in (model.id, *model.aliases)
    }
    price = settings.price
    return Tariff(
        text=text,
        image_usd=Decimal(str(price.image_usd)),
        question_usd=Decimal(str(price.question_usd)),
        call_usd=Decimal(str(price.call_usd)),
    )


def _price(price: TextPrice) -> Price:
    return Price(
        prompt_usd_per_mtok=Decimal(str(price.prompt_usd_per_mtok)),
        completion_usd_per_mtok=Decimal(str(price.completion_usd_per_mtok)),
    )
