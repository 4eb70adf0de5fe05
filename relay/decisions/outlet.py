"""What a stream sends, bounded and in order, and how it ends. [pure] D2.1, D2.5, D3.10."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoders.decision_frames import FrameWriter
from relay.decisions.effects import Close, Opcode, OutFrame

if TYPE_CHECKING:
    from relay.decisions.effects import Effect
    from relay.decisions.limits import DecisionLimits


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends: the Close frame's code, the goodbye's reason and retry hint."""

    code: int
    reason: str | None
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """A frame, and the nonce of the probe that it is, if it is one."""

    frame: OutFrame
    probe: int | None


class Outlet:
    """Frames that wait, frames that were taken and are not written yet, and effects.

    `frames` writes a frame and counts its `seq`; what it returns has to go to `send` at once.
    Native pings are bounded by the number of probes and not counted among the frames.
    """

    def __init__(self, limits: DecisionLimits, stream_id: str) -> None:
        self._max_frames = limits.max_send_queue_frames
        self._max_bytes = limits.max_send_queue_bytes
        self._waiting: deque[Queued] = deque()
        self._taken: deque[Queued] = deque()
        self._count = 0
        self._bytes = 0
        self._effects: deque[Effect] = deque()
        self.frames = FrameWriter(stream_id)
        self.closed = False

    def send(self, payload: bytes, *, probe: int | None = None) -> None:
        """Queue a JSON frame; without room for it the stream ends as a slow reader (D2.5)."""
        if not self.closed and not self._push(payload, probe):
            self.overflow()

    def send_native_ping(self, nonce: int) -> None:
        """Queue a native ping."""
        self._waiting.append(Queued(OutFrame(Opcode.PING, nonce.to_bytes(4, "big")), nonce))

    def _push(self, payload: bytes, probe: int | None) -> bool:
        if self._count + 1 > self._max_frames or self._bytes + len(payload) > self._max_bytes:
            return False
        self._count += 1
        self._bytes += len(payload)
        self._waiting.append(Queued(OutFrame(Opcode.TEXT, payload), probe))
        return True

    def ask(self, effect: Effect) -> None:
        """Queue an effect."""
        self._effects.append(effect)

    def close(self, ending: Ending, *, version: int, last_decision: int) -> None:
        """Say goodbye and close; without room for the goodbye the Close frame goes alone."""
        if self.closed:
            return
        goodbye = self.frames.goodbye(
            ending.reason,
            version=version,
            last_decision=last_decision,
            retry_after_ms=ending.retry_after_ms,
        )
        self._push(goodbye, None)
        self._end(ending.code, ending.reason or "")

    def overflow(self) -> None:
        """Close without what waits: nobody reads it."""
        if not self.closed:
            self._waiting.clear()
            self._end(1013, "slow_reader")

    def silence(self) -> list[Effect]:
        """Nothing is to be sent or done any more; returns the effects that nobody took."""
        self.closed = True
        self._waiting.clear()
        untaken = list(self._effects)
        self._effects.clear()
        return untaken

    def _end(self, code: int, reason: str) -> None:
        self.closed = True
        self._effects.append(Close(code, reason))

    def next_frame(self) -> OutFrame | None:
        """Take the next frame."""
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        self._taken.append(item)
        return item.frame

    def next_effect(self) -> Effect | None:
        """Take the next effect."""
        return self._effects.popleft() if self._effects else None

    def written(self) -> Queued | None:
        """The oldest taken frame has left; None if none was taken."""
        if not self._taken:
            return None
        item = self._taken.popleft()
        if item.frame.opcode is Opcode.TEXT:
            self._count -= 1
            self._bytes -= len(item.frame.payload)
        return item
