"""M3.3: what is known of a stream before anything of it is sent. Cases B54, B60."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.shapes import SHAPES
from relay.errors import (
    ProviderCredentials,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamStalled,
    UpstreamTruncated,
    UpstreamUnavailable,
)
from relay.peek import PEEK_BYTES_MAX, peek
from relay.redact import Redactor
from relay.replies import Resumed, Watched
from relay.routing import Provider
from relay.upstreams.unavailable import UnavailableUpstream
from tests.support.clock import in_virtual_time
from tests.support.script import DONE, PING, chunk, compact, sse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.upstreams.base import UpstreamReply

WAIT_S: Final = 0.05
BOUND_S: Final = 10 * WAIT_S
A: Final = sse(chunk("a", role="assistant"))
ERROR: Final = sse(b'{"error":{"message":"it says so"}}')
Read = bytes | float | Exception


class Scripted:
    """A reply whose reads are given: bytes, a silence in seconds, or an error; then its end."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, *reads: Read) -> None:
        self.left = list(reads)
        self.aborted = False

    async def read(self) -> bytes:
        while self.left:
            if isinstance(self.left[0], float):
                await asyncio.sleep(self.left[0])
                self.left.pop(0)
                continue
            given = self.left.pop(0)
            if isinstance(given, Exception):
                raise given
            assert isinstance(given, bytes)
            return given
        return b""

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    async def release(self) -> None:
        pass


class Flood(Scripted):
    """Comments without end, and always there."""

    async def read(self) -> bytes:
        return PING * 1000


async def look(
    reply: Scripted,
    *,
    peek_s: float | None = WAIT_S,
    first_byte_s: float | None = None,
    shape: str = "openai",
) -> UpstreamReply:
    provider = Provider(
        name="fake",
        upstream=UnavailableUpstream("fake", "never started"),
        shape=SHAPES[shape],
        peek_first_event_s=peek_s,
        redactor=Redactor(("s3cret!!",)),
    )
    async with asyncio.timeout(first_byte_s) as first_byte:
        return await peek(provider, reply, first_byte)


async def rest(reply: UpstreamReply) -> bytes:
    out = b""
    while data := await reply.read():
        out += data
    return out


@in_virtual_time
async def test_without_the_opt_ins_nothing_is_read() -> None:
    reply = Scripted(A)
    assert await look(reply, peek_s=None) is reply
    assert reply.left == [A]


@pytest.mark.parametrize(
    "reads",
    [
        [A, DONE],
        [A[:9], A[9:], DONE],
        [PING, A, DONE],
        [sse(chunk(None, choices=[])), A, DONE],
        [sse(b'{"type":"ping"}'), A, DONE],
        [b"retry: 7\n\n", A, DONE],
        [A.rstrip(b"\n")],
        [A + ERROR],
        [A, UpstreamTruncated("later")],
    ],
)
@in_virtual_time
async def test_a_stream_that_begins_is_handed_on_whole(reads: Sequence[Read]) -> None:
    """Whatever comes behind its first event."""
    reply = Scripted(*reads)
    opened = await look(reply)
    sent = b"".join(read for read in reads if isinstance(read, bytes))
    if isinstance(reads[-1], Exception):
        assert await opened.read() == sent
        with pytest.raises(UpstreamTruncated):
            await opened.read()
    else:
        assert await rest(opened) == sent


