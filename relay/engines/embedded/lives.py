"""The life of one task, of any kind: when, attempts, end (W3.1).

when false ──▶ task_skipped
task_dispatched ─▶ its kind's events ─▶ task_completed ─▶ output_delivered
     ▲                     └──────────▶ task_error ── on_error: fail ──▶ what holds it fails
     └── will_retry, after a pause ─────────┘            skip ──▶ task_skipped
                                                         continue ──▶ goes on without output
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from relay.engines.base import Usage
from relay.engines.embedded.context import measured
from relay.engines.embedded.failures import (
    Outcome,
    Paused,
    TaskFailed,
    failed_step,
    stopped_by,
    task_error,
)
from relay.engines.embedded.group import Guard
from relay.engines.embedded.takeover import end_open, interrupt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from relay.engines.embedded.context import Run
    from relay.engines.embedded.failures import Result

OUTPUT_BYTES: Final = 16 * 1024 * 1024
RETRY_BASE_S: Final = 0.5  # before the first retry at most so long, then doubled
RETRY_MAX_S: Final = 20.0
RETRY_AFTER_MAX_S: Final = 60.0  # a provider that asks for more is asked earlier

OnError = Literal["fail", "skip", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task that is to be run.

    Attributes:
        task_id: of this instance. agent: the one that answers under this id, if any.
        work: one attempt; returns the output, or Paused; raises TaskFailed.
        retries: further attempts after errors that are retryable.
        timeout_s: of each attempt, all that it holds included.
        on_error: what a failure means for what holds it.
        when: whether it is wanted; raises TaskFailed.
    """

    task_id: str
    kind: str
    work: Callable[[Life], Awaitable[Any]]
    agent: str | None = None
    retries: int = 0
    timeout_s: float | None = None
    on_error: OnError = "fail"
    when: Callable[[], bool] | None = None


