"""One order for many producers: random interleavings against a reading of W2.2 and W2.3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.ordering import (
    EngineFrame,
    GiveUp,
    Offer,
    Open,
    Ordering,
    OrderingLimits,
    Say,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.ordering import Effect

OFFER = Offer(url="http://h/s", shape="openai", ours=True)
FINISH_S = 30.0
OUTCOMES = ("workflow_completed", "workflow_error", "workflow_yielded")
ENDS = ("streaming_completed", "task_completed", "task_error")
ABOUT_TASKS = (*ENDS, "streaming_started")


def frame(
    name: str, task: str | None = None, *, offer: bool = False, size: int = 0, tag: str = ""
) -> EngineFrame:
    return EngineFrame(
        name=name,
        frame=f"{name}/{task}/{tag}".encode() + b"x" * size,
        task_id=task,
        offer=OFFER if offer else None,
    )


def names(effects: Sequence[Effect]) -> list[str]:
    """`streaming_started`, `a:text`, `open 1`, `give up 1`."""
    out = []
    for effect in effects:
        match effect:
            case Say(name, _, _):
                out.append(name)
            case Token(task, raw):
                out.append(f"{task}:{raw.decode()}")
            case Open(stream, _, _):
                out.append(f"open {stream}")
            case GiveUp(stream, _):
                out.append(f"give up {stream}")
    return out


# --- single rules ---------------------------------------------------------------------------------


def test_w2_2_an_end_frame_waits_for_its_sub_stream_and_holds_all_that_follows() -> None:
    order = Ordering()
    assert names(order.frame(frame("streaming_started", "a", offer=True), 0)) == [
        "open 1",
        "streaming_started",
    ]
    assert names(order.token(1, b"x")) == ["a:x"]
    assert order.frame(frame("streaming_completed", "a"), 1) == []
    assert order.frame(frame("heartbeat"), 2) == []  # positions keep the engine's order
    assert names(order.token(1, b"y")) == ["a:y"]
    assert names(order.ended(1, 3)) == ["streaming_completed", "heartbeat"]


def test_w2_2_tokens_pass_what_is_held_if_their_start_was_said() -> None:
    order = Ordering()
    for task in "ab":
        order.frame(frame("streaming_started", task, offer=True), 0)
    order.frame(frame("task_completed", "a"), 0)
    assert order.frame(frame("streaming_started", "c", offer=True), 0) == [Open(3, "c", OFFER)]
    assert names(order.token(2, b"b1")) == ["b:b1"]
    assert order.token(3, b"c1") == []
    assert order.token(3, b"c2") == []
    assert names(order.ended(1, 0)) == ["task_completed", "streaming_started", "c:c1c2"]
    assert names(order.token(3, b"c3")) == ["c:c3"]


def test_w3_2_a_sub_stream_that_does_not_finish_is_given_up_and_nothing_is_invented() -> None:
    order = Ordering()
    order.frame(frame("streaming_started", "a", offer=True), 0)
    assert order.next_deadline is None
    order.frame(frame("task_completed", "a"), 100)
    assert order.next_deadline == 100 + FINISH_S
    assert order.due(100 + FINISH_S - 0.001) == []
    assert names(order.due(100 + FINISH_S)) == ["give up 1", "task_completed"]
    assert order.token(1, b"late") == []
    assert order.ended(1, 200) == []
    assert order.dropped == {"token": 1}


def test_w3_2_the_time_runs_from_when_its_tokens_may_go() -> None:
    """Else a sub-stream would be given up that was not read, for another's sake."""
    order = Ordering()
    order.frame(frame("streaming_started", "a", offer=True), 0)
    order.frame(frame("task_completed", "a"), 0)
    order.frame(frame("streaming_started", "b", offer=True), 0)
    order.frame(frame("task_completed", "b"), 0)
    order.token(2, b"text")
    said = order.due(FINISH_S)
    assert names(said) == ["give up 1", "task_completed", "streaming_started", "b:text"]
    assert order.next_deadline == 2 * FINISH_S


def test_w2_2_a_retry_begins_after_the_text_of_the_attempt_before_it() -> None:
    order = Ordering()
    order.frame(frame("streaming_started", "a", offer=True), 0)
    order.frame(frame("task_error", "a"), 0)
    order.frame(frame("task_dispatched", "a"), 0)
    order.frame(frame("streaming_started", "a", offer=True), 0)
    order.token(2, b"new")
    assert names(order.token(1, b"old")) == ["a:old"]
    assert names(order.ended(1, 0)) == [
        "task_error",
        "task_dispatched",
        "streaming_started",
        "a:new",
    ]


