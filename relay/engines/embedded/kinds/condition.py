"""`condition`: one of two branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.engines.embedded.children import note
from relay.engines.embedded.failures import Paused
from relay.engines.embedded.kinds.sequential import in_order
from relay.engines.embedded.lives import skip

if TYPE_CHECKING:
    from relay.engines.embedded.document import Condition
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope

_EXPRESSION_CHARS: Final = 512


async def work(task: Condition, scope: Scope, life: Life) -> Any:
    """Return the output of the last task of the branch that completed, None without one.

    The branch is decided once in a run, whatever is retried or taken over.
    """
    key = f"branch/{life.task_id}"
    step = life.run.memory.step(key)
    if step is None:
        value = task.test.holds(scope.names())
        step = {"value": value, "branch": "then" if value else "else" if task.otherwise else None}
        expression = task.test.text[:_EXPRESSION_CHARS]
        life.say("condition_evaluated", expression=expression, **step, steps={key: step})
    taken, other = task.then, task.otherwise or ()
    if not step["value"]:
        taken, other = other, taken
    for held in other:
        skip(life.run, held.id + scope.suffix, held.type, "branch")
        note(life.run, held, scope, "skipped", None)
    done = await in_order(taken, scope, life)
    if isinstance(done, Paused):
        return done
    outputs = [outcome.output for outcome in done if outcome.status == "completed"]
    return outputs[-1] if outputs else None
