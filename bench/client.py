"""Many streams at once, each checked: every chunk, in order, and one `[DONE]`.

    python -m bench.client --port 8080 --model bench/x --streams 1000 --at-once 1000 --chunks 20

Prints one JSON object. What arrives is kept as it is and checked when all have ended, so that
checking takes no time from the streams that run. A connection is used again, as the SDKs do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.process import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTENT: Final = re.compile(rb'"content":"(\d{6}) ')
_FIRST: Final = b'"content":"000000 '
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
    try:
        body = _dechunked(rest)
    except ValueError:
        raise WrongStream(f"the body is cut: {rest[-80:]!r}") from None
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


@dataclass(eq=False, slots=True)
class Answer:
    """What came of one request.

    Attributes:
        received: the response as it was on the wire.
        first_after_s: from the request to the first chunk with content.
    """

    received: bytearray = field(default_factory=bytearray)
    first_after_s: float | None = None


class Connection(asyncio.Protocol):
    """One connection, which asks again until `left` is empty.

    Attributes:
        begun: set when the first answer has its first content.
        ended: set when the connection is closed.
    """

    def __init__(self, request: bytes, left: list[Answer]) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._request = request
        self._left = left
        self._answer = Answer()
        self._asked_at = 0.0
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's has not the ancestor
        self._ask()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        answer.received += data
        if answer.first_after_s is None and _FIRST in answer.received:
            answer.first_after_s = time.monotonic() - self._asked_at
            self.begun.set()
        if answer.received.endswith(_END):
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def _ask(self) -> None:
        assert self._transport is not None
        if not self._left or _closes(self._answer.received):
            self._transport.close()
            return
        self._answer = self._left.pop()
        self._asked_at = time.monotonic()
        self._transport.write(self._request)


def _closes(received: bytearray) -> bool:
    return b"\r\nconnection: close\r\n" in received.partition(b"\r\n\r\n")[0].lower() + b"\r\n"


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all streams, `at_once` at a time, and return what came of them."""
    request = _request(options)
    answers = [Answer() for _ in range(options.streams)]
    left = answers[::-1]

    async def one_after_the_other(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while left:
            connection = await _open(options.port, Connection(request, left))
            await connection.ended.wait()

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(options.at_once):
            delay_s = options.ramp_s * number / options.at_once
            group.create_task(one_after_the_other(delay_s))
    elapsed_s = time.monotonic() - started
    wrong = []
    for answer in answers:
        try:
            check(bytes(answer.received), options.chunks)
        except WrongStream as error:
            wrong.append(str(error))
    firsts = sorted(a.first_after_s * 1000 for a in answers if a.first_after_s is not None)
    good = options.streams - len(wrong)
    return {
        "good": good,
        "wrong": wrong[:5],
        "chunks": good * options.chunks,
        "elapsed_s": round(elapsed_s, 3),
        "ttft_ms": {str(p): round(_percentile(firsts, p), 2) for p in (50, 99)} if firsts else {},
    }


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """By the nearest rank."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def hold_open(options: argparse.Namespace) -> None:
    """Open streams, print a line when each has had its first chunk, and wait to be ended."""
    request = _request(options)
    streams = [
        await _open(options.port, Connection(request, [Answer()])) for _ in range(options.streams)
    ]
    for stream in streams:
        await stream.begun.wait()
    print("open", flush=True)
    await asyncio.sleep(3600)


async def _open(port: int, connection: Connection) -> Connection:
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
    return connection


def _request(options: argparse.Namespace) -> bytes:
    text = "Count from one to two hundred, please."
    body = {
        "model": options.model,
        "stream": True,
        "messages": [{"role": "user", "content": text}],
        "bench": {
            "chunks": options.chunks,
            "gap_ms": options.gap_ms,
            "one_write": options.one_write,
        },
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
    parser.add_argument("--one-write", action="store_true", help="the whole answer at once")
    parser.add_argument("--ramp-s", type=float, default=0, help="over which the first ones begin")
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
