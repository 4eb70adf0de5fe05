"""One order for what many producers say of a run. [pure] Rules W2.1 to W2.3, W3.2.

    the engine's frames and its end ──┐
    tokens and ends of sub-streams  ──┼──▶ Ordering ──▶ what is to be said and done, in order
    the time                        ──┘

The engine's frames keep their order, so that the n-th has position n: a frame that is held holds
all that follow it, heartbeats too. Only tokens pass: those of a task whose `streaming_started` has
been said. A frame is held while a sub-stream that it ends still flows: the end frame of a task, or
its next `streaming_started`, by the task's own; the outcome by all. A sub-stream that does not
finish within a bound is given up, and the frame goes (no `task_error` is invented).

The outcome and what follows it are not said but kept (`finals`): a run's last frames are written
together with its end.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from encoders.workflow import OUTCOMES, TEXT_ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable

STARTED: Final = "streaming_started"
RESULT: Final = "workflow_result"
YIELDED: Final = "workflow_yielded"
LAST_WORDS: Final = OUTCOMES | {YIELDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingLimits:
    """Bounds.

    Attributes:
        finish_s: how long a frame waits for a sub-stream, and the outcome for `workflow_result`.
        frames_max, bytes_max: of all that is held; beyond it the engine is not read (it may be
            passed by what one read brings, and by one frame).
        waiting_bytes_max: of the tokens of one sub-stream that wait for its `streaming_started`.
        streams_max: sub-streams of a run that are open at a time.
        tasks_max: tasks that stream and have not ended.
    """

    finish_s: float = 30.0
    frames_max: int = 1024
    bytes_max: int = 4 * 1024 * 1024
    waiting_bytes_max: int = 64 * 1024
    streams_max: int = 256
    tasks_max: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A sub-stream that a `streaming_started` advertises and that may be opened (W3.2).

    Attributes:
        ours: whether it has the engine's origin, which alone is sent the engine's key.
    """

    url: str
    shape: str
    ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFrame:
    """A frame of the engine.

    Attributes:
        frame: the bytes that are said. task_id: the task that it is about, None if of none.
        offer: only of a `streaming_started` with a task.
    """

    name: str
    frame: bytes
    task_id: str | None = None
    offer: Offer | None = None


@dataclass(frozen=True, slots=True)
class Say:
    """A frame of the engine, at the next position. `task_id`: whom it is about, None if nobody."""

    name: str
    frame: bytes
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a task's text."""

    task_id: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Open and drain this sub-stream; tell `token` and, once and always, `ended`."""

    stream: int
    task_id: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This sub-stream has not finished in time: close it."""

    stream: int
    task_id: str


Effect: TypeAlias = Say | Token | Open | GiveUp


class _Turn:
    """What a task streams from one `streaming_started` on.

    Attributes:
        said: whether its `streaming_started` was. stream: its sub-stream, None if it has none.
        open: whether that may still bring tokens. awaited: whether a frame waits for its end.
        deadline: when it is given up. waiting: text that came before it was `said`; pieces of a
            JSON string make one together.
    """

    __slots__ = ("awaited", "deadline", "open", "said", "stream", "task_id", "waiting")

    def __init__(self, task_id: str, stream: int | None) -> None:
        self.task_id = task_id
        self.stream = stream
        self.open = stream is not None
        self.said = False
        self.awaited = False
        self.deadline: float | None = None
        self.waiting = bytearray()


@dataclass(slots=True)
class _Held:
    """A frame in its place.

    Attributes:
        awaits: turns that have to end first. begins: the turn that it begins.
    """

    what: Say
    awaits: list[_Turn] = field(default_factory=list)
    begins: _Turn | None = None


