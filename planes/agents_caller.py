"""Makes what calls the agents of the settings (W3.4), with the parts of one gateway."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from planes.logs import request_line
from planes.telemetry import Ended
from relay.agents.asking import Asker
from relay.agents.caller import Caller
from relay.agents.default_model import DefaultModels
from relay.agents.spec import AgentSpec

if TYPE_CHECKING:
    from planes.gateway import Gateway
    from planes.settings import Agent
    from planes.telemetry import Telemetry
    from relay.record import RequestRecord


def make_caller(gateway: Gateway) -> Caller:
    """Return what calls the agents of a gateway; it owns nothing that has to be closed."""
    asker = Asker(
        dialler=gateway.dialler,
        billing=gateway.billing,
        inflight=gateway.inflight,
        observer=gateway.telemetry,
        ended=lambda record: tell(record, gateway.telemetry),
    )
    specs = {name: _spec(name, agent) for name, agent in gateway.settings.agents.items()}
    return Caller(specs, asker, lambda: gateway.router, DefaultModels())


def tell(record: RequestRecord, telemetry: Telemetry) -> None:
    """Write the line of an agent's call of a model that has ended, and count it, as the middleware
    does for a request. Awaits nothing, never raises.
    """
    error = record.error
    status = error.status if error is not None else 200
    now = time.monotonic()
    request_line(
        "warning" if status >= 500 else "info", {"status": status} | record.fields(now), "call"
    )
    telemetry.ended(
        Ended(
            record=record,
            at=now,
            method=None,
            route=None,
            status=status,
            error_code=error.code if error is not None else None,
            headers={},
        )
    )


def _spec(name: str, agent: Agent) -> AgentSpec:
    return AgentSpec(
        id=name,
        model=agent.model,
        candidates=tuple((c.provider, c.model) for c in agent.candidates or ()),
        provider=agent.provider,
        system=agent.system,
        max_tokens=agent.max_tokens,
        parameters=agent.parameters,
        tools=agent.tools,
    )
