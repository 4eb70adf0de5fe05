"""What the handlers of every plane share, built once by the composition root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planes.auth import KeyRing
    from planes.settings import Settings
    from planes.telemetry import Telemetry
    from relay.attempts import Dialler
    from relay.billing import Billing
    from relay.inflight import InFlight
    from relay.record import RequestRecord
    from relay.routing import Router
    from relay.slots import Slots


@dataclass(slots=True, kw_only=True)
class Gateway:
    """The parts of one running gateway.

    Attributes:
        dialler: what this worker has learned of its candidates.
        started: Unix seconds, for the model list.
        other_models: entries of `GET /v1/models` beside the slugs, of other planes.
        ready: whether every provider has been started.
    """

    settings: Settings
    keys: KeyRing
    router: Router
    inflight: InFlight
    slots: Slots
    dialler: Dialler
    billing: Billing
    telemetry: Telemetry
    started: int
    other_models: Sequence[Mapping[str, Any]] = ()
    ready: bool = False


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway")
RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record")