@pytest.mark.parametrize(
    ("reads", "kind", "told"),
    [
        ([ERROR], UpstreamError, "it says so"),
        ([PING, PING + ERROR], UpstreamError, "it says so"),
        ([sse(b'{"type":"message_start"}'), ERROR], UpstreamError, "it says so"),
        ([sse(chunk(None, choices=[])), ERROR + A], UpstreamError, "it says so"),
        ([b"event: error\n" + sse(b'{"message":"it says so"}')], UpstreamError, "it says so"),
        ([sse(chunk("", error={"message": "it says so"}))], UpstreamError, "it says so"),
        ([sse(b'{"error":{"message":"no s3cret!!"}}')], UpstreamError, "no "),
        ([sse(b'{"error":{"message":"m","code":429}}')], UpstreamRateLimited, "m"),
        ([sse(b'{"error":{"message":"m","code":401}}')], ProviderCredentials, ""),
        ([sse(b'{"error":{"message":"m","code":400}}')], UpstreamRefused, "m"),
        ([sse(b"not JSON")], UpstreamProtocolError, "not JSON"),
        ([DONE], UpstreamProtocolError, "without an answer"),
        ([PING, DONE], UpstreamProtocolError, "without an answer"),
        ([], UpstreamProtocolError, "without an answer"),
        ([PING, PING], UpstreamProtocolError, "without an answer"),
        ([b"data: {"], UpstreamProtocolError, "without an answer"),
        ([UpstreamTruncated("reset")], UpstreamTruncated, "reset"),
        ([PING, b"data: {", UpstreamTruncated("reset")], UpstreamTruncated, "reset"),
    ],
)
@in_virtual_time
async def test_a_stream_that_fails_before_it_begins(
    reads: Sequence[Read], kind: type[UpstreamError], told: str
) -> None:
    with pytest.raises(UpstreamError) as failed:
        await look(Scripted(*reads), peek_s=5.0)
    assert type(failed.value) is kind
    assert told in failed.value.message
    assert "s3cret" not in f"{failed.value.message} {failed.value.raw}"
    assert failed.value.fails_over is (kind is not UpstreamRefused)


@pytest.mark.parametrize("before", [[], [PING], [A[:9]], [sse(b'{"type":"ping"}')]])
@in_virtual_time
async def test_a_slow_stream_is_no_broken_one(before: list[Read]) -> None:
    """B54: when its time is over it is taken as it is, and what was read comes first."""
    reply = Scripted(*before, 4 * WAIT_S, A, DONE)
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(BOUND_S):
        opened = await look(reply)
    assert 0.8 * WAIT_S < asyncio.get_running_loop().time() - started < 3 * WAIT_S
    assert await rest(opened) == b"".join(r for r in before if isinstance(r, bytes)) + A + DONE


@in_virtual_time
async def test_comments_do_not_lengthen_the_peek() -> None:
    reads: list[Read] = [PING, WAIT_S / 10]
    reply = Scripted(*reads * 100)
    async with asyncio.timeout(BOUND_S):
        await look(reply)
    assert len(reply.left) > 100


async def test_comments_that_are_always_there_let_its_time_come() -> None:
    """As of a compressed body that holds nothing else. (In real time: nothing waits here.)"""
    async with asyncio.timeout(BOUND_S):
        opened = await look(Flood())
    assert await opened.read() == b"\n", "comments pass nowhere: they are not kept"
    assert await opened.read() == PING * 1000
    with pytest.raises(TimeoutError):
        await look(Flood(), peek_s=None, first_byte_s=WAIT_S)


@in_virtual_time
async def test_the_peek_is_bounded_in_bytes() -> None:
    """B54: a first event larger than that is handed on as it is."""
    large = sse(chunk("x" * 4 * PEEK_BYTES_MAX))
    pieces = [large[at : at + 8192] for at in range(0, len(large), 8192)]
    reply = Scripted(*pieces, ERROR)
    opened = await look(reply, peek_s=5.0)
    assert len(reply.left) > len(pieces) // 2
    assert await rest(opened) == large + ERROR


# --- other shapes ---------------------------------------------------------------------------------


def message_event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + sse(compact({"type": kind} | fields))


START: Final = message_event("message_start", message={"usage": {"input_tokens": 3}})
MESSAGE_PING: Final = message_event("ping")
BLOCK: Final = message_event("content_block_start", index=0, content_block={"type": "text"})
TEXT: Final = message_event(
    "content_block_delta", index=0, delta={"type": "text_delta", "text": "Hi"}
)
OVERLOADED: Final = message_event(
    "error", error={"type": "overloaded_error", "message": "Overloaded"}
)
CANDIDATE: Final = sse(compact({"candidates": [{"content": {"parts": [{"text": "Hi"}]}}]}))
METADATA: Final = sse(compact({"usageMetadata": {"promptTokenCount": 3}}))
EXHAUSTED: Final = sse(compact({"error": {"code": 429, "message": "Quota", "status": "X"}}))


