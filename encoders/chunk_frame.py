"""The frame that the chunks of one stream share: what makes a content chunk cheap. [pure]

Rules M2.2 and the byte tests of M2.6. Nearly every chunk of a stream differs from the one before it
only inside `choices`. The rest, rewritten once, is its *frame*: a chunk that fits it costs two
comparisons and one search for the marks of M2.6; a read that holds only such chunks is spliced as
one, its events never looked at singly.

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

from encoders.json_text import members
from encoders.text_counter import around_text

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
    """

    __slots__ = (
        "_first", "_head", "_is_marked", "_last", "_lessons", "_seam", "_seam_out", "_size",
        "_stem", "_stem_out", "_tail", "_texts", "post", "pre",
    )  # fmt: skip

    def __init__(self, choices: int) -> None:
        self._is_marked = _marks(choices)
        self._head = self._tail = b""
        self.pre = self.post = b""
        self._stem = self._stem_out = b""  # the tail up to a varying last string, if it has one
        self._size = _NEVER
        # The same around whole events, and between two of them.
        self._first = self._last = self._seam = self._seam_out = b""
        self._texts: _TextFrame | None = None
        self._lessons = _LESSONS_MAX

    def learn(self, data: bytes, spans: list[Member], rewritten: bytes) -> None:
        """Take the frame of a chunk for those that follow.

        Args:
            data: the chunk as it came. spans: `members(data)`. rewritten: as it leaves.
        """
        old = [span for span in spans if span.key == "choices"]
        new = [span for span in members(rewritten) if span.key == "choices"]
        if len(old) != 1 or len(new) != 1:
            return
        self._head, self._tail = data[: old[0].value_start + 1], data[old[0].end - 1 :]
        self.pre = b"data: " + rewritten[: new[0].value_start + 1]
        self.post = rewritten[new[0].end - 1 :] + b"\n\n"
        self._size = len(self._head) + len(self._tail)
        self._first, self._last = b"data: " + self._head, self._tail + b"\n\n"
        self._seam, self._seam_out = self._last + self._first, self.post + self.pre
        self._texts = None
        self._stem = self._stem_out = b""
        last = spans[-1]
        varies = last.key not in _STEADY
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

    def splice(self, read: bytes, counter: TextCounter) -> bytes | None:
        """Rewrite a read that is nothing but whole events of plain chunks that fit.

        Args:
            read: bytes of the stream, beginning where an event begins.
            counter: told what comes out.

        Returns:
            What the client gets; None if anything else is in it.
        """
        if self._texts is not None:
            spliced = self._texts.splice(read, counter)
            if spliced is not None:
                return spliced
        first, last = self._first, self._last
        if not first or not read.startswith(first) or not read.endswith(last) or b"\r" in read:
            return None
        if len(read) <= len(first) + len(last):
            return None
        parts = read[len(first) : len(read) - len(last)].split(self._seam)
        joined = b"\n".join(parts)
        # No part has a line end, so every event is one `data:` line.
        if joined.count(b"\n") != len(parts) - 1 or self._is_marked(joined):
            return None
        for part in parts:
            if not part or (b"]" in part and _CLOSES(part)):
                return None
        for part in parts:
            counter.add_bytes(part)
        if self._lessons:
            self._lessons -= 1
            self._texts = _TextFrame.learned(self, parts[-1])
        return b"%b%b%b" % (self.pre, self._seam_out.join(parts), self.post)


class _TextFrame:
    """All that stands around the texts of chunks that bear one text and nothing else that changes.

    What is left between is the inside of one JSON string, so no mark can stand in it.
    """

    __slots__ = ("_first", "_first_out", "_last", "_last_out", "_seam", "_seam_out", "_size")

    def __init__(self, first: bytes, last: bytes, first_out: bytes, last_out: bytes) -> None:
        self._first, self._last, self._seam = first, last, last + first
        self._first_out, self._last_out = first_out, last_out
        self._seam_out = last_out + first_out
        self._size = len(first) + len(last)

    @classmethod
    def learned(cls, frame: ChunkFrame, inside: bytes) -> _TextFrame | None:
        """Return the text frame of a plain chunk; None if it has another number of texts."""
        around = around_text(inside)
        if around is None:
            return None
        before, after = around
        return cls(
            frame._first + before, after + frame._last, frame.pre + before, after + frame.post
        )

    def splice(self, read: bytes, counter: TextCounter) -> bytes | None:
        """See `ChunkFrame.splice`."""
        if not read.startswith(self._first) or not read.endswith(self._last):
            return None
        if len(read) < self._size:
            return None
        texts = read[len(self._first) : len(read) - len(self._last)].split(self._seam)
        joined = b"".join(texts) if len(texts) > 1 else texts[0]
        if b"\n" in joined or b"\r" in joined:
            return None
        if b"\\" in joined or b'"' in joined:
            for text in texts:
                if (b"\\" in text or b'"' in text) and not _STRING_INSIDE(text):
                    return None
        counter.add_text(joined)
        return b"%b%b%b" % (self._first_out, self._seam_out.join(texts), self._last_out)
