"""WebSocket frames of one client as events, and ours as bytes (RFC 6455; D2.2, D2.6). [pure]

websockets' Sans-I/O protocol reads them. It would also answer by itself: a Close with its own
code and text at the first fault, a pong for every ping. Both are the session's to decide (a goodbye
goes first, the answers have a budget), so what it writes is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import (
    CTRL_OPCODES,
    OP_BINARY,
    OP_CLOSE,
    OP_CONT,
    OP_PING,
    OP_PONG,
    OP_TEXT,
    Close,
    CloseCode,
    Frame,
)
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A read of 256 KiB may hold 40,000 empty pings; who has seen enough of them can stop in between.
_SLICE_BYTES: Final = 4096
_CONTROL_BYTES_MAX: Final = 125  # RFC 6455 §5.5
_REASON_BYTES_MAX: Final = _CONTROL_BYTES_MAX - 2
# D2.6: so many pieces are free, then each has to bring so much.
_FREE_FRAGMENTS: Final = 256
_BYTES_A_FRAGMENT: Final = 16
# D2.6: slower than any network, in pieces that do arrive.
_SLOWEST_BYTES_PER_S: Final = 64
_ARRIVALS_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Message:
    """A whole text message; UTF-8 that nobody has checked yet."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """A native ping."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """A native pong, asked for or not."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class ClientClose:
    """The client's Close frame; nothing follows.

    Attributes:
        code: its code, None if it gave none. payload: to send back.
    """

    code: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Violation:
    """What the client sent ends the connection; nothing follows.

    Attributes:
        code: the close code that it deserves. reason: for the log.
    """

    code: int
    reason: str


Event: TypeAlias = Message | Ping | Pong | ClientClose | Violation


class FrameReader:
    """The bytes of one client → events.

    Args:
        max_message_bytes: a message of exactly so many is taken, one more is 1009.
        dribble_s: seconds that a message may take at any speed.
    """

    def __init__(self, max_message_bytes: int, *, dribble_s: float = 10.0) -> None:
        self._max_bytes = max_message_bytes
        self._dribble_s = dribble_s
        # It holds control frames to the limit of messages too, less what is there of a fragmented
        # one: so its own limit is wider and ours is counted in `_data`.
        self._protocol = _Incoming(max_message_bytes + _CONTROL_BYTES_MAX)
        self._parts = bytearray()
        self._fragments = 0
        self._fragmented = False
        self._since: float | None = None  # when an unfinished message or frame began
        self._arrived = 0
        self._arrivals = 0
        self.ended = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._parts) + len(self._protocol.reader.buffer)

    def feed(self, data: bytes, now: float) -> Iterator[Event]:
        """Yield what has come to its end; the caller may stop at any event for good.

        Args:
            now: seconds of any steady clock.
        """
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            piece = view[start : start + _SLICE_BYTES]
            for event in self._feed(piece):
                if self.ended:
                    return
                self.ended = isinstance(event, ClientClose | Violation)
                yield event
            if self.ended:
                return
        violation = self._dribbles(len(data), now)
        if violation is not None:
            self.ended = True
            yield violation

    def _feed(self, piece: memoryview) -> Iterator[Event]:
        protocol = self._protocol
        protocol.receive_data(piece)  # type: ignore[arg-type]  # any buffer will do
        for frame in protocol.events_received():
            assert isinstance(frame, Frame)  # no handshake on an open connection
            if frame.opcode in CTRL_OPCODES:
                yield _control(frame)
            else:
                yield from self._data(frame)
        if protocol.parser_exc is not None:
            yield self._fault(protocol.parser_exc)

    def _data(self, frame: Frame) -> Iterator[Event]:
        if frame.opcode is OP_BINARY:
            yield Violation(CloseCode.UNSUPPORTED_DATA, "a binary frame")
            return
        size = len(self._parts) + len(frame.data)
        if size > self._max_bytes:
            yield _too_big(self._max_bytes)
            return
        self._since = None if frame.fin else self._since
        if frame.fin and frame.opcode is OP_TEXT:
            yield Message(bytes(frame.data))
            return
        self._parts += frame.data
        self._fragments += 1
        self._fragmented = not frame.fin
        if self._fragments > _FREE_FRAGMENTS + size // _BYTES_A_FRAGMENT:
            yield Violation(CloseCode.POLICY_VIOLATION, "a message in too many fragments")
        elif frame.fin:
            assert frame.opcode is OP_CONT
            whole = bytes(self._parts)
            self._parts.clear()
            self._fragments = 0
            yield Message(whole)

    def _dribbles(self, size: int, now: float) -> Violation | None:
        """Tell of a peer that sends and does not get on. One that is silent is the heartbeats'."""
        if self._protocol.reader.between_frames and not self._fragmented:
            self._since = None
            return None
        if self._since is None:
            self._since, self._arrived, self._arrivals = now, 0, 0
        self._arrived += size
        self._arrivals += 1
        took = now - self._since
        slow = self._arrived < took * _SLOWEST_BYTES_PER_S
        if took >= self._dribble_s and self._arrivals >= _ARRIVALS_MIN and slow:
            return Violation(CloseCode.POLICY_VIOLATION, "a message that dribbles")
        return None

    def _fault(self, error: Exception) -> Event:
        close = self._protocol.close_rcvd
        if close is not None:  # in the middle of a message, which RFC 6455 §5.4 allows
            return _client_close(close)
        if isinstance(error, PayloadTooBig):
            return _too_big(self._max_bytes)
        if isinstance(error, ProtocolError):
            return Violation(CloseCode.PROTOCOL_ERROR, str(error))
        if isinstance(error, UnicodeDecodeError):
            return Violation(CloseCode.INVALID_DATA, "a close reason that is not UTF-8")
        return Violation(CloseCode.INTERNAL_ERROR, repr(error))


