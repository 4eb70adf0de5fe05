"""A way to a gateway that breaks: it passes bytes on and cuts connections where a test says.

async with CuttingProxy(gateway.host, gateway.port, cuts=[700, 900]) as way:
    ...                    # the first connection ends after 700 bytes of the answer, the second …
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_LINGER = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Passes TCP on; an async context manager.

    Attributes:
        connections: how many there were. to: where the next ones lead.

    Args:
        cuts: bytes of the gateway after which each of the first connections is cut; None for one
            that is left alone, as all later ones are. Every second cut is a reset.
    """

    def __init__(self, host: str, port: int, *, cuts: Sequence[int | None]) -> None:
        self.to = host, port
        self._cuts = list(cuts)
        self.connections = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = self.connections
        self.connections += 1
        left = self._cuts[number] if number < len(self._cuts) else None
        ends = [writer]
        try:
            try:
                there_reader, there = await asyncio.open_connection(*self.to)
            except OSError:
                return  # nobody is there: the client sees its connection end
            ends.append(there)
            sending = asyncio.create_task(self._pass(reader, there, None))
            self._tasks.add(sending)
            with contextlib.suppress(OSError):
                await self._pass(there_reader, writer, left)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._tasks.discard(sending)
        finally:
            if left is not None and number % 2:
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _LINGER
                )
            for end in ends:
                end.close()
            for end in ends:
                with contextlib.suppress(OSError):
                    await end.wait_closed()
            self._tasks.discard(task)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None
    ) -> None:
        """Until either end closes, or so many bytes have passed."""
        while data := await reader.read(65536):
            if left is not None and len(data) >= left:
                writer.write(data[:left])
                await writer.drain()
                return
            left = left - len(data) if left is not None else None
            writer.write(data)
            await writer.drain()
