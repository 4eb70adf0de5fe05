"""Accepts connections.

uvloop accepts one connection in each turn of its loop. A gateway whose thousand streams make a turn
long would take its next thousand clients at a crawl: measured, seconds. This accepts all that wait.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = structlog.get_logger("sluicegate")

BACKLOG: Final = 4096
_ACCEPTS_A_TURN: Final = 256  # then the streams have their turn
_PAUSE_S: Final = 0.1
# No descriptors or memory left: the connection waits in the backlog until some are free again.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Accepts on a bound socket until it is closed.

    Args:
        sock: bound, non-blocking; owned from here on.
        protocol_factory: makes the protocol of one connection.
    """

    def __init__(
        self, sock: socket.socket, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._sock = sock
        self._protocol_factory = protocol_factory
        self._loop = asyncio.get_running_loop()
        self._adopting: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to accept."""
        self._sock.listen(BACKLOG)
        self._loop.add_reader(self._sock, self._accept)

    async def close(self) -> None:
        """Stop; connections that were accepted live on. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._adopting:
            await asyncio.wait(self._adopting)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left while it waited
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._rest(error)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._adopt(connection))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except OSError as error:
            connection.close()
            log.debug("a connection was lost as it came", why=str(error))

    def _rest(self, error: OSError) -> None:
        """Leave the socket alone for a moment: it would be readable all the time."""
        log.error("cannot accept connections; they wait", why=error.strerror)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)
