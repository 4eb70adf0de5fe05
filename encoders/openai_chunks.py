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
from typing import TYPE_CHECKING, Any, Final

from encoders import openai
from encoders.json_text import Member, dumps, edit, loads, members
from encoders.openai_whole import ChunkAggregator
from encoders.text_counter import TextCounter
from encoders.translator import Kind, NotAChunk, ReplyTooLarge
from encoders.usage import TokenUsage, openai_usage

if TYPE_CHECKING:
    from encoders.openai import ChunkIdentity

# M2.6: what may need healing or observing, in any spacing.
_MARK_WORDS: Final = (
    rb'role"\s*:|finish_reason"\s*:\s*"|tool_calls"\s*:\s*\[|usage"\s*:\s*\{|error"\s*:|x_groq"'
)
_MARKS: Final = re.compile(rb'"(?:' + _MARK_WORDS + rb")")
# Of one choice that was asked for, another that comes all the same must get its role too (M2.3).
_MARKS_OF_ONE: Final = re.compile(rb'"(?:' + _MARK_WORDS + rb'|index"\s*:\s*[^0\s])')
_LF: Final = 0x0A  # between two `data:` lines of one event
# What could close `choices` before the tail does: a bracket with another member behind it.
_CLOSES: Final = re.compile(rb"\]\s*,")
_NONE: Final = frozenset[str]()
_USAGE: Final = frozenset({"usage"})


class ChunkRewriter:
    """Rewrites and observes the chunks of one stream.

    Args:
        identity: model, provider, id and time of the stream's chunks.
        choices: how many choices were asked for (`n`).
        include_usage: whether the client asked for the usage chunk.
        usage_is_ours: whether only we asked the upstream for usage, so that a `"usage":null` on a
            chunk is our doing and is cut out (M2.2).

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
    ) -> None:
        self.identity = identity
        self.usage: TokenUsage | None = None
        self.has_choice = False
        self.error_payload = b""
        self.last_skipped = b""
        self._counter = TextCounter()
        self._count = self._counter.add_bytes
        self._expected_choices = choices
        self._is_marked = (_MARKS_OF_ONE if choices == 1 else _MARKS).search
        self._include_usage = include_usage
        self._cut_null_usage = usage_is_ours and not include_usage
        self._model = dumps(identity.model)
        self._provider = dumps(identity.provider)
        self._started: set[int] = set()
        self._ended: set[int] = set()
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
        return bool(self._ended) and self._started <= self._ended

    @property
    def all_finished(self) -> bool:
        """Whether every choice that was asked for has a finish_reason."""
        return len(self._ended) >= self._expected_choices and self.finished

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
        """Nothing is withheld."""
        return b""

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
            values = {} if choices == [] else {"choices": b"[]"}
            if not told:  # it stood in `x_groq` alone
                values["usage"] = dumps(self._raw_usage)
            if reported or self._raw_usage is None:
                self._usage_event = openai.event(self._splice(data, spans, values))
            return Kind.SKIPPED
        self._counter.add_choices(choices)
        self._emit(data, spans, chunk, out)
        return Kind.CHUNK

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
        values: dict[str, bytes] = {}
        learn = True
        if not isinstance(choices, list):
            values["choices"] = b"[]"  # null or absent; clients iterate over it
        elif self._heal_choices(choices, out):
            values["choices"] = dumps(choices)
            learn = False
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
        if learn and choices and self._started.issuperset(range(self._expected_choices)):
            self._learn(data, spans, rewritten)

    def _heal_choices(self, choices: list[Any], out: list[bytes]) -> bool:
        """One role for each choice, in its first chunk (M2.3, M2.6); note finish reasons.

        Returns:
            Whether `choices` was changed.
        """
        changed = False
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            self.has_choice = True
            index = choice.get("index")
            index = index if isinstance(index, int) else 0
            delta = choice.get("delta")
            role = delta.get("role") if isinstance(delta, dict) else None
            if index not in self._started:
                self._started.add(index)
                if not role:
                    out.append(openai.primer(self.identity, index))
            elif role and isinstance(delta, dict):
                del delta["role"]
                changed = True
            if choice.get("finish_reason"):
                self._ended.add(index)
        return changed

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

    def __init__(self, identity: ChunkIdentity, *, choices: int, max_bytes: int) -> None:
        super().__init__(identity, choices=choices)
        self._aggregator = ChunkAggregator(identity)
        self._bytes_left = max_bytes

    def _emit(
        self, data: bytes, spans: list[Member], chunk: dict[str, Any], out: list[bytes]
    ) -> None:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ReplyTooLarge("the reply is too large to be collected")
        choices = chunk.get("choices")
        if isinstance(choices, list):
            self._heal_choices(choices, [])
        self._aggregator.add(chunk)

    def closing(self) -> bytes:
        return b""

    def result(self) -> bytes:
        """Return the reply as JSON."""
        return self._aggregator.result(self._raw_usage)
