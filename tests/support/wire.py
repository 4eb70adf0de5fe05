"""A client that sees every byte: strict about HTTP framing and SSE, and idle unless told to read.

    async with RawClient(host, port) as client:
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=payload)
        await client.read_until(lambda c: len(c.events) >= 3)
        await client.reset()

Nothing is read before a `read_…` call, so a slow reader is a client that is not asked to read.
Whatever breaks the grammar raises `WireError`: a lenient client would hide what breaks strict ones.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import re
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ([\x20-\x7e]*)")
_HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_SSE_LINE = re.compile(rb":.*|(?:data|event|id|retry): .*")
_MAX_LINE = 65536


class WireError(Exception):
    """The peer broke the grammar, or ended before what was waited for."""


class Response:
    """Parses one response, given in pieces of any size.

    Attributes:
        headers: name and value pairs in order, names as sent.
        chunk_sizes: size of every HTTP chunk of the body.
        complete: the terminal 0-chunk came, or all of the promised length, or the clean FIN that
            ends a body of neither.
        rest: bytes after the end of the response.
    """

    def __init__(self, *, to_head: bool = False) -> None:
        self.status = 0
        self.reason = ""
        self.version = ""
        self.headers: list[tuple[str, str]] = []
        self.trailers: list[tuple[str, str]] = []
        self.chunk_sizes: list[int] = []
        self.complete = False
        self.body = bytearray()
        self.rest = bytearray()
        self._to_head = to_head
        self._left = 0
        self._step: Callable[[], bool] = self._status_line

    @property
    def head_done(self) -> bool:
        """The blank line after the headers came."""
        return self._step not in (self._status_line, self._header_line)

    def header(self, name: str) -> str | None:
        """The value of a header that may come at most once."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        if len(values) > 1:
            raise WireError(f"header {name} came {len(values)} times: {values}")
        return values[0] if values else None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes."""
        self.rest += data
        while not self.complete and self._step():
            pass

    def finish(self) -> None:
        """Takes the peer's clean FIN."""
        if self._step == self._until_close:
            self.complete = True

    def _line(self) -> bytes | None:
        end = self.rest.find(b"\n")
        if end < 0:
            if len(self.rest) > _MAX_LINE:
                raise WireError(f"a line of more than {_MAX_LINE} bytes")
            return None
        line = bytes(self.rest[: end + 1])
        del self.rest[: end + 1]
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise WireError(f"a line that does not end in CR LF: {line!r}")
        return line[:-2]

    def _status_line(self) -> bool:
        if (line := self._line()) is None:
            return False
        if not (match := _STATUS_LINE.fullmatch(line)):
            raise WireError(f"not a status line: {line!r}")
        self.version = line[:8].decode()
        self.status, self.reason = int(match[1]), match[2].decode()
        self._step = self._header_line
        return True

    def _header_line(self) -> bool:
        if (line := self._line()) is None:
            return False
        if line:
            self.headers.append(_field(line))
            return True
        self._choose_framing()
        return True

    def _choose_framing(self) -> None:
        coding, length = self.header("transfer-encoding"), self.header("content-length")
        if coding is not None and length is not None:
            raise WireError("both transfer-encoding and content-length")
        if 100 <= self.status < 200 and self.status != 101:  # an interim answer, not the one
            self.headers.clear()
            self._step = self._status_line
        elif self._to_head or self.status in (101, 204, 304):
            self._step, self.complete = self._until_close, True
        elif coding is not None:
            if coding.lower() != "chunked":
                raise WireError(f"transfer-encoding: {coding}")
            if self.version == "HTTP/1.0":
                raise WireError("transfer-encoding in HTTP/1.0")
            self._step = self._chunk_line
        elif length is not None:
            if not length.isdecimal():
                raise WireError(f"content-length: {length}")
            self._left = int(length)
            self._step, self.complete = self._length, self._left == 0
        else:
            self._step = self._until_close

    def _move(self, size: int) -> int:
        size = min(size, len(self.rest))
        self.body += self.rest[:size]
        del self.rest[:size]
        return size

    def _until_close(self) -> bool:
        return self._move(len(self.rest)) > 0

    def _length(self) -> bool:
        moved = self._move(self._left)
        self._left -= moved
        self.complete = self._left == 0
        return moved > 0

    def _chunk_line(self) -> bool:
        if (line := self._line()) is None:
            return False
        if not _CHUNK_LINE.fullmatch(line):
            raise WireError(f"not a chunk size: {line!r}")
        self._left = int(line, 16)
        if self._left:
            self.chunk_sizes.append(self._left)
        self._step = self._chunk_data if self._left else self._trailer_line
        return True

    def _chunk_data(self) -> bool:
        moved = self._move(self._left)
        self._left -= moved
        if self._left == 0:
            self._step = self._chunk_end
        return moved > 0

    def _chunk_end(self) -> bool:
        if len(self.rest) < 2:
            return False
        if self.rest[:2] != b"\r\n":
            raise WireError(f"a chunk is not closed by CR LF: {bytes(self.rest[:2])!r}")
        del self.rest[:2]
        self._step = self._chunk_line
        return True

    def _trailer_line(self) -> bool:
        if (line := self._line()) is None:
            return False
        if line:
            self.trailers.append(_field(line))
        else:
            self.complete = True
        return True


