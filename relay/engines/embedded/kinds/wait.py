"""`yield`: the run stops until it is given an answer (W2.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.embedded.failures import Paused

if TYPE_CHECKING:
    from relay.engines.embedded.document import Yield
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope


async def work(task: Yield, scope: Scope, life: Life) -> Any:
    """Return the answer if there is one."""
    answers = life.run.memory.answers
    if life.task_id in answers:
        return answers[life.task_id]
    schema = task.answer_schema.schema if task.answer_schema is not None else None
    return Paused(
        task_id=life.task_id,
        prompt=task.prompt.render(scope.names()),
        schema=schema if isinstance(schema, dict) else None,
    )
