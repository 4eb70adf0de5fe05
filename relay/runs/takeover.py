"""Runs that nobody works on: what they have behind them, or how they are ended (W2.5)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from encoders.workflow import RunFrames, data_of
from relay.engines.base import Envelope, Failed, Payer, Usage
from relay.engines.embedded.memory import came_to
from relay.engines.past import past_of
from relay.runs.lane import TASK
from relay.runs.outlet import frame_of
from relay.runs.run import last_events, row_end, summary_of
from relay.stores.runs import Batch, JournalEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.engines.base import Engine, Past
    from relay.money import Settlement
    from relay.stores.runs import RunRow, RunStore

ATTEMPTS_MAX: Final = 5  # claims of one run: one that kills its process every time ends some day
CANCELLED: Final = Failed(code="cancelled", message="the run was cancelled")
CLIENT_GONE: Final = Failed(
    code="cancelled", message="the run was only for its client, which is gone"
)


def hopeless(row: RunRow, engine: Engine | None) -> Failed | None:
    """Why a run that was left by its process is not taken up again; None if it is."""
    if row.cancel_requested:
        return CANCELLED
    # Its client was connected to the process that is gone (A1.6).
    asked = row.document if row.source == "agent" and isinstance(row.document, dict) else {}
    if asked.get("on_disconnect") == "cancel":
        return CLIENT_GONE
    if engine is None:
        return Failed(
            code="orphaned", message="nothing in this gateway works on such runs any more"
        )
    if row.attempts > ATTEMPTS_MAX:
        return Failed(
            code="orphaned",
            message=f"{ATTEMPTS_MAX} gateway processes were lost while they worked on this run; "
            "it is not tried again",
        )
    return None


async def envelope_of(store: RunStore, row: RunRow, calls: Sequence[Settlement] = ()) -> Envelope:
    """Return a run as an engine goes on with it.

    Args:
        calls: the rows of its calls, if its process was lost.
    """
    past = await _past(store, row, calls)
    steps = dict(past.steps)
    for task_id, output in (await store.outputs(row.execution_id)).items():
        steps[TASK + task_id] = {**(steps.get(TASK + task_id) or {}), "output": output}
    return Envelope(
        execution_id=row.execution_id,
        workflow_id=row.workflow_id,
        document=row.document,
        inputs=row.inputs,
        source=row.source,  # type: ignore[arg-type]  # stored as it was given
        payer=Payer(org=row.org, key_id=row.key_id, trial=row.trial),
        created_at=row.created_at,
        plane=row.plane,
        past=replace(past, steps=steps),
    )


async def _past(store: RunStore, row: RunRow, calls: Sequence[Settlement]) -> Past:
    """What a run has behind it, but for its outputs."""
    events = await store.outline(row.execution_id)
    past = past_of(
        ((event.name, data_of(event.frame)) for event in events),
        steps=await store.steps(row.execution_id),
        answers=row.answers,
    )
    if f"unsaid/{row.generation - 1}" in past.steps:
        return past  # its process gave it up, and said what its open tasks had used
    left: dict[str, Usage] = {}
    for call in calls:
        _, task_id, attempt, _ = call.request_id.split("/", 3)
        if str(past.open.get(task_id)) == attempt:
            left[task_id] = left.get(task_id, Usage()) + Usage(
                prompt_tokens=call.prompt_tokens,
                completion_tokens=call.completion_tokens,
                cost_micro_usd=call.cost_micro_usd,
            )
    return replace(past, left=left)


async def end_row(
    store: RunStore, row: RunRow, failed: Failed, now: float, calls: Sequence[Settlement] = ()
) -> None:
    """End a run that nobody works on; nothing if another was faster. `calls`: see `envelope_of`."""
    past = await _past(store, row, calls)
    left = came_to(past.steps)
    counts, usage = left or (row.summary or {}, Usage())
    usage = sum(past.left.values(), usage)
    summary = summary_of(counts, usage, now - row.created_at)
    if left is None and not past.left and row.usage:
        summary["usage"] = row.usage
    frames = RunFrames(row.workflow_id, row.execution_id)
    events = [
        JournalEvent(
            event_id=f"{row.generation}.end.{name}",
            name=name,
            frame=frame_of(frames, name, data, started_at=row.created_at, now=now),
        )
        for name, data in last_events(failed, row.execution_id, summary)
    ]
    end = row_end(failed, now, summary)
    generation = None if row.state == "yielded" else row.generation
    await store.finish(row.execution_id, generation, Batch(events=events), end)