class RawClient:
    """One connection; an async context manager.

    Args:
        rcvbuf: SO_RCVBUF, set before connecting so that the window starts small too.

    Attributes:
        response: the one that is being read.
        eof: the peer closed; `was_reset`: by a reset.
        arrivals: time.monotonic() and size of every read.
    """

    def __init__(self, host: str, port: int, *, rcvbuf: int | None = None) -> None:
        self.response = Response()
        self.eof = False
        self.was_reset = False
        self.arrivals: list[tuple[float, int]] = []
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rcvbuf is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self._address = (host, port)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.get_running_loop().sock_connect(self.sock, self._address)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    @property
    def status(self) -> int:
        """Status code, 0 before the status line came."""
        return self.response.status

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Header pairs in order."""
        return self.response.headers

    @property
    def body(self) -> bytes:
        """The body so far, framing removed."""
        return bytes(self.response.body)

    @property
    def complete(self) -> bool:
        """The body came to its proper end."""
        return self.response.complete

    @property
    def events(self) -> list[bytes]:
        """Whole SSE blocks so far, comments included, without their blank line."""
        return blocks(self.body, whole=self.complete)

    @property
    def json(self) -> Any:
        """The body parsed as JSON."""
        return jsonlib.loads(self.body)

    def header(self, name: str) -> str | None:
        """One header, or None; it may come at most once."""
        return self.response.header(name)

    async def send(self, raw: bytes) -> None:
        """Sends exactly these bytes."""
        await asyncio.get_running_loop().sock_sendall(self.sock, raw)

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | None = None,
        json: object = None,
        version: str = "HTTP/1.1",
    ) -> None:
        """Sends one request and makes ready for its response.

        `host` comes first; `content-length` and `content-type` come with a body, unless given.
        """
        if self.response.rest:
            raise WireError(f"bytes after the last response: {bytes(self.response.rest)!r}")
        given = list(headers)
        named = {name.lower() for name, _ in given}
        usual: list[tuple[str, str]] = [("host", "{}:{}".format(*self._address))]
        if json is not None:
            body = jsonlib.dumps(json).encode()
            usual.append(("content-type", "application/json"))
        if body is not None and "transfer-encoding" not in named:
            usual.append(("content-length", str(len(body))))
        fields = [pair for pair in usual if pair[0] not in named] + given
        lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in fields)]
        self.response = Response(to_head=method == "HEAD")
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b""))

    async def read_some(self, limit: int = 65536, *, timeout: float = 10.0) -> bool:
        """Reads once, at most `limit` bytes. False: the peer has closed."""
        if self.eof:
            return False
        try:
            async with asyncio.timeout(timeout):
                data = await asyncio.get_running_loop().sock_recv(self.sock, limit)
        except TimeoutError:
            raise TimeoutError(f"nothing more within {timeout} s; {self._state()}") from None
        except ConnectionError:
            self.eof = self.was_reset = True
            return False
        if not data:
            self.eof = True
            self.response.finish()
            return False
        self.arrivals.append((time.monotonic(), len(data)))
        self.response.feed(data)
        return True

    async def read_until(
        self, predicate: Callable[[RawClient], object], timeout: float = 10.0
    ) -> None:
        """Reads until the predicate holds; an end before that is a `WireError`."""
        await self._read_while(lambda: not (self.complete or predicate(self)), timeout)
        if not predicate(self):
            raise WireError(f"the response ended too early; {self._state()}")

    async def read_head(self, timeout: float = 10.0) -> None:
        """Reads status line and headers."""
        await self.read_until(lambda client: client.response.head_done, timeout)

    async def read_all(self, timeout: float = 10.0) -> bytes:
        """Reads to the end, proper (`complete`) or not, and returns the body."""
        await self._read_while(lambda: not self.complete, timeout)
        if self.response.rest and self.status != 101:
            raise WireError(f"bytes after the response: {bytes(self.response.rest)!r}")
        return self.body

    async def read_to_eof(self, timeout: float = 10.0) -> bytes:
        """Reads until the peer closes: also sees what comes after a proper end."""
        await self._read_while(lambda: True, timeout)
        return await self.read_all()

    def half_close(self) -> None:
        """Sends FIN; reading goes on."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes: a FIN, or a RST where unread bytes are waiting (so TCP has it)."""
        self.sock.close()

    def reset(self) -> None:
        """Closes with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    async def _read_while(self, wanted: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while wanted() and await self.read_some(timeout=max(0.0, until - time.monotonic())):
            pass

    def _state(self) -> str:
        end = "reset" if self.was_reset else "closed" if self.eof else "open"
        body = self.response.body
        return f"{end}, status {self.status}, {len(body)} body bytes, last {bytes(body[-200:])!r}"


def blocks(body: bytes, *, whole: bool = True) -> list[bytes]:
    """SSE blocks as our contract wants them: LF only, one blank line, `field: value` lines.

    Args:
        whole: the body is at its end, so an unfinished last block is an error.
    """
    *out, tail = body.split(b"\n\n")
    if whole and tail:
        raise WireError(f"the stream ends inside a block: {tail[-200:]!r}")
    for block in out:
        for line in block.split(b"\n"):
            if b"\r" in line or not _SSE_LINE.fullmatch(line):
                raise WireError(f"not an SSE line of ours: {line[:200]!r} in {block[:200]!r}")
    return out


def data_events(body: bytes, *, whole: bool = True) -> list[bytes]:
    """The data of every event, `[DONE]` included; comments are left out."""
    out = []
    for block in blocks(body, whole=whole):
        lines = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
        if lines:
            out.append(b"\n".join(lines))
    return out


def chunks(body: bytes, *, whole: bool = True) -> list[dict[str, Any]]:
    """Every data event but `[DONE]`, parsed."""
    return [jsonlib.loads(data) for data in data_events(body, whole=whole) if data != b"[DONE]"]


def _field(line: bytes) -> tuple[str, str]:
    if not (match := _HEADER_LINE.fullmatch(line)):
        raise WireError(f"not a header: {line!r}")
    return match[1].decode(), match[2].decode("latin-1")
