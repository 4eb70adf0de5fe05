"""What a takeover learns from a run's journal: `Past` of its events. [pure]"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import Past

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Said once in a run. The others belong to an attempt, or tell how far something is.
STRUCTURAL: Final = frozenset(
    {
        "request_received", "workflow_loaded", "workflow_started", "workflow_yielded",
        "output_delivered", "sequential_start", "sequential_complete", "parallel_start",
        "parallel_complete", "condition_evaluated", "batch_start", "batch_item_start",
        "batch_item_complete", "batch_complete", "dynamic_start", "dynamic_generated",
        "dynamic_complete", "debate_start", "debate_round_complete", "debate_judgment",
        "debate_complete",
    }
)  # fmt: skip
_NUMBERED: Final = {
    "batch_item_start": "index",
    "batch_item_complete": "index",
    "debate_round_complete": "round",
}


def place(name: str, data: Mapping[str, Any]) -> tuple[str, str, int]:
    """A structural event as it stands in `Past.emitted`."""
    numbered = _NUMBERED.get(name)
    return name, data.get("task_id", ""), data.get(numbered, 0) if numbered else 0


def past_of(
    events: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    steps: Mapping[str, Any],
    answers: Mapping[str, Any],
) -> Past:
    """Return what an engine needs to go on.

    Args:
        events: name and `data` of each event of the run, in order.
    """
    emitted: set[tuple[str, str, int]] = set()
    still_open: dict[str, int] = {}
    for name, data in events:
        task_id = data.get("task_id", "")  # events of a remote engine hold what it likes
        if name in STRUCTURAL:
            emitted.add(place(name, data))
        elif name == "task_dispatched":
            still_open[task_id] = data.get("attempt", 1)
        elif name in ("task_completed", "task_error"):
            still_open.pop(task_id, None)
    return Past(emitted=frozenset(emitted), steps=steps, open=still_open, answers=answers)
