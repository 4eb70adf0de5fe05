"""Counts the characters that a stream has brought, for providers that report no usage. [pure]

Rule M4.2: text, reasoning and tool arguments of every choice. Most streams end with the provider's
own usage and are never counted: chunks are put by, and counted only when somebody asks or when they
become too many. A content chunk is counted without parsing it: the bytes around its text are
learned once, as the frame of a chunk is.
"""

from __future__ import annotations

import re
from typing import Any, Final

from encoders.json_text import loads
from encoders.tool_slots import argument_text

_TEXT: Final = re.compile(rb'"(?:content|reasoning_content|reasoning|refusal)"\s*:\s*"')
_STRING: Final = re.compile(_TEXT.pattern + rb'((?:[^"\\]|\\.)*+)"', re.DOTALL)
_STRING_END: Final = re.compile(rb'(?:[^"\\]|\\.)*+"', re.DOTALL)


_PUT_BY_BYTES_MAX: Final = 16 * 1024


class TextCounter:
    """Counts the characters of one stream."""

    __slots__ = (
        "_after", "_before", "_characters", "_overhead", "_put_by", "_put_by_bytes", "_texts",
    )  # fmt: skip

    def __init__(self) -> None:
        self._characters = 0
        self._put_by: list[bytes] = []
        self._texts: list[bytes] = []
        self._put_by_bytes = 0
        # What stands around the text of a content chunk, once one was seen.
        self._before = self._after = b""
        self._overhead = 1 << 62

    @property
    def characters(self) -> int:
        """Unicode code points so far."""
        self._count_put_by()
        return self._characters

    def add_bytes(self, inside: bytes) -> None:
        """Count one chunk, given the JSON inside its `choices`."""
        self._put_by.append(inside)
        self._put_by_bytes += len(inside)
        if self._put_by_bytes > _PUT_BY_BYTES_MAX:
            self._count_put_by()

    def add_text(self, text: bytes) -> None:
        """Count a text, given as it stands inside a JSON string."""
        self._texts.append(text)
        self._put_by_bytes += len(text)
        if self._put_by_bytes > _PUT_BY_BYTES_MAX:
            self._count_put_by()

    def _count_put_by(self) -> None:
        for inside in self._put_by:
            self._count(inside)
        self._put_by.clear()
        self._characters += _length_inside(b"".join(self._texts))
        self._texts.clear()
        self._put_by_bytes = 0

    def _count(self, inside: bytes) -> None:
        size = len(inside) - self._overhead
        if size >= 0 and inside.startswith(self._before) and inside.endswith(self._after):
            text = inside[len(self._before) : len(inside) - len(self._after)]
            if b"\\" not in text and b'"' not in text:
                self._characters += size if text.isascii() else len(text.decode("utf-8", "replace"))
                return
        try:
            characters = characters_inside(inside)
        except ValueError:  # not JSON after all; its texts were streamed all the same
            self._characters += sum(map(_length, _STRING.findall(inside)))
            return
        self._characters += characters
        self._learn(inside, characters)

    def add_choices(self, choices: object) -> None:
        """Count one chunk, given its parsed `choices`."""
        self._characters += characters_of(choices)

    def _learn(self, inside: bytes, characters: int) -> None:
        """Keep the surroundings of the text, if the chunk has one text and nothing else."""
        around = around_text(inside, characters)
        if around is not None:
            self._before, self._after = around
            self._overhead = len(self._before) + len(self._after)


def around_text(inside: bytes, characters: int) -> tuple[bytes, bytes] | None:
    """Return what stands before and behind the one text of a chunk, quotes included.

    Args:
        inside: the JSON inside its `choices`. characters: how many it brings.

    Returns:
        None if it bears no text, several, the arguments of a tool call, or one that is not counted.
    """
    starts = list(_TEXT.finditer(inside))
    if len(starts) != 1 or b'"arguments"' in inside:
        return None
    start = starts[0].end()
    end = _STRING_END.match(inside, start)
    if end is None or _length_inside(inside[start : end.end() - 1]) != characters:
        return None
    return inside[:start], inside[end.end() - 1 :]


def characters_inside(inside: bytes) -> int:
    """Return the characters of one chunk, given the JSON inside its `choices`.

    Raises:
        ValueError: it is not JSON.
    """
    return characters_of(loads(b"[%b]" % inside))


def characters_of(choices: object) -> int:
    """Return the characters of one chunk, given its parsed `choices`."""
    characters = 0
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            # a whole reply has messages where a chunk has deltas
            delta = choice.get("delta") or choice.get("message")
            if isinstance(delta, dict):
                characters += _characters(delta)
    return characters


def _length_inside(text: bytes) -> int:
    """Characters of what stands inside a JSON string."""
    if b"\\" in text:
        try:
            return len(loads(b'"%b"' % text))
        except ValueError:  # no JSON after all
            return _length(text)
    return len(text) if text.isascii() else _length(text)


def _length(text: bytes) -> int:
    return len(text.decode("utf-8", "replace"))


def _characters(delta: dict[str, Any]) -> int:
    characters = 0
    for field in ("content", "refusal"):
        if isinstance(text := delta.get(field), str):
            characters += len(text)
    for field in ("reasoning_content", "reasoning"):  # two names of one text
        if isinstance(text := delta.get(field), str) and text:
            characters += len(text)
            break
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            characters += len(argument_text(function.get("arguments")))
    return characters
