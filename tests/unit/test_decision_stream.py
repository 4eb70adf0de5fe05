"""D3.9, D3.10, D5.7: what a stream does when something fails that no peer can bring about."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

from encoders.decision_errors import DecisionError, error
from encoders.decision_served import ModelLimits, Served
from planes.auth import Principal
from planes.decision.dispatch import Account, Services
from planes.decision.frames import ClientClose, Message, Ping
from planes.decision.stream import Stream
from planes.decision.wire import GONE, Wire
from relay.deciders.base import DecisionReply
from relay.decisions.lease import Lease
from relay.decisions.limits import DecisionLimits
from relay.decisions.session import DecisionSession
from relay.inflight import InFlight
from tests.support.checks import until
from tests.support.clock import in_virtual_time
from tests.support.deciding import decide_service
from tests.support.decisions import MODEL, start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.stores.base import Store

DECODER = ThreadPoolExecutor(1)
LIMITS = DecisionLimits.of(
    {"close_handshake_timeout_ms": 200, "decision_settlement_timeout_ms": 300}
)


class FakeWire:
    """Takes what is written, as a kernel that is never full."""

    pending_bytes = 0
    reading_ended = False
    unsent = 0

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False
        self.half_closed = False

    def listen(self, peer: object) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.written += data

    def stop_reading(self) -> None:
        self.reading_ended = True

    def half_close(self) -> None:
        self.half_closed = True

    def abort(self) -> None:
        self.aborted = True

    async def flushed(self) -> None:
        pass

    @property
    def closes(self) -> list[int]:
        """Codes of the Close frames that were written."""
        found, at = [], 0
        while at < len(self.written):
            opcode, length = self.written[at] & 15, self.written[at + 1]
            head = 2 if length < 126 else 4
            if length == 126:
                length = int.from_bytes(self.written[at + 2 : at + 4], "big")
            if opcode == 8:
                found.append(int.from_bytes(self.written[at + head : at + head + 2], "big"))
            at += head + length
        return found


class FakeStore:
    async def start_decision(self, org: str, **_: Any) -> float:
        return 0.0

    async def lease_stream(self, *_: Any, **__: Any) -> None:
        return None

    async def renew_stream(self, *_: Any, **__: Any) -> bool:
        return True

    async def release_stream(self, stream_id: str) -> None:
        pass


class Backend:
    """Answers when it is let."""

    async def close(self) -> None:
        pass

    def __init__(self) -> None:
        self.began = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        self.began += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return DecisionReply(body=b"{}")


class Rig:
    """A stream without a peer."""

    def __init__(self, limits: DecisionLimits = LIMITS) -> None:
        self.wire = FakeWire()
        self.backend = Backend()
        self.inflight = InFlight()
        self.freed: list[str] = []
        self.principal: Principal | DecisionError = Principal(
            org="acme", key_id="k", max_concurrent=None
        )
        served = Served(models={MODEL: ModelLimits()}, media=())
        self.services = Services(
            limits=limits,
            store=cast("Store", FakeStore()),
            decider=decide_service(self.backend, served),
            inflight=self.inflight,
            decoder=DECODER,
        )
        account = Account(
            org="acme", request_id="req_1", stream_id="szws_1", current=lambda: self.principal
        )
        now = asyncio.get_running_loop().time()
        self.session = DecisionSession(limits, stream_id="szws_1", request_id="req_1", now=now)
        self.lease = Lease(cast("Store", FakeStore()), "acme", "szws_1", ttl_s=15.0, renew_s=5.0)
        self.stream = Stream(
            self.services, account, cast("Wire", self.wire), self.session, self.lease
        )
        held = ExitStack()
        held.callback(lambda: self.freed.append("settled"))
        self.stream.start(lambda: self.freed.append("place"), held)

    def say(self, message: dict[str, Any]) -> None:
        self.stream.arrived(Message(json.dumps(message).encode()))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.stream.close()


async def settled(rig: Rig) -> None:
    await until(lambda: "settled" in rig.freed)


@pytest.mark.parametrize("method", ["receive", "handle_timeout", "receive_control", "drain"])
async def test_a_fault_of_the_session_is_1011(
    rig: Rig, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3.9."""

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(DecisionSession, method, bug)
    match method:
        case "receive":
            rig.say(start())
        case "receive_control":
            rig.stream.arrived(Ping(b""))
        case "drain":
            rig.stream.drain()
        case _:
            rig.stream._tick()
    await settled(rig)
    assert rig.wire.closes == [1011]
    assert rig.freed == ["place", "settled"]


