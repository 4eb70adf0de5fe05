"""Chunks of an openai-shape upstream, rewritten as bytes where that is enough. [pure]

Rules M2.2 to M2.4 and the byte tests of M2.6. Nearly every chunk of a stream differs from the one
before it only inside `choices`, so a rewritten *frame* (all that stands before and behind the
contents of `choices`) is learned once and a pure content chunk costs two comparisons, one search
for the marks of M2.6 and no JSON parse. What bears a mark, or does not fit the frame, is parsed;
even then single members are edited as bytes and the rest stays as it was sent.

Why the frame is safe: `head` ends in the `[` of the top-level `choices`, and equal bytes up to
there mean equal structure. `tail` begins with a `]` and holds only balanced members up to the
object's last `}`. That this `]` is the one of `choices` is sure if nothing before it can have
closed the array: no `]` with a comma behind it stands between (else the chunk is parsed). A last
member whose string changes with every chunk (OpenAI's `obfuscation`) is let vary: the tail then
ends in its opening quote, and what follows must be one string without escapes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.json_text import Member, dumps, edit, loads, members
from encoders.openai_healing import ChoiceHealer
from encoders.openai_whole import ChunkAggregator
from encoders.text_counter import TextCounter
from encoders.translator import WITHHELD_MAX, Kind, NotAChunk, ReplyTooLarge
from encoders.usage import TokenUsage, openai_usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.normalize import Normalizer
    from encoders.openai import ChunkIdentity

# M2.6: what may need healing or observing, in any spacing.
_MARK_WORDS: Final = (
    rb'role"\s*:|finish_reason"\s*:\s*"|tool_calls"\s*:\s*\[|usage"\s*:\s*\{|error"\s*:|x_groq"'
)
_CHOICES_MARKED_MAX: Final = 128  # of more, those beyond are parsed
_LF: Final = 0x0A  # between two `data:` lines of one event
# What could close `choices` before the tail does: a bracket with another member behind it.
_CLOSES: Final = re.compile(rb"\]\s*,")
_NONE: Final = frozenset[str]()
_USAGE: Final = frozenset({"usage"})
# Members that every chunk has; what else Azure's empty first chunk bears is told with the next.
_USUAL: Final = frozenset(
    {
        "choices", "created", "id", "model", "object", "provider", "service_tier",
        "system_fingerprint", "usage",
    }
)  # fmt: skip


@lru_cache(maxsize=32)
def _marks(choices: int) -> Callable[[bytes], object]:
    """Return the search for what must be parsed, where so many choices were asked for.

    One that was not asked for and comes all the same must get its role too (M2.3).
    """
    if choices == 1:
        other = rb"[^0\s]"
    else:
        asked = b"|".join(b"%d" % index for index in range(min(choices, _CHOICES_MARKED_MAX)))
        other = rb"(?!(?:" + asked + rb")\b)"
    return re.compile(rb'"(?:' + _MARK_WORDS + rb'|index"\s*+:\s*+' + other + rb")").search


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
        self._is_marked = _marks(choices)
        self._normalizer = normalizer
        self._healer = ChoiceHealer(identity, withheld_max)
        self._include_usage = include_usage
        self._cut_null_usage = usage_is_ours and not include_usage
        self._model = dumps(identity.model)
        self._provider = dumps(identity.provider)
        self._carried: dict[str, bytes] = {}  # members of an empty first chunk
        self._usage_event: bytes | None = None  # the upstream's own usage chunk, rewritten
        self._raw_usage: dict[str, Any] | None = None
        # The learned frame: as it comes, and as it leaves as an event.
        self._head = self._tail = b""
        self._pre = self._post = b""
        self._stem = self._stem_out = b""  # the tail up to a varying last string, if it has one
        self._frame_bytes = 1 << 62  # nothing fits before a frame is learned

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

    def rewrite(self, data: bytes, out: list[bytes]) -> Kind:
        """Rewrite the data of one event; append what the client gets to `out`.

        Raises:
            NotAChunk: `data` is not JSON.
        """
        if len(data) > self._frame_bytes and data.startswith(self._head):
            if data.endswith(self._tail):
                inside = data[len(self._head) : len(data) - len(self._tail)]
                if (
                    inside
                    and _LF not in inside
                    and not self._is_marked(inside)
                    and (b"]" not in inside or not _CLOSES.search(inside))
                ):
                    out += (self._pre, inside, self._post)
                    self._count(inside)
                    return Kind.CHUNK
            elif self._stem and self._rewrite_varying(data, out):
                return Kind.CHUNK
        return self._rewrite_parsed(data, out)

    def _rewrite_varying(self, data: bytes, out: list[bytes]) -> bool:
        """Rewrite a chunk that fits the frame but for the string of its last member."""
        at = data.rfind(self._stem)
        inside = data[len(self._head) : at]
        last = data[at + len(self._stem) : -2]
        if at <= len(self._head) or not data.endswith(b'"}'):
            return False
        if b'"' in last or b"\\" in last or _LF in data:
            return False
        if self._is_marked(inside) or _CLOSES.search(inside):
            return False
        out += (self._pre, inside, self._stem_out, last, b'"}\n\n')
        self._count(inside)
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
        """What precedes `[DONE]` on a stream that completed: the usage chunk, if asked (M2.4)."""
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
        spans = members(data)
        told = isinstance(chunk.get("usage"), dict)
        if not choices and (reported or told):
            if reported or self._raw_usage is None:
                self._usage_event = self._usage_of(data, spans, chunk)
            return Kind.SKIPPED
        if not self._observe_choices(choices) and not reported:
            return self._skip(data)  # all that it says is withheld
        self._emit(data, spans, chunk, out)
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
            self._carried |= {
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
        elif self._healer.heal(choices, before) or self._normalizer is not None:
            values["choices"] = dumps(choices)
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
            self._learn(data, spans, rewritten)

    def _splice(
        self,
        data: bytes,
        spans: list[Member],
        values: dict[str, bytes] | None = None,
        cut: frozenset[str] = _NONE,
    ) -> bytes:
        own = {"model": self._model, "provider": self._provider}
        return edit(data, spans, values=own | (values or {}), cut=cut, after="model")

    def _learn(self, data: bytes, spans: list[Member], rewritten: bytes) -> None:
        """Keep the frame of this chunk for the ones that follow."""
        old = [span for span in spans if span.key == "choices"]
        new = [span for span in members(rewritten) if span.key == "choices"]
        if len(old) != 1 or len(new) != 1:
            return
        self._head, self._tail = data[: old[0].value_start + 1], data[old[0].end - 1 :]
        self._pre = b"data: " + rewritten[: new[0].value_start + 1]
        self._post = rewritten[new[0].end - 1 :] + b"\n\n"
        self._frame_bytes = len(self._head) + len(self._tail)
        self._stem = self._stem_out = b""
        last = spans[-1]
        varies = last.key not in ("model", "provider", "usage", "choices")
        if varies and data.endswith(b'"}') and b"\\" not in data[last.value_start :]:
            value = len(data) - last.value_start - 1  # all behind the opening quote
            self._stem = self._tail[:-value]
            self._stem_out = self._post[: -value - 2]
            self._frame_bytes = len(self._head) + len(self._stem) + 2


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
        return b""

    def result(self) -> bytes:
        """Return the reply as JSON."""
        return self._aggregator.result(self._raw_usage)
