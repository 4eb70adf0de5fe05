"""The workflows plane (W1): where everything is mounted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planes.middleware import expect_continue
from planes.runs import results
from planes.workflows import executing, executions, saved, schema

if TYPE_CHECKING:
    from aiohttp import web

BASE: Final = "/v1/workflows"
_EXECUTION: Final = f"{BASE}/executions/{{execution_id}}"


def add_routes(app: web.Application) -> None:
    """Mount the plane. Fixed paths come before those of saved workflows, whose ids they are."""
    post, get = app.router.add_post, app.router.add_get
    for path in (f"{BASE}/execute-stream", "/v1/cnl/execute-stream"):
        post(path, executing.execute_stream, expect_handler=expect_continue)
    post(f"{BASE}/execute", executing.execute, expect_handler=expect_continue)
    get(f"{BASE}/schema", schema.schema)
    get(f"{BASE}/results/{{run}}/{{task_id}}", results.result)
    get(_EXECUTION, executions.status)
    get(f"{_EXECUTION}/events", executions.events)
    post(f"{_EXECUTION}/cancel", executions.cancel)
    post(f"{_EXECUTION}/resume", executions.resume, expect_handler=expect_continue)
    get(BASE, saved.index)
    one = f"{BASE}/{{workflow_id}}"
    app.router.add_put(one, saved.put, expect_handler=expect_continue)
    get(one, saved.get)
    app.router.add_delete(one, saved.delete)
    post(f"{one}/execute-stream", executing.execute_stream, expect_handler=expect_continue)
    post(f"{one}/execute", executing.execute, expect_handler=expect_continue)
