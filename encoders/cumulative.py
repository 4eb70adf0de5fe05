"""Texts that arrive whole with every chunk, and surrogates that arrive in halves. [pure]

Rule M2.7 (`cumulative_deltas`) and hazard B20.
"""

from __future__ import annotations

from typing import Final

# What a server shows for bytes that are no character yet, and replaces in its next chunk.
_UNSETTLED: Final = "\ufffd" + "".join(map(chr, range(0xD800, 0xDC00)))

_UNSETTLED_MAX: Final = 8
# Two short texts may begin alike by chance.
_REWRITTEN_MIN: Final = 32


class CumulativeText:
    """One text of which each chunk repeats all so far; tells the part that is new.

    A chunk that repeats the text so far, or more than half of it, is a new state of it: what was
    told stands, and what lies beyond its length is told. Any other chunk is a delta, as providers
    send that mix both. Characters at the end that are still to be settled (U+FFFD, half a surrogate
    pair) wait for the next chunk.

    The work for a chunk is linear in that chunk; what is kept is one copy of the text.
    """

    __slots__ = ("_length", "_pieces", "_waiting")

    def __init__(self) -> None:
        self._pieces: list[str] = []  # what was told; joined only if a chunk may repeat it
        self._length = 0
        self._waiting = ""

    def tail(self, text: str) -> str:
        """Return what of `text`, the next chunk, was not told yet."""
        if not text:
            return ""
        if self._length and not self._repeats(text):
            return self._tell(self._waiting + text)
        if len(text) <= self._length:
            return ""
        return self._tell(text[self._length :])

    def flush(self) -> str:
        """Return what waits, at the end of the text."""
        waiting, self._waiting = self._waiting, ""
        self._pieces.append(waiting)
        self._length += len(waiting)
        return waiting

    def _repeats(self, text: str) -> bool:
        if 2 * len(text) <= self._length:
            return False
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        told = self._pieces[0]
        if text.startswith(told) or told.startswith(text):
            return True
        half = self._length // 2 + 1
        return self._length >= _REWRITTEN_MIN and text[:half] == told[:half]

    def _tell(self, text: str) -> str:
        settled = text.rstrip(_UNSETTLED)
        if len(text) - len(settled) > _UNSETTLED_MAX:  # no character is so long
            settled = text
        self._waiting = text[len(settled) :]
        self._pieces.append(settled)
        self._length += len(settled)
        return settled


class SurrogateJoiner:
    """Joins a surrogate pair that was cut between two pieces of one text; half a pair that stays
    alone becomes U+FFFD (B20).
    """

    __slots__ = ("_high",)

    def __init__(self) -> None:
        self._high = ""

    def join(self, text: str) -> str:
        """Return `text` well formed, without a half that may belong to the next piece."""
        if text.isascii() and not self._high:
            return text
        text = self._high + text
        self._high = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._high = text[:-1], text[-1]
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text

    def flush(self) -> str:
        """Return what waits, at the end of the text."""
        high, self._high = self._high, ""
        return "\ufffd" if high else ""
