"""What the handlers of runs share: the service, and who may see which run (W1)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from aiohttp import web

from planes.auth import InvalidKey, presented
from planes.middleware import admit
from relay.engines.base import Payer
from relay.errors import RelayError
from relay.runs.service import RunService

if TYPE_CHECKING:
    from planes.auth import Principal
    from relay.agents.base import AgentCaller
    from relay.engines.base import DocumentError, Problem
    from relay.stores.runs import RunRow

KEY_PREFIX: Final = "ozk_"
RUNS: web.AppKey[RunService] = web.AppKey("runs", RunService)
CALLER: web.AppKey[AgentCaller] = web.AppKey("caller")
_SHOWN_MAX: Final = 20


class RunNotFound(RelayError):
    """There is no such run, or it is another org's (W1.4)."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class InvalidWorkflow(RelayError):
    """A document, or its inputs, cannot be used; nothing was started (W1.4)."""

    status = 400
    code = "invalid_workflow"
    type = "invalid_request_error"

    def __init__(self, error: DocumentError) -> None:
        problems = error.problems
        shown = [_line(problem) for problem in problems[:_SHOWN_MAX]]
        if len(problems) > _SHOWN_MAX:
            shown.append(f"and {len(problems) - _SHOWN_MAX} more")
        super().__init__("; ".join(shown), param=problems[0].path or "workflow")
        self.details = {"problems": [_problem(problem) for problem in problems[:_SHOWN_MAX]]}


def _line(problem: Problem) -> str:
    place = f"line {problem.line}, column {problem.column}" if problem.line is not None else ""
    where = problem.path
    if problem.task_id is not None:
        where += f" (task {problem.task_id})"
    return ": ".join(part for part in (place, where, problem.message) if part)


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "message": problem.message,
        "path": problem.path,
        "line": problem.line,
        "column": problem.column,
        "task_id": problem.task_id,
    }


def admit_to_runs(request: web.Request) -> Principal:
    """As `planes.middleware.admit`; the key starts with `ozk_` (W1).

    Raises:
        InvalidKey, AccountSuspended, PayloadTooLarge, BadRequest.
    """
    key = presented(request.headers)
    if key is not None and not key.startswith(KEY_PREFIX):
        raise InvalidKey(f"this route needs an API key that starts with `{KEY_PREFIX}`")
    return admit(request)


def may_still(request: web.Request) -> bool:
    """Whether the key of a request that streams is still good (J2.4)."""
    try:
        admit(request)
    except RelayError:
        return False
    return True


async def find_run(request: web.Request, principal: Principal) -> RunRow:
    """Return the run that the path names.

    Raises:
        RunNotFound: there is none, or it is not this org's.
    """
    execution_id = request.match_info["execution_id"]
    row = await request.app[RUNS].store.get_run(execution_id)
    if row is None or row.org != principal.org:
        raise RunNotFound(f"there is no execution {execution_id[:64]!r}")
    return row


def new_execution_id() -> str:
    """32 lower-case hex digits (W1.3)."""
    return secrets.token_hex(16)


def made_workflow_id(execution_id: str) -> str:
    """The workflow id of a run whose workflow is not a saved one."""
    return f"wf_{execution_id[:24]}"


def payer_of(principal: Principal) -> Payer:
    """Who pays for what a caller begins."""
    return Payer(org=principal.org, key_id=principal.key_id, trial=principal.trial)
