"""What the translators of shapes that are not OpenAI's have in common. [pure]

A subclass reads one event at a time and says what is in it (`_text`, `_reasoning`, `_open_call`,
`_call_arguments`, `_end_choice`); this turns it into chunks of the OpenAI wire, with one role
primer for each choice (M2.3), tool indexes counted by choice (M2.6) and usage withheld until the
end (M2.4). The same code answers plain requests: then nothing is emitted but collected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.json_text import dumps, loads
from encoders.openai_whole import ChunkAggregator
from encoders.translator import CHOICES_MAX, Kind, NotAChunk, ReplyTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants
    from encoders.usage import TokenUsage

_MARK: Final = "\x00\x01"  # in no name and no id
_FRAMES_MAX: Final = 16


class _Choice:
    """One choice of the stream."""

    __slots__ = ("calls", "ended", "frames")

    def __init__(self) -> None:
        self.calls = 0  # tool calls opened
        self.ended = False
        # What stands around a text in a chunk of this choice, by what the text is: a stream has
        # few of these and uses each for many chunks.
        self.frames: dict[Hashable, list[bytes]] = {}


class ShapeTranslator(ABC):
    """Translates one stream; see `encoders.translator.Translator`.

    Args:
        identity: of the stream's chunks. wants: what the client asked for.
    """

    def __init__(self, identity: ChunkIdentity, wants: StreamWants) -> None:
        self.identity = identity
        self.usage: TokenUsage | None = None
        self.characters = 0
        self.error_payload = b""
        self.last_skipped = b""
        self._wants = wants
        self._reasoning_field = wants.reasoning_field
        self._choices: dict[int, _Choice] = {}
        self._aggregator: ChunkAggregator | None = None
        self._bytes_left = 0
        if wants.collect_bytes_max is not None:
            self._aggregator = ChunkAggregator(identity)
            self._bytes_left = wants.collect_bytes_max

    @property
    def has_choice(self) -> bool:
        return bool(self._choices)

    @property
    def finished(self) -> bool:
        return self.has_choice and all(choice.ended for choice in self._choices.values())

    @property
    def all_finished(self) -> bool:
        return self.finished and len(self._choices) >= self._wants.choices

    def splice(self, events: bytes) -> tuple[bytes, int] | None:
        """Events of another shape are translated one by one."""
        return None

    def rewrite(self, data: bytes, out: list[bytes]) -> Kind:
        try:
            event = loads(data)
        except UnicodeDecodeError:  # a stray byte becomes U+FFFD (§9.2.5), as in any decoder
            return self.rewrite(data.decode("utf-8", "replace").encode(), out)
        except ValueError as error:
            if data.strip() == b"[DONE]":  # what proxies append to every stream
                return Kind.DONE
            raise NotAChunk(str(error)) from None
        kind = self._take(event, out) if isinstance(event, dict) else Kind.SKIPPED
        if kind is Kind.SKIPPED:
            self.last_skipped = data
        return kind

    @abstractmethod
    def _take(self, event: dict[str, Any], out: list[bytes]) -> Kind:
        """Translate one event."""

    def flush(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        usage = self._openai_usage()
        if not self._wants.include_usage or usage is None:
            return b""
        return openai.usage_chunk(self.identity, usage)

    def result(self) -> bytes:
        assert self._aggregator is not None, "this stream is not collected"
        return self._aggregator.result(self._openai_usage())

    # --- what subclasses tell ----------------------------------------------------------------

    def _observe(self, usage: TokenUsage) -> None:
        """Usage was reported; the last report wins, field by field (M2.4)."""
        self.usage = usage if self.usage is None else self.usage.updated(usage)

    def _begin(self, out: list[bytes], index: int = 0) -> _Choice:
        """Return the choice, with its primer before anything else of it (M2.3)."""
        choice = self._choices.get(index)
        if choice is None:
            if len(self._choices) >= max(CHOICES_MAX, self._wants.choices):
                raise ReplyTooLarge(f"more than {len(self._choices)} choices")
            choice = self._choices[index] = _Choice()
            self._emit({"role": "assistant", "content": ""}, out, index)
        return choice

    def _text(self, text: str, out: list[bytes], index: int = 0) -> None:
        self._say("content", _content, text, out, index)

    def _reasoning(self, text: str, out: list[bytes], index: int = 0) -> None:
        self._say("reasoning", self._reasoning_delta, text, out, index)

    def _reasoning_delta(self, text: str) -> dict[str, Any]:
        return {self._reasoning_field: text}

    def _say(
        self,
        what: Hashable,
        delta_of: Callable[[str], dict[str, Any]],
        text: str,
        out: list[bytes],
        index: int,
    ) -> None:
        """Emit a text: the hot path, one encoding of the text and one join.

        Args:
            what: names the frame: `delta_of` gives equal deltas but for the text.
            delta_of: the delta that bears a text, once or more often.
        """
        if not text:
            return
        choice = self._begin(out, index)
        self.characters += len(text)
        if self._aggregator is not None:
            self._emit(delta_of(text), out, index)
            return
        frame = choice.frames.get(what)
        if frame is None:
            if len(choice.frames) >= _FRAMES_MAX:
                choice.frames.clear()
            frame = self._chunk(delta_of(_MARK), index).split(dumps(_MARK))
            choice.frames[what] = frame
        out.append(dumps(text).join(frame))

    def _extend(self, delta: dict[str, Any], out: list[bytes], index: int = 0) -> None:
        """Emit a delta that bears only extension fields."""
        self._begin(out, index)
        self._emit(delta, out, index)

    def _open_call(
        self, call_id: str, name: str, out: list[bytes], index: int = 0, **more: Any
    ) -> int:
        """A tool call begins; return its index in the choice (M2.6).

        Args:
            more: extension fields of the call.
        """
        choice = self._begin(out, index)
        number, choice.calls = choice.calls, choice.calls + 1
        function = {"name": name, "arguments": ""}
        call = {"index": number, "id": call_id, "type": "function", "function": function, **more}
        self._emit({"tool_calls": [call]}, out, index)
        return number

    def _call_arguments(self, number: int, fragment: str, out: list[bytes], index: int = 0) -> None:
        """A fragment of the arguments of the call `number`."""

        def delta_of(text: str) -> dict[str, Any]:
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

        self._say(number, delta_of, fragment, out, index)

    def _end_choice(
        self, reason: str, native: str | None, out: list[bytes], index: int = 0
    ) -> None:
        """A choice is finished. Only the first end of a choice counts.

        Args:
            reason: in OpenAI's words (M2.5). native: in the provider's, kept beside it.
        """
        choice = self._begin(out, index)
        if choice.ended:
            return
        choice.ended = True
        self._emit({}, out, index, reason, native)

    # --- chunks ------------------------------------------------------------------------------

    def _emit(
        self,
        delta: dict[str, Any],
        out: list[bytes],
        index: int,
        reason: str | None = None,
        native: str | None = None,
        **more: Any,
    ) -> None:
        """Emit or collect one chunk; `more` are extension fields of its choice."""
        if self._aggregator is None:
            out.append(self._chunk(delta, index, reason, native, **more))
            return
        choice = _choice_of(delta, index, reason, native) | more
        self._bytes_left -= len(dumps(choice))
        if self._bytes_left < 0:
            raise ReplyTooLarge("the reply is too large to be collected")
        self._aggregator.add({"choices": [choice]})

    def _chunk(
        self,
        delta: dict[str, Any],
        index: int,
        reason: str | None = None,
        native: str | None = None,
        **more: Any,
    ) -> bytes:
        return openai.chunk(self.identity, [_choice_of(delta, index, reason, native) | more])

    def _openai_usage(self) -> dict[str, Any] | None:
        """Usage in OpenAI's form; None if nothing was reported."""
        usage = self.usage
        if usage is None:
            return None
        prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
        out: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if usage.cached_tokens is not None:
            out["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        if usage.reasoning_tokens is not None:
            out["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return out


def _content(text: str) -> dict[str, Any]:
    return {"content": text}


def _choice_of(
    delta: dict[str, Any], index: int, reason: str | None, native: str | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
    if native is not None:
        choice["native_finish_reason"] = native
    return choice
