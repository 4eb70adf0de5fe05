"""What a session has to send: bounded, in order, counted until it is written. [pure] D2.1, D2.5."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.decisions.effects import OutFrame


@dataclass(frozen=True, slots=True)
class _Queued:
    frame: OutFrame
    probe: int | None
    counted: bool


class SendQueue:
    """Frames that wait, and frames that were taken and are not written yet.

    Args:
        max_frames, max_bytes: of JSON frames, both kinds together. Native pings are bounded by
            the number of probes and not counted.
    """

    def __init__(self, *, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._waiting: deque[_Queued] = deque()
        self._taken: deque[_Queued] = deque()
        self._frames = 0
        self._bytes = 0

    def push(self, frame: OutFrame, *, probe: int | None = None, counted: bool = True) -> bool:
        """Queue a frame; False, and nothing queued, if there is no room for it."""
        size = len(frame.payload)
        if counted:
            if self._frames + 1 > self._max_frames or self._bytes + size > self._max_bytes:
                return False
            self._frames += 1
            self._bytes += size
        self._waiting.append(_Queued(frame, probe, counted))
        return True

    def take(self) -> OutFrame | None:
        """The next frame to write, or None."""
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        self._taken.append(item)
        return item.frame

    def written(self) -> tuple[OutFrame, int | None] | None:
        """The oldest taken frame is written: it and its probe, None if there is no such frame."""
        if not self._taken:
            return None
        item = self._taken.popleft()
        if item.counted:
            self._frames -= 1
            self._bytes -= len(item.frame.payload)
        return item.frame, item.probe

    def discard(self) -> None:
        """Drop what waits: nobody reads it."""
        self._waiting.clear()
