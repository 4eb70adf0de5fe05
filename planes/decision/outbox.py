"""What goes to a client: the session's frames and the pongs it asked for (D2.5)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from planes.decision.frames import encode_ping, encode_pong, encode_text
from relay.decisions.effects import Opcode

if TYPE_CHECKING:
    from planes.decision.wire import Wire
    from relay.decisions.effects import OutFrame
    from relay.decisions.session import DecisionSession


class Outbox:
    """Writes frames one by one, each when the kernel has taken the one before: what waits, waits
    in the session, which counts it.

    Args:
        max_pongs: that wait.
    """

    def __init__(self, wire: Wire, session: DecisionSession, *, max_pongs: int) -> None:
        self._wire = wire
        self._session = session
        self._max_pongs = max_pongs
        self._pongs: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._blocked = False
        self._counted = False

    def answer(self, payload: bytes) -> bool:
        """Have a ping answered; False if too many answers wait already."""
        if len(self._pongs) >= self._max_pongs:
            return False
        self._pongs.append(payload)
        return True

    def flush(self) -> bool:
        """Write as long as the kernel takes it. True: it does not, and `unblock` is to be run."""
        while not self._blocked:
            if self._pongs:
                frame, self._counted = encode_pong(self._pongs.popleft()), False
            elif (out := self._session.next_frame()) is not None:
                frame, self._counted = _encoded(out), True
            else:
                return False
            self._wire.write(frame)
            if self._wire.unsent:
                self._blocked = True
                return True
            self._written()
        return False

    async def unblock(self) -> None:
        """Wait until the kernel has taken all that was written."""
        await self._wire.flushed()
        self._blocked = False
        self._written()

    def flush_all(self) -> None:
        """Write all that is left, whether or not it is taken."""
        for frame in self._session.frames_to_send():
            self._wire.write(_encoded(frame))

    def _written(self) -> None:
        if self._counted:
            self._session.written(self._loop.time())


def _encoded(frame: OutFrame) -> bytes:
    if frame.opcode is Opcode.TEXT:
        return encode_text(frame.payload)
    return encode_ping(frame.payload)
