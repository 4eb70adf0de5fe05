"""`parallel`: tasks at the same time, started in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.embedded.children import (
    at_once,
    in_all,
    raise_known_failure,
    run_task,
    say_counts,
)
from relay.engines.embedded.failures import Paused

if TYPE_CHECKING:
    from relay.engines.embedded.document import Parallel
    from relay.engines.embedded.failures import Result
    from relay.engines.embedded.group import Guard
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope


async def work(task: Parallel, scope: Scope, life: Life) -> Any:
    """Return the outputs by written id."""
    run, tasks = life.run, task.tasks
    ids = [held.id + scope.suffix for held in tasks]
    life.say("parallel_start", task_ids=ids, max_concurrency=task.max_concurrency)
    life.closing = lambda: say_counts(life, "parallel_complete", ids)
    raise_known_failure(life, (run.job(held, scope, None) for held in tasks))

    async def one(index: int, guard: Guard) -> Result:
        return await run_task(run, tasks[index], scope, parent=life, guard=guard)

    done = in_all(await at_once(life, len(tasks), task.max_concurrency, one))
    if isinstance(done, Paused):
        return done
    return {held.id: outcome.output for held, outcome in zip(tasks, done, strict=True)}
