"""How a container runs what it holds: one after the other, or some at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.embedded.document import Batch
from relay.engines.embedded.failures import STOPPED, Outcome, Paused, TaskFailed, stopped_by
from relay.engines.embedded.group import Guard, run_group
from relay.engines.embedded.lives import Life

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from relay.engines.embedded.context import Run
    from relay.engines.embedded.document import Task
    from relay.engines.embedded.failures import Result
    from relay.engines.embedded.lives import Job, OnError
    from relay.engines.embedded.scope import Scope


async def run_job(run: Run, job: Job, parent: Life | None, guard: Guard) -> Result:
    """Run one job under a guard.

    Raises:
        TaskFailed: it failed, and its `on_error` is "fail".
    """
    epoch = parent.epoch if parent is not None else 0
    return await Life(run, job, parent=parent, guard=guard, epoch=epoch).result()


async def run_task(
    run: Run,
    task: Task,
    scope: Scope,
    *,
    parent: Life | None,
    guard: Guard,
    on_error: OnError | None = None,
) -> Result:
    """Run a task of the document and note in its scope how it ended.

    Args:
        on_error: for a task that does not say it itself; None for the run's.

    Raises:
        TaskFailed: it failed, and its `on_error` is "fail".
    """
    result = await run_job(run, run.job(task, scope, on_error), parent, guard)
    if isinstance(result, Outcome):
        note(run, task, scope, result.status, result.output)
    return result


def note(run: Run, task: Task, scope: Scope, status: str, output: Any) -> None:
    """Let templates see how a task has ended, and those in it, which were skipped if never run."""
    scope.record(task.id, status, output)
    if isinstance(task, Batch):
        return  # what runs for an item is seen there only
    for held in (held for tasks in task.lists() for held in tasks if not scope.knows(held.id)):
        task_id = held.id + scope.suffix
        step = run.memory.step(f"task/{task_id}") or {}
        note(run, held, scope, run.memory.status(task_id) or "skipped", step.get("output"))


def say_counts(life: Life, name: str, task_ids: Iterable[str]) -> None:
    """Say the event that ends a container: how many of its tasks completed, how many failed."""
    statuses = [life.run.memory.status(task_id) for task_id in task_ids]
    life.say(name, completed=statuses.count("completed"), failed=statuses.count("failed"))


def raise_known_failure(life: Life, jobs: Iterable[Job]) -> None:
    """End at once if the run was cut after one of the jobs had failed for all.

    Raises:
        TaskFailed: of the one that failed by itself.
    """
    memory = life.run.memory
    if not memory.has_failures:
        return
    known: TaskFailed | None = None
    for job in jobs:
        outcome = memory.finished(job.task_id, life.epoch)
        if outcome is None or outcome.error is None or job.on_error != "fail":
            continue
        if known is None or known.code == STOPPED:
            known = outcome.error
    if known is not None:
        raise known


async def at_once(
    life: Life, count: int, limit: int, work: Callable[[int, Guard], Awaitable[Result]]
) -> list[Result]:
    """Run `work` for each index, at most `limit` at a time, started in order.

    Raises:
        TaskFailed: the first one; all others were stopped and have ended.
    """
    results: list[Any] = [None] * count
    guard = Guard(life.guard)
    indices = iter(range(count))
    failed: list[TaskFailed] = []

    async def worker() -> None:
        for index in indices:
            if failed:
                return
            try:
                results[index] = await work(index, guard)
            except TaskFailed as error:
                failed.append(error)
                if guard.reason is None:
                    guard.reason = stopped_by(error)
                raise

    try:
        await run_group([worker() for _ in range(min(limit, count))])
    except TaskFailed:
        raise failed[0] from None
    return results


def in_all(results: Sequence[Result]) -> Paused | list[Outcome]:
    """The outcomes, unless one of them waits for an answer: the first in the document."""
    outcomes: list[Outcome] = []
    for result in results:
        if isinstance(result, Paused):
            return result
        outcomes.append(result)
    return outcomes
