"""The OpenAI wire: what we write ourselves. [pure]

Source: OpenAI's chat completions streaming reference; rules M1.2, M2.1, M2.3, M3.4. Clocks and ids
are arguments. Everything returned is whole SSE events or whole JSON documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from encoders.sse import encode_comment

if TYPE_CHECKING:
    from collections.abc import Mapping

DONE: Final = b"data: [DONE]\n\n"
PROCESSING: Final = encode_comment("OPENROUTER PROCESSING")


@dataclass(slots=True, kw_only=True)
class ChunkIdentity:
    """What every chunk of one stream has in common; the upstream's own once it was seen.

    Attributes:
        model: the served slug (M2.2). provider: who served. Fixed for the stream.
        id, created: as the upstream says, else ours; `created` in Unix seconds.
    """

    model: str
    provider: str
    id: str
    created: int

    def seen(self, chunk: dict[str, Any]) -> None:
        """Take over id and time of an upstream's chunk."""
        chunk_id, created = chunk.get("id"), chunk.get("created")
        if isinstance(chunk_id, str) and chunk_id:
            self.id = chunk_id
        if isinstance(created, int) and not isinstance(created, bool) and created > 0:
            self.created = created


def event(payload: bytes) -> bytes:
    """Wrap one JSON document as one event (M2.1).

    A line break in JSON that was sent over several `data:` lines is white space between tokens, so
    it may become a space: naive clients read line by line.
    """
    if b"\n" in payload:
        payload = payload.replace(b"\n", b" ")
    return b"data: " + payload + b"\n\n"


def chunk(identity: ChunkIdentity, choices: list[dict[str, Any]], **more: Any) -> bytes:
    """Return one `chat.completion.chunk` event of ours."""
    return event(
        dumps(
            {
                "id": identity.id,
                "object": "chat.completion.chunk",
                "created": identity.created,
                "model": identity.model,
                "provider": identity.provider,
                "choices": choices,
                **more,
            }
        )
    )


def primer(identity: ChunkIdentity, index: int) -> bytes:
    """The role primer of one choice, for upstreams that send none (M2.3)."""
    delta = {"role": "assistant", "content": ""}
    return chunk(identity, [{"index": index, "delta": delta, "finish_reason": None}])


def usage_chunk(identity: ChunkIdentity, usage: dict[str, Any]) -> bytes:
    """The final usage chunk (M2.4)."""
    return chunk(identity, [], usage=usage)


def error_chunk(identity: ChunkIdentity, *, message: str, code: str, raw: object) -> bytes:
    """The chunk that ends a stream that failed after its first byte (M3.4).

    Args:
        message, code: for the client. raw: what the provider said, redacted, or None.
    """
    error = {
        "message": message,
        "type": "upstream_error",
        "code": code,
        "metadata": {"provider_name": identity.provider, "raw": raw},
    }
    choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "error"}
    return chunk(identity, [choice], error=error)


def model_entry(name: str, *, owner: str, created: int) -> dict[str, Any]:
    """One model as `GET …/models` lists it; `name` is what OpenRouter's list has beside OpenAI's
    fields.

    Args:
        created: Unix seconds.
    """
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "name": name}


def error_body(
    message: str,
    *,
    type_: str,
    code: str,
    param: str | None,
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """The JSON body of an error before the first byte (M1.2).

    Args:
        details: for machines, what the message says; left out if None.
    """
    error: dict[str, Any] = {"message": message, "type": type_, "param": param, "code": code}
    if details is not None:
        error["details"] = details
    return dumps({"error": error})
