"""What the tasks of a remote engine's run have streamed, so that it can be stored. [pure]

Rules W1.3, W2.2: a task's stored output is its text since its last `streaming_started`. A task that
streamed nothing has the `output` of its `task_completed`, if there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import loads
from relay.engines.remote.frames import data_of, frame_data
from relay.ordering import STARTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.ordering import Say

TEXT_BYTES_MAX: Final = 16 * 1024 * 1024
TEXTS_BYTES_MAX: Final = 64 * 1024 * 1024
_COMPLETED: Final = frozenset({"streaming_completed", "task_completed"})


class Texts:
    """The texts of the tasks of one run that have not ended.

    Args:
        text_max: bytes of one. texts_max: of all together.
    """

    def __init__(self, text_max: int = TEXT_BYTES_MAX, texts_max: int = TEXTS_BYTES_MAX) -> None:
        self._text_max = text_max
        self._texts_max = texts_max
        self._bytes = 0
        self._texts: dict[str, bytearray] = {}

    def room(self, task_id: str) -> bool:
        """Whether more of this task's text may be said."""
        text = self._texts.get(task_id, b"")
        return len(text) < self._text_max and self._bytes < self._texts_max

    def token(self, task_id: str, raw: bytes) -> None:
        """A piece of text was said."""
        self._texts.setdefault(task_id, bytearray()).extend(raw)
        self._bytes += len(raw)

    def said(self, say: Say) -> Mapping[str, Any] | None:
        """A frame is said now; return the steps that become durable with it (J1.4)."""
        task_id = say.task_id
        if task_id is None:
            return None
        if say.name not in _COMPLETED:
            if say.name in (STARTED, "task_error"):
                self._forget(task_id)
            return None
        text = self._texts.get(task_id)
        if say.name == "task_completed":
            self._forget(task_id)
        if text:
            return {f"task/{task_id}": {"output": _well_formed(loads(b'"' + text + b'"'))}}
        output = data_of(frame_data(say.frame)).get("output")
        return None if output is None else {f"task/{task_id}": {"output": output}}

    def _forget(self, task_id: str) -> None:
        text = self._texts.pop(task_id, None)
        if text is not None:
            self._bytes -= len(text)


def _well_formed(text: str) -> str:
    """The text with U+FFFD for half an emoji, as the journal has it (B20)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
