"""`task`: one call of an agent, streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.embedded.answers import Unreadable, json_value
from relay.engines.embedded.calls import ask

if TYPE_CHECKING:
    from relay.engines.embedded.document import AgentTask
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope


async def work(task: AgentTask, scope: Scope, life: Life) -> Any:
    """Return the reply's text, or the JSON value that it is."""
    prompt = task.prompt.render(scope.names())
    reply = await ask(life, task.agent, prompt, max_tokens=task.max_tokens)
    if task.json_schema is None:
        return reply.text
    try:
        value = json_value(reply.text)
    except Unreadable as error:
        raise life.failure("invalid_output", str(error), retryable=True) from None
    problems = task.json_schema.problems(value)
    if problems:
        message = f"the reply does not fit the schema: {'; '.join(problems)}"
        raise life.failure("invalid_output", message, retryable=True)
    return value
