"""What an end-to-end test looks at beside the answer: the log, the sockets, the slots.

Bounds are ten times what is expected: they tell a fault from a slow machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.gateway import AUTH, MODEL

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tests.support.fake_upstream import FakeUpstream, RecordedRequest
    from tests.support.gateway import GatewayProcess
    from tests.support.wire import RawClient

CHAT = "/v1/chat/completions"
HANG_UP_BOUND_S = 2.5  # M4.1 expects 0.25


def payload(*, model: str = MODEL, stream: bool = True, **more: Any) -> dict[str, Any]:
    """The body of a chat request."""
    messages = [{"role": "user", "content": "Say hi."}]
    return {"model": model, "stream": stream, "messages": messages} | more


async def ask(client: RawClient, *, path: str = CHAT, **body: Any) -> None:
    """Sends a chat request; nothing is read yet."""
    await client.request("POST", path, headers=[AUTH], json=payload(**body))


async def ask_through(client: RawClient, up: FakeUpstream, **asked: Any) -> RecordedRequest:
    """Sends a chat request (arguments as for `ask`) and returns it as the upstream gets it."""
    index = len(up.requests)
    await ask(client, **asked)
    return await up.request(index)


async def until(
    holds: Callable[[], object], timeout: float = HANG_UP_BOUND_S, *, what: str = "it"
) -> float:
    """Waits until the condition holds and returns how long that took, in seconds."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > timeout:
            raise AssertionError(f"{what} did not happen within {timeout} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - started


async def until_still(*requests: RecordedRequest, quiet_s: float = 0.3) -> None:
    """Waits until nothing more of any of these answers is taken."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        if (now := sum(request.bytes_written for request in requests)) != seen:
            seen, since = now, time.monotonic()
        await asyncio.sleep(0.02)


def in_kernel(sock: socket.socket, what: int) -> int:
    """FIONREAD: received and not read; TIOCOUTQ: written and not acknowledged by the peer."""
    (size,) = struct.unpack("i", fcntl.ioctl(sock, what, b"\0" * 4))
    return int(size)


async def has_read(sock: socket.socket) -> None:
    """Waits until the other end, a process on this machine, has read what was sent, or closed."""
    ends = [f"0100007F:{end[1]:04X}" for end in (sock.getpeername(), sock.getsockname())]

    def read() -> bool:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == ends:
                # What waits to be read; a connection that is not accepted yet has no inode.
                return fields[4].endswith(":00000000") and fields[9] != "0"
        return True

    await until(read, 20, what="reading")


class Aftermath:
    """What a gateway's log and sockets show since this was made.

    Args:
        gateway: at rest: no request runs or has its line still to come, and no connection to an
            upstream is pooled.
    """

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._log_start = len(gateway.stderr())
        self._sockets = gateway.open_sockets()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log lines since, but for those about prices, which tests do not set; what is no JSON
        is the line {"text": …}.
        """
        out: list[dict[str, Any]] = []
        written = self._gateway.stderr()[self._log_start :]
        for line in written.rpartition("\n")[0].splitlines():  # the last may be half written
            try:
                out.append(json.loads(line))
            except ValueError:
                out.append({"text": line})
        return [line for line in out if line.get("logger") != "sluicegate.prices"]

    @property
    def new_sockets(self) -> int:
        """How many sockets more than at the start the gateway holds."""
        return self._gateway.open_sockets() - self._sockets

    async def one_request_line(self, **fields: Any) -> dict[str, Any]:
        """Waits for the line of the one request since, checks fields of it, and returns it.

        There is nothing else in the log: no traceback, no warning, no second line.
        """
        await until(lambda: self.lines, what="a log line")
        await asyncio.sleep(0.02)
        assert [line.get("event") for line in self.lines] == ["request"], self.lines
        line = self.lines[0]
        assert {name: line.get(name) for name in fields} == fields, line
        return line

    async def no_socket_left(self) -> None:
        """Waits until the gateway holds no more sockets than at the start."""
        await until(lambda: self.new_sockets <= 0, what=f"the end of {self.new_sockets} sockets")


async def slot_is_free(gateway: GatewayProcess, slug: str) -> None:
    """Waits until a key that may run one request at a time may run one again.

    Args:
        slug: of a model whose provider refuses connections: 503 if it is asked at all.
    """
    started = time.monotonic()
    status = 429
    while status == 429 and time.monotonic() - started < HANG_UP_BOUND_S:
        async with gateway.client() as client:
            await ask(client, model=slug)
            await client.read_all()
            status = client.status
    assert status == 503, "the slot was not freed"