class Ordering:
    """The order of one run. Methods return what is to be done now, in order; `now` is any clock.

    Attributes:
        finals: the outcome, what came after it, and `workflow_result`, once they may be said.
        dropped: what was not let through, by kind, for the log: `outcome` (a second one), `result`
            (one without an outcome), `late` (behind the end), `token` (of no open task), `stream`
            (more than can be open).
    """

    def __init__(self, limits: OrderingLimits | None = None) -> None:
        self.finals: list[Say] = []
        self.dropped: Counter[str] = Counter()
        self._limits = limits or OrderingLimits()
        self._queue: deque[_Held] = deque()
        self._held_bytes = 0
        self._turns: dict[str, _Turn] = {}  # by task, until its end frame has come
        self._open: dict[int, _Turn] = {}
        self._streams = 0
        self._outcome = self._result = self._eof = False
        self._result_by: float | None = None

    # --- what may be asked -----------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether so much is held that the engine is not to be read now."""
        held = len(self._queue) + len(self.finals)
        return held >= self._limits.frames_max or self._held_bytes >= self._limits.bytes_max

    @property
    def complete(self) -> bool:
        """Whether nothing that the engine says can count any more."""
        return self._result or self._eof

    @property
    def done(self) -> bool:
        """Whether all is said: only `finals` is left."""
        return self.complete and not self._queue and not self._open

    @property
    def next_deadline(self) -> float | None:
        """When `due` is to be called; None: not before something else happens."""
        times = [turn.deadline for turn in self._open.values() if turn.deadline is not None]
        if self._result_by is not None and not self.complete:
            times.append(self._result_by)
        return min(times, default=None)

    def room(self, stream: int) -> bool:
        """Whether this sub-stream is to be read now."""
        turn = self._open.get(stream)
        if turn is None or turn.said:
            return True
        limits = self._limits
        return len(turn.waiting) < limits.waiting_bytes_max and self._held_bytes < limits.bytes_max

    # --- what happens ----------------------------------------------------------------------------

    def frame(self, frame: EngineFrame, now: float) -> list[Effect]:
        """The engine said this."""
        if self.complete:
            self.dropped["late"] += 1
            return []
        out: list[Effect] = []
        held = _Held(Say(frame.name, frame.frame, frame.task_id))
        if frame.name in LAST_WORDS:
            if self._outcome:
                self.dropped["outcome"] += 1
                return []
            self._outcome = True
            self._turns.clear()
            held.awaits = list(self._open.values())
        elif frame.name == RESULT:
            if not self._outcome:
                self.dropped["result"] += 1
                return self.eof(now)
            self._result = True
        elif frame.task_id is not None and (frame.name in TEXT_ENDS or frame.name == STARTED):
            held.awaits = [t for t in self._open.values() if t.task_id == frame.task_id]
            self._turns.pop(frame.task_id, None)
            if frame.name == STARTED:
                held.begins = self._begin(frame.task_id, frame.offer, out)
        _await(held.awaits)
        self._queue.append(held)
        self._held_bytes += len(frame.frame)
        self._advance(now, out)
        return out

    def inline(self, task_id: str, raw: bytes) -> list[Effect]:
        """The engine said a piece of a task's text itself, between its frames."""
        turn = self._turns.get(task_id)
        if turn is None or turn.stream is not None or self.complete:
            self.dropped["token"] += 1
            return []
        return self._take(turn, raw)

    def token(self, stream: int, raw: bytes) -> list[Effect]:
        """A sub-stream brought a piece of its task's text."""
        turn = self._open.get(stream)
        if turn is None:
            self.dropped["token"] += 1
            return []
        return self._take(turn, raw)

    def ended(self, stream: int, now: float) -> list[Effect]:
        """A sub-stream has ended, well or not. Idempotent."""
        out: list[Effect] = []
        turn = self._open.pop(stream, None)
        if turn is not None:
            turn.open = False
            self._advance(now, out)
        return out

    def eof(self, now: float) -> list[Effect]:
        """The engine says no more: its stream ended, broke off, or broke the protocol."""
        out: list[Effect] = []
        self._eof = True
        _await(self._open.values())
        self._advance(now, out)
        return out

    def due(self, now: float) -> list[Effect]:
        """So late it is."""
        out: list[Effect] = []
        for stream, turn in list(self._open.items()):
            if turn.deadline is not None and turn.deadline <= now:
                del self._open[stream]
                turn.open = False
                out.append(GiveUp(stream, turn.task_id))
        self._advance(now, out)
        if self._result_by is not None and self._result_by <= now and not self.complete:
            out += self.eof(now)
        return out

    # --- how it is done --------------------------------------------------------------------------

    def _begin(self, task_id: str, offer: Offer | None, out: list[Effect]) -> _Turn:
        stream = None
        if offer is not None and not self._outcome:
            if len(self._open) < self._limits.streams_max:
                self._streams += 1
                stream = self._streams
                out.append(Open(stream, task_id, offer))
            else:
                self.dropped["stream"] += 1
        turn = _Turn(task_id, stream)
        if stream is not None:
            self._open[stream] = turn
        if not self._outcome and len(self._turns) < self._limits.tasks_max:
            self._turns[task_id] = turn
        return turn

    def _take(self, turn: _Turn, raw: bytes) -> list[Effect]:
        if turn.said:
            return [Token(turn.task_id, raw)]
        turn.waiting += raw
        self._held_bytes += len(raw)
        return []

    def _advance(self, now: float, out: list[Effect]) -> None:
        """Say what nothing holds; from then on clocks run for what holds the rest."""
        queue = self._queue
        while queue and not any(turn.open for turn in queue[0].awaits):
            self._say(queue.popleft(), now, out)
        if queue or self._eof:
            for turn in self._open.values():
                # Not before its tokens may go: until then it was not read.
                if turn.awaited and turn.said and turn.deadline is None:
                    turn.deadline = now + self._limits.finish_s

    def _say(self, held: _Held, now: float, out: list[Effect]) -> None:
        what = held.what
        if self.finals or what.name in LAST_WORDS:
            if not self.finals:
                self._result_by = now + self._limits.finish_s
            self.finals.append(what)
            return
        self._held_bytes -= len(what.frame)
        out.append(what)
        turn = held.begins
        if turn is not None:
            turn.said = True
            if turn.waiting:
                out.append(Token(turn.task_id, bytes(turn.waiting)))
                self._held_bytes -= len(turn.waiting)
                turn.waiting = bytearray()


def _await(turns: Iterable[_Turn]) -> None:
    for turn in turns:
        turn.awaited = True
