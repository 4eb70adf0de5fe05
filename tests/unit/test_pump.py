"""The pump gives way, and ends what an upstream does not end (M3.4, M4.1)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkRewriter
from relay.lifecycle import Lifecycle, Outcome, StreamInput
from relay.pump import Discard, pump
from relay.redact import Redactor
from relay.stream import StreamRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHUNK = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},'
    b'"finish_reason":%s}]}\n\n'
)


class Reply:
    """An upstream that always has data at once: a compressed body, for one."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, *reads: bytes, then: bytes | None) -> None:
        self._reads = list(reads)
        self._then = then
        self.count = 0

    async def read(self) -> bytes:
        self.count += 1
        if self._reads:
            return self._reads.pop(0)
        if self._then is None:
            await asyncio.Event().wait()
        return self._then or b""

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """Nothing is pushed."""

    def abort(self) -> None:
        """Nothing to close."""

    async def release(self) -> None:
        """Nothing to give back."""


def relay() -> StreamRelay:
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="m", provider="p", id="x", created=1)
    return StreamRelay(
        translator=ChunkRewriter(identity),
        lifecycle=life,
        redactor=Redactor(),
        max_event_bytes=1 << 20,
    )


def nothing() -> None:
    """Told of the first bytes."""


async def test_data_without_end_starves_nobody_and_a_hang_up_is_seen() -> None:
    reply = Reply(then=b": nothing to tell\n\n")
    task = asyncio.create_task(pump(reply, relay(), Discard(), nothing))
    for _ in range(50):  # each turn of the loop is ours too
        await asyncio.sleep(0)
    assert 50 <= reply.count <= 50 * 5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_data_that_is_pushed_without_end_starves_nobody() -> None:
    """A turn is short, for what came in it may be pushed as well as read."""

    class Pushing(Reply):
        async def forward(self, push: Callable[[bytes], bool]) -> None:
            self.count += 1
            assert push(CHUNK % b"null")

    reply = Pushing(then=CHUNK % b"null")
    task = asyncio.create_task(pump(reply, relay(), Discard(), nothing))
    await asyncio.sleep(0)
    for _ in range(50):
        before = reply.count
        await asyncio.sleep(0)
        assert reply.count - before <= 8  # a read and a push each
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_silence_after_the_last_finish_reason_is_an_end() -> None:
    target = relay()
    reply = Reply(CHUNK % b'"stop"', then=None)
    await asyncio.wait_for(pump(reply, target, Discard(), nothing, finish_grace_s=0.02), 5)
    assert target.outcome is Outcome.COMPLETED


async def test_comments_after_the_last_finish_reason_do_not_put_it_off() -> None:
    target = relay()
    reply = Reply(CHUNK % b'"stop"', then=b": still here\n\n")
    await asyncio.wait_for(pump(reply, target, Discard(), nothing, finish_grace_s=0.02), 5)
    assert target.outcome is Outcome.COMPLETED


class Forwarded(Reply):
    """An upstream whose bytes are pushed as they come; `last` are the last, then it is silent."""

    def __init__(self, first: bytes, *last: bytes) -> None:
        super().__init__(first, then=None)
        self._last = last

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        for data in self._last:
            if not push(data):
                return
            await asyncio.sleep(0)
        await asyncio.Event().wait()


async def test_silence_after_a_finish_reason_that_was_pushed_is_an_end() -> None:
    target = relay()
    reply = Forwarded(CHUNK % b"null", CHUNK % b"null", CHUNK % b'"stop"')
    await asyncio.wait_for(pump(reply, target, Discard(), nothing, finish_grace_s=0.02), 5)
    assert target.outcome is Outcome.COMPLETED
    assert reply.count == 1  # what followed was awaited where it is pushed


async def test_comments_that_are_pushed_after_a_finish_reason_do_not_put_it_off() -> None:
    target = relay()
    reply = Forwarded(CHUNK % b"null", CHUNK % b'"stop"', *([b": still here\n\n"] * 1_000_000))
    await asyncio.wait_for(pump(reply, target, Discard(), nothing, finish_grace_s=0.02), 5)
    assert target.outcome is Outcome.COMPLETED


async def test_the_end_after_a_finish_reason_is_pushed() -> None:
    target = relay()
    reply = Forwarded(CHUNK % b"null", CHUNK % b'"stop"', b"data: [DONE]\n\n")
    await asyncio.wait_for(pump(reply, target, Discard(), nothing), 5)
    assert target.outcome is Outcome.COMPLETED


async def test_an_answer_that_is_not_complete_may_be_silent() -> None:
    task = asyncio.create_task(
        pump(Forwarded(CHUNK % b"null"), relay(), Discard(), nothing, finish_grace_s=0.02)
    )
    await asyncio.sleep(0.2)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_first_bytes_are_told_once() -> None:
    told: list[int] = []
    reply = Reply(b": c\n\n", CHUNK % b"null", CHUNK % b'"stop"', then=b"")
    await pump(reply, relay(), Discard(), lambda: told.append(reply.count))
    assert told == [2]
