"""Chunks of an openai-shape upstream, rewritten as bytes where that is enough. [pure]

Rules M2.2 to M2.4 and the byte tests of M2.6. A pure content chunk fits the frame of its stream
(`encoders.chunk_frame`) and is spliced, whole reads of them at once. Of a chunk that fits and bears
a mark, only the inside of `choices` is parsed. What does not fit is parsed whole; even then single
members are edited as bytes and the rest stays as it was sent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.chunk_frame import ChunkFrame
from encoders.json_text import Member, dumps, edit, loads, members, respell
from encoders.openai_healing import ChoiceHealer
from encoders.openai_whole import ChunkAggregator
from encoders.text_counter import TextCounter
from encoders.translator import WITHHELD_MAX, Kind, NotAChunk, ReplyTooLarge
from encoders.usage import TokenUsage, openai_usage

if TYPE_CHECKING:
    from encoders.normalize import Normalizer
    from encoders.openai import ChunkIdentity

# Marks whose place is beside `choices`.
_FOREIGN: Final = re.compile(rb'"(?:usage|error|x_groq)"').search
_NONE: Final = frozenset[str]()
_USAGE: Final = frozenset({"usage"})
# Members that every chunk has; what else Azure's empty first chunk bears is told with the next.
_USUAL: Final = frozenset(
    {
        "choices", "created", "id", "model", "object", "provider", "service_tier",
        "system_fingerprint", "usage",
    }
)  # fmt: skip


class ChunkRewriter:
    """Rewrites and observes the chunks of one stream.

    Args:
        identity: model, provider, id and time of the stream's chunks.
        choices: how many choices were asked for (`n`).
        include_usage: whether the client asked for the usage chunk.
        usage_is_ours: whether only we asked the upstream for usage, so that a `"usage":null` on a
            chunk is our doing and is cut out (M2.2).
        normalizer: for a provider whose descriptor says so (M2.7); then every chunk is parsed.
        withheld_max: characters that may be withheld until they can be told.

    Attributes:
        usage: the last usage reported, None if there was none.
        has_choice: whether any choice was seen (M3.4).
        error_payload: the upstream's own error event, once one came.
        last_skipped: the last event that was kept from the client, for error reports.
    """

    def __init__(
        self,
        identity: ChunkIdentity,
        *,
        choices: int = 1,
        include_usage: bool = False,
        usage_is_ours: bool = True,
        normalizer: Normalizer | None = None,
        withheld_max: int = WITHHELD_MAX,
    ) -> None:
        self.identity = identity
        self.usage: TokenUsage | None = None
        self.has_choice = False
        self.error_payload = b""
        self.last_skipped = b""
        self._counter = TextCounter()
        self._count = self._counter.add_bytes
        self._expected_choices = choices
        self._frame = ChunkFrame(choices)
        self._normalizer = normalizer
        self._healer = ChoiceHealer(identity, withheld_max, choices)
        self._include_usage = include_usage
        self._cut_null_usage = usage_is_ours and not include_usage
        self._model = dumps(identity.model)
        self._provider = dumps(identity.provider)
        self._carried: dict[str, bytes] = {}  # members of an empty first chunk
        self._usage_event: bytes | None = None  # the upstream's own usage chunk, rewritten
        self._raw_usage: dict[str, Any] | None = None

    @property
    def characters(self) -> int:
        """Characters of text, reasoning and tool arguments so far (M4.2)."""
        return self._counter.characters

    @property
    def finished(self) -> bool:
        """Whether every choice that was seen has a finish_reason (and one was seen)."""
        started, ended = self._healer.started, self._healer.ended
        return bool(ended) and started <= ended

    @property
    def all_finished(self) -> bool:
        """Whether every choice that was asked for has a finish_reason."""
        return len(self._healer.ended) >= self._expected_choices and self.finished

    def splice(self, events: bytes) -> tuple[bytes, int] | None:
        """Rewrite the plain content chunks that come first."""
        texts = self._frame.texts
        return None if texts is None else texts.splice(events, self._counter)

    def rewrite(self, data: bytes, out: list[bytes]) -> Kind:
        """Rewrite the data of one event; append what the client gets to `out`.

        Raises:
            NotAChunk: `data` is not JSON.
        """
        frame = self._frame
        inside = frame.inside(data)
        if inside is None:
            inside = frame.varying(data, out)
            if inside is None:
                return self._rewrite_parsed(data, out)
            self._count(inside)
        elif frame.plain(inside):
            out += (frame.pre, inside, frame.post)
            self._count(inside)
            frame.learn_texts(inside)
        elif not self._rewrite_marked(inside, out):
            return self._rewrite_parsed(data, out)
        return Kind.CHUNK

    def _rewrite_marked(self, inside: bytes, out: list[bytes]) -> bool:
        """Rewrite a chunk that fits the frame but is to be looked at: a role, a finish_reason, tool
        calls. Marks that do not belong into `choices` are left to `_rewrite_parsed`.
        """
        if _FOREIGN(inside):
            return False
        try:
            choices = loads(b"[%b]" % inside)
        except ValueError:
            return False
        self._observe_choices(choices)
        before: list[dict[str, Any]] = []
        if self._healer.heal(choices, before):
            sent = b"[%b]" % inside
            inside = respell(sent, loads(sent), choices)[1:-1]
        out += [openai.chunk(self.identity, [choice]) for choice in before]
        out += (self._frame.pre, inside, self._frame.post)
        return True

    def flush(self) -> bytes:
        return b"".join(openai.chunk(self.identity, [choice]) for choice in self._withheld())

    def _withheld(self) -> list[dict[str, Any]]:
        """Give back what was withheld, as choices of ours."""
        out: list[dict[str, Any]] = []
        if self._normalizer is not None:
            for choice in self._normalizer.flush():
                self._healer.heal([choice], out)
                out.append(choice)
        return out + self._healer.flush()

    def closing(self) -> bytes:
        """What precedes `[DONE]` on a stream that completed: calls that nothing else completed
        (M2.6), and the usage chunk, if asked (M2.4).
        """
        calls = [openai.chunk(self.identity, [choice]) for choice in self._healer.close()]
        return b"".join(calls) + self._usage_chunk()

    def _usage_chunk(self) -> bytes:
        if not self._include_usage:
            return b""
        if self._usage_event is None and self._raw_usage is not None:
            return openai.usage_chunk(self.identity, self._raw_usage)
        return self._usage_event or b""

    def result(self) -> bytes:
        """Nothing is collected here; see `ChunkCollector`."""
        raise TypeError("this stream is not collected")

    def _rewrite_parsed(self, data: bytes, out: list[bytes]) -> Kind:
        if data.strip() == b"[DONE]":
            return Kind.DONE
        if b"\n" in data:
            data = data.replace(b"\n", b" ")  # as in openai.event
        try:
            chunk = loads(data)
        except UnicodeDecodeError:  # a stray byte becomes U+FFFD (§9.2.5), as in any decoder
            return self._rewrite_parsed(data.decode("utf-8", "replace").encode(), out)
        except ValueError as error:
            raise NotAChunk(str(error)) from None
        if not isinstance(chunk, dict):
            return self._skip(data)
        choices = chunk.get("choices")
        is_chunk = isinstance(choices, list) or chunk.get("object") == "chat.completion.chunk"
        if chunk.get("error") or chunk.get("object") == "error":
            self.error_payload = self._splice(data, members(data)) if is_chunk else data
            return Kind.ERROR
        reported = self._observe_usage(chunk)
        if not is_chunk:
            return self._skip(data)
        self.identity.seen(chunk)
        told = isinstance(chunk.get("usage"), dict)
        if not choices and (reported or told):
            if self._include_usage and (reported or self._raw_usage is None):
                self._usage_event = self._usage_of(data, members(data), chunk)
            return Kind.SKIPPED
        if not self._observe_choices(choices) and not reported:
            return self._skip(data)  # all that it says is withheld
        self._emit(data, members(data), chunk, out)
        return Kind.CHUNK

    def _usage_of(self, data: bytes, spans: list[Member], chunk: dict[str, Any]) -> bytes:
        """The upstream's usage chunk as its client gets it."""
        values = {} if chunk.get("choices") == [] else {"choices": b"[]"}
        if not isinstance(chunk.get("usage"), dict):  # it stood in `x_groq` alone
            values["usage"] = dumps(self._raw_usage)
        return openai.event(self._splice(data, spans, values))

    def _observe_choices(self, choices: Any) -> bool:
        """Count and normalise; return whether anything is left to be told."""
        if not isinstance(choices, list):
            return True
        self.has_choice |= any(isinstance(choice, dict) for choice in choices)
        if self._normalizer is not None:
            return self._normalizer.take(choices, self._counter)
        self._counter.add_choices(choices)
        return True

    def _skip(self, data: bytes) -> Kind:
        self.last_skipped = data
        return Kind.SKIPPED

    def _observe_usage(self, chunk: dict[str, Any]) -> bool:
        """Read usage wherever this chunk bears it; the last report wins (M2.4)."""
        groq = chunk.get("x_groq")
        candidates = (groq.get("usage") if isinstance(groq, dict) else None, chunk.get("usage"))
        reported = False
        for raw in candidates:
            usage = openai_usage(raw)
            if usage is not None:
                assert isinstance(raw, dict)
                self.usage = usage if self.usage is None else self.usage.updated(usage)
                self._raw_usage = raw
                self._usage_event = None
                reported = True
        return reported

    def _emit(
        self, data: bytes, spans: list[Member], chunk: dict[str, Any], out: list[bytes]
    ) -> None:
        """Emit one chunk: primers before it, its choices healed, usage withheld."""
        choices = chunk.get("choices")
        if not choices and not self.has_choice:  # Azure's first: clients index `choices[0]`
            if not self._carried:
                self._carried = {
                    span.key: data[span.value_start : span.end]
                    for span in spans
                    if span.key not in _USUAL
                }
            return
        values = {key: value for key, value in self._carried.items() if key not in chunk}
        learn = not values and self._normalizer is None
        self._carried.clear()
        before: list[dict[str, Any]] = []
        if not isinstance(choices, list):
            values["choices"] = b"[]"  # null or absent; clients iterate over it
        elif self._normalizer is not None:
            self._healer.heal(choices, before)
            values["choices"] = dumps(choices)
        elif self._healer.heal(choices, before):
            sent = [data[span.value_start : span.end] for span in spans if span.key == "choices"]
            values["choices"] = respell(sent[-1], loads(sent[-1]), choices)
            learn = False
        out += [openai.chunk(self.identity, [choice]) for choice in before]
        cut = _USAGE if self._cut_null_usage and "usage" in chunk else _NONE
        if isinstance(chunk.get("usage"), dict):  # it is told once, at the end
            learn = False
            if self._include_usage:
                values["usage"] = b"null"
            else:
                cut = _USAGE
        groq = chunk.get("x_groq")
        if isinstance(groq, dict):
            learn = False
            if "usage" in groq and not self._include_usage:
                values["x_groq"] = dumps({k: v for k, v in groq.items() if k != "usage"})
        rewritten = self._splice(data, spans, values, cut)
        out.append(openai.event(rewritten))
        if learn and choices and self._healer.started.issuperset(range(self._expected_choices)):
            self._frame.learn(data, spans, rewritten)

    def _splice(
        self,
        data: bytes,
        spans: list[Member],
        values: dict[str, bytes] | None = None,
        cut: frozenset[str] = _NONE,
    ) -> bytes:
        own = {"model": self._model, "provider": self._provider}
        return edit(data, spans, values=own | (values or {}), cut=cut, after="model")


