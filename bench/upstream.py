"""An upstream that streams numbered chunks, paced or as fast as it can.

    python -m bench.upstream        prints its port

The request says what is wanted, and whatever stands between passes it on:
`{"bench": {"chunks": 200, "gap_ms": 20, "one_write": false}}`. Each chunk is a write of its own,
and streams with no gap take turns; with `one_write` the whole answer is one. The bytes are made
before, and a chunk of a stream without a gap costs one system call and little else, so that this
process is not what is measured. The content of chunk 7 begins with `000007`. As providers do, it
sends `"usage":null` on each chunk and one usage chunk if it is asked for usage.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import TYPE_CHECKING, Any, Final

from bench.process import run_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_CHUNK: Final = (
    '{"id":"chatcmpl-BenchAbCdEfGhIjKlMnOpQrStUv","object":"chat.completion.chunk",'
    '"created":1790000000,"model":"bench","service_tier":"default","system_fingerprint":"fp_bench",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]%s}'
)
_USAGE: Final = (
    '{"id":"chatcmpl-BenchAbCdEfGhIjKlMnOpQrStUv","object":"chat.completion.chunk",'
    '"created":1790000000,"model":"bench","choices":[],"usage":{"prompt_tokens":11,'
    '"completion_tokens":%d,"total_tokens":%d}}'
)


def events(count: int, *, usage: bool) -> list[bytes]:
    """Return the HTTP chunks of one answer, one event in each; the body's end is in the last."""
    null = ',"usage":null' if usage else ""
    data = [_CHUNK % ('{"role":"assistant","content":""}', "null", null)]
    data += [_CHUNK % (f'{{"content":"{n:06d} x"}}', "null", null) for n in range(count)]
    data.append(_CHUNK % ("{}", '"stop"', null))
    if usage:
        data.append(_USAGE % (count, count + 11))
    out = [_http_chunk(f"data: {item}\n\n".encode()) for item in [*data, "[DONE]"]]
    out[-1] += b"0\r\n\r\n"
    return out


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self) -> None:
        self._incoming = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has not the ancestor

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        head, blank, rest = self._incoming.partition(b"\r\n\r\n")
        if not blank:
            return
        if not head.startswith(b"POST "):
            assert self._transport is not None
            self._transport.write(_NOT_FOUND)  # something that is passed on while targets start
            self._incoming = rest
            return
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        if len(rest) >= length:
            self._incoming = rest[length:]
            self._answer(json.loads(rest[:length]))

    def _answer(self, request: dict[str, Any]) -> None:
        assert self._transport is not None
        asked = request["bench"]
        usage = bool((request.get("stream_options") or {}).get("include_usage"))
        out = _answers(asked["chunks"], usage=usage)
        gap_s = asked["gap_ms"] / 1000
        # What providers send before the first token is computed, and that token, go at once.
        if asked.get("one_write"):
            self._transport.write(b"".join((_HEAD, *out)))
        elif not gap_s:
            self._transport.write(_HEAD + out[0] + out[1])
            turns.join(self._transport, out)
        else:
            self._transport.write(_HEAD + out[0] + out[1])
            due = asyncio.get_running_loop().time() + gap_s
            self._next = asyncio.get_running_loop().call_at(due, self._send, out, 2, gap_s, due)

    def _send(self, out: Sequence[bytes], at: int, gap_s: float, due: float) -> None:
        assert self._transport is not None
        self._transport.write(out[at])
        at, due = at + 1, due + gap_s
        if at < len(out):
            loop = asyncio.get_running_loop()
            self._next = loop.call_at(due, self._send, out, at, gap_s, due)


class Turns:
    """The streams without a gap: each writes one chunk, then the next one does.

    They write to the socket itself. One that is full gets the rest of its answer from its
    transport, which waits for it.
    """

    def __init__(self) -> None:
        self._streams: list[tuple[asyncio.WriteTransport, int, Iterator[bytes]]] = []

    def join(self, transport: asyncio.WriteTransport, out: Sequence[bytes]) -> None:
        """Take part from the third chunk on, beginning with the next turn of the loop."""
        handle = transport.get_extra_info("socket").fileno()
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._turn)
        self._streams.append((transport, handle, itertools.islice(out, 2, None)))

    def _turn(self) -> None:
        self._streams = [stream for stream in self._streams if self._write(*stream)]
        if self._streams:
            asyncio.get_running_loop().call_soon(self._turn)

    def _write(
        self, transport: asyncio.WriteTransport, handle: int, chunks: Iterator[bytes]
    ) -> bool:
        """Write one chunk; return whether there are more to write here."""
        if transport.is_closing():
            return False
        if transport.get_write_buffer_size():
            return True  # the head has not left yet
        if (chunk := next(chunks, None)) is None:
            return False
        try:
            written = os.write(handle, chunk)
        except BlockingIOError:
            written = 0
        except OSError:
            return False  # reset; the transport learns of it too
        if written == len(chunk):
            return True
        transport.write(b"".join((chunk[written:], *chunks)))
        return False


turns: Final = Turns()
_rendered: dict[tuple[int, bool], list[bytes]] = {}


def _answers(count: int, *, usage: bool) -> list[bytes]:
    if (count, usage) not in _rendered:
        _rendered[count, usage] = events(count, usage=usage)
    return _rendered[count, usage]


if __name__ == "__main__":
    run_server(Connection)
