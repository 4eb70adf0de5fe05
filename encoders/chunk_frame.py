"""The frame that the chunks of one stream share: what makes a content chunk cheap. [pure]

Rules M2.2 and the byte tests of M2.6. Nearly every chunk of a stream differs from the one before it
only inside `choices`. The rest, rewritten once, is its *frame*: a chunk that fits it costs two
comparisons and one search for the marks of M2.6; a run of such chunks that bear one text each is
spliced as one, its events never looked at singly.

Why this is safe. `head` ends in the `[` of the top-level `choices`, and equal bytes up to there
mean equal structure. `tail` begins with a `]` and holds only balanced members up to the object's
last `}`. That this `]` is the one of `choices` is sure if nothing before it can have closed the
array: no `]` with a comma behind it stands between, or what stands between parses as the elements
of an array. A last member whose string changes with every chunk (OpenAI's `obfuscation`) is let
vary: the tail then ends in its opening quote, and what follows must be one string without escapes.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from encoders.text_counter import around_text, characters_inside

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.json_text import Member
    from encoders.text_counter import TextCounter

# M2.6: what may need healing or observing, in any spacing.
_MARK_WORDS: Final = (
    rb'role"\s*:|finish_reason"\s*:\s*"|tool_calls"\s*:\s*\[|usage"\s*:\s*\{|error"\s*:|x_groq"'
)
_CHOICES_MARKED_MAX: Final = 128  # of more, those beyond are parsed
# What could close `choices` before the tail does: a bracket with another member behind it.
_CLOSES: Final = re.compile(rb"\]\s*,").search
_NEVER: Final = 1 << 62
_STRING_INSIDE: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+').fullmatch
_PLAIN_TEXT: Final = re.compile(rb'[^"\\\r\n]*+').fullmatch
# How often a stream is looked at for what stands around its texts: reasoning comes before content,
# and of a stream whose chunks all differ there is nothing to learn.
_LESSONS_MAX: Final = 16
# Members whose last place in a chunk does not mean that their string changes.
_STEADY: Final = frozenset({"model", "provider", "usage", "choices"})


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


class ChunkFrame:
    """The frame of one stream's chunks; fits nothing until it has learned one.

    Args:
        choices: how many choices were asked for.

    Attributes:
        pre, post: what stands before and behind the inside of `choices` in a client's event.
        texts: what stands around texts, once that is known: runs of content are spliced by it.
    """

    __slots__ = (
        "_head", "_is_marked", "_lessons", "_size", "_stem", "_stem_out", "_tail",
        "post", "pre", "texts",
    )  # fmt: skip

    def __init__(self, choices: int) -> None:
        self._is_marked = _marks(choices)
        self._head = self._tail = b""
        self.pre = self.post = b""
        self._stem = self._stem_out = b""  # the tail up to a varying last string, if it has one
        self._size = _NEVER
        self.texts: TextFrame | None = None
        self._lessons = _LESSONS_MAX

    def learn(self, data: bytes, spans: list[Member], rewritten: bytes) -> None:
        """Take the frame of a chunk for those that follow.

        Args:
            data: the chunk as it came. spans: `members(data)`. rewritten: as it leaves.
        """
        old = [span for span in spans if span.key == "choices"]
        if len(old) != 1:
            return
        choices = data[old[0].value_start : old[0].end]
        if rewritten.count(choices) != 1:  # a second place: which is it?
            return
        at = rewritten.index(choices)
        self._head, self._tail = data[: old[0].value_start + 1], data[old[0].end - 1 :]
        self.pre = b"data: " + rewritten[: at + 1]
        self.post = rewritten[at + len(choices) - 1 :] + b"\n\n"
        self._size = len(self._head) + len(self._tail)
        self.texts = None
        self._stem = self._stem_out = b""
        last = spans[-1]
        # Nothing of ours may stand behind a member that varies.
        varies = last.key not in _STEADY and rewritten.endswith(data[last.start :])
        if varies and data.endswith(b'"}') and b"\\" not in data[last.value_start :]:
            value = len(data) - last.value_start - 1  # all behind the opening quote
            self._stem = self._tail[:-value]
            self._stem_out = self.post[: -value - 2]
            self._size = len(self._head) + len(self._stem) + 2

    def inside(self, data: bytes) -> bytes | None:
        """Return what stands inside `choices`, None if this chunk does not fit the frame.

        It may bear marks. That it is the whole inside is sure if it is `plain`, or else if
        `[` + inside + `]` is JSON.
        """
        if len(data) <= self._size or not data.startswith(self._head):
            return None
        if not data.endswith(self._tail):
            return None
        inside = data[len(self._head) : len(data) - len(self._tail)]
        return inside if inside and b"\n" not in inside else None

    def plain(self, inside: bytes) -> bool:
        """Whether the inside of a chunk needs no parsing."""
        return not self._is_marked(inside) and (b"]" not in inside or not _CLOSES(inside))

    def varying(self, data: bytes, out: list[bytes]) -> bytes | None:
        """Rewrite a plain chunk that fits but for the string of its last member.

        Returns:
            The inside of its `choices`, None if it does not fit; then nothing was appended.
        """
        if not self._stem or not data.startswith(self._head):
            return None
        at = data.rfind(self._stem)
        inside = data[len(self._head) : at]
        last = data[at + len(self._stem) : -2]
        if at <= len(self._head) or not data.endswith(b'"}'):
            return None
        if b'"' in last or b"\\" in last or b"\n" in data:
            return None
        if self._is_marked(inside) or _CLOSES(inside):
            return None
        out += (self.pre, inside, self._stem_out, last, b'"}\n\n')
        return inside

    def learn_texts(self, inside: bytes) -> None:
        """Take what stands around the text of a plain chunk."""
        if self._lessons:
            self._lessons -= 1
            self.texts = TextFrame.learned(self, inside)


class TextFrame:
    """All that stands around the texts of chunks that bear one text and nothing else that changes.

    What is left between is the inside of one JSON string, so no mark can stand in it.

    Args:
        before, after: the text in the data of a chunk as it comes.
        before_out, after_out: the same in the event as it leaves.
    """

    __slots__ = (
        "_after", "_after_out", "_around", "_before", "_before_out", "_end", "_seam_out", "_start",
    )  # fmt: skip

    def __init__(self, before: bytes, after: bytes, before_out: bytes, after_out: bytes) -> None:
        self._before, self._after = before, after
        self._before_out, self._after_out = before_out, after_out
        self._seam_out = after_out + before_out
        # The same around one event.
        self._start, self._end = b"data: " + before, after + b"\n\n"
        self._around = len(self._start) + len(self._end)

    @classmethod
    def learned(cls, frame: ChunkFrame, inside: bytes) -> TextFrame | None:
        """Return the text frame of a plain chunk; None if it has another number of texts."""
        try:
            around = around_text(inside, characters_inside(inside))
        except ValueError:
            return None  # not JSON
        if around is None:
            return None
        before, after = around
        return cls(
            frame._head + before, after + frame._tail, frame.pre + before, after + frame.post
        )

    def splice(self, events: bytes, counter: TextCounter) -> tuple[bytes, int] | None:
        """Rewrite the first of these events, as many as are plain chunks that bear one text.

        Args:
            events: whole events as they came. counter: told what comes out.

        Returns:
            What the client gets for them and how many bytes they are; None if there is none.
        """
        if not events.startswith(b"data: "):
            return None
        if len(events) >= self._around and events.startswith(self._start):
            # Nearly every read of a slow stream is one event, and of a text without escapes.
            text = events[len(self._start) : -len(self._end)]
            if events.endswith(self._end) and _PLAIN_TEXT(text):
                counter.add_text(text)
                return b"%b%b%b" % (self._before_out, text, self._after_out), len(events)
        before, after = self._before, self._after
        start, end = len(before), -len(after)
        around = start + len(after)
        texts: list[bytes] = []
        for data in events[6:-2].split(b"\n\ndata: "):
            if not data.startswith(before) or not data.endswith(after) or len(data) < around:
                break
            texts.append(data[start:end])
        if not texts:
            return None
        joined = b"".join(texts) if len(texts) > 1 else texts[0]
        if b"\n" in joined or b"\r" in joined:  # not each one `data:` line
            return None
        if b"\\" in joined or b'"' in joined:
            for text in texts:
                if (b"\\" in text or b'"' in text) and not _STRING_INSIDE(text):
                    return None
        counter.add_text(joined)
        out = b"%b%b%b" % (self._before_out, self._seam_out.join(texts), self._after_out)
        return out, len(texts) * (around + 8) + len(joined)