def test_w2_2_a_start_without_an_end_before_it_waits_too() -> None:
    order = Ordering()
    order.frame(frame("streaming_started", "a", offer=True), 0)
    assert names(order.frame(frame("streaming_started", "a", offer=True), 0)) == ["open 2"]
    assert names(order.ended(1, 0)) == ["streaming_started"]


@pytest.mark.parametrize("name", OUTCOMES)
def test_w2_3_the_outcome_waits_for_every_sub_stream(name: str) -> None:
    order = Ordering()
    for task in "ab":
        order.frame(frame("streaming_started", task, offer=True), 0)
    order.frame(frame(name), 0)
    order.frame(frame("workflow_result"), 0)
    assert (order.complete, order.done, order.finals) == (True, False, [])
    assert names(order.token(2, b"x")) == ["b:x"]
    order.ended(1, 0)
    assert not order.finals
    assert order.ended(2, 0) == []
    assert names(order.finals) == [name, "workflow_result"]
    assert order.done


def test_w2_3_a_second_outcome_and_all_behind_the_result_are_dropped_and_counted() -> None:
    order = Ordering()
    order.frame(frame("workflow_completed"), 0)
    order.frame(frame("workflow_error"), 0)
    order.frame(frame("heartbeat"), 0)
    order.frame(frame("workflow_result"), 0)
    for name in ("workflow_result", "workflow_completed", "heartbeat"):
        assert order.frame(frame(name), 0) == []
    assert names(order.finals) == ["workflow_completed", "heartbeat", "workflow_result"]
    assert order.dropped == {"outcome": 1, "late": 3}


def test_w2_3_a_result_without_an_outcome_is_no_end() -> None:
    order = Ordering()
    order.frame(frame("workflow_result"), 0)
    assert (order.done, order.finals, order.dropped) == (True, [], {"result": 1})


def test_w2_3_a_result_that_does_not_come_is_not_waited_for_for_ever() -> None:
    order = Ordering()
    order.frame(frame("workflow_completed"), 5)
    assert not order.done
    assert order.next_deadline == 5 + FINISH_S
    assert order.due(5 + FINISH_S) == []
    assert order.done
    assert names(order.finals) == ["workflow_completed"]


def test_w2_2_the_engines_own_tokens_obey_the_same_order() -> None:
    order = Ordering()
    assert order.inline("a", b"no start") == []
    order.frame(frame("streaming_started", "a"), 0)
    assert names(order.inline("a", b"1")) == ["a:1"]
    order.frame(frame("streaming_started", "s", offer=True), 0)
    order.frame(frame("task_completed", "s"), 0)
    order.frame(frame("streaming_started", "b"), 0)
    assert order.inline("b", b"2") == []
    assert names(order.inline("a", b"3")) == ["a:3"]
    order.frame(frame("task_completed", "a"), 0)
    assert order.inline("a", b"behind its end") == []
    assert names(order.ended(1, 0)) == [
        "task_completed",
        "streaming_started",
        "b:2",
        "task_completed",
    ]
    assert order.inline("s", b"of a task with a sub-stream, and ended") == []
    assert order.dropped == {"token": 3}


def test_w3_2_what_is_held_is_bounded_by_not_reading() -> None:
    limits = OrderingLimits(frames_max=3, bytes_max=1000, waiting_bytes_max=10, streams_max=2)
    order = Ordering(limits)
    order.frame(frame("streaming_started", "a", offer=True), 0)
    order.frame(frame("task_completed", "a"), 0)
    order.frame(frame("streaming_started", "b", offer=True), 0)
    assert not order.full
    order.token(2, b"x" * 9)
    assert order.room(2)
    order.token(2, b"x")
    assert not order.room(2)
    assert order.room(1)
    order.frame(frame("streaming_started", "c", offer=True), 0)
    assert order.full
    assert order.dropped == {"stream": 1}
    order.ended(1, 0)
    assert not order.full
    assert order.room(2)


def test_w3_2_bytes_are_bounded_too() -> None:
    order = Ordering(OrderingLimits(bytes_max=1000))
    order.frame(frame("streaming_started", "a", offer=True), 0)
    order.frame(frame("task_completed", "a", size=900), 0)
    order.frame(frame("streaming_started", "b", offer=True, size=10), 0)
    assert order.room(2)
    order.token(2, b"y" * 100)
    assert order.full
    assert not order.room(2)
    order.ended(1, 0)
    assert not order.full


# --- random interleavings -------------------------------------------------------------------------


