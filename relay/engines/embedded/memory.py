"""What a run knows of itself: finished steps, attempts, what was said. [pure]

Steps are durable with the frame that they came with (J1.4), so that a takeover goes on where the
run was cut. Keys:

    task/<id>            a task that completed or was skipped; nothing runs it again
    failed/<id>/<epoch>  a task that failed for good, in this epoch
    attempt/<id>/<n>     attempt n, which was followed by another
    branch/<id>          which branch a condition took
    plan/<id>            what a dynamic's planner proposed
    judgment/<id>        a debate's judgment
    unsaid/<generation>  what calls used that were open when a process gave the run up

An *epoch* counts the retries of everything that a task is in: a container that is retried runs what
failed in it again, and nothing that completed. An interruption (the process died) is no retry.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from relay.engines.base import Past, Usage
from relay.engines.embedded.failures import Outcome, TaskFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERRUPTED: Final = "interrupted"


class Attempt(NamedTuple):
    """An attempt that was followed by another."""

    number: int
    code: str
    epoch: int


class Memory:
    """The memory of one run, over its takeovers.

    Attributes:
        open: tasks that a former owner of the run dispatched and did not end: their last attempt.
        left: what those used that no step tells of yet.
        answers: to yields, by task id.
        usage: of all that was called, as far as it is known.
        has_failures: whether any task failed for good, in any epoch.
    """

    def __init__(self, past: Past) -> None:
        self.open = dict(past.open)
        self.left = dict(past.left)
        self.answers = past.answers
        self.usage = Usage()
        self.has_failures = False
        self._said = set(past.emitted)
        self._steps: dict[str, Any] = {}
        self._attempts: dict[str, list[Attempt]] = {}
        self._last: dict[str, int] = {}
        self._statuses: dict[str, str] = {}
        self._used: dict[str, Usage] = {}
        for key, step in past.steps.items():
            self.learn(key, step)

    def learn(self, key: str, step: Any) -> None:
        """Take a step that is, or is being made, durable."""
        what, _, rest = key.partition("/")
        task_id, _, number = rest.partition("/")
        if (usage := usage_of(step)) != Usage():
            self.usage += usage
            if what in ("attempt", "plan", "judgment"):
                self._used[task_id] = self.used(task_id) + usage
        if what == "attempt":
            attempt = Attempt(int(number), step["code"], step["epoch"])
            self._attempts.setdefault(task_id, []).append(attempt)
            self._last[task_id] = max(attempt.number, self._last.get(task_id, 0))
            return
        self._steps[key] = step
        if what == "task":
            self._statuses[task_id] = step["status"]
        elif what == "failed":
            self.has_failures = True
            self._statuses.setdefault(task_id, "failed")
            self._last[task_id] = max(step["attempt"], self._last.get(task_id, 0))

    def step(self, key: str) -> Any:
        """A step's value; None if it was not done."""
        return self._steps.get(key)

    def first(self, name: str, task_id: str, index: int) -> bool:
        """Whether a structural event was not said yet; from now on it was."""
        key = (name, task_id, index)
        if key in self._said:
            return False
        self._said.add(key)
        return True

    def finished(self, task_id: str, epoch: int) -> Outcome | None:
        """How a task ended that is not to be run again in this epoch."""
        step = self._steps.get(f"task/{task_id}")
        if step is not None:
            return Outcome(status=step["status"], output=step.get("output"))
        step = self._steps.get(f"failed/{task_id}/{epoch}")
        if step is None:
            return None
        error = TaskFailed(**step["error"], task_id=step["task_id"], retryable=step["retryable"])
        return Outcome(status="failed", error=error)

    def begun(self, task_id: str) -> bool:
        """Whether it was dispatched before."""
        return task_id in self.open or task_id in self._last

    def next_attempt(self, task_id: str) -> int:
        """The number of a task's next attempt, from 1."""
        return self._last.get(task_id, 0) + 1

    def retries(self, task_id: str, epoch: int | None = None) -> int:
        """How often it was retried, in this epoch or in all."""
        return sum(
            attempt.code != INTERRUPTED and epoch in (None, attempt.epoch)
            for attempt in self._attempts.get(task_id, ())
        )

    def used(self, task_id: str) -> Usage:
        """What it used so far, but for what its present attempt has not made durable."""
        return self._used.get(task_id, Usage())

    def status(self, task_id: str) -> str | None:
        """How a task ended; None if it did not."""
        return self._statuses.get(task_id)

    def summary(self) -> dict[str, int]:
        """`execution_summary`, as far as an engine fills it."""
        counts = Counter(self._statuses.values())
        return {
            "tasks": len(self._statuses),
            "completed": counts["completed"],
            "failed": counts["failed"],
            "skipped": counts["skipped"],
        }


def came_to(steps: Mapping[str, Any]) -> tuple[dict[str, int], Usage] | None:
    """What a run came to that left these steps; None if its engine counts nothing in them, as a
    remote one, whose are outputs.
    """
    counted = {k: step for k, step in steps.items() if isinstance(step, dict) and "usage" in step}
    if not counted:
        return None
    known = Memory(Past(steps=counted))
    return known.summary(), known.usage


def usage_of(step: Mapping[str, Any]) -> Usage:
    """What a step used itself."""
    used = step.get("usage") or {}
    return Usage(
        prompt_tokens=used.get("prompt_tokens", 0),
        completion_tokens=used.get("completion_tokens", 0),
        cost_micro_usd=used.get("cost_micro_usd", 0),
    )
