"""The composition root: settings in, a running gateway out.

make_app(settings)   the aiohttp application, with everything it owns
make_runner(app)     the one runner of production and tests, see `planes.runner`

The process around it (sockets, signals, drain) is `planes.server`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from planes import health
from planes.accounts import Accounts
from planes.agents import routes as agents_routes
from planes.agents_caller import make_caller
from planes.auth import KeyRing
from planes.decision import routes as decision_routes
from planes.decision.plane import DECISION, make_plane
from planes.gateway import GATEWAY, Gateway
from planes.middleware import observe
from planes.models import routes as models_routes
from planes.providers import Providers
from planes.runner import make_runner
from planes.runs.access import CALLER, RUNS
from planes.runs.build import make_runs
from planes.telemetry import State, Telemetry
from planes.workflows import routes as workflows_routes
from relay.attempts import Dialler
from relay.inflight import InFlight
from relay.slots import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from planes.decision.plane import DecisionPlane
    from planes.settings import Settings

log = structlog.get_logger("sluicegate")

__all__ = ["make_app", "make_runner"]


def make_app(settings: Settings, *, replay_if_no_local: bool = False) -> web.Application:
    """Return the application; its cleanup frees all that it acquires.

    Args:
        replay_if_no_local: a local model that cannot start is replaced by recorded transcripts
            instead of failing the start (O1.1).
    """
    app = web.Application(middlewares=[observe], client_max_size=settings.server.max_body_bytes)
    providers = Providers(settings)
    keys = KeyRing(settings.keys)
    accounts = Accounts(settings, keys)
    inflight = InFlight()
    telemetry = Telemetry(
        settings,
        State(
            inflight=inflight,
            unsettled=lambda: accounts.unsettled,
            open_holds=lambda: accounts.billing.open_holds,
            runs=lambda: app[RUNS].running,
            followers=lambda: app[RUNS].followers,
        ),
    )
    gateway = app[GATEWAY] = Gateway(
        settings=settings,
        keys=keys,
        router=providers.router(),
        inflight=inflight,
        slots=Slots(),
        dialler=Dialler(),
        billing=accounts.billing,
        telemetry=telemetry,
        started=int(time.time()),
    )

    decisions = make_plane(gateway, store=accounts.store)
    caller = app[CALLER] = make_caller(gateway)
    runs = app[RUNS] = make_runs(
        gateway, caller, store=accounts.store.runs, sweep=accounts.sweep_run
    )

    async def run_parts(_: web.Application) -> AsyncIterator[None]:
        try:
            await telemetry.start()
            await accounts.start(gateway.router)  # first: a store that cannot be used is told soon
            if decisions is not None:
                decisions.start()
            gateway.router = await providers.start(replay_if_no_local=replay_if_no_local)
            await runs.start()  # last: runs that were left go on at once, and need all of it
            gateway.ready = True
            yield
        finally:
            gateway.ready = False
            try:
                await runs.close()
                if decisions is not None:
                    await decisions.close()
                await providers.close()
            finally:
                try:
                    await accounts.close()
                finally:
                    await telemetry.close()

    app.cleanup_ctx.append(run_parts)
    app.on_response_prepare.append(_name_the_server)
    _mount(app, gateway, decisions)
    return app


def _mount(app: web.Application, gateway: Gateway, decisions: DecisionPlane | None) -> None:
    """Mount every plane that is served."""
    app.add_routes(health.routes)
    if gateway.telemetry.metrics is not None:
        app.add_routes(health.metrics_routes)
    models_routes.add_routes(app)
    workflows_routes.add_routes(app)
    agents_routes.add_routes(app)
    if decisions is not None:
        app[DECISION] = decisions
        gateway.other_models = decisions.models(gateway.started)
        decision_routes.add_routes(app)
    else:
        decision_routes.add_off_routes(app)


async def _name_the_server(_: web.Request, response: web.StreamResponse) -> None:
    """Say who answers, and not which versions of what it is made of."""
    response.headers["Server"] = "sluicegate"