@pytest.mark.parametrize(
    ("shape", "reads", "kind"),
    [
        ("anthropic", [START, MESSAGE_PING, OVERLOADED], UpstreamUnavailable),
        ("anthropic", [START, MESSAGE_PING, BLOCK, OVERLOADED], UpstreamUnavailable),
        ("anthropic", [START, UpstreamTruncated("reset")], UpstreamTruncated),
        ("anthropic", [START, MESSAGE_PING], UpstreamProtocolError),
        ("gemini", [METADATA, EXHAUSTED], UpstreamRateLimited),
        ("gemini", [METADATA], UpstreamProtocolError),
    ],
)
@in_virtual_time
async def test_what_precedes_an_answer_is_none(
    shape: str, reads: list[Read], kind: type[UpstreamError]
) -> None:
    """B54: message_start, pings and usage; what the error means is its status."""
    with pytest.raises(UpstreamError) as failed:
        await look(Scripted(*reads), peek_s=5.0, shape=shape)
    assert type(failed.value) is kind


@pytest.mark.parametrize(
    ("shape", "reads"),
    [
        ("anthropic", [START, MESSAGE_PING, BLOCK, TEXT, OVERLOADED]),
        ("gemini", [METADATA, CANDIDATE, EXHAUSTED]),
    ],
)
@in_virtual_time
async def test_an_answer_of_another_shape_is_handed_on(shape: str, reads: list[bytes]) -> None:
    reply = Scripted(*reads)
    opened = await look(reply, peek_s=5.0, shape=shape)
    assert reply.left == reads[-1:], "no more is read than is needed"
    assert await rest(opened) == b"".join(reads)


# --- the first byte -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"d", b"event: x", b"\xef\xbb\xbfd", b"\n\nd", b"\r: c\rd"])
@in_virtual_time
async def test_a_byte_that_is_not_of_a_comment_is_the_first(first: bytes) -> None:
    reply = Scripted(first, 4 * WAIT_S, A)
    opened = await look(reply, peek_s=None, first_byte_s=WAIT_S)
    assert await rest(opened) == first + A


@pytest.mark.parametrize(
    "reads", [[], [PING], [b": a very long com"], [b"\n\n"], [b"\xef\xbb\xbf:"], [b":\r", b"\n: "]]
)
@in_virtual_time
async def test_neither_silence_nor_comments_are(reads: list[Read]) -> None:
    """B60."""
    reply = Scripted(*reads, 4 * WAIT_S, A)
    with pytest.raises(TimeoutError):
        await look(reply, peek_s=None, first_byte_s=WAIT_S)


@in_virtual_time
async def test_a_first_byte_that_never_comes_is_a_failure() -> None:
    with pytest.raises(UpstreamProtocolError, match="without an answer"):
        await look(Scripted(PING), peek_s=None, first_byte_s=5.0)


@in_virtual_time
async def test_without_a_peek_an_error_event_is_handed_on() -> None:
    opened = await look(Scripted(ERROR), peek_s=None, first_byte_s=5.0)
    assert await rest(opened) == ERROR


@in_virtual_time
async def test_the_peek_goes_on_after_the_first_byte_and_the_other_way_round() -> None:
    """Each of the two has a time of its own."""
    ping = sse(b'{"type":"ping"}')
    with pytest.raises(UpstreamError, match="it says so"):
        await look(Scripted(ping[:3], 2 * WAIT_S, ping[3:], ERROR), peek_s=5.0, first_byte_s=WAIT_S)
    with pytest.raises(TimeoutError):
        await look(Scripted(PING, 5.0), peek_s=WAIT_S, first_byte_s=2 * WAIT_S)
    opened = await look(Scripted(PING, 2 * WAIT_S, A), peek_s=WAIT_S, first_byte_s=5.0)
    assert await rest(opened) == PING + A


