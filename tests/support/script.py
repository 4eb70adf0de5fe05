"""What a scripted provider can do, step by step, and the bodies it usually sends.

`tests.support.fake_upstream` plays these on its connections and hands all of them on: import them
from there.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, Protocol, assert_never

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


# --- the steps of a script ------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """Status line and headers. A `content-length` in `headers` beats the computed one."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    framing: Literal["chunked", "close", "length"] = "chunked"


@dataclass(frozen=True)
class Send:
    """Body bytes: one HTTP chunk, or as they are under the other framings; one packet each."""

    data: bytes


@dataclass(frozen=True)
class Raw:
    """Exact bytes on the socket, whatever the framing."""

    data: bytes


@dataclass(frozen=True)
class Sleep:
    """Silence for a while."""

    seconds: float


@dataclass(frozen=True)
class Wait:
    """Silence until the test sets the event."""

    event: asyncio.Event


@dataclass(frozen=True)
class Flood:
    """`count` times the same block, each drained: `bytes_written` stops where the peer's does."""

    block: bytes
    count: int


@dataclass(frozen=True)
class Pings:
    """`n` SSE comments, one each `interval_s`, the first at once."""

    n: int
    interval_s: float


@dataclass(frozen=True)
class Eof:
    """The clean end: the zero chunk, the promised length, or FIN where FIN is the end."""


@dataclass(frozen=True)
class Fin:
    """FIN with no terminating chunk; the connection is then read until the peer closes too."""


@dataclass(frozen=True)
class Rst:
    """A connection reset, sent after everything written before has left."""


Step = Head | Send | Raw | Sleep | Wait | Flood | Pings | Eof | Fin | Rst


def completed(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The script with the head and the end that a test may leave out."""
    out = list(steps)
    if not out or not isinstance(out[-1], Eof | Fin | Rst):
        out.append(Eof())
    for at, step in enumerate(out):
        if isinstance(step, Send | Flood | Pings | Eof):
            out.insert(at, Head())
        if not isinstance(step, Sleep | Wait):
            break
    return tuple(out)


def body_length(steps: Sequence[Step]) -> int:
    """How many body bytes the script sends."""
    total = 0
    for step in steps:
        if isinstance(step, Send):
            total += len(step.data)
        elif isinstance(step, Flood):
            total += len(step.block) * step.count
        elif isinstance(step, Pings):
            total += len(PING) * step.n
    return total


# --- playing --------------------------------------------------------------------------------------


class Line(Protocol):
    """A connection, as a script sees it."""

    async def write(self, data: bytes) -> None:
        """Writes and waits until it is gone."""

    def finish(self) -> None:
        """Sends FIN."""

    async def reset(self) -> None:
        """Sends RST."""


class Player:
    """Plays one script on one connection."""

    def __init__(self, line: Line, steps: tuple[Step, ...]) -> None:
        self._line = line
        self._steps = steps
        self._framing: str | None = None  # None: no Head yet, the test frames by itself

    async def do(self, step: Step) -> None:
        """Does one step."""
        match step:
            case Head():
                await self._head(step)
            case Send(data):
                await self._body(data)
            case Raw(data):
                await self._line.write(data)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Wait(event):
                await event.wait()
            case Flood(block, count):
                for _ in range(count):
                    await self._body(block)
            case Pings(n, interval_s):
                await self._pings(n, interval_s)
            case Eof():
                await self._eof()
            case Fin():
                self._line.finish()
            case Rst():
                await self._line.reset()
            case _:
                assert_never(step)

    async def _head(self, head: Head) -> None:
        self._framing = head.framing
        usual = "text/event-stream" if head.status == 200 else "application/json"
        headers = {"content-type": usual} | {k.lower(): v for k, v in head.headers.items()}
        if head.framing == "chunked":
            headers["transfer-encoding"] = "chunked"
        elif head.framing == "close":
            headers["connection"] = "close"
        else:
            headers.setdefault("content-length", str(body_length(self._steps)))
        lines = [f"HTTP/1.1 {head.status} {_reason(head.status)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        raw = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        await self._line.write(raw)

    async def _body(self, data: bytes) -> None:
        # An empty chunk would be the end of the body.
        if self._framing == "chunked":
            data = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
        await self._line.write(data)

    async def _pings(self, n: int, interval_s: float) -> None:
        for number in range(n):
            if number:
                await asyncio.sleep(interval_s)
            await self._body(PING)

    async def _eof(self) -> None:
        if self._framing == "chunked":
            await self._line.write(b"0\r\n\r\n")
        elif self._framing == "close":
            self._line.finish()


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


# --- bodies ---------------------------------------------------------------------------------------


def chunk(
    content: str | None,
    *,
    index: int = 0,
    role: str | None = None,
    finish_reason: str | None = None,
    delta: Mapping[str, object] | None = None,
    **extra: object,
) -> bytes:
    """One `chat.completion.chunk` as JSON.

    Args:
        content: None leaves it out of the delta.
        delta: more fields of the delta.
        extra: top-level fields, also in place of the usual ones (`choices=[]`, `usage={…}`).
    """
    parts: dict[str, object] = {}
    if role is not None:
        parts["role"] = role
    if content is not None:
        parts["content"] = content
    parts |= delta or {}
    choice = {"index": index, "delta": parts, "logprobs": None, "finish_reason": finish_reason}
    return compact(
        {
            "id": "chatcmpl-fake",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "upstream-model",
            "system_fingerprint": "fp_fake",
            "choices": [choice],
        }
        | extra
    )


def compact(value: object) -> bytes:
    """JSON with no spaces and non-ASCII as it is, as providers send it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def sse(data: bytes | str) -> bytes:
    """One SSE event with that data; every line of it gets its own `data:`."""
    raw = data.encode() if isinstance(data, str) else data
    return b"".join(b"data: " + line + b"\n" for line in raw.split(b"\n")) + b"\n"


def openai_stream(
    words: Iterable[str], *, finish: str | None = "stop", usage: bool = True, done: bool = True
) -> list[Send]:
    """A whole answer: primer, one chunk a word, finish, usage, `[DONE]`; each its own packet."""
    said = list(words)
    events = [chunk("", role="assistant"), *(chunk(word) for word in said)]
    if finish is not None:
        events.append(chunk(None, finish_reason=finish))
    if usage:
        count = {"prompt_tokens": 7, "completion_tokens": len(said), "total_tokens": 7 + len(said)}
        events.append(chunk(None, choices=[], usage=count))
    sends = [Send(sse(event)) for event in events]
    return [*sends, Send(DONE)] if done else sends


def json_answer(payload: object, *, status: int = 200, **headers: str) -> list[Step]:
    """A plain JSON answer with its length; `retry_after="3"` becomes `retry-after: 3`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    head = Head(status, {"content-type": "application/json"} | named, "length")
    return [head, Send(compact(payload)), Eof()]


def cut(data: bytes, *positions: int) -> list[bytes]:
    """The data in pieces, cut before each of the positions (negative ones count from the end)."""
    places = sorted(at if at >= 0 else len(data) + at for at in positions)
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    """The data in two pieces, in every way."""
    for at in range(1, len(data)):
        yield cut(data, at)


def spaced(parts: Iterable[bytes], gap_s: float = 0.02) -> list[Step]:
    """A `Send` for each part with a pause before the next: two reads on the other side."""
    steps: list[Step] = []
    for part in parts:
        steps += [Sleep(gap_s), Send(part)] if steps else [Send(part)]
    return steps
