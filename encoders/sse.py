"""Server-Sent Events: an incremental decoder and an encoder. [pure]

Source: WHATWG HTML §9.2.5 (parsing) and §9.2.6 (interpreting); rules M3.1 and M2.1.

The decoder takes the bytes of a response body in whatever pieces they arrive and returns whole
events; every way to cut the same bytes gives the same events. It works on bytes only (a character
cut between two reads is never decoded) and looks at each byte a constant number of times.

Line ends: LF is the fast path. A read that holds a CR is normalised to LF first, with a flag for a
CR at its very end, so that a LF at the start of the next read belongs to it.

We are more lenient than the standard in one point: `finish` hands over a last event that has no
blank line behind it, and the caller decides whether it is whole (M3.1).
"""

from __future__ import annotations

import re
from typing import Final

_BOM: Final = b"\xef\xbb\xbf"
_END: Final = b"\n\n"
_FORBIDDEN_IN_FIELD: Final = re.compile(r"[\r\n\0]")
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


class SseEvent:
    """One dispatched event. A plain slots object: one is made for each chunk of a stream.

    Attributes:
        data: the data lines joined by LF, undecoded.
        event: the event's name, empty for the default `message`.
        id: the last event id of the stream so far, empty if none.
    """

    __slots__ = ("data", "event", "id")

    def __init__(self, data: bytes, event: bytes = b"", id: bytes = b"") -> None:
        self.data = data
        self.event = event
        self.id = id

    def __repr__(self) -> str:
        return f"SseEvent({self.data!r}, event={self.event!r}, id={self.id!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SseEvent):
            return NotImplemented
        return (self.data, self.event, self.id) == (other.data, other.event, other.id)

    __hash__ = None  # type: ignore[assignment]  # a mutable value


class SseEventTooLarge(ValueError):
    """An event passed the decoder's bound; the decoder takes nothing more.

    Attributes:
        events: whole events of the same read that came before the large one.
    """

    def __init__(self, limit: int, events: list[SseEvent]) -> None:
        super().__init__(f"an event of more than {limit} bytes")
        self.events = events


