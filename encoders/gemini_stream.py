"""Reads a stream of `GenerateContentResponse` objects. [pure]

Rules M2.3 to M2.6 and M3.4. Each event holds the next parts of its candidates. What is particular:
usage is cumulative and on every event; a function call comes whole and often without an id; a
reason to finish may stand on an event that others follow, so it is told when the stream ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.gemini_messages import OTHER_PARTS, SIGNATURE_FORMAT, SIGNATURE_TYPE
from encoders.gemini_partial import PartialCall
from encoders.json_text import dumps, loads
from encoders.reasoning_details import FIELD as REASONING_DETAILS
from encoders.shape_translator import ShapeTranslator
from encoders.translator import Kind
from encoders.usage import TokenUsage, token_count

if TYPE_CHECKING:
    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants

# What is not here is `stop`, or `tool_calls` if functions were called (M2.5).
_REASONS: Final = {
    "MAX_TOKENS": "length",
    "CONTINUATION": "length",
    **dict.fromkeys(
        (
            "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE",
            "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION", "MODEL_ARMOR",
            "ESCALATION", "PUP_LIMITED_DISABLED",
        ),
        "content_filter",
    ),
}  # fmt: skip
_UNSPECIFIED: Final = frozenset({"FINISH_REASON_UNSPECIFIED", "BLOCKED_REASON_UNSPECIFIED"})
_COUNTS: Final = frozenset(
    {
        "promptTokenCount",
        "toolUsePromptTokenCount",
        "candidatesTokenCount",
        "thoughtsTokenCount",
        "cachedContentTokenCount",
        "totalTokenCount",
    }
)
# Fields of a candidate that travel in a chunk's choice as they are.
_KEPT: Final = {
    "groundingMetadata": "grounding_metadata",
    "citationMetadata": "citation_metadata",
    "urlContextMetadata": "url_context_metadata",
    "finishMessage": "native_finish_message",
}
_BESIDE_PARTS: Final = frozenset({*_KEPT, "logprobsResult"})
# What a part may have besides what it is.
_BESIDE: Final = frozenset({"thought", "thoughtSignature", "text", "functionCall"})
_END_BYTES: Final = 1024
_SOURCES_MAX: Final = 4096  # beyond it one may be told twice
_ID_TAIL: Final = 24  # OpenAI takes ids of up to 40 characters


class _State:
    """What is to be remembered of one choice."""

    __slots__ = ("details", "images", "partial", "sources")

    def __init__(self) -> None:
        self.details = 0  # reasoning_details so far
        self.images = 0
        self.partial: PartialCall | None = None
        self.sources: set[str] = set()  # URLs that annotations have told


class GeminiTranslator(ShapeTranslator):
    """Translates one stream; see `encoders.translator.Translator`."""

    def __init__(self, identity: ChunkIdentity, wants: StreamWants) -> None:
        super().__init__(identity, wants)
        self._counts: dict[str, int] = {}
        self._states: dict[int, _State] = {}
        self._ends: dict[int, tuple[str, str]] = {}  # in OpenAI's words and in Gemini's
        self._identified = False
        self._ends_early = False  # a choice went on after it had a reason to finish

    @property
    def all_finished(self) -> bool:
        # Older models say STOP on each event: then only the end of the stream is the end.
        return super().all_finished and not self._ends_early

    def rewrite(self, data: bytes, out: list[bytes]) -> Kind:
        kind = super().rewrite(data, out)
        if kind is not Kind.SKIPPED or data.lstrip()[:1] != b"[":
            return kind
        for event in loads(data.decode("utf-8", "replace")):  # errors come in a list of one
            told = self._take(event, out) if isinstance(event, dict) else Kind.SKIPPED
            if told is Kind.FAILED:
                return told
            kind = told if told is Kind.CHUNK else kind
        return kind

    def flush(self) -> bytes:
        out: list[bytes] = []
        for index, (reason, native) in sorted(self._ends.items()):
            if reason == "stop" and self._choices[index].calls:
                reason = "tool_calls"
            # The bound was for what the provider sends; an end that it has told always fits.
            self._bytes_left = max(self._bytes_left, len(native) + _END_BYTES)
            self._emit({}, out, index, reason, native)
        self._ends.clear()
        return b"".join(out)

    def _take(self, event: dict[str, Any], out: list[bytes]) -> Kind:
        if event.get("error"):
            return Kind.FAILED
        response_id = event.get("responseId")
        if not self._identified and response_id:
            self._identified = True
            self.identity.seen({"id": response_id})
        told = self._count(event.get("usageMetadata"))
        candidates = event.get("candidates")
        for position, candidate in enumerate(candidates if isinstance(candidates, list) else ()):
            if isinstance(candidate, dict):
                told = True
                self._candidate(candidate, candidate_index(candidate, position), out)
        if (blocked := block_reason(event)) is not None:
            told = True
            self._end(0, "content_filter", blocked, out)
        return Kind.CHUNK if told else Kind.SKIPPED

    def _candidate(self, candidate: dict[str, Any], index: int, out: list[bytes]) -> None:
        content = candidate.get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                self._part(part, index, out)
        self._metadata(candidate, index, out)
        reason = candidate.get("finishReason")
        if isinstance(reason, str) and reason and reason not in _UNSPECIFIED:
            self._end(index, _REASONS.get(reason, "stop"), reason, out)

    # --- parts -------------------------------------------------------------------------------

    def _part(self, part: dict[str, Any], index: int, out: list[bytes]) -> None:
        signature, text = part.get("thoughtSignature"), part.get("text")
        call, blob = part.get("functionCall"), part.get("inlineData")
        if isinstance(call, dict):
            self._function_call(call, signature, index, out)
            return  # its signature goes with it
        if isinstance(text, str):
            if text:
                self._go_on(index)
                self._close_partial(index, out)
            if part.get("thought") is True:
                self._reasoning(text, out, index)
            else:
                self._text(text, out, index)
        elif isinstance(blob, dict) and str(blob.get("mimeType")).startswith("image/"):
            self._image(blob, index, out)
        elif part.keys() - _BESIDE:
            self._go_on(index)
            self._extend({OTHER_PARTS: [part]}, out, index)  # with its signature
            return
        if isinstance(signature, str) and signature:
            self._signature(signature, index, out)

    def _signature(
        self, signature: str, index: int, out: list[bytes], call_id: str | None = None
    ) -> None:
        state = self._state(index)
        detail = {
            "type": SIGNATURE_TYPE,
            "data": signature,
            "format": SIGNATURE_FORMAT,
            "index": state.details,
        }
        state.details += 1
        if call_id is not None:
            detail["id"] = call_id
        self._extend({REASONING_DETAILS: [detail]}, out, index)

    def _image(self, blob: dict[str, Any], index: int, out: list[bytes]) -> None:
        self._go_on(index)
        state = self._state(index)
        url = f"data:{blob['mimeType']};base64,{blob.get('data') or ''}"
        image = {"type": "image_url", "image_url": {"url": url}, "index": state.images}
        state.images += 1
        self._extend({"images": [image]}, out, index)

    # --- function calls ----------------------------------------------------------------------

    def _function_call(
        self, call: dict[str, Any], signature: object, index: int, out: list[bytes]
    ) -> None:
        """A whole call, or a piece of one: then it is told when something else follows."""
        state = self._state(index)
        if state.partial is None or not state.partial.is_continued_by(call):
            self._close_partial(index, out)
            if not call.get("willContinue") and "partialArgs" not in call:
                args, call_id = call.get("args"), call.get("id")
                self._call(call.get("name"), args, call_id, signature, index, out)
                return
            state.partial = PartialCall(self._wants.withheld_max)
        state.partial.add(call, signature)

    def _close_partial(self, index: int, out: list[bytes]) -> None:
        state = self._states.get(index)
        if state is None or state.partial is None:
            return
        partial, state.partial = state.partial, None
        name, args = partial.name, partial.arguments
        self._call(name, args, partial.call_id, partial.signature, index, out)

    def _call(
        self,
        name: object,
        args: object,
        call_id: object,
        signature: object,
        index: int,
        out: list[bytes],
    ) -> None:
        """Tell one call: at once, for it is complete."""
        if not isinstance(name, str) or not name:
            return
        self._go_on(index)
        choice = self._begin(out, index)
        if not isinstance(call_id, str) or not call_id:
            call_id = f"call_{self.identity.id[-_ID_TAIL:]}_{index}_{choice.calls}"
        more: dict[str, Any] = {}
        signed = isinstance(signature, str) and signature
        if signed:
            more["extra_content"] = {"google": {"thought_signature": signature}}
        number = self._open_call(call_id, name, out, index, **more)
        text = args if isinstance(args, str) and args else dumps(args or {}).decode()
        self._call_arguments(number, text, out, index)
        if signed and self._reasoning_field == "reasoning":  # where OpenRouter's clients keep it
            self._signature(str(signature), index, out, call_id)

    # --- what stands beside the parts --------------------------------------------------------

    def _metadata(self, candidate: dict[str, Any], index: int, out: list[bytes]) -> None:
        if _BESIDE_PARTS.isdisjoint(candidate):
            return
        kept = {ours: candidate[key] for key, ours in _KEPT.items() if candidate.get(key)}
        if logprobs := _logprobs(candidate.get("logprobsResult")):
            kept["logprobs"] = {"content": logprobs}
        if not kept:
            return
        self._begin(out, index)
        annotations = self._annotations(candidate.get("groundingMetadata"), index)
        delta = {"annotations": annotations} if annotations else {}
        self._emit(delta, out, index, **kept)

    def _annotations(self, metadata: object, index: int) -> list[dict[str, Any]]:
        """The web pages that the answer rests on, each told once."""
        chunks = metadata.get("groundingChunks") if isinstance(metadata, dict) else None
        told = self._state(index).sources
        out: list[dict[str, Any]] = []
        for chunk in chunks if isinstance(chunks, list) else ():
            web = chunk.get("web") if isinstance(chunk, dict) else None
            url = web.get("uri") if isinstance(web, dict) else None
            if isinstance(web, dict) and isinstance(url, str) and url not in told:
                if len(told) < _SOURCES_MAX:
                    told.add(url)
                citation = {"url": url, "title": web.get("title") or url}
                out.append({"type": "url_citation", "url_citation": citation})
        return out

    def _count(self, metadata: object) -> bool:
        """Read usage: each event repeats the counts so far, or only some of them (M2.4)."""
        if not isinstance(metadata, dict) or _COUNTS.isdisjoint(metadata):
            return False
        for key in metadata:
            if key in _COUNTS and (count := token_count(metadata, key)) is not None:
                self._counts[key] = count
        if self._counts:
            self.usage = _usage(self._counts)
        return True

    # --- ends --------------------------------------------------------------------------------

    def _end(self, index: int, reason: str, native: str, out: list[bytes]) -> None:
        """A choice has a reason to finish; the last one counts."""
        partial = self._state(index).partial
        if partial is not None and (reason == "stop" or partial.complete):
            self._close_partial(index, out)  # any other reason may have cut it
        self._begin(out, index).ended = True
        self._ends[index] = reason, native

    def _go_on(self, index: int) -> None:
        """More of a choice comes, whether or not it had finished."""
        if self._ends.pop(index, None) is not None:
            self._choices[index].ended = False
            self._ends_early = True

    def _state(self, index: int) -> _State:
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = _State()
        return state


def candidate_index(candidate: dict[str, Any], position: int) -> int:
    """The index of a candidate; its position where it does not say (JSON may leave out 0)."""
    index = candidate.get("index")
    return index if type(index) is int and index >= 0 else position


def block_reason(response: object) -> str | None:
    """Why the prompt was blocked; None if it was not."""
    feedback = response.get("promptFeedback") if isinstance(response, dict) else None
    reason = feedback.get("blockReason") if isinstance(feedback, dict) else None
    return reason if isinstance(reason, str) and reason and reason not in _UNSPECIFIED else None


def _usage(counts: dict[str, int]) -> TokenUsage:
    """Counts in OpenAI's terms: what tools brought in is input, thoughts are output."""
    prompt, tools = counts.get("promptTokenCount"), counts.get("toolUsePromptTokenCount", 0)
    answer, thoughts = counts.get("candidatesTokenCount"), counts.get("thoughtsTokenCount")
    completion = answer if thoughts is None else (answer or 0) + thoughts
    if answer is not None and counts.get("totalTokenCount") == (prompt or 0) + tools + answer:
        completion = answer  # some models count thoughts among the candidates' tokens
    return TokenUsage(
        prompt_tokens=None if prompt is None else prompt + tools,
        completion_tokens=completion,
        cached_tokens=counts.get("cachedContentTokenCount"),
        reasoning_tokens=thoughts,
    )


def _logprobs(result: object) -> list[dict[str, Any]]:
    """Log probabilities in OpenAI's form."""
    if not isinstance(result, dict):
        return []
    chosen, top = result.get("chosenCandidates"), result.get("topCandidates")
    top = top if isinstance(top, list) else []
    out: list[dict[str, Any]] = []
    for position, token in enumerate(chosen if isinstance(chosen, list) else ()):
        step = top[position] if position < len(top) else None
        others = step.get("candidates") if isinstance(step, dict) else None
        if isinstance(token, dict):
            others = others if isinstance(others, list) else []
            likely = [_token(other) for other in others if isinstance(other, dict)]
            out.append({**_token(token), "top_logprobs": likely})
    return out


def _token(token: dict[str, Any]) -> dict[str, Any]:
    text = str(token.get("token") or "")
    return {
        "token": text,
        "logprob": token.get("logProbability", 0.0),
        "bytes": list(text.encode("utf-8", "replace")),
    }