@in_virtual_time
async def test_a_line_behind_many_comments_is_not_the_beginning() -> None:
    """Where comments were dropped, a byte order mark behind them is still none."""
    reads = [PING * 1000, b"\xef\xbb\xbf" + A, A]
    assert (await rest(await look(Scripted(*reads), peek_s=5.0))) == b"\n" + reads[1] + A


# --- whatever is sent -----------------------------------------------------------------------------

PARTS: Final = st.lists(
    st.sampled_from([PING, A, ERROR, DONE, b":\r\n", b"\n", b"retry: 1\n\n", PING * 800]),
    max_size=6,
)


@given(st.sampled_from([b"", b"\xef\xbb\xbf"]), PARTS, st.data())
def test_how_a_stream_is_cut_changes_nothing(
    mark: bytes, parts: list[bytes], data: st.DataObject
) -> None:
    sent = mark + b"".join(parts)
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(sent) - 1)), max_size=8)))
    ends = [0, *places, len(sent)]
    pieces = [sent[a:b] for a, b in pairwise(ends) if sent[a:b]]

    async def outcome(*reads: bytes) -> bytes | str:
        try:
            read = await rest(await look(Scripted(*reads), peek_s=5.0, first_byte_s=5.0))
        except UpstreamError as error:
            return error.message
        assert sent.endswith(read), "nothing is lost but at the beginning"
        assert not sent[: len(sent) - len(read)].strip(mark + b"\r\n: ping"), "and only comments"
        return "begun"

    whole = asyncio.run(outcome(sent) if sent else outcome())
    assert asyncio.run(outcome(*pieces)) == whole
    begins = min((sent.find(part) for part in (ERROR, DONE, A) if part in sent), default=-1)
    assert (whole == "begun") is (begins >= 0 and sent[begins:].startswith(A))


# --- the other wrappers ---------------------------------------------------------------------------


@in_virtual_time
async def test_a_resumed_reply_without_bytes_is_not_at_its_end() -> None:
    assert await rest(Resumed(Scripted(b"x"), b"")) == b"x"


@in_virtual_time
async def test_a_silence_ends_a_watched_stream_and_its_connection() -> None:
    """B76: each silence by itself; whatever comes ends it."""
    reply = Scripted(A, WAIT_S / 2, PING, WAIT_S / 2, PING, WAIT_S / 2, PING, 60.0)
    watched = Watched(reply, "fake", WAIT_S)
    for expected in (A, PING, PING, PING):
        assert await watched.read() == expected
    with pytest.raises(UpstreamStalled, match=r"fake sent nothing for 0\.05 s"):
        await watched.read()
    assert reply.aborted


class Pushing(Scripted):
    """As a connection that pushes: each read goes to `push` when its time has come."""

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        while self.left and push(await self.read()):
            pass
        if not self.left:
            await asyncio.sleep(60.0)


@in_virtual_time
async def test_a_silence_ends_what_is_pushed() -> None:
    """Each push is a sound; then `read` tells of the silence, as of a death."""
    reply = Pushing(A, WAIT_S / 2, PING, WAIT_S / 2, PING, WAIT_S / 2, A)
    watched, pushed = Watched(reply, "fake", WAIT_S), []

    def push(data: bytes) -> bool:
        pushed.append(data)
        return True

    await watched.forward(push)
    assert pushed == [A, PING, PING, A]
    with pytest.raises(UpstreamStalled):
        await watched.read()
    assert reply.aborted


@in_virtual_time
async def test_a_client_that_is_slow_ends_the_pushing_and_no_more() -> None:
    reply = Pushing(A, A)
    watched = Watched(reply, "fake", WAIT_S)
    await watched.forward(lambda data: False)
    await asyncio.sleep(2 * WAIT_S)
    assert await watched.read() == A


@in_virtual_time
async def test_what_is_held_is_read_before_anything_is_pushed() -> None:
    resumed = Resumed(Pushing(A), b"held")
    await resumed.forward(lambda data: pytest.fail(f"{data!r} came first"))
    assert await resumed.read() == b"held"
