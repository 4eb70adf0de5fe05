"""A run told as OpenAI chunks: the agents plane's wire. [pure]

Rules A1.2 to A1.4; seed 002 §4.3; hazards B11 to B13: no `event:`, `id:` or `retry:` line ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from encoders.openai import DONE, event

if TYPE_CHECKING:
    from collections.abc import Mapping

_ID_HEX: Final = 24
# What stands for the text in the chunk that others are made of; no model says it.
_MARK: Final = "\x00text\x01"


def chunk_id(execution_id: str) -> str:
    """`chatcmpl-` and the first 24 hex digits of the execution's id (A1.2)."""
    return f"chatcmpl-{execution_id[:_ID_HEX]}"


def finish_reason(reason: str | None) -> str:
    """`length` if the reply was cut by its limit, else `stop`."""
    return "length" if reason == "length" else "stop"


class AgentChunks:
    """The chunks of one run.

    Args:
        created: Unix seconds. model: what is served, until `served` tells better.
        usage_chunk: whether usage comes in a chunk of its own (`stream_options.include_usage`).

    Attributes:
        finish: the `finish_reason` so far. usage: as the run reported it, None if it did not.
    """

    def __init__(self, execution_id: str, *, created: int, model: str, usage_chunk: bool) -> None:
        self._id = chunk_id(execution_id)
        self._created = created
        self._usage_chunk = usage_chunk
        self._model = model
        self._around: tuple[bytes, bytes] | None = None
        self.finish: str | None = None
        self.usage: Mapping[str, Any] | None = None

    def served(self, model: str) -> None:
        """Take over who serves; before any text."""
        self._model = model
        self._around = None

    def text(self, raw: bytes, *, first: bool) -> bytes:
        """One content chunk, with the primer before it if it is the first (A1.2).

        Args:
            raw: what stands between the quotes of a JSON string.
        """
        if self._around is None:
            before, _, after = self._chunk({"content": _MARK}).partition(dumps(_MARK)[1:-1])
            self._around = before, after
        before, after = self._around
        primer = self._chunk({"role": "assistant"}) if first else b""
        return b"%b%b%b%b" % (primer, before, raw, after)

    def end(self) -> bytes:
        """The final chunk, usage and `[DONE]`."""
        usage = dict(self.usage) if self.usage is not None else None
        if usage is None or self._usage_chunk:
            final = self._chunk({}, finish=finish_reason(self.finish))
        else:
            final = self._chunk({}, finish=finish_reason(self.finish), usage=usage)
        if usage is not None and self._usage_chunk:
            final += event(dumps({**self._head(), "choices": [], "usage": usage}))
        return final + DONE

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }

    def _chunk(self, delta: dict[str, Any], *, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return event(dumps({**self._head(), "choices": [choice], **more}))


def error_event(message: str) -> bytes:
    """What ends a stream that failed after its head; no `[DONE]` follows (A1.4)."""
    error = {"message": message, "type": "server_error", "code": "engine_error"}
    return event(dumps({"error": error}))


def whole_reply(
    execution_id: str,
    *,
    created: int,
    model: str,
    text: str,
    finish: str | None,
    usage: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A run as one `chat.completion`."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(finish)}
    reply: dict[str, Any] = {
        "id": chunk_id(execution_id),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
    }
    if usage is not None:
        reply["usage"] = dict(usage)
    return reply
