"""Runs that begin: inline documents and saved ones, with a stream and without (W1.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from planes.gateway import GATEWAY, RECORD
from planes.json_bodies import json_response
from planes.runs.access import (
    RUNS,
    InvalidWorkflow,
    RunNotFound,
    admit_to_runs,
    made_workflow_id,
    new_execution_id,
    payer_of,
)
from planes.runs.stream import RunStream
from planes.workflows.schemas import read_asked, read_inputs
from relay.engines.base import DocumentError
from relay.runs.groups import NUMBERED, VERBATIM
from relay.runs.service import Beginning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from planes.auth import Principal
    from relay.engines.base import Checked, Source
    from relay.runs.groups import Wire
    from relay.runs.hub import Hub
    from relay.stores.runs import RunRow, RunStore

PLANE: Final = "workflows"
# Bytes of a document and the inputs: what takes no longer than to tell a thread; more are checked
# in one.
_CHECKED_HERE_MAX: Final = 8 * 1024


async def execute_stream(request: web.Request) -> web.StreamResponse:
    """`POST /v1/workflows/execute-stream`, `/v1/workflows/{id}/execute-stream` and the alias."""
    with request.app[GATEWAY].inflight.request():
        principal = admit_to_runs(request)
        beginning = await _asked(request, principal)
        stream = RunStream(
            request,
            beginning.execution_id,
            beginning.workflow_id,
            wire_of(request),
            one_leg=True,
        )
        await request.app[RUNS].begin(beginning, stream.follower.join)
        return await stream.serve()


async def execute(request: web.Request) -> web.Response:
    """`POST /v1/workflows/execute`: 202 and ids, or with `?wait=true` the result."""
    with request.app[GATEWAY].inflight.request():
        principal = admit_to_runs(request)
        beginning = await _asked(request, principal)
        runs = request.app[RUNS]
        run = await runs.begin(beginning, _nobody)
        execution_id = beginning.execution_id
        request[RECORD].execution_id = execution_id
        headers = {"x-execution-id": execution_id, "x-workflow-id": beginning.workflow_id}
        if request.query.get("wait", "").lower() in ("true", "1", "yes"):
            async with request.app[GATEWAY].inflight.interruptible():
                await run.ended.wait()
            row = await runs.store.get_run(execution_id)
            assert row is not None
            return json_response(await result_of(runs.store, row), headers=headers)
        base = f"/v1/workflows/executions/{execution_id}"
        document = {
            "execution_id": execution_id,
            "workflow_id": beginning.workflow_id,
            "status": "running",
            "status_url": base,
            "events_url": f"{base}/events",
        }
        return json_response(document, status=202, headers=headers)


def wire_of(request: web.Request) -> Wire:
    """How a POST stream is written: verbatim unless `?positions=true` (W2.6)."""
    asked = request.query.get("positions", "").lower() in ("true", "1", "yes")
    return NUMBERED if asked else VERBATIM


async def check(request: web.Request, document: str | Mapping[str, Any], inputs: Any) -> Checked:
    """Look at a document before anything is started.

    Raises:
        InvalidWorkflow: with every problem and its place (W1.4).
    """
    engine = request.app[RUNS].engine(PLANE)
    try:
        if _is_small(document, inputs):
            return engine.check(document, inputs)
        return await asyncio.to_thread(engine.check, document, inputs)
    except DocumentError as error:
        raise InvalidWorkflow(error) from None


async def result_of(store: RunStore, row: RunRow) -> dict[str, Any]:
    """What `?wait=true` answers."""
    result: dict[str, Any] = {
        "execution_id": row.execution_id,
        "workflow_id": row.workflow_id,
        "status": row.state,
        "final_task_id": row.final_task_id,
        "output": None,
        "usage": row.usage,
        "execution_summary": row.summary,
        "error": row.error,
    }
    if row.final_task_id is not None:
        stored = await store.output(row.execution_id, row.final_task_id)
        result["output"] = stored[0] if stored else None
    return result


async def _asked(request: web.Request, principal: Principal) -> Beginning:
    source: Source
    execution_id = new_execution_id()
    workflow_id = request.match_info.get("workflow_id")
    if workflow_id is None:
        asked = await read_asked(request)
        document, inputs, source = asked.document, asked.inputs, "inline"
        workflow_id = made_workflow_id(execution_id)
    else:
        inputs = await read_inputs(request)
        saved = await request.app[RUNS].store.get_workflow(principal.org, workflow_id)
        if saved is None:
            raise RunNotFound(f"there is no saved workflow {workflow_id!r}")
        document, source = saved.document, "saved"
    checked = await check(request, document, inputs)
    return Beginning(
        execution_id=execution_id,
        workflow_id=workflow_id,
        name=checked.name,
        document=document,
        inputs=inputs,
        source=source,
        payer=payer_of(principal),
        plane=PLANE,
        max_concurrent=principal.max_concurrent,
    )


def _is_small(document: str | Mapping[str, Any], inputs: Any) -> bool:
    try:
        size = len(document) if isinstance(document, str) else len(dumps(document))
        return size + len(dumps(inputs)) <= _CHECKED_HERE_MAX
    except (TypeError, ValueError):
        return False  # whatever it is, the check tells


def _nobody(_: Hub) -> None:
    """Nobody follows."""