class Life:
    """One task as it runs.

    Attributes:
        attempt: from 1. guard: stops this attempt. epoch: for what it holds.
        usage: of this attempt's own calls. tells_usage: whether its end says it.
        final: how its last call ended, for the step.
        closing: says the event that stands before its last end (`batch_complete`, …).
        tools: its tool steps that are open.
    """

    def __init__(
        self, run: Run, job: Job, *, parent: Life | None, guard: Guard | None, epoch: int
    ) -> None:
        self.run = run
        self.job = job
        self.task_id = job.task_id
        self.attempt = 0
        self.epoch = epoch
        self.guard = Guard(guard)
        self.usage = Usage()
        self.tells_usage = True
        self.final: Mapping[str, Any] | None = None
        self.closing: Callable[[], None] | None = None
        self.tools: list[str] = []
        self._parent = parent
        self._outer_guard = guard
        self._outer_epoch = epoch
        self._timeout: asyncio.Timeout | None = None
        self._began_at = 0.0

    # -- for kinds ------------------------------------------------------------------------------

    def say(
        self, name: str, *, key: int = 0, steps: Mapping[str, Any] | None = None, **data: Any
    ) -> None:
        """Say an event of this task that a run says once.

        Args:
            key: tells apart events of one name: the index of an item, the number of a round.
        """
        self.run.once(name, {"task_id": self.task_id, **data}, index=key, steps=steps)

    def failure(self, code: str, message: str, *, retryable: bool = False) -> TaskFailed:
        """A failure of this task."""
        return TaskFailed(code, message, task_id=self.task_id, retryable=retryable)

    def abort(self, error: TaskFailed) -> None:
        """Stop this attempt at the loop's next turn, from a plain call."""
        if self._timeout is not None and not self.guard.stopped:
            self.guard.reason = error
            self._timeout.reschedule(self.run.now())

    def why_stopped(self) -> str | None:
        """The code of what stops this attempt; None if nothing in the run does."""
        why = self.guard.why()
        return why.code if why is not None else None

    def is_under(self, other: Life) -> bool:
        """Whether `other` holds this task, at any depth."""
        life = self._parent
        while life is not None and life is not other:
            life = life._parent
        return life is other

    # -- its life -------------------------------------------------------------------------------

    async def result(self) -> Result:
        """Run it to its end, or find that it was.

        Raises:
            TaskFailed: it failed, and `on_error` is "fail".
        """
        memory = self.run.memory
        outcome = memory.finished(self.task_id, self._outer_epoch)
        if outcome is None:
            result = await self._unless_unwanted()
            if isinstance(result, Paused):
                return result
            outcome = result
        if outcome.status == "completed":
            self._deliver(outcome.output)
        if outcome.status != "failed" or outcome.error is None:
            return outcome
        if self.job.on_error == "fail":
            raise outcome.error
        if self.job.on_error == "skip":
            skip(self.run, self.task_id, self.job.kind, "on_error")
            return Outcome(status="skipped", error=outcome.error)
        return outcome

    async def _unless_unwanted(self) -> Result:
        if self.job.when is not None and not self.run.memory.begun(self.task_id):
            try:
                wanted = self.job.when()
            except TaskFailed as error:
                await self._dispatch()
                return self._fail(error)
            if not wanted:
                skip(self.run, self.task_id, self.job.kind, "when")
                return Outcome(status="skipped")
        return await self._attempts()

    async def _attempts(self) -> Result:
        job, memory = self.job, self.run.memory
        interrupt(self.run, self.task_id, job.kind)
        open_attempt = memory.open.pop(self.task_id, None)
        if open_attempt is None:
            await self._dispatch()
        else:
            self._begin(open_attempt)
        while True:
            self.epoch = self._outer_epoch + memory.retries(self.task_id)
            try:
                output = await self._one_attempt()
                if not isinstance(output, Paused):
                    return self._complete(output)
            except TaskFailed as error:
                if not error.retryable or memory.retries(job.task_id, self._outer_epoch) >= (
                    job.retries
                ):
                    return self._fail(error)
                self._retry(error)
                pause_s = self._pause(error)
            except asyncio.CancelledError:
                why = self._outer_guard.why() if self._outer_guard is not None else None
                if why is not None:
                    self._fail(why, why.error())
                raise
            else:
                return output
            await asyncio.sleep(pause_s)
            await self._dispatch()

    async def _one_attempt(self) -> Any:
        limit_s = self.job.timeout_s
        late = self.failure(
            "timeout", f"an attempt took longer than timeout_s ({limit_s} s)", retryable=True
        )
        try:
            async with asyncio.timeout(limit_s) as self._timeout:
                self.guard = Guard(self._outer_guard, reason=late, timeout=self._timeout)
                return await self.job.work(self)
        except TimeoutError:
            if not self.guard.stopped or self.guard.reason is None:
                raise  # a bug, not the time limit
            raise self.guard.reason from None

    def _pause(self, error: TaskFailed) -> float:
        """Full jitter: from 0 to a bound that doubles with each retry; what a provider asked for
        comes before it.
        """
        retries = self.run.memory.retries(self.task_id, self._outer_epoch)
        asked_s = min(error.retry_after_s, RETRY_AFTER_MAX_S)
        return asked_s + self.run.jitter() * min(RETRY_MAX_S, RETRY_BASE_S * 2.0 ** (retries - 1))

    # -- what it says ---------------------------------------------------------------------------

    def _begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.usage = Usage()
        self.final = None
        self._began_at = self.run.now()
        self.run.running[self.task_id] = self

    async def _dispatch(self) -> None:
        await self.run.outlet.ready()  # else a batch of quick tasks outruns the journal
        self._begin(self.run.memory.next_attempt(self.task_id))
        data: dict[str, Any] = {"task_id": self.task_id, "kind": self.job.kind}
        if self.job.agent is not None:
            data["agent"] = self.job.agent
            if (model := self.run.models.get(self.job.agent)) is not None:
                data["model"] = model
        self.run.emit("task_dispatched", {**data, "attempt": self.attempt})

    def _complete(self, output: Any) -> Outcome:
        size, preview = measured(output)
        if size > OUTPUT_BYTES:
            raise self.failure("output_too_large", f"the output has more than {OUTPUT_BYTES} bytes")
        if self.closing is not None:
            self.closing()
        data: dict[str, Any] = {
            "task_id": self.task_id,
            "kind": self.job.kind,
            "duration_ms": round((self.run.now() - self._began_at) * 1000),
        }
        used = self.run.memory.used(self.task_id) + self.usage
        if self.tells_usage and used != Usage():
            data["usage"] = used.document()
        step = {
            "status": "completed",
            "output": output,
            "usage": self.usage.step(),
            "final": self.final,
        }
        del self.run.running[self.task_id]
        data["output_preview"] = preview
        self.run.emit("task_completed", data, {f"task/{self.task_id}": step})
        self._deliver(output, size)
        return Outcome(status="completed", output=output)

    def _deliver(self, output: Any, size: int | None = None) -> None:
        if self.run.memory.first("output_delivered", self.task_id, 0):
            url = f"/v1/workflows/results/{self.run.envelope.execution_id}/{self.task_id}"
            size = measured(output)[0] if size is None else size
            data = {"task_id": self.task_id, "bytes": size, "result_url": url}
            self.run.emit("output_delivered", data)

    def _told(self, error: TaskFailed) -> dict[str, str]:
        if error.task_id == self.task_id:
            return error.error()
        return {"code": "task_failed", "message": f"{error.task_id}: {error.message}"}

    def _retry(self, error: TaskFailed) -> None:
        end_open(self.run, stopped_by(error), self)
        step = {"code": error.code, "epoch": self._outer_epoch, "usage": self.usage.step()}
        key = f"attempt/{self.task_id}/{self.attempt}"
        self._end(self._told(error), will_retry=True, steps={key: step})

    def _fail(self, error: TaskFailed, told: Mapping[str, str] | None = None) -> Outcome:
        end_open(self.run, stopped_by(error), self)
        if self.closing is not None:
            self.closing()
        self.stop(error, told or self._told(error))
        return Outcome(status="failed", error=error)

    def stop(self, error: TaskFailed, told: Mapping[str, str] | None = None) -> None:
        """Say that it failed for good.

        Args:
            told: what the event says of the error.
        """
        step = {**failed_step(error, self.attempt), "usage": self.usage.step()}
        key = f"failed/{self.task_id}/{self._outer_epoch}"
        self._end(told or error.error(), will_retry=False, steps={key: step})

    def _end(self, told: Mapping[str, str], *, will_retry: bool, steps: Mapping[str, Any]) -> None:
        for tool_id in self.tools:
            self.run.emit("task_error", task_error(tool_id, "tool", told, self.attempt))
        self.tools.clear()
        del self.run.running[self.task_id]
        data = task_error(self.task_id, self.job.kind, told, self.attempt, will_retry=will_retry)
        self.run.emit("task_error", data, steps)


def skip(run: Run, task_id: str, kind: str, reason: str) -> None:
    """Say that a task is skipped, once."""
    step = {"status": "skipped", "usage": None, "final": None}
    if run.memory.step(f"task/{task_id}") is None:
        data = {"task_id": task_id, "kind": kind, "reason": reason}
        run.emit("task_skipped", data, {f"task/{task_id}": step})
