"""`debate`: agents argue in rounds, a judge decides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from relay.engines.base import Usage
from relay.engines.embedded.calls import ask
from relay.engines.embedded.children import run_job
from relay.engines.embedded.context import measured
from relay.engines.embedded.failures import Outcome, TaskFailed
from relay.engines.embedded.lives import Job

if TYPE_CHECKING:
    from relay.engines.embedded.document import Debate
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope

TRANSCRIPT_CHARS: Final = 1024 * 1024  # of all that the next speaker reads


async def work(task: Debate, scope: Scope, life: Life) -> str:
    """Return the judgment's text. Every speaker reads all that was said before.

    Contributions have the retries of this task; if one fails for all, that is not retried.
    """
    topic = task.prompt.render(scope.names())
    life.say("debate_start", debaters=list(task.debaters), rounds=task.rounds)
    rounds = 0
    life.closing = lambda: life.say("debate_complete", rounds=rounds)
    said: list[str] = []
    for number in range(1, task.rounds + 1):
        for place, agent in enumerate(task.debaters, 1):
            prompt = _asked(life, topic, said, f"You are speaker {place}, in round {number}.")
            job = Job(
                task_id=f"{life.task_id}.{number}.{place}",
                kind="task",
                work=partial(_speak, agent, prompt),
                agent=agent,
                retries=task.retries,
            )
            said.append(f"[round {number}, speaker {place}]\n{await _contribution(life, job)}")
        rounds = number
        life.say("debate_round_complete", key=number, round=number)
    return await _judgment(task, _asked(life, topic, said, "You are the judge: decide."), life)


def _asked(life: Life, topic: str, said: list[str], role: str) -> str:
    parts = [topic, *(("The debate so far:", *said) if said else ()), role]
    length = sum(map(len, parts))
    if length > TRANSCRIPT_CHARS:
        raise life.failure(
            "debate_too_long", f"the debate has more than {TRANSCRIPT_CHARS:,} characters"
        )
    return "\n\n".join(parts)


async def _contribution(life: Life, job: Job) -> str:
    try:
        result = await run_job(life.run, job, life, life.guard)
    except TaskFailed as error:
        raise error.final() from None
    assert isinstance(result, Outcome)  # an agent's call does not wait for an answer
    text: str = result.output
    return text


async def _speak(agent: str, prompt: str, life: Life) -> str:
    return (await ask(life, agent, prompt)).text


async def _judgment(task: Debate, prompt: str, life: Life) -> str:
    key = f"judgment/{life.task_id}"
    step = life.run.memory.step(key)
    if step is None:
        reply = await ask(life, task.judge, prompt)
        step = {"text": reply.text, "usage": life.usage.step(), "final": life.final}
        life.usage = Usage()  # in the step from now on
        preview = measured(reply.text)[1]
        life.say("debate_judgment", judge=task.judge, output_preview=preview, steps={key: step})
    life.final = step["final"]
    text: str = step["text"]
    return text
