"""Makes what calls the agents of the settings (W3.4), with the parts of one gateway."""

from __future__ import annotations

import time
from ipaddress import ip_network
from typing import TYPE_CHECKING

from planes.logs import request_line
from planes.settings import HttpTool
from planes.settings.tools import tool_name
from planes.telemetry import Ended
from planes.version import USER_AGENT
from relay.agents.addresses import AddressRule
from relay.agents.asking import Asker
from relay.agents.caller import Caller
from relay.agents.default_model import DefaultModels
from relay.agents.http_tool import HttpTool as RunTool
from relay.agents.spec import AgentSpec
from relay.agents.tools import Toolbox
from relay.engines.embedded.schemas import AnswerSchema

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
    settings = gateway.settings
    addresses = AddressRule(map(ip_network, settings.agents_plane.tool_networks))
    specs = {name: _spec(name, agent) for name, agent in settings.agents.items()}
    toolboxes = {name: _toolbox(agent, addresses) for name, agent in settings.agents.items()}
    return Caller(specs, asker, lambda: gateway.router, DefaultModels(), toolboxes)


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
        tools=tuple(
            tool.declaration() if isinstance(tool, HttpTool) else tool for tool in agent.tools
        ),
        tool_rounds=agent.tool_rounds,
    )


def _toolbox(agent: Agent, addresses: AddressRule) -> Toolbox:
    tools = [
        RunTool(
            name=tool.name,
            url=tool.url,
            method=tool.method,
            headers=tool.headers,
            schema=AnswerSchema(dict(tool.parameters)),
            addresses=addresses,
            timeout_s=tool.timeout_s,
            max_bytes=tool.max_bytes,
            user_agent=USER_AGENT,
        )
        for tool in agent.tools
        if isinstance(tool, HttpTool)
    ]
    return Toolbox(tools, [name for name in map(tool_name, agent.tools) if name is not None])
