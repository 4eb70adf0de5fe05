"""The workflows plane's wire: named events and token frames. [pure]

Rules W2.1, W2.2, W2.6; seed 002 §4.2. JSON never holds a raw line break, so that every payload is
one `data:` line; `orjson` and `encoders.json_text` see to that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Mapping

# Events that end the text of their task, if it has one (W2.2).
TEXT_ENDS: Final = frozenset({"streaming_completed", "task_completed", "task_error"})
OUTCOMES: Final = frozenset({"workflow_completed", "workflow_error"})
VOCABULARY: Final = frozenset(
    {
        "request_received", "workflow_loaded", "workflow_started", "task_dispatched",
        "task_completed", "task_error", "task_skipped", "streaming_started",
        "streaming_completed", "output_delivered", "parallel_start", "parallel_complete",
        "sequential_start", "sequential_complete", "dynamic_start", "dynamic_generated",
        "dynamic_complete", "batch_start", "batch_item_start", "batch_item_complete",
        "batch_progress", "batch_complete", "debate_start", "debate_round_complete",
        "debate_judgment", "debate_complete", "condition_evaluated", "workflow_yielded",
        "workflow_result", "workflow_completed", "workflow_error", "heartbeat",
    }
)  # fmt: skip
_NAME: Final = re.compile(r"[^\r\n\0]{1,200}")


def frame(name: str, payload: bytes) -> bytes:
    """One named event (W2.1).

    Args:
        payload: one JSON document without line breaks.

    Raises:
        ValueError: the name would break the framing.
    """
    return _head(name) + payload + b"\n\n"


def _head(name: str) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError("an event's name is 1 to 200 characters without CR, LF and NUL")
    return b"event: " + name.encode("utf-8", "replace") + b"\ndata: "


def data_of(frame: bytes) -> dict[str, Any]:
    """The `data` of an engine's event; empty if it is none of ours."""
    _, _, payload = frame.partition(b"\ndata:")
    try:
        told = loads(payload)
    except ValueError:
        return {}
    data = told.get("data") if isinstance(told, dict) else None
    return data if isinstance(data, dict) else {}


def with_id(position: int, frame: bytes) -> bytes:
    """The frame with its position as SSE id (W2.6)."""
    return b"id: %d\n" % position + frame


def _around(name: str) -> tuple[bytes, bytes]:
    """What stands before the payload of an event, and before its `data`."""
    return _head(name), b'"type":%b,"data":' % dumps(name)


_KNOWN: Final = {name: _around(name) for name in VOCABULARY}


class RunFrames:
    """Makes the engine events of one run (W2.1); what they all begin with is encoded once."""

    __slots__ = ("_ids",)

    def __init__(self, workflow_id: str, execution_id: str) -> None:
        self._ids = dumps({"workflow_id": workflow_id, "execution_id": execution_id})[:-1]

    def frame(
        self, name: str, data: Mapping[str, Any], *, timestamp: str, elapsed_ms: int
    ) -> bytes:
        """One event.

        Args:
            timestamp: ISO 8601, UTC.

        Raises:
            ValueError: the name would break the framing.
        """
        head, of_type = _KNOWN.get(name) or _around(name)
        ids, told, at = self._ids, dumps(data), timestamp.encode()
        return b'%b%b,"timestamp":"%b",%b%b,"elapsed_ms":%d}\n\n' % (
            *(head, ids, at, of_type, told, elapsed_ms),
        )


def token_head(task_id: str) -> bytes:
    """What stands before a delta in the token frames of a task (W2.2)."""
    return b'event: token\ndata: {"task_id":' + dumps(task_id) + b',"delta":"'


def token(head: bytes, raw: bytes) -> bytes:
    """A token frame of the POST stream: exactly two fields, no id (W2.2).

    Args:
        head: of `token_head`. raw: what stands between the quotes of a JSON string.
    """
    return b'%b%b"}\n\n' % (head, raw)


def placed_token(head: bytes, raw: bytes, offset: int) -> bytes:
    """A token frame of the re-attach route: with the characters before it (W2.6)."""
    return b'%b%b","offset":%d}\n\n' % (head, raw, offset)
