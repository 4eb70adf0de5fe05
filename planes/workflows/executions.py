"""Runs that there are: status, events, cancel, answer, results (W1.2, W1.3, W2.6, J2)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from planes.gateway import GATEWAY, RECORD
from planes.json_bodies import json_response
from planes.runs.access import RUNS, RunNotFound, admit_to_runs, find_run
from planes.runs.results import document_of
from planes.runs.stream import RunStream
from planes.workflows.executing import wire_of
from planes.workflows.schemas import read_answer
from relay.engines.embedded.schemas import AnswerSchema
from relay.errors import BadRequest, RelayError
from relay.runs.groups import PLACED
from relay.stores.runs import ENDED

if TYPE_CHECKING:
    from relay.stores.runs import RunRow

_POSITION: Final = re.compile(r"[0-9]{1,18}")


class CursorUnusable(RelayError):
    """The client's position is beyond the head, or before what is kept (J2.1)."""

    status = 409
    code = "cursor_unusable"
    type = "invalid_request_error"

    def __init__(self, message: str, *, snapshot_url: str, oldest: int) -> None:
        super().__init__(message, param="after")
        self.details = {"snapshot_url": snapshot_url, "oldest": oldest}


class NotWaiting(RelayError):
    """The run waits for no answer."""

    status = 409
    code = "not_waiting"
    type = "invalid_request_error"


async def status(request: web.Request) -> web.Response:
    """`GET /v1/workflows/executions/{execution_id}`."""
    return json_response(document_of(await find_run(request, admit_to_runs(request))))


async def cancel(request: web.Request) -> web.Response:
    """`POST …/cancel`: the only thing that ends a run early (J2.5)."""
    with request.app[GATEWAY].inflight.request():
        row = await find_run(request, admit_to_runs(request))
        request[RECORD].execution_id = row.execution_id
        after = await request.app[RUNS].cancel(row) or row
        return json_response(document_of(after), status=200 if after.state in ENDED else 202)


async def resume(request: web.Request) -> web.StreamResponse:
    """`POST …/resume`: answers a yield; the next leg as a stream (W2.3)."""
    with request.app[GATEWAY].inflight.request():
        principal = admit_to_runs(request)
        await find_run(request, principal)
        answer = await read_answer(request)
        runs = request.app[RUNS]
        # Not before the body was read: by then the run may wait for another answer.
        row = await find_run(request, principal)
        _check_answer(row, answer)
        stream = RunStream(
            request,
            row.execution_id,
            row.workflow_id,
            wire_of(request),
            after=row.head,
            one_leg=True,
        )
        run = await runs.resume(
            row, answer, stream.follower.join, max_concurrent=principal.max_concurrent
        )
        if run is None:
            if row.state == "yielded":
                raise NotWaiting("the execution was answered, or ended, by another request")
            raise NotWaiting(f"the execution is {row.state}; it waits for no answer")
        return await stream.serve()


def _check_answer(row: RunRow, answer: Any) -> None:
    """The answer fits the schema that the yield names, if it names one (cnl)."""
    schema = row.waits_for.get("schema") if row.state == "yielded" else None
    if schema is None:
        return
    problems = AnswerSchema(schema).problems(answer)
    if problems:
        raise BadRequest("; ".join(problems), param="answer")


async def events(request: web.Request) -> web.StreamResponse:
    """`GET …/events?after=<position>`: replays and follows (W2.6, J2.1)."""
    with request.app[GATEWAY].inflight.request():
        row = await find_run(request, admit_to_runs(request))
        after = _cursor(request)
        page = await request.app[RUNS].store.read(row.execution_id, after=after, limit=1)
        if page is None:
            raise RunNotFound(f"there is no execution {row.execution_id!r}")
        if after > page.head or after < page.oldest - 1:
            missing = f"beyond the head, {page.head}" if after > page.head else "no longer kept"
            raise CursorUnusable(
                f"position {after} is {missing}; begin from `details.snapshot_url`",
                snapshot_url=f"/v1/workflows/executions/{row.execution_id}",
                oldest=page.oldest,
            )
        if after == page.head and page.state != "running":
            return web.Response(status=204, headers={"x-execution-id": row.execution_id})
        stream = RunStream(request, row.execution_id, row.workflow_id, PLACED, after=after)
        return await stream.serve()


def _cursor(request: web.Request) -> int:
    """`after` and `Last-Event-ID`: the larger wins (J2.1)."""
    given = [request.query.get("after"), request.headers.get("Last-Event-ID")]
    positions = [0]
    for text in given:
        if text is None or not text.strip():
            continue
        if not _POSITION.fullmatch(text.strip()):
            raise BadRequest(f"a position is a number of digits, not {text[:32]!r}", param="after")
        positions.append(int(text))
    return max(positions)
