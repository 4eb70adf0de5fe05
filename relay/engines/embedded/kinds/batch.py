"""`batch`: one task for each item of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.engines.embedded.children import at_once, in_all, raise_known_failure, run_task
from relay.engines.embedded.failures import Outcome, Paused
from relay.engines.embedded.limits import RUN_ITEMS

if TYPE_CHECKING:
    from relay.engines.embedded.document import Batch
    from relay.engines.embedded.failures import Result
    from relay.engines.embedded.group import Guard
    from relay.engines.embedded.lives import Life
    from relay.engines.embedded.scope import Scope

PROGRESS_S: Final = 0.25  # between two `batch_progress` of one batch


class _Progress:
    """What a batch says of its items."""

    def __init__(self, life: Life, total: int) -> None:
        self._life = life
        self._total = total
        self._open: set[int] = set()
        self._statuses = {"completed": 0, "failed": 0, "skipped": 0}
        self._told = -1
        self._told_at: float | None = None

    def started(self, index: int) -> None:
        self._open.add(index)
        self._life.say("batch_item_start", key=index, index=index)

    def ended(self, index: int, status: str) -> None:
        self._open.discard(index)
        self._statuses[status] += 1
        self._life.say("batch_item_complete", key=index, index=index, status=status)
        now = self._life.run.now()
        if self._told_at is None or now - self._told_at >= PROGRESS_S:
            self._told_at = now
            self._tell()

    def close(self) -> None:
        """Say how the batch ended; items that its failure stopped have failed."""
        for index in sorted(self._open):
            self._statuses["failed"] += 1
            self._life.say("batch_item_complete", key=index, index=index, status="failed")
        if self._told != self._done():
            self._tell()
        completed, failed = self._statuses["completed"], self._statuses["failed"]
        self._life.say("batch_complete", completed=completed, failed=failed)

    def _done(self) -> int:
        return sum(self._statuses.values())

    def _tell(self) -> None:
        self._told = self._done()
        data = {"done": self._told, "failed": self._statuses["failed"], "total": self._total}
        self._life.run.emit("batch_progress", {"task_id": self._life.task_id, **data})


async def work(task: Batch, scope: Scope, life: Life) -> Any:
    """Return the outputs in the order of the items; a failed one is `{error}`, a skipped one None.

    `on_error` of the batch is that of its items, too, unless the task says it itself.
    """
    run = life.run
    items = task.items.entries(scope.names())
    if run.count_items(life.task_id, len(items)) > RUN_ITEMS:
        raise life.failure(
            "too_many_items", f"the batches of a run may have {RUN_ITEMS:,} items together"
        )
    progress = _Progress(life, len(items))
    life.say("batch_start", total=len(items))
    life.closing = progress.close

    def item_scope(index: int) -> Scope:
        return scope.item(index, task.variable, items[index])

    if run.memory.has_failures:
        jobs = (run.job(task.task, item_scope(at), task.on_error) for at in range(len(items)))
        raise_known_failure(life, jobs)

    async def one(index: int, guard: Guard) -> Result:
        progress.started(index)
        result = await run_task(
            run,
            task.task,
            item_scope(index),
            parent=life,
            guard=guard,
            on_error=task.on_error,
        )
        if isinstance(result, Outcome):
            progress.ended(index, result.status)
        return result

    done = in_all(await at_once(life, len(items), task.concurrency, one))
    return done if isinstance(done, Paused) else [outcome.item() for outcome in done]