class _Incoming(ServerProtocol):
    """Reads an open connection and answers nothing."""

    reader: _Reader

    def __init__(self, max_size: int) -> None:
        super().__init__(state=OPEN, max_size=max_size)
        self.reader = _Reader()
        self.parser = self.parse()  # on that reader
        next(self.parser)

    def send_frame(self, frame: Frame) -> None:
        """Drop it."""


class _Reader(StreamReader):
    """Tells besides whether a frame has begun."""

    between_frames = True

    def at_eof(self) -> Generator[None, None, bool]:
        self.between_frames = True
        return (yield from super().at_eof())

    def read_exact(self, n: int) -> Generator[None, None, bytes]:
        self.between_frames = False
        return (yield from super().read_exact(n))


def _control(frame: Frame) -> Event:
    payload = bytes(frame.data)
    if frame.opcode is OP_PING:
        return Ping(payload)
    if frame.opcode is OP_PONG:
        return Pong(payload)
    return _client_close(Close.parse(payload))


def _client_close(close: Close) -> ClientClose:
    if close.code == CloseCode.NO_STATUS_RCVD:
        return ClientClose(None, b"")
    return ClientClose(int(close.code), close.serialize())


def _too_big(limit: int) -> Violation:
    return Violation(CloseCode.MESSAGE_TOO_BIG, f"a message over {limit} bytes")


def encode_text(data: bytes) -> bytes:
    """Return one message of ours."""
    return Frame(OP_TEXT, data).serialize(mask=False)


def encode_ping(payload: bytes) -> bytes:
    """Return a ping of ours; at most 125 bytes of payload."""
    return Frame(OP_PING, payload).serialize(mask=False)


def encode_pong(payload: bytes) -> bytes:
    """Return the answer to a ping."""
    return Frame(OP_PONG, payload).serialize(mask=False)


def encode_close(code: int, reason: str) -> bytes:
    """Return a Close of ours; a reason over 123 bytes is cut between two characters (D3.10).

    Raises:
        ProtocolError: the code is not one that may be sent, as 1006.
    """
    cut = reason.encode()[:_REASON_BYTES_MAX].decode("utf-8", "ignore")
    return encode_close_back(Close(code, cut).serialize())


def encode_close_back(payload: bytes) -> bytes:
    """Return the Close that answers a client's (RFC 6455 §5.5.1)."""
    return Frame(OP_CLOSE, payload).serialize(mask=False)
