"""Builds what runs workflows and agents, from the parts of one gateway (W3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planes.logs import request_line
from planes.settings import HttpEngine
from planes.version import USER_AGENT
from relay.engines.embedded.agent import AgentEngine
from relay.engines.embedded.engine import EmbeddedEngine
from relay.engines.http import HttpEngine as RemoteEngine
from relay.engines.remote.link import RemoteLimits
from relay.runs.service import RunService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from planes.gateway import Gateway
    from relay.agents.base import AgentCaller
    from relay.engines.base import Engine
    from relay.money import Settlement
    from relay.stores.runs import RunStore


def make_runs(
    gateway: Gateway,
    caller: AgentCaller,
    *,
    store: RunStore,
    sweep: Callable[[str], Awaitable[Sequence[Settlement]]],
) -> RunService:
    """Return the service that all runs of this process belong to; not started."""
    settings = gateway.settings.workflows
    embedded = EmbeddedEngine(caller, heartbeat_s=settings.heartbeat_s)
    engine: Engine = embedded
    if isinstance(settings.engine, HttpEngine):
        engine = _remote(settings.engine)
    return RunService(
        store,
        {
            "workflows": engine,
            "agents": AgentEngine(caller, heartbeat_s=settings.heartbeat_s),
        },
        gateway.inflight,
        gateway.slots,
        owner=gateway.billing.worker,
        orphan_after_s=settings.orphan_after_s,
        retention_days=gateway.settings.journal.retention_days,
        runs_max=settings.max_runs,
        sweep=sweep,
        tell=lambda fields: request_line("info", fields, "run"),
    )


def _remote(settings: HttpEngine) -> RemoteEngine:
    key = settings.api_key
    return RemoteEngine(
        settings.base_url,
        api_key=key.get_secret_value() if key is not None else "",
        allow_stream_origins=settings.allow_stream_origins,
        limits=RemoteLimits(
            connect_s=settings.connect_timeout_s,
            header_s=settings.header_timeout_s,
            idle_s=settings.idle_timeout_s,
            stream_idle_s=settings.stream_idle_timeout_s,
            finish_s=settings.stream_finish_timeout_s,
        ),
        user_agent=USER_AGENT,
    )
