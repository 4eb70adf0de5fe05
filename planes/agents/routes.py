"""The agents plane: runs of one agent, told on the OpenAI wire (A1)."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from encoders.agent import AgentChunks, whole_reply
from encoders.openai import model_entry
from encoders.sse import encode_comment
from planes.agents.schemas import parse_chat, parse_execute
from planes.gateway import GATEWAY, RECORD
from planes.json_bodies import json_response
from planes.middleware import admit, expect_continue, read_body, wants_comments
from planes.runs.access import CALLER, RUNS, made_workflow_id, new_execution_id, payer_of
from planes.runs.results import result_for
from planes.runs.stream import RunStream
from relay.engines.base import Failed
from relay.errors import ModelNotFound, RelayError
from relay.lifecycle import Outcome
from relay.runs.agent_wire import AgentWire
from relay.runs.service import Beginning
from relay.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from planes.agents.schemas import Asked
    from planes.auth import Principal
    from planes.settings import Agent
    from relay.engines.base import Ending
    from relay.runs.hub import Hub
    from relay.runs.run import Run

PLANE: Final = "agents"
BASE: Final = "/v1/agents"


class AgentNotFound(RelayError):
    """There is no such agent, or nobody serves it."""

    status = 404
    code = "agent_not_found"
    type = "invalid_request_error"


class EngineRefused(RelayError):
    """The run was not accepted, or a run without a stream failed (A1.4)."""

    status = 502
    code = "engine_error"
    type = "server_error"


def add_routes(app: web.Application) -> None:
    """Mount the plane."""
    one = f"{BASE}/{{agent}}"
    app.router.add_get(BASE, index)
    app.router.add_get(f"{BASE}/results/{{run}}/{{task_id}}", result)
    app.router.add_get(one, get)
    app.router.add_get(f"{one}/models", list_models)
    app.router.add_get(f"{one}/models/{{model:.+}}", get_model)
    for path, handler in (("execute", execute), ("chat/completions", chat)):
        app.router.add_post(f"{one}/{path}", handler, expect_handler=expect_continue)


async def index(request: web.Request) -> web.Response:
    """`GET /v1/agents`: those that are served."""
    admit(request)
    agents = request.app[GATEWAY].settings.agents
    data = [_document(name, agents[name], slug) for name, slug in _served(request).items()]
    return json_response({"object": "list", "data": data})


async def get(request: web.Request) -> web.Response:
    """`GET /v1/agents/{agent}`."""
    admit(request)
    name = _agent(request)
    settings = request.app[GATEWAY].settings
    return json_response(_document(name, settings.agents[name], _served(request)[name]))


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/agents/{agent}/models`: to an SDK with this base the agent is the one model."""
    admit(request)
    return json_response({"object": "list", "data": [_model(request, _agent(request))]})


async def get_model(request: web.Request) -> web.Response:
    """`GET /v1/agents/{agent}/models/{model}`; see `list_models`."""
    admit(request)
    agent, model = _agent(request), request.match_info["model"]
    if model != agent:
        raise ModelNotFound(f"the one model here is {agent!r}, not {model[:64]!r}", param="model")
    return json_response(_model(request, agent))


async def result(request: web.Request) -> web.Response:
    """`GET /v1/agents/results/{run}/{task_id}`; see the workflows plane's."""
    return await result_for(request, admit(request))


async def execute(request: web.Request) -> web.StreamResponse:
    """`POST /v1/agents/{agent}/execute`."""
    router = request.app[GATEWAY].router
    return await _run(request, partial(parse_execute, router=router), _as_result)


async def chat(request: web.Request) -> web.StreamResponse:
    """`POST /v1/agents/{agent}/chat/completions`: all that an OpenAI SDK needs."""
    router = request.app[GATEWAY].router
    return await _run(request, partial(parse_chat, router=router), _as_completion)


async def _run(
    request: web.Request,
    parse: Callable[[bytes, str], Asked],
    tell: Callable[[_Finished], dict[str, Any]],
) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    with gateway.inflight.request():
        principal = admit(request)
        agent = _agent(request)
        body = await read_body(request)
        asked = parse(body, agent)
        beginning = _beginning(agent, asked, principal)
        request[RECORD].execution_id = beginning.execution_id
        if asked.stream:
            return await _stream(request, agent, asked, beginning, principal)
        return await _whole(request, agent, asked, beginning, tell)


def _beginning(agent: str, asked: Asked, principal: Principal) -> Beginning:
    execution_id = new_execution_id()
    return Beginning(
        execution_id=execution_id,
        workflow_id=made_workflow_id(execution_id),
        name=agent,
        document=asked.document,
        inputs={},
        source="agent",
        payer=payer_of(principal),
        plane=PLANE,
        max_concurrent=principal.max_concurrent,
    )


async def _begin(
    request: web.Request, beginning: Beginning, asked: Asked, on_hub: Callable[[Hub], None]
) -> Run:
    try:
        return await request.app[RUNS].begin(beginning, on_hub, only_for_caller=asked.cancel)
    except StoreError:
        raise EngineRefused("the run was not accepted: its journal cannot be written now") from None


def _left(run: Run, asked: Asked) -> None:
    """The client is not there any more, by its own will or by ours (A1.6)."""
    if asked.cancel and run.ending is None:
        run.cancel()


