"""What a new owner of a run says of the tasks that were open (W2.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.engines.embedded.failures import failed_step, task_error
from relay.engines.embedded.memory import INTERRUPTED

if TYPE_CHECKING:
    from relay.engines.embedded.context import Run
    from relay.engines.embedded.failures import TaskFailed
    from relay.engines.embedded.lives import Life


def interrupt(run: Run, task_id: str, kind: str) -> None:
    """Say of a task that a former owner left while it had a call that it is run again.

    A task that only holds others, or waits for an answer, goes on, and nothing is said of it.
    """
    memory = run.memory
    attempt = memory.open.get(task_id)
    made = {"dynamic": f"plan/{task_id}", "debate": f"judgment/{task_id}"}.get(kind)
    if attempt is None or not (kind == "task" or (made is not None and memory.step(made) is None)):
        return
    error = {"code": INTERRUPTED, "message": "the process that ran it stopped"}
    del memory.open[task_id]
    for tool_id in [key for key in memory.open if key.startswith(f"{task_id}.tool.")]:
        run.emit("task_error", task_error(tool_id, "tool", error, memory.open.pop(tool_id)))
    data = task_error(task_id, kind, error, attempt, will_retry=True)
    step = {"code": INTERRUPTED, "epoch": 0, "usage": _left(run, task_id)}
    run.emit("task_error", data, {f"attempt/{task_id}/{attempt}": step})


def _left(run: Run, task_id: str) -> dict[str, int] | None:
    used = run.memory.left.pop(task_id, None)
    return used.step() if used is not None else None


def end_open(run: Run, error: TaskFailed, under: Life | None = None) -> None:
    """End what is open, the last one first; nothing of it is run again in its epoch.

    Args:
        under: only what this task holds, at any depth; it stays open itself.
    """
    for life in reversed(list(run.running.values())):
        if under is None or life.is_under(under):
            life.stop(error)
    # Those of a former owner that this one has not come to.
    for task_id, attempt in reversed(list(run.memory.open.items())):
        holders = run.places.holders(task_id)
        if under is None or under.task_id in holders:
            del run.memory.open[task_id]
            epoch = sum(map(run.memory.retries, holders))
            kind = run.places.kind(task_id)
            step = {**failed_step(error, attempt), "usage": _left(run, task_id)}
            steps = {f"failed/{task_id}/{epoch}": step}
            data = task_error(task_id, kind, error.error(), attempt)
            run.emit("task_error", data, None if kind == "tool" else steps)
