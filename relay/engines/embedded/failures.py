"""How a task ends: its outcome, its failure, or a wait for an answer. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

STOPPED: Final = "cancelled"

Status = Literal["completed", "failed", "skipped"]


class TaskFailed(Exception):
    """A task failed; raised on to what holds it unless its `on_error` says otherwise.

    Attributes:
        code: of the agent call's error, or of the engine (docs/spec/workflows.md, W3.1).
        task_id: the innermost task that failed.
        retryable: whether the same again may do better. retry_after_s: seconds that a provider
            asked to be left alone, 0 if none did.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        task_id: str,
        retryable: bool = False,
        retry_after_s: float = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.task_id = task_id
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    def error(self) -> dict[str, str]:
        """As it stands in events and in the outputs of a batch."""
        return {"code": self.code, "message": self.message}

    def final(self) -> TaskFailed:
        """The same, not to be retried."""
        return TaskFailed(self.code, self.message, task_id=self.task_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A task has ended.

    Attributes:
        output: None unless completed. error: why it failed or was skipped, if it was for that.
    """

    status: Status
    output: Any = None
    error: TaskFailed | None = None

    def item(self) -> Any:
        """As an entry of the list that a batch or a dynamic makes."""
        if self.status == "failed" and self.error is not None:
            return {"error": self.error.error()}
        return self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A `yield` waits for its answer, and so does everything that it is in (W2.3)."""

    task_id: str
    prompt: str
    schema: Mapping[str, Any] | None


Result: TypeAlias = Outcome | Paused


def stopped_by(error: TaskFailed) -> TaskFailed:
    """What those are told that stop because of a failure elsewhere."""
    return TaskFailed(
        STOPPED,
        f"stopped, because {error.task_id} failed: {error.message}",
        task_id=error.task_id,
        retryable=error.retryable,
    )


def failed_step(error: TaskFailed, attempt: int) -> dict[str, Any]:
    """The step of a task that failed for good."""
    return {
        "status": "failed",
        "error": error.error(),
        "task_id": error.task_id,
        "retryable": error.retryable,
        "attempt": attempt,
        "usage": None,
    }


def task_error(
    task_id: str,
    kind: str,
    error: Mapping[str, str],
    attempt: int,
    *,
    will_retry: bool = False,
) -> dict[str, Any]:
    """The `data` of a `task_error`."""
    return {
        "task_id": task_id,
        "kind": kind,
        "error": error,
        "attempt": attempt,
        "will_retry": will_retry,
    }