# -- with a stream --------------------------------------------------------------------------------


async def _stream(
    request: web.Request, agent: str, asked: Asked, beginning: Beginning, principal: Principal
) -> web.StreamResponse:
    settings = request.app[GATEWAY].settings
    plane = settings.agents_plane
    chunks = AgentChunks(
        beginning.execution_id,
        created=int(time.time()),
        model=_served(request)[agent],
        usage_chunk=asked.usage_chunk,
    )
    comments = wants_comments(request, principal)
    stream = RunStream(
        request,
        beginning.execution_id,
        beginning.workflow_id,
        AgentWire(agent, chunks),
        one_leg=True,
        keepalive=encode_comment(plane.keepalive_comment) if comments else b"",
        keepalive_s=plane.keepalive_s,
        # No client of this wire can follow again: it is waited for as on the models plane (M3.5).
        lag_s=settings.server.write_stall_s,
    )
    stream.headers["Content-Type"] = "text/event-stream; charset=utf-8"
    stream.headers["X-Task-Id"] = agent
    run = await _begin(request, beginning, asked, stream.follower.join)
    try:
        response = await stream.serve()
        if isinstance(run.ending, Failed):  # told in the stream; the log has it as elsewhere
            record = request[RECORD]
            record.outcome, record.error = Outcome.UPSTREAM_ERROR, EngineRefused(run.ending.message)
        return response
    finally:
        _left(run, asked)


# -- without --------------------------------------------------------------------------------------


class _Finished:
    """A run that has ended, for the answer of a request without a stream."""

    def __init__(self, run: Run, agent: str, model: str) -> None:
        self.execution_id = run.execution_id
        self.workflow_id = run.envelope.workflow_id
        self.agent = agent
        self.model = model
        self.output: Any = None
        self.usage: dict[str, int] | None = None
        self.finish: str | None = None


async def _whole(
    request: web.Request,
    agent: str,
    asked: Asked,
    beginning: Beginning,
    tell: Callable[[_Finished], dict[str, Any]],
) -> web.Response:
    run = await _begin(request, beginning, asked, lambda _: None)
    try:
        async with request.app[GATEWAY].inflight.interruptible():
            await run.ended.wait()
    finally:
        _left(run, asked)
    finished = _Finished(run, agent, _served(request).get(agent, agent))
    await _fill(request, finished, run.ending)
    headers = {
        "X-Execution-Id": finished.execution_id,
        "X-Workflow-Id": finished.workflow_id,
        "X-Task-Id": agent,
    }
    return json_response(tell(finished), headers=headers)


async def _fill(request: web.Request, finished: _Finished, ending: Ending | None) -> None:
    """Take over how the run ended.

    Raises:
        EngineRefused: it failed, or goes on in another process.
    """
    if ending is None:
        raise _refused(finished, "the run goes on in another process")
    if isinstance(ending, Failed):
        raise _refused(finished, ending.message)
    store = request.app[RUNS].store
    stored = await store.output(finished.execution_id, finished.agent)
    finished.output = stored[0] if stored is not None else None
    step = (await store.steps(finished.execution_id)).get(f"task/{finished.agent}") or {}
    final = step.get("final") or {}
    if final.get("reported", True):
        finished.usage = ending.usage.document()
    finished.finish = final.get("finish_reason")
    finished.model = final.get("model") or finished.model


def _refused(finished: _Finished, message: str) -> EngineRefused:
    error = EngineRefused(message)
    error.details = {
        "execution_id": finished.execution_id,
        "workflow_id": finished.workflow_id,
        "task_id": finished.agent,
    }
    return error


def _as_result(finished: _Finished) -> dict[str, Any]:
    return {
        "execution_id": finished.execution_id,
        "workflow_id": finished.workflow_id,
        "task_id": finished.agent,
        "agent": finished.agent,
        "model": finished.model,
        "output": finished.output,
        "finish_reason": finished.finish,
        "usage": finished.usage,
    }


def _as_completion(finished: _Finished) -> dict[str, Any]:
    return whole_reply(
        finished.execution_id,
        created=int(time.time()),
        model=finished.model,
        text=finished.output or "",
        finish=finished.finish,
        usage=finished.usage,
    )


# -- agents ---------------------------------------------------------------------------------------


def _served(request: web.Request) -> Mapping[str, str]:
    """The agents that can be called, with their model's slug."""
    return request.app[CALLER].agents()


def _agent(request: web.Request) -> str:
    """Return the agent that the path names.

    Raises:
        AgentNotFound.
    """
    name = request.match_info["agent"]
    served = _served(request)
    if name not in served:
        known = ", ".join(sorted(served)[:20]) or "none"
        raise AgentNotFound(f"there is no agent {name[:64]!r} here (there are: {known})")
    return name


def _model(request: web.Request, agent: str) -> dict[str, Any]:
    return model_entry(agent, owner="sluicegate", created=request.app[GATEWAY].started)


def _document(name: str, agent: Agent, slug: str) -> dict[str, Any]:
    """An agent as clients see it: never its prompt, nor what its tools bear."""
    return {
        "id": name,
        "object": "agent",
        "model": slug,
        "max_tokens": agent.max_tokens,
    }
