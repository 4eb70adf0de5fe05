"""D2.2: what came from a client stays in order, and what waits is bounded."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import pytest

from encoders.decision_messages import Malformed
from planes.decision import inbox as module
from planes.decision.frames import Message, Ping, Violation
from planes.decision.inbox import Inbox
from planes.decision.wire import GONE, Arrival, Wire

if TYPE_CHECKING:
    from encoders.decision_messages import Incoming

LARGE = Message(b"x" * 100_000)
SMALL = Message(b"y")
LIMIT = 250_000
DECODER = ThreadPoolExecutor(1)


class FakeWire:
    pending_bytes = 0
    stopped = False

    def stop_reading(self) -> None:
        self.stopped = True


class Taken:
    """An inbox on a wire that is not there, and what it has given."""

    def __init__(self) -> None:
        self.wire = FakeWire()
        self.taken: list[Arrival] = []
        self.decoded: list[bool] = []
        self.inbox = Inbox(
            cast("Wire", self.wire), max_bytes=LIMIT, take=self._take, decoder=DECODER
        )
        self.work: asyncio.Task[None] | None = None

    def _take(self, arrival: Arrival, incoming: Incoming | None) -> None:
        self.taken.append(arrival)
        self.decoded.append(incoming is not None)

    def put(self, *arrivals: Arrival) -> None:
        for arrival in arrivals:
            if self.inbox.put(arrival):
                self.work = asyncio.ensure_future(self.inbox.work())


async def test_small_things_are_taken_at_once() -> None:
    box = Taken()
    box.put(SMALL, Ping(b""), GONE)
    assert box.taken == [SMALL, Ping(b""), GONE]
    assert box.work is None


async def test_what_comes_behind_a_large_message_waits() -> None:
    box = Taken()
    box.put(SMALL, LARGE, SMALL, Ping(b""), LARGE, GONE)
    assert box.taken == [SMALL]
    assert box.work is not None
    await box.work
    assert box.taken == [SMALL, LARGE, SMALL, Ping(b""), LARGE, GONE]
    assert box.decoded == [False, True, False, False, True, False]
    box.put(SMALL)
    assert box.taken[-1] is SMALL


async def test_decoding_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_is_free, went_on = threading.Event(), []

    def slow(data: bytes) -> Incoming:
        went_on.append(loop_is_free.wait(10))
        return Malformed()

    monkeypatch.setattr(module, "decode", slow)
    box = Taken()
    box.put(LARGE)
    await asyncio.sleep(0)
    loop_is_free.set()
    assert box.work is not None
    await box.work
    assert went_on == [True]


async def test_the_collector_rests_while_a_large_message_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def note(data: bytes) -> Incoming:
        seen.append(gc.isenabled())
        return Malformed()

    monkeypatch.setattr(module, "decode", note)
    box = Taken()
    box.put(LARGE)
    assert box.work is not None
    await box.work
    assert (seen, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize("pending", [0, 60_000])
async def test_too_many_bytes_that_wait_are_1009(pending: int) -> None:
    """The message that is being decoded does not count; the one that is not whole yet does."""
    box = Taken()
    box.wire.pending_bytes = pending
    box.put(LARGE)
    await asyncio.sleep(0)  # it is being decoded
    box.put(LARGE)
    assert box.taken == []
    box.put(LARGE)
    if not pending:
        assert box.taken == []
        box.put(LARGE)
    assert [type(a) for a in box.taken] == [Violation]
    assert isinstance(box.taken[0], Violation)
    assert box.taken[0].code == 1009
    assert box.wire.stopped


async def test_too_many_things_that_wait_are_1008() -> None:
    box = Taken()
    box.put(LARGE)
    await asyncio.sleep(0)
    box.put(*[Ping(b"")] * 1024)
    assert box.taken == []
    box.put(Ping(b""))
    assert [a.code for a in box.taken if isinstance(a, Violation)] == [1008]
