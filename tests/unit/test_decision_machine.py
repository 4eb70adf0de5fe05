"""Random interleavings of everything that can happen to a stream, against a plain model of it.

Invariants (D7): `seq` and versions grow by one, an ack comes before a decision that covers it, at
most one decide is in flight, what is rejected changes nothing, equal inputs give equal bytes.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encoders.decision_errors import DecisionError
from relay.decisions.effects import Close, Decided, Failed, StartDecide, TakeStart
from relay.decisions.limits import DecisionLimits
from relay.decisions.session import DecisionSession
from tests.support.decision_driver import QUESTIONS, REPLY, STREAM_ID, encode, start_message

LIMITS = DecisionLimits(
    max_events_per_second=1e6,
    event_burst=1_000_000,
    max_messages_per_second=1e6,
    message_burst=1_000_000,
    protocol_refusal_limit=1_000_000,
    max_duration_ms=120_000,
    idle_timeout_ms=50_000,
    max_decide_body_bytes=400,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.none() | st.sampled_from(["k1", " k2 ", "k3"])


class Recorded:
    """A session whose inputs are kept, so that they can be played again."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, tuple[Any, ...]]] = []
        self.outputs: list[object] = []
        self.session = DecisionSession(LIMITS, stream_id=STREAM_ID, request_id="r", now=0.0)
        self.take()

    def call(self, name: str, *arguments: Any) -> list[object]:
        self.inputs.append((name, arguments))
        getattr(self.session, name)(*arguments)
        return self.take()

    def take(self) -> list[object]:
        new: list[object] = []
        for frame in self.session.frames_to_send():
            new.append(frame.payload)
            self.session.written(0.0)
        while (effect := self.session.next_effect()) is not None:
            new.append(effect)
        self.outputs += new
        return new


