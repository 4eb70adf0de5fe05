"""Streams of the Messages API as chunks of the OpenAI wire. [pure]

Rules M2.3 to M2.6, M3.4. One message is one choice; its content blocks are bound by their index and
may interleave. Events, blocks and deltas of unknown types are passed over, and so are the tools
that the provider runs itself: their calls are nothing that a client could answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.anthropic_messages import CLAUDE_FORMAT
from encoders.json_text import dumps
from encoders.reasoning_details import FIELD
from encoders.shape_translator import ShapeTranslator
from encoders.translator import CALLS_MAX, Kind, ReplyTooLarge
from encoders.usage import TokenUsage, token_count

if TYPE_CHECKING:
    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants

# M2.5, total: what is not here is `stop`.
_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_INPUT: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class _Block:
    """A content block that is open."""

    __slots__ = ("arguments", "call", "citations", "detail", "input", "start")

    def __init__(self) -> None:
        self.call: int | None = None  # number of its tool call
        self.arguments = False  # whether fragments of them came
        self.input: Any = None  # what the start said they are
        self.detail: int | None = None  # index of its reasoning detail
        self.start = 0  # characters of text before it
        self.citations: list[dict[str, Any]] = []


class MessagesTranslator(ShapeTranslator):
    """Translates one stream; see `encoders.translator.Translator`."""

    def __init__(self, identity: ChunkIdentity, wants: StreamWants) -> None:
        super().__init__(identity, wants)
        self._blocks: dict[object, _Block] = {}
        self._details = 0  # reasoning details opened
        self._withheld_left = wants.withheld_max  # bytes of citations, which wait for their end
        self._text_length = 0
        self._tokens: dict[str, int] = {}  # as reported, by the API's names
        self._first_output: int | None = None

    def _take(self, event: dict[str, Any], out: list[bytes]) -> Kind:
        match event.get("type"):
            case "content_block_delta":
                delta = event.get("delta")
                if isinstance(delta, dict):
                    return self._delta(event.get("index"), delta, out)
            case "content_block_start":
                block = event.get("content_block")
                if isinstance(block, dict):
                    return self._start(event.get("index"), block, out)
            case "content_block_stop":
                return self._stop(event.get("index"), out)
            case "message_start":
                message = event.get("message")
                if isinstance(message, dict):
                    return self._begin_message(message)
            case "message_delta":
                return self._end_message(event, out)
            case "message_stop":
                return self._done(out)
            case "error":
                return Kind.FAILED
            case None if event.get("error"):  # a proxy's own error, in nobody's envelope
                return Kind.FAILED
            case _:
                pass
        return Kind.SKIPPED

    # --- the message -------------------------------------------------------------------------

    def _begin_message(self, message: dict[str, Any]) -> Kind:
        if not self.has_choice:
            self.identity.seen({"id": message.get("id")})
        usage = message.get("usage")
        if isinstance(usage, dict):
            self._first_output = token_count(usage, "output_tokens")
            self._count({key: value for key, value in usage.items() if key in _INPUT})
        return Kind.CHUNK

    def _end_message(self, event: dict[str, Any], out: list[bytes]) -> Kind:
        usage, delta = event.get("usage"), event.get("delta")
        if isinstance(usage, dict):
            self._count(usage)
        reason = delta.get("stop_reason") if isinstance(delta, dict) else None
        if isinstance(reason, str):
            self._end_choice(_REASONS.get(reason, "stop"), reason, out)
        return Kind.CHUNK

    def _done(self, out: list[bytes]) -> Kind:
        if self.usage is not None and self.usage.completion_tokens is None:
            self._observe(TokenUsage(completion_tokens=self._first_output))
        if self.has_choice and not self.finished:
            self._end_choice("stop", None, out)
        return Kind.DONE

    def _count(self, usage: dict[str, Any]) -> None:
        """Take a report: each field stands until the next report of it (B29).

        The output of `message_start` is a first guess, before anything was said: it would stand
        for the whole answer if the stream broke off, so it is no report (M4.2).
        """
        for key in (*_INPUT, "output_tokens"):
            count = token_count(usage, key)
            if count is not None:
                self._tokens[key] = count
        inputs = [self._tokens[key] for key in _INPUT if key in self._tokens]
        seen = TokenUsage(
            prompt_tokens=sum(inputs) if inputs else None,
            completion_tokens=self._tokens.get("output_tokens"),
            cached_tokens=self._tokens.get("cache_read_input_tokens"),
            reasoning_tokens=token_count(usage.get("output_tokens_details"), "thinking_tokens"),
        )
        if seen != TokenUsage():
            self._observe(seen)

    # --- its blocks --------------------------------------------------------------------------

    def _start(self, index: object, said: dict[str, Any], out: list[bytes]) -> Kind:
        kind = said.get("type")
        self._blocks.pop(_key(index), None)
        block = self._block(index)
        match kind:
            case "text":
                for citation in _objects(said.get("citations")):
                    self._cite(block, citation)
                self._say_text(said.get("text"), out)
            case "thinking":
                self._think(block, said.get("thinking"), out)
                self._sign(block, said.get("signature"), out)
            case "redacted_thinking":
                detail = self._detail(block)
                data = {"type": "reasoning.encrypted", "data": said.get("data")}
                self._extend({FIELD: [data | {"format": CLAUDE_FORMAT, "index": detail}]}, out)
            case "tool_use":
                number = self._choices[0].calls if self._choices else 0
                call_id = said.get("id") or f"call_{self.identity.id}_{number}"
                block.call = self._open_call(str(call_id), str(said.get("name") or ""), out)
                block.input = said.get("input")
            case _:
                return Kind.SKIPPED
        return Kind.CHUNK

    def _delta(self, index: object, delta: dict[str, Any], out: list[bytes]) -> Kind:
        match delta.get("type"):
            case "text_delta":
                self._say_text(delta.get("text"), out)
                return Kind.CHUNK
            case "input_json_delta":
                block = self._blocks.get(_key(index))
                fragment = delta.get("partial_json")
                if block is None or block.call is None or not isinstance(fragment, str):
                    return Kind.SKIPPED
                block.arguments = block.arguments or bool(fragment.strip())
                self._call_arguments(block.call, fragment, out)
            case "thinking_delta":
                self._think(self._block(index), delta.get("thinking"), out)
            case "signature_delta":
                self._sign(self._block(index), delta.get("signature"), out)
            case "citations_delta":
                citation = delta.get("citation")
                if isinstance(citation, dict):
                    self._cite(self._block(index), citation)
            case _:
                return Kind.SKIPPED
        return Kind.CHUNK

    def _stop(self, index: object, out: list[bytes]) -> Kind:
        block = self._blocks.pop(_key(index), None)
        if block is None:
            return Kind.SKIPPED
        if block.call is not None and not block.arguments:
            whole = block.input if isinstance(block.input, dict) else {}
            self._call_arguments(block.call, dumps(whole).decode(), out)
        if block.citations:
            self._withheld_left = self._wants.withheld_max
            notes = [
                _annotation(citation, block.start, self._text_length)
                for citation in block.citations
            ]
            self._extend({"annotations": notes}, out)
        return Kind.CHUNK

    def _block(self, index: object) -> _Block:
        """Return an open block; one whose start never came begins now (B89)."""
        key = _key(index)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= CALLS_MAX:
                raise ReplyTooLarge(f"more than {CALLS_MAX} content blocks at once")
            block = self._blocks[key] = _Block()
            block.start = self._text_length
        return block

    def _cite(self, block: _Block, citation: dict[str, Any]) -> None:
        self._withheld_left -= len(dumps(citation))
        if self._withheld_left < 0:
            raise ReplyTooLarge("the citations are too large")
        block.citations.append(citation)

    def _say_text(self, text: object, out: list[bytes]) -> None:
        if isinstance(text, str):
            self._text_length += len(text)
            self._text(text, out)

    def _detail(self, block: _Block) -> int:
        if block.detail is None:
            block.detail = self._details
            self._details += 1
        return block.detail

    def _think(self, block: _Block, text: object, out: list[bytes]) -> None:
        if not isinstance(text, str) or not text:
            return
        detail = self._detail(block)

        def delta_of(piece: str) -> dict[str, Any]:
            entry = {"type": "reasoning.text", "text": piece}
            entries = [entry | {"format": CLAUDE_FORMAT, "index": detail}]
            return {self._reasoning_field: piece, FIELD: entries}

        self._say(("reasoning", detail), delta_of, text, out, 0)

    def _sign(self, block: _Block, signature: object, out: list[bytes]) -> None:
        """Bring the signature that a follow-up turn needs; also of thinking that is not shown."""
        if isinstance(signature, str) and signature:
            entry = {"type": "reasoning.text", "text": "", "signature": signature}
            detail = self._detail(block)
            self._extend({FIELD: [entry | {"format": CLAUDE_FORMAT, "index": detail}]}, out)


def _key(index: object) -> object:
    return index if isinstance(index, int) else None


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _annotation(citation: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return a citation in OpenAI's form, if it has one for it; else in its own."""
    if isinstance(citation.get("url"), str):
        place = {
            "url": citation["url"],
            "title": citation.get("title") or "",
            "start_index": start,
            "end_index": end,
            "content": citation.get("cited_text") or "",
        }
        return {"type": "url_citation", "url_citation": place}
    kind = str(citation.get("type") or "citation")
    rest = {key: value for key, value in citation.items() if key != "type"}
    return {"type": kind, kind: rest | {"start_index": start, "end_index": end}}
