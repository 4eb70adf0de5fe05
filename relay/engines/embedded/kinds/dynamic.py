"""`dynamic`: a planner proposes tasks, which are run; one level deep."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import Usage
from relay.engines.embedded.answers import Unreadable, plan
from relay.engines.embedded.calls import ask
from relay.engines.embedded.children import (
    at_once,
    in_all,
    raise_known_failure,
    run_job,
    say_counts,
)
from relay.engines.embedded.failures import Paused, TaskFailed
from relay.engines.embedded.lives import Job

if TYPE_CHECKING:
    from relay.engines.embedded.document import Dynamic
    from relay.engines.embedded.failures import Result
    from relay.engines.embedded.group import Guard
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope

CONCURRENCY: Final = 4

_INSTRUCTIONS: Final = """

Split this into at most {max_tasks} tasks that do not depend on each other. Reply with one JSON
object and nothing else, in this form:
{{"tasks": [{{"id": "a-short-name", "agent": "one of the agents", "prompt": "what to do"}}]}}
Every id must be different and use only letters, digits, "_" and "-". The agents are: {agents}.
"""


async def work(task: Dynamic, scope: Scope, life: Life) -> Any:
    """Return the outputs in the order of the plan; a failed one is `{error}`, a skipped one None.

    The plan is made once in a run, whatever is retried or taken over afterwards. The planned tasks
    have the retries and the `on_error` of this one; if one fails for all, that is not retried.
    """
    run = life.run
    life.say("dynamic_start", planner=task.planner)
    ids: list[str] = []
    life.closing = lambda: say_counts(life, "dynamic_complete", ids)
    planned = await _planned(task, scope, life)
    ids += [f"{life.task_id}.{entry['id']}" for entry in planned]
    jobs = [
        Job(
            task_id=task_id,
            kind="task",
            work=partial(_answer, entry),
            agent=entry["agent"],
            retries=task.retries,
            on_error=life.job.on_error,
        )
        for task_id, entry in zip(ids, planned, strict=True)
    ]

    async def one(index: int, guard: Guard) -> Result:
        return await run_job(run, jobs[index], life, guard)

    try:
        raise_known_failure(life, jobs)
        done = in_all(await at_once(life, len(jobs), CONCURRENCY, one))
    except TaskFailed as error:
        raise error.final() from None
    return done if isinstance(done, Paused) else [outcome.item() for outcome in done]


async def _planned(task: Dynamic, scope: Scope, life: Life) -> list[dict[str, str]]:
    key = f"plan/{life.task_id}"
    step = life.run.memory.step(key)
    if step is None:
        told = _INSTRUCTIONS.format(
            max_tasks=task.max_tasks, agents=", ".join(json.dumps(name) for name in task.agents)
        )
        prompt = task.prompt.render(scope.names()) + told
        reply = await ask(life, task.planner, prompt, streamed=False)
        try:
            planned = plan(reply.text, agents=task.agents, max_tasks=task.max_tasks)
        except Unreadable as error:
            raise life.failure("invalid_plan", str(error), retryable=True) from None
        step = {"tasks": planned, "usage": life.usage.step()}
        life.usage, life.final = Usage(), None  # in the step from now on
        task_ids = [f"{life.task_id}.{entry['id']}" for entry in planned]
        life.say("dynamic_generated", task_ids=task_ids, steps={key: step})
    tasks: list[dict[str, str]] = step["tasks"]
    return tasks


async def _answer(entry: dict[str, str], life: Life) -> str:
    return (await ask(life, entry["agent"], entry["prompt"])).text
