"""What came from a client, in order, and decoded before it is taken (D2.2)."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from typing import TYPE_CHECKING, Final

from encoders.decision_messages import decode
from planes.decision.frames import Message, Violation

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from encoders.decision_messages import Incoming
    from planes.decision.wire import Arrival, Wire

# So much JSON of the worst kind is decoded in 3 ms.
_DECODED_HERE_MAX: Final = 16 * 1024
# Far more than every budget of D2.4 lets wait behind one message that is being decoded.
_WAITING_MAX: Final = 1024


class Inbox:
    """Takes what is small at once; large messages are decoded in a thread, and what comes in the
    meantime waits its turn.

    Args:
        max_bytes: of messages that wait, with the one that is not whole yet; beyond it 1009.
        take: is given everything, in order; a large message with what `decode` made of it.
        decoder: where large messages are decoded.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        max_bytes: int,
        take: Callable[[Arrival, Incoming | None], None],
        decoder: Executor,
    ) -> None:
        self._wire = wire
        self._max_bytes = max_bytes
        self._take = take
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Arrival] = deque()
        self._bytes = 0
        self._busy = False

    def put(self, arrival: Arrival) -> bool:
        """Add what has come. True: `work` is to be run."""
        if not self._busy and not _is_large(arrival):
            self._take(arrival, None)
            return False
        self._waiting.append(arrival)
        if isinstance(arrival, Message):
            self._bytes += len(arrival.data)
        if not self._busy:
            self._busy = True
            return True
        self._bound()
        return False

    async def work(self) -> None:
        """Take all that waits."""
        try:
            while self._waiting:
                arrival = self._waiting.popleft()
                incoming = None
                if isinstance(arrival, Message):
                    self._bytes -= len(arrival.data)
                    if _is_large(arrival):
                        incoming = await self._loop.run_in_executor(
                            self._decoder, _decode, arrival.data
                        )
                self._take(arrival, incoming)
        finally:
            self._busy = False

    def _bound(self) -> None:
        code = None
        if self._bytes + self._wire.pending_bytes > self._max_bytes:
            code = 1009
        elif len(self._waiting) > _WAITING_MAX:
            code = 1008
        if code is not None:
            self._waiting.clear()
            self._bytes = 0
            self._wire.stop_reading()
            self._take(Violation(code, "too much waits to be read"), None)


def _decode(data: bytes) -> Incoming:
    """Decode without the collector, which holds the interpreter: at a million new containers it
    would come again and again (655 ms at the worst, 134 without), and none of them is garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return decode(data)
    finally:
        if collects:
            gc.enable()


def _is_large(arrival: Arrival) -> bool:
    return isinstance(arrival, Message) and len(arrival.data) > _DECODED_HERE_MAX
