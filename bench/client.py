"""Many streams at once, each checked: every chunk, in order, and one `[DONE]`.

    python -m bench.client --port 8080 --model bench/x --streams 1000 --at-once 1000 --chunks 20

Prints one JSON object. What arrives is kept as it is and checked once a stream has ended, so that
checking takes no time from the streams that run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.process import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTENT: Final = re.compile(rb'"content":"(\d{6}) ')
_END: Final = b"\r\n0\r\n\r\n"
_DONE: Final = b"data: [DONE]\n\n"


class WrongStream(Exception):
    """A stream was not as it must be; the text says how."""


def check(response: bytes, chunks: int) -> None:
    """Check one whole response.

    Raises:
        WrongStream: its status, its framing, its order or its end.
    """
    head, _, rest = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise WrongStream(f"{head[:60]!r}: {rest[:300]!r}")
    body = _dechunked(rest)
    seen = [int(number) for number in _CONTENT.findall(body)]
    if seen != list(range(chunks)):
        raise WrongStream(f"{len(seen)} chunks of {chunks}, or not in order")
    if body.count(_DONE) != 1 or not body.endswith(_DONE):
        raise WrongStream(f"{body.count(_DONE)} times [DONE], the end is {body[-80:]!r}")


def _dechunked(data: bytes) -> bytes:
    out: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        if not size:
            return b"".join(out)
        out.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size


class Stream(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, request: bytes, ended: Callable[[], object]) -> None:
        self.received = bytearray()
        self.begun = asyncio.Event()
        self.first_after_s: float | None = None
        self._request = request
        self._ended = ended
        self._asked_at = 0.0
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's has not the ancestor
        assert self.transport is not None
        self._asked_at = time.monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.first_after_s is None and b'"content":"000000 ' in self.received:
            self.first_after_s = time.monotonic() - self._asked_at
            self.begun.set()
        if self.received.endswith(_END):
            assert self.transport is not None
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all streams, `at_once` at a time, and return what came of them."""
    request = _request(options)
    streams: list[Stream] = []

    async def one_after_the_other(left: list[None]) -> None:
        while left:
            left.pop()
            ended = asyncio.Event()
            streams.append(await _open(options.port, Stream(request, ended.set)))
            await ended.wait()

    left: list[None] = [None] * options.streams
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(options.at_once):
            group.create_task(one_after_the_other(left))
    elapsed_s = time.monotonic() - started
    wrong = []
    for stream in streams:
        try:
            check(bytes(stream.received), options.chunks)
        except (WrongStream, ValueError) as error:
            wrong.append(str(error))
    firsts = sorted(s.first_after_s * 1000 for s in streams if s.first_after_s is not None)
    good = options.streams - len(wrong)
    return {
        "good": good,
        "wrong": wrong[:5],
        "chunks": good * options.chunks,
        "elapsed_s": round(elapsed_s, 3),
        "ttft_ms": {p: round(firsts[len(firsts) * p // 100], 1) for p in (50, 99)}
        if firsts
        else {},
    }


async def hold_open(options: argparse.Namespace) -> None:
    """Open streams, print a line when each has had its first chunk, and wait to be ended."""
    streams = [
        await _open(options.port, Stream(_request(options), lambda: None))
        for _ in range(options.streams)
    ]
    for stream in streams:
        await stream.begun.wait()
    print("open", flush=True)
    await asyncio.sleep(3600)


async def _open(port: int, stream: Stream) -> Stream:
    await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", port)
    return stream


def _request(options: argparse.Namespace) -> bytes:
    text = "Count from one to two hundred, please."
    body = {
        "model": options.model,
        "stream": True,
        "messages": [{"role": "user", "content": text}],
        "bench": {"chunks": options.chunks, "gap_ms": options.gap_ms},
    }
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: 127.0.0.1:{options.port}",
        f"authorization: Bearer {options.key}",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.client", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--gap-ms", type=float, default=0)
    parser.add_argument("--hold", action="store_true", help="open them and keep them open")
    return parser.parse_args(arguments)


def main() -> int:
    """Run; exit code 1 if a stream was wrong."""
    options = parse_options()
    raise_file_limit()
    if options.hold:
        uvloop.run(hold_open(options))
        return 0
    result = uvloop.run(run(options))
    print(json.dumps(result))
    return 0 if result["good"] == options.streams else 1


if __name__ == "__main__":
    sys.exit(main())
