"""The openai shape: requests and replies pass nearly as they are (M2.2, M5). [pure]"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from encoders.json_text import dumps
from encoders.normalize import normalizer
from encoders.openai_chunks import ChunkCollector, ChunkRewriter
from encoders.openai_healing import heal_reply
from encoders.openai_whole import rewrite_whole, whole_to_chunks
from encoders.shape import WholeReply, collected
from encoders.text_counter import TextCounter
from encoders.usage import openai_usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants, Translator


class OpenAIShape:
    """Chat completions; see `encoders.shape.Shape`."""

    def url(self, base_url: str, model: str, *, stream: bool) -> str:
        return f"{base_url}/chat/completions"

    def auth(self, api_key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def request(
        self, body: Mapping[str, Any], *, model: str, stream: bool, stream_options: bool
    ) -> dict[str, Any]:
        """The request as sent, with the provider's model name, and usage asked for (M2.4)."""
        out = dict(body)
        out["model"] = model
        if stream:
            out["stream"] = True
            if stream_options:
                given = out.get("stream_options")
                options = dict(given) if isinstance(given, dict) else {}
                out["stream_options"] = options | {"include_usage": True}
            else:
                out.pop("stream_options", None)
        return out

    def translator(self, identity: ChunkIdentity, wants: StreamWants) -> Translator:
        correcting = normalizer(wants, identity.id)
        if wants.collect_bytes_max is not None:
            return ChunkCollector(
                identity,
                choices=wants.choices,
                max_bytes=wants.collect_bytes_max,
                normalizer=correcting,
                withheld_max=wants.withheld_max,
            )
        return ChunkRewriter(
            identity,
            choices=wants.choices,
            normalizer=correcting,
            withheld_max=wants.withheld_max,
            include_usage=wants.include_usage,
            usage_is_ours=wants.usage_is_ours,
        )

    def is_reply(self, reply: object) -> bool:
        return isinstance(reply, dict) and isinstance(reply.get("choices"), list)

    def events_of(self, reply: Any) -> list[bytes]:
        return [*whole_to_chunks(reply), b"[DONE]"]

    def whole(
        self, data: bytes, reply: Any, identity: ChunkIdentity, wants: StreamWants
    ) -> WholeReply:
        """The reply as sent but for model and provider (M2.2), its tool calls healed (M2.6)."""
        if wants.inline_tool_calls:
            return collected(self, reply, identity, wants)
        counter = TextCounter()
        counter.add_choices(reply.get("choices"))
        choices = dumps(reply["choices"]) if heal_reply(reply, identity.id) else None
        return WholeReply(
            body=rewrite_whole(
                data, model=identity.model, provider=identity.provider, choices=choices
            ),
            usage=openai_usage(reply.get("usage")),
            characters=counter.characters,
        )
