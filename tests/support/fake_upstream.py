"""A provider that says exactly what a test tells it to, byte for byte, and remembers who left when.

    async with FakeUpstream() as up:
        up.script(Head(), Send(sse(chunk("Hi"))), Sleep(0.5), Rst())
        ...                                     # the gateway calls `up.base_url`
        request = await up.request(0)
        closed_at = await request.wait_closed()

It stands on a raw asyncio protocol: an HTTP library would mend the faults that tests are about. A
script that writes before any `Head` gets a plain one, and one that names no end gets `Eof()`.
The steps and the helpers that build bodies are those of `tests.support.script`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import struct
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.support.script import (
    DONE,
    PING,
    Eof,
    Fin,
    Flood,
    Head,
    Pings,
    Player,
    Raw,
    Rst,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    compact,
    completed,
    cut,
    every_cut,
    json_answer,
    openai_stream,
    spaced,
    sse,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "DONE",
    "PING",
    "Eof",
    "FakeUpstream",
    "Fin",
    "Flood",
    "Head",
    "Pings",
    "Raw",
    "RecordedRequest",
    "Rst",
    "Send",
    "Sleep",
    "Step",
    "Wait",
    "chunk",
    "compact",
    "cut",
    "every_cut",
    "json_answer",
    "openai_stream",
    "spaced",
    "sse",
]

_SIOCOUTQNSD = 0x894B  # linux/sockios.h: bytes that the kernel has not put on the wire yet


@dataclass(eq=False)
class RecordedRequest:
    """One request as it came, and how far its answer got.

    Attributes:
        headers: names in lower case; of a repeated one, the last.
        received_at: time.monotonic() when the last byte of its body was here.
        answered: set when the last step of its script is done.
        steps_done: how many steps are.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: _Connection
    received_at: float = field(default_factory=time.monotonic)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    steps_done: int = 0
    queued: int = 0
    drained: int = 0

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    @property
    def closed(self) -> asyncio.Event:
        """Set when the peer closed or reset the connection (a half-close counts)."""
        return self.connection.peer_closed

    @property
    def closed_at(self) -> float | None:
        """time.monotonic() of that moment."""
        return self.connection.closed_at

    @property
    def bytes_written(self) -> int:
        """Bytes of the answer that the kernel took, head and framing included."""
        # The transport drops its buffer when it dies: then only whole writes are known.
        waiting = self.connection.unwritten()
        return self.drained if waiting is None else max(self.drained, self.queued - waiting)

    async def wait_closed(self, timeout: float = 5.0) -> float:
        """Waits for the peer's close and returns its time."""
        async with asyncio.timeout(timeout):
            await self.closed.wait()
        assert self.closed_at is not None
        return self.closed_at


class FakeUpstream:
    """The fake provider; an async context manager.

    Args:
        sndbuf: SO_SNDBUF of its connections, for tests of back-pressure that want it early.
    """

    def __init__(self, *, sndbuf: int | None = None) -> None:
        self.requests: list[RecordedRequest] = []
        self.connections: list[_Connection] = []
        self._scripts: deque[tuple[Step, ...]] = deque()
        self._by_model: defaultdict[str, deque[tuple[Step, ...]]] = defaultdict(deque)
        self._repeated: dict[str, tuple[Step, ...]] = {}
        self._arrival = asyncio.Event()
        self._sndbuf = sndbuf
        self._server: asyncio.Server | None = None
        self.host = "127.0.0.1"
        self.port = 0

    @property
    def origin(self) -> str:
        """The address without a path, as providers that are not OpenAI's want it."""
        return f"http://{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The address as an OpenAI client wants it."""
        return f"{self.origin}/v1"

    @property
    def pending(self) -> int:
        """Scripts queued and not asked for yet; those of `repeat=True` are not counted."""
        return len(self._scripts) + sum(len(queue) for queue in self._by_model.values())

    def forget(self) -> int:
        """Drops the scripts that were not asked for and returns how many there were."""
        count = self.pending
        self._scripts.clear()
        self._by_model.clear()
        return count

    def script(self, *steps: Step) -> None:
        """Queues the answer to the next request that no `script_for` claims."""
        self._scripts.append(completed(steps))

    def script_for(self, model: str, *steps: Step, repeat: bool = True) -> None:
        """Sets the answer to every request for `model`, or with repeat=False to one more."""
        if repeat:
            self._repeated[model] = completed(steps)
        else:
            self._by_model[model].append(completed(steps))

    async def request(self, index: int = 0, timeout: float = 5.0) -> RecordedRequest:
        """The request of that number, waited for."""
        try:
            async with asyncio.timeout(timeout):
                while len(self.requests) <= index:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            raise AssertionError(
                f"{len(self.requests)} requests within {timeout} s, not {index + 1}"
            ) from None
        return self.requests[index]

    async def __aenter__(self) -> Self:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._sndbuf is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._sndbuf)
        listener.bind((self.host, 0))
        self.port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self.connections:
            connection.drop()
        tasks = [connection.task for connection in self.connections]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self.connections:
            await connection.lost.wait()
        await self._server.wait_closed()
        # A fault of a script or an unreadable request would otherwise pass for a hang-up.
        for result in results:
            if isinstance(result, Exception) and error is None:
                raise result

    def record(self, request: RecordedRequest) -> tuple[Step, ...]:
        """Notes a request and hands out its script."""
        self.requests.append(request)
        self._arrival.set()
        queued = {model for model, scripts in self._by_model.items() if scripts}
        for model in queued | self._repeated.keys():
            if _asks_for(request, model):
                if self._by_model[model]:
                    return self._by_model[model].popleft()
                if model in self._repeated:
                    return self._repeated[model]
        if self._scripts:
            return self._scripts.popleft()
        said = f"the fake upstream has no script for {request.method} {request.path}"
        return completed(json_answer({"error": {"message": said}}, status=500))