async def test_a_fault_in_a_task_is_1011(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(DecisionSession, "start_granted", bug)
    rig.say(start(mode="on_change"))
    await settled(rig)
    assert rig.wire.closes == [1011]


async def test_a_fault_at_the_end_ends_it_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("planes.decision.stream.encode_close", bug)
    rig.session.violation(1003, 0.0)
    rig.stream._pump()
    await settled(rig)
    assert rig.wire.closes == []
    assert rig.wire.aborted


async def test_a_close_that_is_not_answered(rig: Rig) -> None:
    """D3.10: the connection is cut after the time for the handshake."""
    rig.stream.drain()
    await settled(rig)
    assert rig.wire.closes == [1012]
    assert rig.wire.aborted


async def test_a_close_that_is_answered(rig: Rig) -> None:
    rig.stream.drain()
    await until(lambda: rig.wire.closes)
    assert not rig.freed
    rig.stream.arrived(ClientClose(1012, b"\x03\xf4"))
    await settled(rig)
    assert rig.wire.closes == [1012]


async def test_a_client_that_talks_on_after_our_close(rig: Rig) -> None:
    rig.stream.drain()
    await until(lambda: rig.wire.closes)
    for _ in range(300):
        rig.stream.arrived(Ping(b""))
    assert rig.wire.reading_ended
    assert rig.wire.half_closed
    await settled(rig)


@pytest.mark.parametrize("end", [GONE, ClientClose(1000, b"\x03\xe8"), ClientClose(None, b"")])
async def test_a_decide_is_settled_after_the_client_left(rig: Rig, end: Any) -> None:
    """D5.7: the place is free at once, what runs is awaited."""
    rig.say(start(mode="on_change"))
    await until(lambda: rig.backend.began)
    rig.stream.arrived(end)
    await rig.stream.over.wait()
    await asyncio.sleep(0.05)
    assert rig.freed == ["place"]
    rig.backend.go.set()
    await settled(rig)
    assert (rig.backend.began, rig.backend.cancelled) == (1, 0)


async def test_a_decide_that_does_not_settle_is_cancelled(rig: Rig) -> None:
    rig.say(start(mode="on_change"))
    await until(lambda: rig.backend.began)
    rig.stream.arrived(GONE)
    began = asyncio.get_running_loop().time()
    await settled(rig)
    assert rig.backend.cancelled == 1
    assert asyncio.get_running_loop().time() - began >= 0.25


@in_virtual_time
async def test_a_decide_has_its_time_once() -> None:
    """D3.6: what it had before the goodbye is not given again after the Close."""
    rig = Rig(DecisionLimits.of({"decision_settlement_timeout_ms": 1500}))
    rig.say(start(mode="on_change"))
    await until(lambda: rig.backend.began)
    began = asyncio.get_running_loop().time()
    rig.stream.drain()
    await until(lambda: rig.wire.closes, 10)
    rig.stream.arrived(ClientClose(1012, b"\x03\xf4"))
    await until(lambda: "settled" in rig.freed, 10)
    assert 1.4 < asyncio.get_running_loop().time() - began < 2.8
    await until(lambda: rig.backend.cancelled == 1)
    await rig.stream.close()


async def test_an_account_that_is_refused_since(rig: Rig) -> None:
    """D5.6."""
    rig.principal = error("account_suspended", "suspended")
    rig.say(start(mode="on_change"))
    await settled(rig)
    assert rig.wire.closes == [1008]
    assert rig.backend.began == 0
    assert b'"reason":"auth"' in rig.wire.written


async def test_it_may_be_closed_at_any_time(rig: Rig) -> None:
    rig.say(start(mode="on_change"))
    await until(lambda: rig.backend.began)
    await rig.stream.close()
    assert rig.freed == ["place", "settled"]
    assert rig.wire.aborted
    await until(lambda: rig.backend.cancelled == 1)


async def test_nothing_is_heard_after_the_end(rig: Rig) -> None:
    rig.stream.arrived(GONE)
    await settled(rig)
    before = rig.wire.written
    rig.say(start())
    rig.stream.stalled()
    rig.stream.drain()
    assert rig.wire.written == before
