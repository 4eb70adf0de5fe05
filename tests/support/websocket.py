"""A WebSocket client that sends any bytes and checks every byte that it gets (RFC 6455, D2.1).

async with gateway.client() as client:
    socket = RawSocket(client)
    await socket.open("/v1/system-zero/stream", headers=[AUTH])
    await socket.text('{"type": "pong", "nonce": 1}')
    hello = await socket.json()
"""

from __future__ import annotations

import json as jsonlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.support.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.wire import RawClient

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_CONTROL: Final = frozenset({CLOSE, PING, PONG})
PROTOCOL: Final = "system-zero.stream.v1"
# RFC 6455 §1.3: the key of its example and the answer to it.
KEY: Final = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT: Final = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
UPGRADE: Final = (
    ("upgrade", "websocket"),
    ("connection", "Upgrade"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", KEY),
)
STREAM: Final = "/v1/system-zero/stream"


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True
) -> bytes:
    """One frame of a client, right or wrong.

    Args:
        rsv: the three reserved bits, RSV1 being 4.
    """
    head = bytes([fin << 7 | rsv << 4 | opcode])
    bit = masked << 7
    if len(payload) < 126:
        head += bytes([bit | len(payload)])
    elif len(payload) < 65536:
        head += bytes([bit | 126]) + struct.pack("!H", len(payload))
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", len(payload))
    if not masked:
        return head + payload
    mask = os.urandom(4)
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    whole = int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")
    return head + mask + whole.to_bytes(len(payload), "big")


def close(code: int | None = 1000, reason: str = "") -> bytes:
    """A client's Close frame."""
    return frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason.encode())


@dataclass(frozen=True)
class ServerFrame:
    """One frame of the server."""

    opcode: int
    payload: bytes

    @property
    def code(self) -> int | None:
        """The code of a Close."""
        assert self.opcode == CLOSE
        return struct.unpack("!H", self.payload[:2])[0] if self.payload else None

    @property
    def reason(self) -> str:
        """The reason of a Close."""
        assert self.opcode == CLOSE
        return self.payload[2:].decode()


class RawSocket:
    """The frames of one connection; what breaks the grammar raises `WireError`.

    Attributes:
        messages: every JSON message so far; their `seq` was checked.
    """

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = []
        self.pings: list[bytes] = []

    async def open(
        self,
        path: str = STREAM,
        *,
        headers: Iterable[tuple[str, str]] = (),
        protocol: str | None = PROTOCOL,
        upgrade: Iterable[tuple[str, str]] = UPGRADE,
        tail: bytes = b"",
    ) -> int:
        """Ask for the upgrade and return the status.

        Args:
            tail: bytes that follow the request at once, without waiting for the 101.
        """
        named = [("sec-websocket-protocol", protocol)] if protocol is not None else []
        fields = [*upgrade, *named, *headers]
        await self.client.request("GET", path, headers=fields)
        if tail:
            await self.client.send(tail)
        await self.client.read_head()
        if self.client.status != 101:
            await self.client.read_all()
        return self.client.status

    async def send(self, *frames: bytes) -> None:
        """Sends bytes as they are."""
        await self.client.send(b"".join(frames))

    async def text(self, message: str | bytes) -> None:
        """Sends one text message."""
        await self.send(frame(TEXT, message.encode() if isinstance(message, str) else message))

    async def say(self, **message: Any) -> None:
        """Sends one JSON message."""
        await self.text(jsonlib.dumps(message))

    async def frame(self, timeout: float = 10.0) -> ServerFrame:
        """The next frame."""
        while (found := self._take()) is None:
            if not await self.client.read_some(timeout=timeout):
                end = "reset" if self.client.was_reset else "closed"
                raise WireError(f"the connection was {end}; messages: {self.messages[-3:]}")
        return found

    async def json(self, timeout: float = 10.0) -> dict[str, Any]:
        """The next JSON message; native pings before it are answered."""
        while True:
            found = await self.frame(timeout)
            if found.opcode == PING:
                self.pings.append(found.payload)
                await self.send(frame(PONG, found.payload))
                continue
            if found.opcode != TEXT:
                raise WireError(f"not a message: {found}")
            return self._checked(found.payload)

    async def until_close(self, timeout: float = 10.0) -> ServerFrame:
        """Reads up to the Close and returns it; `messages` has what came before."""
        while True:
            found = await self.frame(timeout)
            if found.opcode == CLOSE:
                return found
            if found.opcode == TEXT:
                self._checked(found.payload)

    def _checked(self, payload: bytes) -> dict[str, Any]:
        message: dict[str, Any] = jsonlib.loads(payload)
        expected = self.messages[-1]["seq"] + 1 if self.messages else 1
        if message["seq"] != expected:
            raise WireError(f"seq {message['seq']} where {expected} comes next: {message}")
        self.messages.append(message)
        return message

    def _take(self) -> ServerFrame | None:
        rest = self.client.response.rest
        if len(rest) < 2:
            return None
        opcode, length, at = rest[0] & 15, rest[1] & 127, 2
        if rest[0] & 0x70 or not rest[0] & 0x80 or rest[1] & 0x80:
            raise WireError(f"reserved bits, a fragment or a mask: {bytes(rest[:2])!r}")
        if opcode not in (TEXT, *_CONTROL) or (opcode in _CONTROL and length > 125):
            raise WireError(f"not a frame of ours: {bytes(rest[:2])!r}")
        if length >= 126:
            size = 2 if length == 126 else 8
            if len(rest) < 2 + size:
                return None
            length, at = int.from_bytes(rest[2 : 2 + size], "big"), 2 + size
        if len(rest) < at + length:
            return None
        payload = bytes(rest[at : at + length])
        del rest[: at + length]
        return ServerFrame(opcode, payload)
