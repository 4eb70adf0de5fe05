"""What a decision stream asks of its shell, and what it is told back. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError
    from encoders.decision_frames import RateLimit
    from encoders.decision_served import Subject


class Opcode(Enum):
    """The kinds of frames that a session sends, by their RFC 6455 opcode."""

    TEXT = 1
    PING = 9


@dataclass(frozen=True, slots=True)
class OutFrame:
    """One whole frame to be written: JSON in UTF-8, or the payload of a native ping."""

    opcode: Opcode
    payload: bytes


@dataclass(frozen=True, slots=True)
class TakeStart:
    """Ask the account's budget for one start (D5.4).

    Answered once by `start_granted`, `start_refused` or `store_unavailable`.
    """


@dataclass(frozen=True, slots=True)
class StartDecide:
    """Run one decide; answered once by `resolve(ticket, …)`, also after the end of the stream.

    Attributes:
        ticket: names this dispatch.
        body: the decide body, canonical JSON (D4.10).
        idempotency_key: the key of the state's version, or None.
        state_version: the version of the snapshot.
        subject: what `check_served` looks at before a backend is asked.
    """

    ticket: int
    body: bytes
    idempotency_key: str | None
    state_version: int
    subject: Subject


@dataclass(frozen=True, slots=True)
class Close:
    """Release the lease, write all frames that came before, then a Close frame (D1.5, D3.10).

    Attributes:
        code: the close code.
        reason: the close reason, ASCII, at most 123 bytes; the goodbye's reason or empty.
    """

    code: int
    reason: str


Effect: TypeAlias = TakeStart | StartDecide | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decide that was answered.

    Attributes:
        reply: the HTTP decision reply, compact JSON.
        request_id: of the decide.
        server_timing: the reply's `server-timing`. latency_ms: its `x-latency-ms`.
        rate_limit: the account's budget after it.
        replayed: whether it was decided before, under the same key (D6.2).
    """

    reply: bytes
    request_id: str
    server_timing: str | None = None
    latency_ms: float | None = None
    rate_limit: RateLimit | None = None
    replayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A decide that was refused or failed; see `Decided`."""

    error: DecisionError
    request_id: str
    server_timing: str | None = None
    rate_limit: RateLimit | None = None
