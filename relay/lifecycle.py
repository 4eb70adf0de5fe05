"""The life of one relayed stream, as a table. [pure]

    RESERVED ──DIAL──▶ OPENING ──HEADERS──▶ STREAMING ──TERMINAL──▶ CLOSED(COMPLETED)
        │                 │ ▲ DIAL (retry)      │  │
        │                 └─┘                   │  └─CLIENT_GONE (opt-in)─▶ DRAINING
        └── any failure ──┴──────────┬──────────┘                            │
                                     ▼                                       ▼
                              CLOSED(outcome)                      CLOSED(CLIENT_ABORT)

`advance` is the only thing that moves a stream. CLOSED keeps its cause, and late hang-ups,
deadlines and shutdowns leave it as it is; anything else after CLOSED, and every pair that the
table does not hold, is a bug of ours and raises `IllegalTransition`. Source: the lifecycle table
of the architecture page (docs/spec/models.md, "Life of a stream"), rules M3.4, M3.6, M4.1.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class StreamState(StrEnum):
    """Where a stream is."""

    RESERVED = "reserved"  # admitted; nothing dialled
    OPENING = "opening"  # a candidate is dialled, no status yet
    STREAMING = "streaming"  # status known, body arriving
    DRAINING = "draining"  # client gone, read on for the usage (opt-in)
    CLOSED = "closed"


class StreamInput(StrEnum):
    """What can happen to a stream."""

    DIAL = "dial"
    HEADERS = "headers"
    DATA = "data"
    TERMINAL = "terminal"
    EOF = "eof"
    UPSTREAM_ERROR = "upstream_error"
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class Outcome(StrEnum):
    """How a stream ended: exactly one for each stream."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # failed before anything was dialled
    TRUNCATED = "truncated"  # upstream ended without saying that it was done
    UPSTREAM_ERROR = "upstream_error"
    CLIENT_ABORT = "client_abort"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class IllegalTransition(AssertionError):
    """An input that the table does not hold in this state: a programmer's error."""


_S, _I, _O = StreamState, StreamInput, Outcome
Step = StreamState | Outcome  # an Outcome closes the stream with it

TABLE: Final[dict[tuple[StreamState, StreamInput], Step]] = {
    (_S.RESERVED, _I.DIAL): _S.OPENING,
    (_S.RESERVED, _I.UPSTREAM_ERROR): _O.REJECTED,
    (_S.RESERVED, _I.CLIENT_GONE): _O.CLIENT_ABORT,
    (_S.RESERVED, _I.DEADLINE): _O.DEADLINE,
    (_S.RESERVED, _I.SHUTDOWN): _O.SHUTDOWN,
    (_S.OPENING, _I.DIAL): _S.OPENING,
    (_S.OPENING, _I.HEADERS): _S.STREAMING,
    (_S.OPENING, _I.EOF): _O.UPSTREAM_ERROR,
    (_S.OPENING, _I.UPSTREAM_ERROR): _O.UPSTREAM_ERROR,
    (_S.OPENING, _I.CLIENT_GONE): _O.CLIENT_ABORT,
    (_S.OPENING, _I.DEADLINE): _O.DEADLINE,
    (_S.OPENING, _I.SHUTDOWN): _O.SHUTDOWN,
    (_S.STREAMING, _I.DATA): _S.STREAMING,
    (_S.STREAMING, _I.TERMINAL): _O.COMPLETED,
    (_S.STREAMING, _I.EOF): _O.TRUNCATED,  # COMPLETED after a finish_reason, see `advance`
    (_S.STREAMING, _I.UPSTREAM_ERROR): _O.UPSTREAM_ERROR,
    (_S.STREAMING, _I.CLIENT_GONE): _O.CLIENT_ABORT,  # or DRAINING, see `advance`
    (_S.STREAMING, _I.DEADLINE): _O.DEADLINE,
    (_S.STREAMING, _I.SHUTDOWN): _O.SHUTDOWN,
    (_S.DRAINING, _I.DATA): _S.DRAINING,
    (_S.DRAINING, _I.TERMINAL): _O.CLIENT_ABORT,
    (_S.DRAINING, _I.EOF): _O.CLIENT_ABORT,
    (_S.DRAINING, _I.UPSTREAM_ERROR): _O.CLIENT_ABORT,
    (_S.DRAINING, _I.CLIENT_GONE): _S.DRAINING,
    (_S.DRAINING, _I.DEADLINE): _O.CLIENT_ABORT,
    (_S.DRAINING, _I.SHUTDOWN): _O.CLIENT_ABORT,
    (_S.CLOSED, _I.CLIENT_GONE): _S.CLOSED,
    (_S.CLOSED, _I.DEADLINE): _S.CLOSED,
    (_S.CLOSED, _I.SHUTDOWN): _S.CLOSED,
}


class Lifecycle:
    """The state of one stream; moved by `advance` alone.

    Args:
        drain_on_abort: read on for the usage after a hang-up (off by default: M4.1 cancels).
    """

    __slots__ = ("_drain_on_abort", "_outcome", "_state")

    def __init__(self, *, drain_on_abort: bool = False) -> None:
        self._state = StreamState.RESERVED
        self._outcome: Outcome | None = None
        self._drain_on_abort = drain_on_abort

    @property
    def state(self) -> StreamState:
        """Where the stream is now."""
        return self._state

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it is open. Set once."""
        return self._outcome

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._state is StreamState.CLOSED

    def advance(self, event: StreamInput, *, finished: bool = False) -> StreamState:
        """Apply one input.

        Args:
            event: what happened.
            finished: whether a finish_reason was seen; an EOF after one is a normal end (M3.4).

        Raises:
            IllegalTransition: the table does not hold this pair.
        """
        step = TABLE.get((self._state, event))
        if step is None:
            raise IllegalTransition(f"{event} in state {self._state}")
        if self._state is StreamState.STREAMING:
            if event is StreamInput.EOF and finished:
                step = Outcome.COMPLETED
            elif event is StreamInput.CLIENT_GONE and self._drain_on_abort:
                step = StreamState.DRAINING
        if isinstance(step, Outcome):
            self._outcome = step
            self._state = StreamState.CLOSED
        else:
            self._state = step
        return self._state
