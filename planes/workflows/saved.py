"""Saved workflows, by org (W1.2)."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from planes.gateway import GATEWAY
from planes.json_bodies import json_response
from planes.runs.access import RUNS, RunNotFound, admit_to_runs
from planes.workflows.executing import check
from planes.workflows.schemas import read_asked
from relay.errors import BadRequest
from relay.runs.outlet import timestamp

if TYPE_CHECKING:
    from relay.stores.runs import StoredWorkflow

RESERVED: Final = frozenset({"execute", "execute-stream", "executions", "results", "schema"})
_POST_ONLY: Final = frozenset({"execute", "execute-stream"})
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


async def put(request: web.Request) -> web.Response:
    """`PUT /v1/workflows/{workflow_id}`: checked, then saved."""
    with request.app[GATEWAY].inflight.request():
        principal = admit_to_runs(request)
        workflow_id = request.match_info["workflow_id"]
        if not _ID.fullmatch(workflow_id):
            raise BadRequest(
                "the id of a workflow is 1 to 64 letters, digits, `_` or `-`", param="workflow_id"
            )
        if workflow_id in RESERVED:
            raise BadRequest(f"the id {workflow_id!r} is reserved", param="workflow_id")
        asked = await read_asked(request)
        checked = await check(request, asked.document, {})
        store = request.app[RUNS].store
        new = await store.put_workflow(
            principal.org,
            workflow_id,
            name=checked.name,
            document=asked.document,
            now=time.time(),
        )
        saved = await store.get_workflow(principal.org, workflow_id)
        assert saved is not None
        return json_response(_document(saved), status=201 if new else 200)


async def get(request: web.Request) -> web.Response:
    """`GET /v1/workflows/{workflow_id}`."""
    principal = admit_to_runs(request)
    workflow_id = request.match_info["workflow_id"]
    if workflow_id in _POST_ONLY:  # a forgotten body, not a question for one that is saved
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    saved = await request.app[RUNS].store.get_workflow(principal.org, workflow_id)
    if saved is None:
        raise RunNotFound(f"there is no saved workflow {workflow_id[:64]!r}")
    return json_response({**_document(saved), "workflow": saved.document})


async def delete(request: web.Request) -> web.Response:
    """`DELETE /v1/workflows/{workflow_id}`; its runs stay."""
    principal = admit_to_runs(request)
    workflow_id = request.match_info["workflow_id"]
    if not await request.app[RUNS].store.delete_workflow(principal.org, workflow_id):
        raise RunNotFound(f"there is no saved workflow {workflow_id[:64]!r}")
    return json_response({"id": workflow_id, "object": "workflow", "deleted": True})


async def index(request: web.Request) -> web.Response:
    """`GET /v1/workflows`."""
    principal = admit_to_runs(request)
    saved = await request.app[RUNS].store.list_workflows(principal.org)
    return json_response({"object": "list", "data": [_document(each) for each in saved]})


def _document(saved: StoredWorkflow) -> dict[str, Any]:
    return {
        "id": saved.id,
        "object": "workflow",
        "name": saved.name,
        "created_at": timestamp(saved.created_at),
        "updated_at": timestamp(saved.updated_at),
    }
