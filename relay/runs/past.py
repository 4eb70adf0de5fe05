"""What a run that is taken up again has behind it, read from its journal (W2.5). [pure]"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import loads
from relay.engines.base import Past

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from relay.stores.runs import StoredEvent

# Events of single attempts: said again by whoever takes the run up.
_OF_ATTEMPTS: Final = frozenset(
    {
        "task_dispatched", "task_error", "streaming_started", "streaming_completed", "heartbeat",
        "batch_progress", "workflow_result",
    }
)  # fmt: skip


def past_of(
    events: Iterable[StoredEvent], steps: Mapping[str, Any], answers: Mapping[str, Any]
) -> Past:
    """Return the past of a run.

    Args:
        events: all of its journal, in order.
    """
    emitted: set[tuple[str, str, int]] = set()
    attempts: dict[str, int] = {}
    for event in events:
        data = _data(event.frame)
        task_id = event.task_id
        if event.name not in _OF_ATTEMPTS:
            emitted.add((event.name, task_id, _number(data.get("index", data.get("round")))))
        if event.name == "task_dispatched":
            attempts[task_id] = _number(data.get("attempt")) or 1
        elif event.name in ("task_completed", "task_error", "task_skipped"):
            attempts.pop(task_id, None)
    return Past(emitted=frozenset(emitted), steps=steps, open=attempts, answers=answers)


def _data(frame: bytes) -> dict[str, Any]:
    _, _, payload = frame.partition(b"\ndata: ")
    try:
        data = loads(payload.strip()).get("data")
    except (ValueError, AttributeError):
        return {}
    return data if isinstance(data, dict) else {}


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