class SseDecoder:
    """Incremental decoder of one event stream.

    Args:
        max_event_bytes: bound for the bytes of one event, comments and field names included; also
            the bound of what the decoder keeps between two reads.
    """

    __slots__ = ("_held", "_last_id", "_max", "_skip_lf", "_start")

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._max = max_event_bytes
        self._held = bytearray()  # an unfinished event
        self._skip_lf = False  # the last read ended in CR
        self._start: bytes | None = b""  # bytes that may yet become a BOM; None once past it
        self._last_id = b""

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished event that are held."""
        return len(self._held)

    def feed(self, data: bytes) -> list[SseEvent]:
        """Take the next bytes of the body and return the events that they complete.

        Raises:
            SseEventTooLarge: an event is larger than the bound; it holds the events before it.
        """
        if self._start is not None:
            data = self._strip_bom(data)
        if self._skip_lf:
            if not data:
                return []
            self._skip_lf = False
            if data[0] == 0x0A:
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data[-1] == 0x0D
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not data:
            return []
        if self._held:
            return self._feed_held(data)
        return self._feed_fresh(data)

    def complete(self, data: bytes) -> bytes | None:
        """Take the next bytes and return those of all events that are complete now, not yet
        decoded; the rest is held.

        Returns:
            None if these bytes have to be fed instead (nothing was taken): at a BOM, where CR is
            about, or where the bound could be passed.
        """
        held = self._held
        if self._start is None and not held and not self._skip_lf and data.endswith(_END):
            # Nearly every read is one whole event, or several.
            return None if b"\r" in data or len(data) > self._max else data
        if self._start == b"" and data and data[0] != _BOM[0]:
            self._start = None  # no BOM
        if self._start is not None or self._skip_lf or len(held) + len(data) > self._max:
            return None
        if b"\r" in data or not data:
            return None
        end = data.rfind(_END) + 2
        if end < 2:
            if held and data[0] == 0x0A and held[-1] == 0x0A:  # the blank line was cut in two
                return None
            held += data
            return b""
        whole = data if end == len(data) else data[:end]
        if held:
            whole = bytes(held) + whole
            held.clear()
        if end < len(data):
            held += data[end:]
        return whole

    def decode(self, whole: bytes) -> list[SseEvent]:
        """Return the events of what `complete` returned."""
        return self._feed_fresh(whole)

    def finish(self) -> list[SseEvent]:
        """The body is over: return the last event, if one is pending without its blank line."""
        if self._start:
            self._held += self._start
            self._start = None
        events: list[SseEvent] = []
        self._dispatch(bytes(self._held), events)
        self._held.clear()
        return events

    def _feed_fresh(self, data: bytes) -> list[SseEvent]:
        """Nothing is held: `data` begins at an event's start."""
        end = data.rfind(_END)
        if end < 0:
            self._hold(data, [])
            return []
        events: list[SseEvent] = []
        check = len(data) > self._max
        for block in data[:end].split(_END):
            if check and len(block) > self._max:
                raise SseEventTooLarge(self._max, events)
            # The one shape that nearly every event of a model stream has, kept inline.
            if block.startswith(b"data: ") and b"\n" not in block:
                if len(block) > 6:
                    events.append(SseEvent(block[6:], b"", self._last_id))
            elif block:
                self._dispatch(block, events)
        if end + 2 < len(data):
            self._hold(data[end + 2 :], events)
        return events

    def _feed_held(self, data: bytes) -> list[SseEvent]:
        """Complete the held event first, then go on as on a fresh read."""
        if data[0] == 0x0A and self._held[-1] == 0x0A:
            cut, rest = 0, 1  # the blank line was cut in two
        else:
            at = data.find(_END)
            if at < 0:
                self._hold(data, [])
                return []
            cut, rest = at, at + 2
        if len(self._held) + cut > self._max:
            raise SseEventTooLarge(self._max, [])
        self._held += data[:cut]
        events: list[SseEvent] = []
        self._dispatch(bytes(self._held), events)
        self._held.clear()
        if rest < len(data):
            try:
                events += self._feed_fresh(data[rest:])
            except SseEventTooLarge as error:
                raise SseEventTooLarge(self._max, events + error.events) from None
        return events

    def _hold(self, data: bytes, events: list[SseEvent]) -> None:
        """Keep the start of an event for the next read; `events` came before it."""
        if len(self._held) + len(data) > self._max:
            raise SseEventTooLarge(self._max, events)
        self._held += data

    def _strip_bom(self, data: bytes) -> bytes:
        """Drop exactly one BOM at the stream's start, however it is cut."""
        assert self._start is not None
        data = self._start + data
        if len(data) < 3 and _BOM.startswith(data):
            self._start = data
            return b""
        self._start = None
        return data[3:] if data.startswith(_BOM) else data

    def _dispatch(self, block: bytes, events: list[SseEvent]) -> None:
        """Interpret the lines of one block; append its event if it has data."""
        lines: list[bytes] = []
        event = b""
        for line in block.split(b"\n"):
            name, colon, value = line.partition(b":")
            if colon and value[:1] == b" ":
                value = value[1:]
            if name == b"data":
                lines.append(value)
            elif name == b"event":
                event = value
            elif name == b"id" and b"\0" not in value:
                self._last_id = value
            # comments (an empty name), `retry` and unknown fields carry nothing for us
        data = b"\n".join(lines)
        if data:  # an empty data buffer is not dispatched (§9.2.6)
            events.append(SseEvent(data, event, self._last_id))


def encode_event(data: bytes, *, event: str = "", id: str = "") -> bytes:
    """Encode one event.

    Args:
        data: the payload; every line end in it (CR, LF, CRLF) begins a new `data:` line.
        event: the event's name, none if empty.
        id: the event's id, none if empty. Never on an OpenAI-shaped surface (J4.1).

    Raises:
        ValueError: CR, LF or NUL in `event` or `id`: the caller would forge events.
    """
    head = b""
    for field, value in (("event", event), ("id", id)):
        if _FORBIDDEN_IN_FIELD.search(value):
            raise ValueError(f"{field} must not contain CR, LF or NUL: {value!r}")
        if value:
            head += f"{field}: {value}\n".encode()
    lines = _LINE_END.split(data)
    return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


def encode_comment(text: str) -> bytes:
    """Encode a comment of its own, ended by a blank line.

    Raises:
        ValueError: CR or LF in `text`.
    """
    if _FORBIDDEN_IN_FIELD.search(text):
        raise ValueError("a comment must be one line")
    return b": " + text.encode() + b"\n\n"
