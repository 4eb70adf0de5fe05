"""The anthropic shape: the Messages API (M5). [pure]"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from encoders.anthropic_request import messages_request
from encoders.anthropic_stream import MessagesTranslator
from encoders.json_text import dumps
from encoders.shape import WholeReply, collected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants, Translator

VERSION: Final = "2023-06-01"
_VERSIONED: Final = re.compile(r"[^/]/v\d+\w*$")


class AnthropicShape:
    """The Messages API; see `encoders.shape.Shape`."""

    def url(self, base_url: str, model: str, *, stream: bool) -> str:
        """The route; `base_url` with or without its version."""
        return f"{base_url}{'' if _VERSIONED.search(base_url) else '/v1'}/messages"

    def auth(self, api_key: str) -> dict[str, str]:
        """The key and the version of the API; configured `headers` replace either."""
        version = {"anthropic-version": VERSION}
        return {"x-api-key": api_key} | version if api_key else version

    def request(
        self, body: Mapping[str, Any], *, model: str, stream: bool, stream_options: bool
    ) -> dict[str, Any]:
        return messages_request(body, model=model, stream=stream)

    def translator(self, identity: ChunkIdentity, wants: StreamWants) -> Translator:
        return MessagesTranslator(identity, wants)

    def is_reply(self, reply: object) -> bool:
        return isinstance(reply, dict) and isinstance(reply.get("content"), list)

    def events_of(self, reply: Any) -> list[bytes]:
        """The message as the events that would have streamed it, each block in one."""
        head = {k: v for k, v in reply.items() if k not in ("content", "stop_reason")}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
        for index, block in enumerate(reply["content"]):
            start = {"type": "content_block_start", "index": index, "content_block": block}
            events += [start, {"type": "content_block_stop", "index": index}]
        delta = {"stop_reason": reply.get("stop_reason") or "end_turn"}
        events.append({"type": "message_delta", "delta": delta, "usage": reply.get("usage")})
        events.append({"type": "message_stop"})
        return [dumps(event) for event in events]

    def whole(
        self, data: bytes, reply: Any, identity: ChunkIdentity, wants: StreamWants
    ) -> WholeReply:
        return collected(self, reply, identity, wants)