class ChunkCollector(ChunkRewriter):
    """Collects the chunks of a stream into one plain reply: a `stream:false` request that was
    dialled as a stream (M4.1). Emits nothing; `result` is the reply.

    Args:
        identity: as for `ChunkRewriter`. max_bytes: bound for the sum of all chunks.
    """

    def __init__(
        self,
        identity: ChunkIdentity,
        *,
        choices: int,
        max_bytes: int,
        normalizer: Normalizer | None = None,
        withheld_max: int = WITHHELD_MAX,
    ) -> None:
        super().__init__(
            identity, choices=choices, normalizer=normalizer, withheld_max=withheld_max
        )
        self._aggregator = ChunkAggregator(identity)
        self._bytes_left = max_bytes

    def _emit(
        self, data: bytes, spans: list[Member], chunk: dict[str, Any], out: list[bytes]
    ) -> None:
        choices = chunk.get("choices")
        # Of a provider that repeats itself, what is left of the chunk counts.
        self._bytes_left -= len(data if self._normalizer is None else dumps(choices))
        if self._bytes_left < 0:
            raise ReplyTooLarge("the reply is too large to be collected")
        before: list[dict[str, Any]] = []
        if isinstance(choices, list):
            self._healer.heal(choices, before)
        for choice in before:
            self._aggregator.add({"choices": [choice]})
        self._aggregator.add(chunk)

    def flush(self) -> bytes:
        for choice in self._withheld():
            self._aggregator.add({"choices": [choice]})
        return b""

    def closing(self) -> bytes:
        for choice in self._healer.close():
            self._aggregator.add({"choices": [choice]})
        return b""

    def result(self) -> bytes:
        """Return the reply as JSON."""
        return self._aggregator.result(self._raw_usage)
