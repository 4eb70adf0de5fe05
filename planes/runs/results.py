"""What is told of runs: their status, their outputs (W1.2, W1.3, A1.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planes.json_bodies import json_response
from planes.runs.access import RUNS, RunNotFound, admit_to_runs
from relay.errors import RelayError
from relay.runs.outlet import timestamp
from relay.stores.runs import ENDED

if TYPE_CHECKING:
    from aiohttp import web

    from planes.auth import Principal
    from relay.stores.runs import RunRow


class NotReady(RelayError):
    """The run is in flight (W1.3)."""

    status = 404
    code = "not_ready"
    type = "invalid_request_error"


async def result(request: web.Request) -> web.Response:
    """`GET /v1/workflows/results/{run}/{task_id}`: by execution, or a workflow's newest run."""
    return await result_for(request, admit_to_runs(request))


async def result_for(request: web.Request, principal: Principal) -> web.Response:
    """Answer with the output that the path names.

    Raises:
        RunNotFound, NotReady.
    """
    store = request.app[RUNS].store
    named, task_id = request.match_info["run"], request.match_info["task_id"]
    row = await store.get_run(named)
    if row is None or row.org != principal.org:
        newest = await store.newest_run(principal.org, named)
        row = await store.get_run(newest) if newest is not None else None
    if row is None:
        raise RunNotFound(f"there is no execution and no workflow {named[:64]!r} with one")
    if row.state not in ENDED:
        waits = "waits for an answer" if row.state == "yielded" else "is in flight"
        raise NotReady(f"the execution {row.execution_id} {waits}; read on until it has ended")
    stored = await store.output(row.execution_id, task_id)
    if stored is None:
        raise RunNotFound(
            f"the execution {row.execution_id} has no output of a task {task_id[:64]!r}"
        )
    document = {
        "execution_id": row.execution_id,
        "workflow_id": row.workflow_id,
        "task_id": task_id,
        "output": stored[0],
    }
    return json_response(document)


def document_of(row: RunRow) -> dict[str, Any]:
    """A run as its status route tells it."""
    document: dict[str, Any] = {
        "execution_id": row.execution_id,
        "workflow_id": row.workflow_id,
        "name": row.name,
        "source": row.source,
        "status": row.state,
        "created_at": timestamp(row.created_at),
        "updated_at": timestamp(row.updated_at),
        "finished_at": timestamp(row.finished_at) if row.finished_at is not None else None,
        "position": row.head,
        "final_task_id": row.final_task_id,
        "execution_summary": row.summary,
        "usage": row.usage,
        "error": row.error,
        "cancel_requested": row.cancel_requested,
        "events_url": f"/v1/workflows/executions/{row.execution_id}/events",
    }
    if row.state == "yielded":
        resume_url = f"/v1/workflows/executions/{row.execution_id}/resume"
        document["waits_for"] = {**row.waits_for, "resume_url": resume_url}
    return document
