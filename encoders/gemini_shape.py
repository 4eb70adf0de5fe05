"""The gemini shape: `generateContent` and `streamGenerateContent` of the Gemini API. [pure]

Rule M5. Source: the API's reference and the types of Google's `google-genai` SDK.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from encoders.gemini_request import gemini_request
from encoders.gemini_stream import GeminiTranslator, block_reason, candidate_index
from encoders.json_text import dumps
from encoders.shape import collected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from encoders.openai import ChunkIdentity
    from encoders.shape import WholeReply
    from encoders.translator import StreamWants, Translator

_VERSIONED: Final = re.compile(r"/v\d+(?:(?:alpha|beta)\d*)?$")
_COLLECTIONS: Final = ("models/", "tunedModels/", "endpoints/")


class GeminiShape:
    """GenerateContent; see `encoders.shape.Shape`."""

    def url(self, base_url: str, model: str, *, stream: bool) -> str:
        """The version `v1beta` is added unless `base_url` ends in one, or in `/publishers/…`."""
        base = base_url.removesuffix("/models")
        if not _VERSIONED.search(base) and "/publishers/" not in base:
            base += "/v1beta"
        collection = next((c for c in _COLLECTIONS if model.startswith(c)), "models/")
        name = quote(model.removeprefix(collection), safe="")
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"{base}/{collection}{name}:{method}"

    def auth(self, api_key: str) -> dict[str, str]:
        """The key travels in a header: in a URL it would stand in every log on the way."""
        return {"x-goog-api-key": api_key} if api_key else {}

    def request(
        self, body: Mapping[str, Any], *, model: str, stream: bool, stream_options: bool
    ) -> dict[str, Any]:
        """Usage is always reported, and the path says whether it is a stream."""
        return gemini_request(body, model=model)

    def translator(self, identity: ChunkIdentity, wants: StreamWants) -> Translator:
        return GeminiTranslator(identity, wants)

    def is_reply(self, reply: object) -> bool:
        """A response with a candidate or a blocked prompt, or a list with such a response."""
        if isinstance(reply, list):
            return any(map(_is_response, reply))
        return _is_response(reply)

    def events_of(self, reply: Any) -> list[bytes]:
        """One event for each response: without `alt=sse` a stream is a list of them.

        The document is complete, so is each candidate that does not say how it ended.
        """
        responses = reply if isinstance(reply, list) else [reply]
        ended = {
            index
            for response in responses
            for index, candidate in _candidates(response)
            if candidate.get("finishReason")
        }
        seen = {index for response in responses for index, _ in _candidates(response)}
        missing = [{"index": i, "finishReason": "STOP"} for i in sorted(seen - ended)]
        if missing:
            responses = [*responses, {"candidates": missing}]
        return [dumps(response) for response in responses]

    def whole(
        self, data: bytes, reply: Any, identity: ChunkIdentity, wants: StreamWants
    ) -> WholeReply:
        return collected(self, reply, identity, wants)


def _is_response(reply: object) -> bool:
    return any(True for _ in _candidates(reply)) or block_reason(reply) is not None


def _candidates(response: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """The candidates of a response with their indexes, as the translator counts them."""
    candidates = response.get("candidates") if isinstance(response, dict) else None
    for position, candidate in enumerate(candidates if isinstance(candidates, list) else ()):
        if isinstance(candidate, dict):
            yield candidate_index(candidate, position), candidate
