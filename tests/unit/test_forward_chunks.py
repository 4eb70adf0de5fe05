"""The short way for a read that is one HTTP chunk does what aiohttp's parser would do."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.streams import StreamReader
from hypothesis import given
from hypothesis import strategies as st

from relay.upstreams.connections import ForwardedContent, Forwarding, UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that sends nothing and knows whether it was closed."""

    closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ByTheParser(Forwarding):
    """Takes every read on the long way."""

    __slots__ = ()

    between_chunks = property(lambda _: False, lambda *_: None)


async def forwarded(
    reads: Sequence[bytes], kind: type[Forwarding] = Forwarding
) -> tuple[list[bytes], bool, str, int]:
    """Return what was pushed for each read, whether the body ended, the error that a reader of the
    body would see, and how many reads the parser saw.
    """
    connection = UpstreamConnection(asyncio.get_running_loop())
    wire = Wire()
    connection.connection_made(wire)
    connection.set_response_params(read_until_eof=True)
    connection.data_received(HEAD)
    message: Any
    content: Any
    message, content = await connection.read()
    assert message.code == 200
    assert type(content) is StreamReader
    pushed: list[bytes] = []
    parsed: list[bytes] = []

    class Counted(ForwardedContent):
        __slots__ = ()

        def feed_data(self, data: bytes, size: int = 0) -> bool:
            parsed.append(data)
            return super().feed_data(data, size)

    def push(data: bytes) -> bool:
        pushed.append(data)
        return True

    forwarding = kind(push, 1 << 20, wire)
    connection.forwarding = forwarding
    content.__class__ = Counted
    for read in reads:
        if not wire.closed and not content.is_eof():
            connection.data_received(read)
    error = content.exception() or connection.exception()
    return pushed, content.is_eof(), type(error).__name__, len(parsed)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_the_parser_sees_no_read_that_is_one_chunk_behind_another() -> None:
    events = [b"data: %d\n\n" % n for n in range(100)]
    pushed, ended, _, parsed = await forwarded([*map(chunk, events), b"0\r\n\r\n"])
    assert pushed == events
    assert ended
    assert parsed == 1  # the first, behind which it is known where the parser stands


@pytest.mark.parametrize(
    "read",
    [
        b"0\r\n\r\n",
        b"3\r\nabc",
        b"3\r\nabc\r\n3\r\nabc\r\n",
        b"003\r\nabc\r\n",
        b"3;x\r\nabc\r\n",
        b"4\r\nabc\r\n",
        b"2\r\nabc\r\n",
        b"+3\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"1_0\r\nabcdefghijklmnop\r\n",
        b"A\r\nabcdefghij\r\n",
        b"1F\r\n" + b"x" * 31 + b"\r\n",
        b"\r\n3\r\nabc\r\n",
        b"3\nabc\n",
        b"\r\n",
        b"-1\r\n\r\n",
        b"fffff\r\nabc\r\n",
    ],
)
async def test_one_read_behind_a_chunk(read: bytes) -> None:
    """Whatever it is, and whatever follows: as the parser has it."""
    for reads in ([chunk(b"x"), read], [chunk(b"x"), read, chunk(b"\r\n"), b"0\r\n\r\n"]):
        assert (await forwarded(reads))[:3] == (await forwarded(reads, ByTheParser))[:3]


async def test_a_head_that_is_cut_is_no_place_between_chunks() -> None:
    """The second read looks like a whole chunk, and is in the extension and data of another."""
    reads = [chunk(b"x") + b"1f;a", b"5\r\nabcde\r\n", b"y" * 24 + b"\r\n", b"0\r\n\r\n"]
    pushed, ended, error, _ = await forwarded(reads)
    assert pushed == [b"x", b"abcde\r\n", b"y" * 24]
    assert (ended, error) == (True, "NoneType")


DATA = st.binary(min_size=1, max_size=20) | st.sampled_from(
    [b"\r\n", b"1\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"\n", b"x" * 300, b"x" * 70_000]
)
SIZES = st.sampled_from(["%x", "%X", "0%x", "%x;a=b", "%x ", "%x\t;a"])


@given(
    st.lists(st.tuples(DATA, SIZES), min_size=1, max_size=8),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nt: 1\r\n\r\n", b"00\r\n\r\n", b"", b"zz\r\n", b"\r\n"]),
    st.sets(st.integers(1, 200)),
    st.booleans(),
)
async def test_however_the_body_is_cut(
    chunks: list[tuple[bytes, str]], end: bytes, cuts: set[int], whole: bool
) -> None:
    parts = [(size % len(data)).encode() + b"\r\n" + data + b"\r\n" for data, size in chunks]
    parts.append(end)
    if whole:  # the cuts join parts, so that many reads are whole chunks
        reads: list[bytes] = []
        for n, part in enumerate(parts):
            if n in cuts and reads:
                reads[-1] += part
            else:
                reads.append(part)
    else:
        body = b"".join(parts)
        places = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
        reads = [body[a:b] for a, b in itertools.pairwise(places)]
    reads = [read for read in reads if read]
    short, long = await forwarded(reads), await forwarded(reads, ByTheParser)
    assert short[:3] == long[:3]