class Stream(RuleBasedStateMachine):
    """The model: what the state, its version, its key and its batches have to be."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Recorded()
        self.now = 0.0
        self.seq = 1
        self.state: Any = None
        self.key: str | None = None
        self.acked: list[str] = []
        self.uncovered: list[str] = []
        self.batch: list[str] = []
        self.decided_version = 0
        self.asked = False
        self.decide: StartDecide | None = None
        self.goodbye = False
        self.closed = False
        self.silent = False

    @initialize(
        mode=st.sampled_from(["on_change", "on_request"]),
        state=TEXTS | st.lists(TEXTS, max_size=2) | st.just({"a": 1}),
        interval=st.sampled_from([0, 0, 3000]),
        key=KEYS,
    )
    def start(self, mode: str, state: Any, interval: int, key: str | None) -> None:
        message = start_message(state, mode=mode) | {"min_interval_ms": interval}
        self.mode = mode
        self.send(message, key, state)

    # --- what happens

    def send(self, message: dict[str, Any], key: str | None, state: Any) -> None:
        """Send a mutation; `state` is what it makes of the state if it is accepted."""
        if key is not None:
            message = message | {"idempotency_key": key}
        frames = self.handle(self.real.call("receive", encode(message), self.now))
        if self.silent or not frames:
            return
        first = frames[0]
        if first["type"] == "ack":
            self.state, self.key = state, key and key.strip()
            self.acked.append(first["event_id"])
            self.uncovered.append(first["event_id"])
            assert first["state_version"] == len(self.acked)
            assert first["event_id"] == f"evt_{len(self.acked)}"
            assert first["synthesized_body_bytes"] == len(self.body())
        else:
            assert first["type"] == "error"
            assert (first["phase"], first["event_id"]) == ("protocol", message["event_id"])

    @property
    def next_id(self) -> str:
        return f"evt_{len(self.acked) + 1}"

    @rule(text=TEXTS, key=KEYS)
    def append_text(self, text: str, key: str | None) -> None:
        grown = self.state + text if isinstance(self.state, str) else None
        self.send({"type": "append_text", "event_id": self.next_id, "text": text}, key, grown)

    @rule(items=st.lists(TEXTS, max_size=2), key=KEYS)
    def append_items(self, items: list[str], key: str | None) -> None:
        grown = self.state + items if isinstance(self.state, list) else None
        self.send({"type": "append_items", "event_id": self.next_id, "items": items}, key, grown)

    @rule(state=TEXTS | st.lists(TEXTS, max_size=2) | st.just("x" * 500), key=KEYS)
    def replace(self, state: Any, key: str | None) -> None:
        self.send({"type": "replace", "event_id": self.next_id, "state": state}, key, state)

    @rule(offset=st.sampled_from([-1, 1, 7]), key=KEYS)
    def out_of_order(self, offset: int, key: str | None) -> None:
        wrong = f"evt_{len(self.acked) + 1 + offset}"
        before = len(self.acked)
        self.send({"type": "replace", "event_id": wrong, "state": "no"}, key, "no")
        assert len(self.acked) == before

    @rule(offset=st.sampled_from([0, 0, 0, -1, 1]))
    def ask_for_a_decide(self, offset: int) -> None:
        named = max(1, len(self.acked) + offset)
        message = {"type": "decide", "state_version": named}
        running = self.decide is not None
        frames = self.handle(self.real.call("receive", encode(message), self.now))
        if self.silent or not frames:
            return
        if frames[0]["type"] == "scheduled":
            assert named == len(self.acked)
            assert frames[0]["in_flight"] is running
        else:
            assert frames[0]["type"] == "error"
            assert frames[0]["event_id"] is None

    @precondition(lambda self: self.asked)
    @rule()
    def grant(self) -> None:
        self.asked = False
        self.handle(self.real.call("start_granted", self.now))

    @precondition(lambda self: self.asked)
    @rule(wait_ms=st.sampled_from([1, 500, 5000]))
    def refuse(self, wait_ms: int) -> None:
        self.asked = False
        self.handle(self.real.call("start_refused", wait_ms, self.now))

    @precondition(lambda self: self.decide is not None)
    @rule()
    def answer(self) -> None:
        assert self.decide is not None
        decide, self.decide = self.decide, None
        batch, self.batch = self.batch, []
        result = Decided(reply=REPLY, request_id="d")
        before = self.closed or self.silent
        frames = self.handle(self.real.call("resolve", decide.ticket, result, self.now))
        if before:
            assert frames == []
            return
        assert frames[0]["type"] == "decision"
        assert frames[0]["state_version"] == decide.state_version
        assert frames[0]["covered_event_ids"] == batch
        assert set(batch) <= set(self.acked)
        self.decided_version = decide.state_version

    @precondition(lambda self: self.decide is not None)
    @rule(
        status=st.sampled_from([429, 503, 504, 409]),
        retryable=st.booleans(),
        delay_ms=st.none() | st.sampled_from([0, 700, 30_000]),
    )
    def fail(self, status: int, retryable: bool, delay_ms: int | None) -> None:
        assert self.decide is not None
        decide, self.decide = self.decide, None
        batch, self.batch = self.batch, []
        self.uncovered = batch + self.uncovered
        problem = DecisionError("x", "x", status, retryable=retryable, retry_after_ms=delay_ms)
        result = Failed(error=problem, request_id="d")
        before = self.closed or self.silent
        frames = self.handle(self.real.call("resolve", decide.ticket, result, self.now))
        if before:
            assert frames == []
            return
        assert (frames[0]["type"], frames[0]["phase"]) == ("error", "decide")
        assert frames[0]["state_version"] == decide.state_version
        assert frames[0]["covered_event_ids"] == batch
        assert frames[0]["fatal"] is self.closed or frames[-1]["reason"] != "overload"

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.7, 3.0, 9.0]))
    def pass_time(self, seconds: float) -> None:
        target = self.now + seconds
        while (due := self.real.session.next_deadline()) is not None and due <= target:
            self.now = max(self.now, due)
            for output in self.real.call("handle_timeout", self.now):
                self.handle([output])
                if isinstance(output, bytes) and output[:1] != b"{":
                    self.handle(self.real.call("receive_control", 10, output, self.now))
        self.now = target

    @rule(
        name=st.sampled_from(
            ["drain"] * 4
            + ["lease_lost", "store_unavailable", "maintenance", "fail"]
            + ["client_closed", "lost", "slow_reader"]
        )
    )
    @precondition(lambda self: len(self.acked) > 2)
    def end(self, name: str) -> None:
        self.handle(self.real.call(name, self.now))
        if name in ("client_closed", "lost"):
            self.silent = True

    # --- what has to hold

    def body(self) -> bytes:
        return encode(
            {
                "model": "MODEL_ID",
                "state": self.state,
                "questions": QUESTIONS,
                "prompt_cache_key": STREAM_ID,
            }
        )

    def handle(self, outputs: list[object]) -> list[dict[str, Any]]:
        """Check outputs as they come; returns the JSON frames among them, pings left out."""
        frames: list[dict[str, Any]] = []
        for output in outputs:
            assert not self.silent, "something was sent to a peer that left"
            assert not self.closed, "something came after the Close"
            if isinstance(output, bytes):
                if output[:1] == b"{":
                    frames.append(self.frame(json.loads(output)))
            elif isinstance(output, TakeStart):
                assert not self.asked
                assert self.decide is None
                self.asked = True
            elif isinstance(output, StartDecide):
                assert self.decide is None, "two decides in flight"
                assert output.body == self.body(), "not the accepted state"
                assert (output.idempotency_key, output.state_version) == (
                    self.key,
                    len(self.acked),
                )
                self.decide = output
                self.batch, self.uncovered = self.uncovered, []
            else:
                assert isinstance(output, Close)
                assert self.goodbye or output.reason == "slow_reader"
                self.closed = True
        return [frame for frame in frames if frame["type"] != "ping"]

    def frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        self.seq += 1
        assert frame["seq"] == self.seq
        assert frame["stream_id"] == STREAM_ID
        assert not self.goodbye, "a frame after the goodbye"
        if frame["type"] == "goodbye":
            self.goodbye = True
            last = frame["last_decision_state_version"]
            assert self.decided_version <= last <= frame["state_version"] <= len(self.acked) + 1
        return frame

    @invariant()
    def agrees_with_the_model(self) -> None:
        session = self.real.session
        assert session.state_version == len(self.acked)
        assert session.closing is (self.closed or self.silent)
        assert (session.in_flight is not None) is (self.decide is not None)
        deadline = session.next_deadline()
        assert (deadline is None) is session.closing

    def teardown(self) -> None:
        """Equal inputs at equal times give equal bytes and effects."""
        again = Recorded()
        for name, arguments in self.real.inputs:
            again.call(name, *arguments)
        assert again.outputs == self.real.outputs


Stream.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStream = Stream.TestCase
