"""The task kinds: what one attempt of each does (W3.1, cnl.md)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from relay.engines.embedded.document import (
    AgentTask,
    Batch,
    Condition,
    Debate,
    Dynamic,
    Parallel,
    Sequential,
    Yield,
)
from relay.engines.embedded.failures import TaskFailed
from relay.engines.embedded.kinds import (
    agent_task,
    batch,
    condition,
    debate,
    dynamic,
    parallel,
    sequential,
    wait,
)
from relay.engines.embedded.lives import Job
from relay.engines.embedded.templates import TemplateProblem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.engines.embedded.document import Task
    from relay.engines.embedded.lives import Life, OnError
    from relay.engines.embedded.scope import Scope


def job_of(task: Task, scope: Scope, on_error: OnError) -> Job:
    """The job of a task of the document.

    Args:
        on_error: for a task that does not say it itself.
    """
    task_id = task.id + scope.suffix
    work, agent = _work(task, scope)
    return Job(
        task_id=task_id,
        kind=task.type,
        work=partial(_attempt, work),
        agent=agent,
        retries=task.retries,
        timeout_s=task.timeout_s,
        on_error=task.on_error or on_error,
        when=None if task.when is None else partial(_wanted, task, scope, task_id),
    )


def _work(task: Task, scope: Scope) -> tuple[Callable[[Life], Awaitable[Any]], str | None]:
    match task:
        case AgentTask():
            return partial(agent_task.work, task, scope), task.agent
        case Sequential():
            return partial(sequential.work, task, scope), None
        case Parallel():
            return partial(parallel.work, task, scope), None
        case Condition():
            return partial(condition.work, task, scope), None
        case Batch():
            return partial(batch.work, task, scope), None
        case Dynamic():
            return partial(dynamic.work, task, scope), task.planner
        case Debate():
            return partial(debate.work, task, scope), task.judge
        case Yield():
            return partial(wait.work, task, scope), None


async def _attempt(work: Callable[[Life], Awaitable[Any]], life: Life) -> Any:
    try:
        return await work(life)
    except TemplateProblem as problem:
        raise life.failure("template_error", problem.message) from None


def _wanted(task: Task, scope: Scope, task_id: str) -> bool:
    assert task.when is not None
    try:
        return task.when.holds(scope.names())
    except TemplateProblem as problem:
        raise TaskFailed("template_error", f"when: {problem.message}", task_id=task_id) from None
