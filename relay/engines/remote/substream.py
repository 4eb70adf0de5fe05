"""Reads a sub-stream that a remote engine advertises: bytes in, text out. [pure] Rule W3.2.

A provider's stream goes through the translator of its shape, as on the models plane; of what comes
out the content of choice 0 is the task's text, and reasoning and tool calls are not. The shape
`token` is `event: token` frames whose data has a `delta`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from encoders.deltas import DeltaReader
from encoders.json_text import loads
from encoders.openai import ChunkIdentity
from encoders.shapes import SHAPES
from encoders.sse import SseDecoder, SseEvent, SseEventTooLarge
from encoders.translator import StreamWants
from relay.engines.remote.frames import TOKEN, raw_of
from relay.lifecycle import Lifecycle, StreamInput
from relay.stream import StreamRelay

if TYPE_CHECKING:
    from relay.redact import Redactor

_EVENT_BYTES_MAX: Final = 16 * 1024 * 1024


class TextReader(Protocol):
    """Reads one sub-stream.

    Attributes:
        ended: whether nothing that comes can count. finishing: whether the text is complete, and
            only formalities may follow. problem: why it ended too early, "" if it did not.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def finishing(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return the text that they bring, raw."""

    def eof(self) -> bytes:
        """The body has ended; return the text that was still held, raw."""


def text_reader(shape: str, redactor: Redactor) -> TextReader:
    """Return what reads a sub-stream of this shape, one of `frames.SHAPES`.

    Args:
        redactor: keeps the engine's key out of `problem`.
    """
    if shape == TOKEN:
        return _TokenReader()
    return _ProviderReader(shape, redactor)


class _ProviderReader:
    """A stream of a shape of M5."""

    def __init__(self, shape: str, redactor: Redactor) -> None:
        self._deltas = DeltaReader()
        identity = ChunkIdentity(model="", provider="the sub-stream", id="", created=0)
        lifecycle = Lifecycle()
        for step in (StreamInput.DIAL, StreamInput.HEADERS):
            lifecycle.advance(step)
        self._relay = StreamRelay(
            translator=SHAPES[shape].translator(identity, StreamWants()),
            lifecycle=lifecycle,
            redactor=redactor,
            max_event_bytes=_EVENT_BYTES_MAX,
        )

    @property
    def ended(self) -> bool:
        return self._relay.closed

    @property
    def finishing(self) -> bool:
        return self._relay.finishing

    @property
    def problem(self) -> str:
        return self._relay.error.message if self._relay.error is not None else ""

    def feed(self, data: bytes) -> bytes:
        return self._deltas.feed(self._relay.feed(data))

    def eof(self) -> bytes:
        return self._deltas.feed(self._relay.eof())


class _TokenReader:
    """`event: token` frames; ends with its body, or with `data: [DONE]`."""

    finishing = False

    def __init__(self) -> None:
        self.ended = False
        self.problem = ""
        self._decoder = SseDecoder(_EVENT_BYTES_MAX)

    def feed(self, data: bytes) -> bytes:
        try:
            return self._take(self._decoder.feed(data))
        except SseEventTooLarge as error:
            text = self._take(error.events)
            self.ended = True
            self.problem = f"the sub-stream sent {error}"
            return text

    def eof(self) -> bytes:
        text = self._take(self._decoder.finish())
        self.ended = True
        return text

    def _take(self, events: list[SseEvent]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if self.ended:
                break
            if event.data.strip() == b"[DONE]":
                self.ended = True
            elif event.event == TOKEN.encode():
                said = _parsed(event.data)
                delta = said.get("delta") if isinstance(said, dict) else None
                if isinstance(delta, str):
                    out.append(raw_of(delta))
        return b"".join(out)


def _parsed(data: bytes) -> Any:
    try:
        return loads(data)
    except ValueError:
        return None
