"""The text of a stream that we write ourselves, read back. [pure]

`relay.stream.StreamRelay` writes whole events of the OpenAI wire; who runs an agent wants the text
in them (W2.2, W3.4). A text is handed on *raw*, as the bytes between the quotes of a JSON string:
it goes into another JSON document without being decoded, and pieces concatenate to one string, also
where an emoji was cut in two (B20).

Nearly every event differs from the one before it in its text alone. What stands around the text is
learned from an event that was parsed, and proved by putting another text in its place; an event
that begins and ends so, and holds the inside of one JSON string between, is not parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps, loads
from encoders.openai import ChunkIdentity
from encoders.openai_whole import ChunkAggregator
from encoders.translator import NotAChunk, ReplyTooLarge
from encoders.usage import openai_usage

if TYPE_CHECKING:
    from encoders.usage import TokenUsage

_HEAD: Final = b"data: "
_END: Final = b"\n\n"
_DONE: Final = b"[DONE]"
# What a text cannot hold, or holds as an escape.
_SPECIAL: Final = re.compile(rb'["\\\x00-\x1f]').search
_ESCAPE: Final = rb'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})'
_STRINGS_INSIDE: Final = re.compile(
    rb'[^"\\\x00-\x1f]*+(?:(?:\n|' + _ESCAPE + rb')[^"\\\x00-\x1f]*+)*+'
).fullmatch
_STRING_END: Final = re.compile(rb'(?:[^"\\]|\\.)*+"', re.DOTALL)
_TEXT: Final = re.compile(rb'"content"\s*:\s*"')
_REASONING: Final = re.compile(rb'"(?:reasoning_content|reasoning)"\s*:\s*"')
# OpenAI's padding, another one in each chunk.
_PADDING: Final = re.compile(rb'"obfuscation"\s*:\s*"([^"\\\x00-\x1f]*+)"\}\Z')
_PROBE: Final = "\x00another text\x01"
# Of a stream whose chunks all differ there is nothing to learn.
_LESSONS_MAX: Final = 16
_COLLECT_BYTES_MAX: Final = 16 * 1024 * 1024


class DeltaReader:
    """Reads choice 0 of one stream.

    Args:
        collect: whether `message` will be asked for.
        collect_bytes_max: bound for the chunks that it is made of, texts aside.

    Attributes:
        finish_reason: the last one, None before it. usage: the last one, None if none was told.
        error: the error that ended the stream, as it stands in its chunk; None if none did.
        done: whether `[DONE]` was there.
        fault: what cannot be read, None if all can be: an event is not JSON, or
            `collect_bytes_max`. What comes after it is not looked at.
    """

    def __init__(
        self, *, collect: bool = False, collect_bytes_max: int = _COLLECT_BYTES_MAX
    ) -> None:
        self.finish_reason: str | None = None
        self.usage: TokenUsage | None = None
        self.error: Any = None
        self.done = False
        self.fault: NotAChunk | ReplyTooLarge | None = None
        self._texts = _Around()
        self._reasoning = _Around()
        self._aggregator: ChunkAggregator | None = None
        self._bytes_left = collect_bytes_max
        if collect:
            nobody = ChunkIdentity(model="", provider="", id="", created=0)
            self._aggregator = ChunkAggregator(nobody)

    def feed(self, events: bytes) -> bytes:
        """Take whole events; return the text that they bring, raw; empty if they bring none."""
        if self.fault is not None:
            return b""
        text = self._texts.run(events)
        if text is not None:
            return text
        out: list[bytes] = []
        texts_end = self._texts.reach(events)
        text = self._texts.run(events[:texts_end])
        if text is not None:  # the last read of most streams: texts, then what ends them
            out.append(text)
            events = events[texts_end:]
        try:
            for event in events.split(_END):
                if event:
                    self._take(event + _END, out)
        except (NotAChunk, ReplyTooLarge) as fault:
            self.fault = fault
        return out[0] if len(out) == 1 else b"".join(out)

    def message(self) -> dict[str, Any]:
        """What else than text the answer is made of, as an assistant's message: role, tool calls,
        the reasoning that a provider wants back.
        """
        assert self._aggregator is not None, "this stream is not collected"
        choices = loads(self._aggregator.result(None))["choices"]
        message: dict[str, Any] = choices[0]["message"] if choices else {"role": "assistant"}
        return message

    def _take(self, event: bytes, out: list[bytes]) -> None:
        """Take one event."""
        text = self._texts.run(event)
        if text is not None:
            out.append(text)
            return
        if self._aggregator is None and self._reasoning.run(event) is not None:
            return  # reasoning is no content
        if not event.startswith(_HEAD):
            return  # a comment
        data = event[len(_HEAD) : -len(_END)]
        if data == _DONE:
            self.done = True
            return
        chunk = _parsed(data)
        if chunk is not None:
            self._take_chunk(chunk, data, out)

    def _take_chunk(self, chunk: dict[str, Any], data: bytes, out: list[bytes]) -> None:
        if chunk.get("error"):
            self.error = chunk["error"]
        usage = openai_usage(chunk.get("usage"))
        if usage is not None:
            self.usage = usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index", 0) in (0, None):
                self._take_choice(choice, len(data), out)
        alone = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)
        if alone and usage is None and not self.error:
            self._learn(chunk, data)

    def _take_choice(self, choice: dict[str, Any], size: int, out: list[bytes]) -> None:
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        text = delta.get("content")
        if isinstance(text, str) and text:
            out.append(dumps(text)[1:-1])
        if self._aggregator is not None:
            rest = {key: value for key, value in delta.items() if key != "content"}
            if rest:
                self._bytes_left -= size
                if self._bytes_left < 0:
                    raise ReplyTooLarge("the calls of the reply are too large")
                self._aggregator.add({"choices": [{"index": 0, "delta": rest}]})

    def _learn(self, chunk: dict[str, Any], data: bytes) -> None:
        choice = chunk["choices"][0]
        delta = choice.get("delta")
        if (
            choice.get("index", 0) != 0
            or choice.get("finish_reason")
            or not isinstance(delta, dict)
        ):
            return
        if any(isinstance(value, list | dict) and value for value in delta.values()):
            return  # calls, and what else is collected
        told = [key for key, value in delta.items() if isinstance(value, str) and value]
        others = [key for key in told if key != "role"]
        if others == ["content"]:
            self._texts.learn(chunk, data, "content", _TEXT)
        elif others in (["reasoning_content"], ["reasoning"]):
            self._reasoning.learn(chunk, data, others[0], _REASONING)


class _Around:
    """What stands around the texts of one kind; fits nothing until it has learned it.

    That an event is taken without being parsed changes nothing: with another text in it, what it
    was learned from says the same but for that text, and no line end can stand in an event.
    """

    __slots__ = ("_after", "_before", "_lessons", "_padded", "_seam")

    def __init__(self) -> None:
        self._before = self._after = self._seam = b""
        self._padded = False  # `_after` ends in the opening quote of a padding
        self._lessons = _LESSONS_MAX

    def learn(
        self, chunk: dict[str, Any], data: bytes, key: str, pattern: re.Pattern[bytes]
    ) -> None:
        """Learn from the data of a chunk that was parsed, if it has one text of this kind.

        Args:
            chunk: `data`, parsed. key: of its delta. pattern: finds where a text begins.
        """
        starts = [match.end() for match in pattern.finditer(data)]
        if not self._lessons or len(starts) != 1:
            return
        self._lessons -= 1
        start = starts[0]
        end = _STRING_END.match(data, start)
        if end is None:
            return
        before, after = data[:start], data[end.end() - 1 :]
        delta = chunk["choices"][0]["delta"]
        probed = {**chunk, "choices": [{**chunk["choices"][0], "delta": {**delta, key: _PROBE}}]}
        if loads(before + dumps(_PROBE)[1:-1] + after) != probed:
            return
        padding = _PADDING.search(after)
        self._padded = padding is not None
        if padding is not None:
            after = after[: padding.start(1)]
        self._before, self._after = _HEAD + before, after if self._padded else after + _END
        self._seam = self._after + self._before

    def reach(self, events: bytes) -> int:
        """Where the last event that looks like a text ends; 0 if none does."""
        at = events.rfind(self._before) if self._before else -1
        return events.index(_END, at) + len(_END) if at >= 0 else 0

    def run(self, events: bytes) -> bytes | None:
        """Return the texts of these events, joined; None if one of them is anything else."""
        before, after = self._before, self._after
        if not before or not events.startswith(before):
            return None
        if self._padded:
            return self._padded_run(events)
        if not events.endswith(after) or len(events) < len(self._seam):
            return None
        inside = events[len(before) : -len(after)]
        if _END not in inside:
            texts = [inside]
            text = inside
        else:
            # Cut everywhere at the same places; whether these were the right ones tells the join.
            start, end = len(before), len(_END) - len(after)
            texts = [event[start:end] for event in events[: -len(_END)].split(_END)]
            if self._seam.join(texts) != inside:
                return None
            text = b"".join(texts)
        if text.isascii() and not _SPECIAL(text):
            return text
        return text if _are_texts(texts, text) else None

    def _padded_run(self, events: bytes) -> bytes | None:
        """As `run`, where each event ends in another padding."""
        before, after = self._before, self._after
        texts: list[bytes] = []
        for event in events[: -len(_END)].split(_END):
            at = event.rfind(after)
            if at < len(before) or not event.startswith(before) or not event.endswith(b'"}'):
                return None
            padding = event[at + len(after) : -2]
            if _SPECIAL(padding) or not padding.isascii():
                return None
            texts.append(event[len(before) : at])
        text = b"".join(texts)
        return text if _are_texts(texts, text) else None


def _are_texts(texts: list[bytes], joined: bytes) -> bool:
    """Whether each of these is the inside of one JSON string.

    They are looked at together, apart by a line feed: no string, escape or character goes across.
    """
    if b"\n" in joined:
        return False
    apart = b"\n".join(texts)
    if _SPECIAL(joined) and not _STRINGS_INSIDE(apart):
        return False
    try:
        apart.decode()
    except UnicodeDecodeError:
        return False
    return True


class RawText:
    """Counts the characters of raw pieces as of the one text that they are together: halves of an
    emoji in two pieces are one character.

    Attributes:
        characters: Unicode code points so far.
    """

    __slots__ = ("_half", "characters")

    def __init__(self) -> None:
        self.characters = 0
        self._half = False  # the last piece ended in a high surrogate

    def add(self, raw: bytes) -> int:
        """Take the next piece; return by how many characters the text grew.

        Raises:
            ValueError: not the inside of a JSON string.
        """
        if raw.isascii() and b"\\" not in raw:
            grown = len(raw)
            self._half = self._half and not raw
        else:
            text = decoded(raw)
            grown = len(text)
            if text:
                if self._half and "\udc00" <= text[0] <= "\udfff":
                    grown -= 1
                self._half = "\ud800" <= text[-1] <= "\udbff"
        self.characters += grown
        return grown


def decoded(raw: bytes) -> str:
    """Return the text of raw pieces that were joined.

    Raises:
        ValueError: not the inside of a JSON string.
    """
    text = loads(b'"%b"' % raw)
    assert isinstance(text, str)
    return text


def _parsed(data: bytes) -> dict[str, Any] | None:
    """Return a chunk, None for JSON that is none.

    Raises:
        NotAChunk: not JSON.
    """
    try:
        chunk = loads(data)
    except ValueError:
        # As a lenient client reads it: a stray byte is U+FFFD, a raw tab is a tab.
        try:
            chunk = json.loads(data.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError) as error:
            raise NotAChunk(str(error)) from None
    return dict(chunk) if isinstance(chunk, Mapping) else None