class _Connection(asyncio.Protocol):
    """One connection: reads requests, plays their scripts, notices the peer's close at any time."""

    task: asyncio.Task[None]
    _transport: asyncio.Transport
    _request: RecordedRequest

    def __init__(self, upstream: FakeUpstream) -> None:
        self.peer_closed = asyncio.Event()
        self.closed_at: float | None = None
        self.lost = asyncio.Event()
        self._upstream = upstream
        self._incoming = bytearray()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._finished = False
        self._ours = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # No buffer of ours: a drained write is in the kernel, and each one is a packet.
        transport.set_write_buffer_limits(high=0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream.connections.append(self)
        self.task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        self._readable.set()

    def eof_received(self) -> None:
        self._note_close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._note_close()
        self.lost.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def unwritten(self) -> int | None:
        """Bytes that the kernel has not taken, None when the connection is dead."""
        return None if self._transport.is_closing() else self._transport.get_write_buffer_size()

    async def write(self, data: bytes) -> None:
        """Writes and waits until the kernel has it all."""
        request = self._request
        request.queued += len(data)
        self._transport.write(data)
        if self._transport.is_closing():  # or a flood into nothing would never let the loop notice
            await asyncio.sleep(0)
        await self._writable.wait()
        request.drained += len(data)

    def finish(self) -> None:
        """Sends FIN and goes on listening."""
        self._finished = True
        with contextlib.suppress(OSError):  # reset by the peer, and not told yet
            self._transport.write_eof()

    async def reset(self) -> None:
        """Sends RST, after what was written."""
        handle = self.socket
        for _ in range(200):
            # A reset throws away what the kernel has not sent; the bound is for a stuck reader.
            unsent = fcntl.ioctl(handle.fileno(), _SIOCOUTQNSD, struct.pack("i", 0))
            if unsent == struct.pack("i", 0):
                break
            await asyncio.sleep(0.005)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._finished = True
        self.drop()

    def drop(self) -> None:
        """Ends the connection from our side; that is no close of the peer's."""
        self._ours = True
        self._transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()

    @property
    def socket(self) -> socket.socket:
        """The kernel's, through the transport."""
        handle: socket.socket = self._transport.get_extra_info("socket")
        return handle

    def _note_close(self) -> None:
        if self._ours or self.closed_at is not None:
            return
        self.closed_at = time.monotonic()
        self.peer_closed.set()
        self.task.cancel()

    async def _serve(self) -> None:
        try:
            while not self._finished:
                self._request = request = await self._read_request()
                steps = self._upstream.record(request)
                player = Player(self, steps)
                for step in steps:
                    await player.do(step)
                    request.steps_done += 1
                request.answered.set()
            await self.lost.wait()
        finally:
            self._transport.abort()

    async def _read_request(self) -> RecordedRequest:
        line, *fields = (await self._read_to(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _version = line.split(" ")
        pairs = (item.partition(":") for item in fields)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._read_chunked()
        else:
            body = await self._read_exactly(int(headers.get("content-length", "0")))
        return RecordedRequest(method, path, headers, body, self)

    async def _read_chunked(self) -> bytes:
        body = b""
        while size := int(await self._read_to(b"\r\n"), 16):
            body += (await self._read_exactly(size + 2))[:size]
        await self._read_to(b"\r\n")
        return body

    async def _read_to(self, end: bytes) -> bytes:
        while (at := self._incoming.find(end)) < 0:
            await self._read_more()
        return (await self._read_exactly(at + len(end)))[:at]

    async def _read_exactly(self, size: int) -> bytes:
        while len(self._incoming) < size:
            await self._read_more()
        data = bytes(self._incoming[:size])
        del self._incoming[:size]
        return data

    async def _read_more(self) -> None:
        self._readable.clear()
        await self._readable.wait()


def _asks_for(request: RecordedRequest, model: str) -> bool:
    # Some shapes name the model in the path, and not every body is JSON.
    if f"/{model}:" in request.path:
        return True
    try:
        return bool(request.json["model"] == model)
    except (ValueError, KeyError, TypeError):
        return False