@dataclass
class Stream:
    """A sub-stream as the checker knows it."""

    task: str
    start: int  # number of the frame that advertised it
    open: bool = True
    given_up: bool = False


@dataclass
class World:
    """Drives an ordering and checks all that it does by the rules alone.

    Frames are numbered as they are accepted. `said` is how many of them are out: they can only go
    in their order, so one number tells all.
    """

    order: Ordering = field(default_factory=lambda: Ordering(OrderingLimits(finish_s=FINISH_S)))
    now: float = 0.0
    frames: list[EngineFrame] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    said: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    came: dict[int, bytes] = field(default_factory=dict)  # text by the frame of its start
    went: dict[int, bytes] = field(default_factory=dict)
    outcome: int | None = None
    result: bool = False
    eof_at: float | None = None
    over: bool = False  # the outcome is out
    said_at: list[float] = field(default_factory=list)
    sent: int = 0

    # what the rules say of what is in

    def start_of(self, task: str, *, among: int | None = None) -> int | None:
        """The frame that begins the turn which is open for this task among the first frames."""
        for number in reversed(range(len(self.frames) if among is None else among)):
            found = self.frames[number]
            if found.task_id == task and found.name in ABOUT_TASKS:
                return number if found.name == "streaming_started" else None
        return None

    def holders(self, number: int) -> list[Stream]:
        """The open sub-streams that hold this frame itself."""
        found = self.frames[number]
        if found.name in OUTCOMES:
            return [s for s in self.streams.values() if s.open and s.start < number]
        if found.name in ABOUT_TASKS:
            same = [s for s in self.streams.values() if s.open and s.start < number]
            return [s for s in same if s.task == found.task_id]
        return []

    # what may happen

    def frame(self, name: str, task: str, *, offer: bool) -> None:
        if self.order.full or self.order.complete:
            return
        about = task if name in ABOUT_TASKS or name == "task_dispatched" else None
        self.sent += 1
        made = frame(name, about, offer=offer, tag=str(self.sent))
        if name in OUTCOMES:
            accepted = self.outcome is None
            if accepted:
                self.outcome = len(self.frames)
        elif name == "workflow_result":
            accepted = self.outcome is not None
            if accepted:
                self.result = True
            else:
                self.eof_at = self.now
        else:
            accepted = True
        if accepted:
            self.frames.append(made)
            self.arrived.append(self.now)
        self.check(self.order.frame(made, self.now))

    def inline(self, task: str) -> None:
        if self.order.full or self.order.complete:
            return
        start = self.start_of(task)
        taken = start is not None and self.outcome is None
        if any(s.start == start for s in self.streams.values()):
            taken = False
        self.text(start if taken else None, self.order.inline, task)

    def token(self, pick: int) -> None:
        if not self.streams:
            return
        stream = sorted(self.streams)[pick % len(self.streams)]
        if not self.order.room(stream):
            return
        known = self.streams[stream]
        self.text(known.start if known.open else None, self.order.token, stream)

    def text(self, start: int | None, tell: object, who: object) -> None:
        self.sent += 1
        raw = f"<{self.sent}>".encode()
        if start is not None:
            self.came[start] = self.came.get(start, b"") + raw
        effects = tell(who, raw)  # type: ignore[operator]
        if start is not None and start < self.said:
            assert effects == [Token(str(self.frames[start].task_id), raw)]  # at once
        self.check(effects)

    def end(self, pick: int) -> None:
        if self.streams:
            stream = sorted(self.streams)[pick % len(self.streams)]
            self.streams[stream].open = False
            self.check(self.order.ended(stream, self.now))

    def eof(self) -> None:
        if not self.order.complete:
            self.eof_at = self.now
            self.check(self.order.eof(self.now))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.order.next_deadline) is not None and deadline <= until:
            assert deadline >= self.now
            self.now = deadline
            was_complete = self.order.complete
            effects = self.order.due(self.now)
            if self.order.complete and not was_complete:  # workflow_result was waited for
                assert self.outcome is not None
                assert self.arrived[self.outcome] + FINISH_S <= self.now
                self.eof_at = self.now
            self.check(effects)
        self.now = until

    # what came of it

    def check(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Say(_, data, _):
                    self.say(data)
                case Token(task, raw):
                    start = self.start_of(task, among=self.said)
                    assert start is not None, "outside of its task's turn (W2.2)"
                    assert not self.over, "behind the outcome (W2.2)"
                    self.went[start] = self.went.get(start, b"") + raw
                case Open(stream, task, _):
                    assert stream not in self.streams
                    assert self.frames[-1].task_id == task
                    self.streams[stream] = Stream(task, len(self.frames) - 1)
                case GiveUp(stream, _):
                    self.give_up(stream)
        finals = self.order.finals
        if finals:
            assert self.outcome is not None
            while self.said < self.outcome + len(finals):
                self.say(finals[self.said - self.outcome].frame, final=True)
            self.over = True
        self.check_nothing_waits_for_nothing()

    def say(self, data: bytes, *, final: bool = False) -> None:
        assert data == self.frames[self.said].frame, "not in the engine's order (W2.1)"
        assert self.holders(self.said) == [], "before its sub-stream's end (W3.2)"
        assert final == (self.outcome is not None and self.said >= self.outcome)
        about = self.frames[self.said].task_id
        if self.frames[self.said].name in ABOUT_TASKS and about is not None:
            start = self.start_of(about, among=self.said)
            if start is not None:  # the turn that ends here is all told
                assert self.went.get(start) == self.came.get(start), "a token was lost (W2.2)"
        self.said += 1
        self.said_at.append(self.now)

    def give_up(self, stream: int) -> None:
        known = self.streams[stream]
        assert known.open
        waits = [
            self.arrived[n] for n in range(self.said, len(self.frames)) if known in self.holders(n)
        ]
        if self.eof_at is not None:
            waits.append(self.eof_at)
        assert waits, "nothing waits for it"
        assert self.now >= max(min(waits), self.said_at[known.start]) + FINISH_S, "too early"
        known.open, known.given_up = False, True

    def check_nothing_waits_for_nothing(self) -> None:
        if self.said < len(self.frames):
            assert self.holders(self.said), "held without a reason"
        if any(s.open for s in self.streams.values()) and self.order.complete:
            assert self.order.next_deadline is not None, "never ends"

    def finish(self) -> None:
        """Whatever is missing: all of it is said within a bound."""
        self.eof()
        self.wait(FINISH_S * (len(self.streams) + 1))
        assert self.order.done
        assert self.said == len(self.frames)
        assert self.went == self.came
        finals = names(self.order.finals)
        assert len([name for name in finals if name in OUTCOMES]) == (self.outcome is not None)
        assert finals.count("workflow_result") == self.result
        assert not self.result or finals[-1] == "workflow_result"


OTHERS = ("heartbeat", "task_dispatched", "made_up")
TASKS = st.sampled_from("ab")
ACTIONS = st.one_of(
    st.tuples(st.just("frame"), st.sampled_from(ABOUT_TASKS), TASKS, st.booleans()),
    st.tuples(st.just("frame"), st.just("streaming_started"), TASKS, st.just(True)),
    st.tuples(
        st.just("frame"), st.sampled_from(["heartbeat", "task_dispatched", "made_up"]), TASKS
    ),
    st.tuples(st.just("token"), st.integers(0, 5)),
    st.tuples(st.just("inline"), TASKS),
    st.tuples(st.just("frame"), st.sampled_from(ABOUT_TASKS), TASKS, st.just(False)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, FINISH_S / 2, FINISH_S, 3 * FINISH_S])),
)
LAST = st.tuples(
    st.just("frame"), st.sampled_from([*OUTCOMES, "workflow_result", "workflow_result"]), TASKS
)
SCRIPTS = st.tuples(
    st.lists(ACTIONS, max_size=30),
    st.lists(st.one_of(LAST, ACTIONS), max_size=12),
    st.lists(st.one_of(ACTIONS, st.just(("eof",))), max_size=8),
)


@settings(max_examples=400)
@given(script=SCRIPTS, frames_max=st.sampled_from([2, 5, 1024]), small=st.booleans())
def test_w2_2_w2_3_any_interleaving(
    script: tuple[list[tuple[object, ...]], ...], frames_max: int, small: bool
) -> None:
    limits = OrderingLimits(
        finish_s=FINISH_S, frames_max=frames_max, waiting_bytes_max=8 if small else 1024
    )
    world = World(Ordering(limits))
    for action, *details in [step for part in script for step in part]:
        match action, details:
            case "frame", [str(name), str(task), *more]:
                offer = bool(more and more[0]) and name == "streaming_started"
                world.frame(name, task, offer=offer)
            case "token", [int(pick)]:
                world.token(pick)
            case "inline", [str(task)]:
                world.inline(task)
            case "end", [int(pick)]:
                world.end(pick)
            case "wait", [float(seconds)]:
                world.wait(seconds)
            case "eof", []:
                world.eof()
            case _:
                raise AssertionError(action)
    world.finish()
