"""`sequential`: tasks one after the other; and the tasks of a run and of a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.embedded.children import run_task, say_counts
from relay.engines.embedded.failures import Paused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.engines.embedded.document import Sequential, Task
    from relay.engines.embedded.failures import Outcome
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope


async def in_order(tasks: Sequence[Task], scope: Scope, life: Life) -> Paused | list[Outcome]:
    """Run tasks in order, up to the first that waits for an answer."""
    outcomes: list[Outcome] = []
    for task in tasks:
        result = await run_task(life.run, task, scope, parent=life, guard=life.guard)
        if isinstance(result, Paused):
            return result
        outcomes.append(result)
    return outcomes


async def work(task: Sequential, scope: Scope, life: Life) -> Any:
    """Return the list of outputs; a skipped or failed task's is None."""
    ids = [held.id + scope.suffix for held in task.tasks]
    life.say("sequential_start", task_ids=ids)
    life.closing = lambda: say_counts(life, "sequential_complete", ids)
    done = await in_order(task.tasks, scope, life)
    return done if isinstance(done, Paused) else [outcome.output for outcome in done]
