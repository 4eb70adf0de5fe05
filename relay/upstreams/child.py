"""One running child of the local model: its address, the tail of its standard error, its end."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Final, cast

from relay.errors import UpstreamUnavailable

STDERR_TAIL_BYTES: Final = 4096

_KILL_WAIT_S: Final = 2.0
_PIPE_WAIT_S: Final = 0.5
_ADDRESS_LINE_BYTES_MAX: Final = 1024


class Child(asyncio.SubprocessProtocol):
    """One running child: its address, the tail of its standard error, its end.

    A protocol and not a pair of reader tasks: callbacks need nobody to own them, and a pipe that
    nobody reads would block the child.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.address: str | None = None
        self.exited: asyncio.Future[None] = loop.create_future()
        self._changed: asyncio.Future[None] = loop.create_future()  # address known, or over
        self._drained: asyncio.Future[None] = loop.create_future()  # the pipes are at their end
        self._transport: asyncio.SubprocessTransport | None = None
        self._line = bytearray()
        self._tail = bytearray()

    @classmethod
    async def start(cls, command: tuple[str, ...]) -> Child:
        """Start the program. Its own session: a Ctrl-C is for us, who may have to drain first."""
        loop = asyncio.get_running_loop()
        try:
            _, child = await loop.subprocess_exec(
                cls,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UpstreamUnavailable(f"cannot start the local model: {error}") from error
        return child

    @property
    def pid(self) -> int | None:
        """Process id; None once its end was seen."""
        return None if self.exited.done() else self._process().get_pid()

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process().get_returncode()

    async def serving(self, wait_s: float) -> None:
        """Wait for the address.

        Raises:
            UpstreamUnavailable: the process ended instead, or it took too long.
        """
        await asyncio.wait([self._changed], timeout=wait_s)
        if self.address is None:
            why = f"exit status {self.returncode}" if self._changed.done() else f"in {wait_s:g} s"
            raise UpstreamUnavailable(
                f"the local model's process printed no address: {why}{self.last_words()}"
            )

    async def over(self) -> None:
        """Wait for its end, and a little for its last words, which may still be in the pipe."""
        await asyncio.wait([self.exited])
        await asyncio.wait([self._drained], timeout=_PIPE_WAIT_S)

    async def terminate(self, wait_s: float) -> None:
        """Ask it to end, wait; then kill it and see it reaped. Killed at once if cancelled.

        Not with `asyncio.timeout`, which on Python 3.11.2 (Debian 12) raises CancelledError where
        it should raise TimeoutError when the task was cancelled before, as it is in a clean-up.
        """
        try:
            with suppress(ProcessLookupError):
                self._process().terminate()
            await asyncio.wait([self.exited], timeout=wait_s)
            with suppress(ProcessLookupError):
                self._process().kill()
            await asyncio.wait([self.exited], timeout=_KILL_WAIT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it if it runs, and free the pipes. Synchronous, idempotent."""
        self._process().close()

    def _process(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None, "connection_made comes before start returns"
        return self._transport

    def last_words(self) -> str:
        """Return the end of its standard error, ready to be put behind a message."""
        text = self._tail.decode("utf-8", "replace").strip()
        return f"; its last words: {text}" if text else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by the loop."""
        # A cast, for uvloop's class has the methods and not the ancestor.
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Collect the address line (1) and the tail of standard error (2)."""
        if fd == 2:
            self._tail += data
            del self._tail[:-STDERR_TAIL_BYTES]
        elif self.address is None and len(self._line) <= _ADDRESS_LINE_BYTES_MAX:
            self._line += data
            line, newline, _ = self._line.partition(b"\n")
            if newline:
                self._on_line(bytes(line))

    def _on_line(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):
            self.address = str(json.loads(line)["address"])
        _settle(self._changed)

    def process_exited(self) -> None:
        """The process is over: nothing serves at the address any more."""
        _settle(self.exited)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is over and its pipes are read to the end."""
        for future in (self.exited, self._drained, self._changed):
            _settle(future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
