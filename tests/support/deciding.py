"""A decide service over a backend of a test's own: no store unless one is given, free of charge."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from relay.billing import Billing
from relay.decisions.keys import Keys
from relay.decisions.limits import DecisionLimits
from relay.decisions.service import DecideService
from relay.decisions.tariff import Tariff
from relay.prices import PriceBook
from relay.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from encoders.decision_served import Served
    from relay.billing import BillingHook
    from relay.deciders.base import DecisionBackend
    from relay.stores.base import Store


def decide_service(
    backend: DecisionBackend,
    served: Served,
    *,
    slots: Slots | None = None,
    store: object = None,
    hooks: Sequence[BillingHook] = (),
    limits: DecisionLimits | None = None,
    tariff: Tariff | None = None,
) -> DecideService:
    """Return one.

    Args:
        store: needed for decides with an idempotency key.
    """
    return DecideService(
        backend,
        served,
        slots or Slots(),
        billing=Billing(hooks, PriceBook({}, {}), worker="worker_1", hold_output_tokens=1),
        tariff=tariff or Tariff(),
        keys=Keys(cast("Store", store), limits or DecisionLimits()),
        provider="fake",
    )
