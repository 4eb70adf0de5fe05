"""The listener takes all that wait, and outlives a shortage of descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest
import uvloop

from planes.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    uvloop.new_event_loop,
    asyncio.new_event_loop,
]


class Counting(asyncio.Protocol):
    """Counts the connections made."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Counting.made += 1
        stream = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the ancestor
        stream.write(b"hello")
        stream.close()


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


class Scripted:
    """A socket whose `accept` fails as told before it works."""

    def __init__(self, sock: socket.socket, errors: list[int]) -> None:
        self._sock = sock
        self._errors = errors
        self.accepts = 0

    def accept(self) -> Any:
        self.accepts += 1
        if self._errors:
            raise OSError(self._errors.pop(0), "told to")
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_all_that_wait_are_taken_in_one_turn(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """One a turn would be 200 turns, and with a thousand streams a turn is long."""

    async def run() -> None:
        sock = bound()
        Counting.made = 0
        listener = Listener(sock, Counting)
        listener.start()
        with ExitStack() as clients:
            for _ in range(200):
                clients.enter_context(socket.create_connection(sock.getsockname()))
            for _ in range(10):
                await asyncio.sleep(0)
            assert Counting.made == 200
            await asyncio.sleep(0.1)  # they close
        await listener.close()
        await listener.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED])
def test_a_shortage_is_waited_out_without_spinning(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planes.listener._PAUSE_S", 0.05)

    async def run() -> None:
        scripted = Scripted(bound(), [code, code])
        listener = Listener(scripted, Counting)  # type: ignore[arg-type]
        listener.start()
        reader, writer = await asyncio.open_connection(*scripted.getsockname())
        async with asyncio.timeout(10):
            assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()
        assert scripted.accepts <= 6
        await listener.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(run())
