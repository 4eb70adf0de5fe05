"""What a store must do for runs: journals, checkpoints, leases, saved workflows (J1, W1.2, W2.5).

`tests/contract/` holds every store to it. All methods are atomic, raise `StoreError` if the
database fails, and may be called from several processes on one database. A call that is cancelled
may still be done, and is done before what its caller calls next.

A *journal* is an append-only log named by its stream, `run/<execution_id>`; positions are gap-free
integers from 1, given out in the transaction of the append (J1.1). A run is *owned* by the worker
that its row names, under a generation that grows with every claim; appends and terminals of an
older generation change nothing (J1.3). Whether an owner lives is told by its worker's lease
(`Store.renew_lease`).

Times are Unix seconds. JSON values come back as they went in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RunState = Literal["running", "yielded", "completed", "failed", "cancelled"]
ENDED: frozenset[RunState] = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """One durable frame.

    Attributes:
        event_id: its identity; appended twice it is one event (J1.2). name: of the event.
        task_id: of every event that has one, else "": which text begins and ends where is told by
            it.
        frame: the bytes as they leave: `event:` and `data:` lines and the blank line, no `id:`.
    """

    event_id: str
    name: str
    frame: bytes
    task_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """An event as it was given its place."""

    position: int
    name: str
    frame: bytes
    task_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """A checkpoint of a task's text (J1.4).

    Attributes:
        event_id: of the `streaming_started` event of this task that this text follows: in the
            journal already, or in the same append; else StoreError. task_id: whose text.
        offset: characters before it; pieces are stored in order. One that is there already writes
            nothing; a gap is a StoreError.
        raw: what stands between the quotes of a JSON string. chars: its characters.
    """

    event_id: str
    task_id: str
    offset: int
    raw: bytes
    chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredText:
    """A task's text so far, after the `streaming_started` at `position`; never empty."""

    position: int
    task_id: str
    raw: bytes
    chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one append makes durable, together or not at all.

    Attributes:
        steps: finished steps by key; one that is there already keeps its first value.
        outputs: outputs by task id, JSON values; a later one replaces the first.
    """

    events: Sequence[JournalEvent] = ()
    texts: Sequence[TextPiece] = ()
    steps: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that begins; its row is `running` and owned by `owner` under generation 1."""

    execution_id: str
    workflow_id: str
    org: str
    key_id: str
    trial: bool
    plane: str
    name: str
    source: str
    document: Any
    inputs: Any
    owner: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as stored.

    Attributes:
        head: the position of its newest event, 0 if none.
        owner: the worker that owns it, "" if nobody does.
        attempts: how often it was claimed, its start included, answers to its yields not.
        cancel_requested: a client asked for its end.
        final_task_id, error, summary, usage, finished_at: of its newest terminal or yield.
        answers: answers to its yields by task id. waits_for: the yield that waits
            (`{task_id, prompt, schema}`), None unless yielded.
    """

    execution_id: str
    workflow_id: str
    org: str
    key_id: str
    trial: bool
    plane: str
    name: str
    source: str
    document: Any
    inputs: Any
    state: RunState
    owner: str
    generation: int
    attempts: int
    cancel_requested: bool
    created_at: float
    updated_at: float
    finished_at: float | None
    head: int
    final_task_id: str | None
    error: Any
    summary: Any
    usage: Any
    answers: Mapping[str, Any]
    waits_for: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a leg of a run ends.

    Attributes:
        state: what its row becomes; never `running`.
        waits_for: see `RunRow`; needed for `yielded`, and for nothing else.
    """

    state: RunState
    at: float
    final_task_id: str | None = None
    error: Any = None
    summary: Any = None
    usage: Any = None
    waits_for: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWorkflow:
    """A saved workflow. `document` is as received: text, or an object."""

    id: str
    org: str
    name: str
    document: Any
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPage:
    """Events after a position.

    Attributes:
        oldest: the oldest position that is still kept; head + 1 if none is.
        state: of the run, as of the same moment.
    """

    events: Sequence[StoredEvent]
    head: int
    oldest: int
    state: RunState


class RunStore(Protocol):
    """The runs of a database."""

    # -- saved workflows ------------------------------------------------------------------------

    async def put_workflow(
        self, org: str, workflow_id: str, *, name: str, document: Any, now: float
    ) -> bool:
        """Save or overwrite one; whether it is new."""

    async def get_workflow(self, org: str, workflow_id: str) -> StoredWorkflow | None:
        """Return one of the org's."""

    async def delete_workflow(self, org: str, workflow_id: str) -> bool:
        """Forget one; whether there was one. Its runs stay."""

    async def list_workflows(self, org: str) -> list[StoredWorkflow]:
        """The org's, by id; their `document` is None."""

    # -- rows -----------------------------------------------------------------------------------

    async def create_run(self, run: NewRun, batch: Batch) -> None:
        """Write the row and the first events. StoreError if the id is taken."""

    async def get_run(self, execution_id: str) -> RunRow | None:
        """Return a row; whose it is, is for the caller to look at."""

    async def newest_run(self, org: str, workflow_id: str) -> str | None:
        """The execution id of the newest run of the org's workflow."""

    async def touch_runs(self, owner: str, now: float) -> None:
        """Set `updated_at` of all running rows of this owner (W2.4)."""

    async def request_cancel(self, execution_id: str, now: float) -> RunRow | None:
        """Ask for the end of a run; nothing if it has ended. Return its row as it is then."""

    async def cancels_of(self, owner: str) -> list[str]:
        """Running runs of this owner whose end was asked for."""

    async def release_runs(self, owner: str) -> None:
        """Give up all running rows of this owner: they may be claimed at once."""

    async def claim_runs(
        self, owner: str, *, now: float, stale_before: float, limit: int
    ) -> list[RunRow]:
        """Take over running rows that nobody owns, whose owner has no lease at `now`, or whose
        `updated_at` is before `stale_before` (not this owner's own, unless stale): generation and
        attempts grow by one. A row goes to one claimant only (W2.5, J1.3).
        """

    async def resume_run(
        self,
        execution_id: str,
        *,
        owner: str,
        answer: Any,
        now: float,
        generation: int | None = None,
    ) -> RunRow | None:
        """Answer a run that waits: it is `running` again, owned by `owner` under a new generation.
        None if it does not wait, or no longer under `generation`, where that is given: what it
        waits for is another answer then.
        """

    # -- the journal ----------------------------------------------------------------------------

    async def append(self, execution_id: str, generation: int, batch: Batch) -> int | None:
        """Make a batch durable; return the position of its first event (the head if it has none).
        An event whose id is there already keeps its position and writes nothing (J1.2). None if
        the run is not `running` under this generation: nothing is written (J1.3).
        """

    async def finish(
        self, execution_id: str, generation: int | None, batch: Batch, end: RunEnd
    ) -> int | None:
        """As `append`, and end the run or its leg in the same transaction: of all that race for
        it, one gets a position and the others None. `generation` None: whoever owns it, and a run
        that waits may be ended too.
        """

    async def read(self, execution_id: str, *, after: int, limit: int) -> JournalPage | None:
        """Return events after a position, at most so many; None if there is no such run."""

    async def texts(
        self, execution_id: str, *, first: int, last: int, bytes_max: int | None = None
    ) -> list[StoredText]:
        """Texts that follow a `streaming_started` at these positions (inclusive), by position.

        Args:
            bytes_max: the one with which they have so many bytes is the last one.
        """

    async def open_texts(self, execution_id: str, *, at: int) -> list[StoredText]:
        """Texts of streams that are open at position `at`, by position: `streaming_started` at or
        before it, and no `streaming_completed`, `task_completed`, `task_error` or other
        `streaming_started` of that task after it up to `at`. Whole as they are now, not as at `at`.
        """

    async def steps(self, execution_id: str) -> dict[str, Any]:
        """Finished steps."""

    async def outline(self, execution_id: str) -> list[StoredEvent]:
        """All events of a run in order: what a takeover reads once."""

    async def output(self, execution_id: str, task_id: str) -> tuple[Any] | None:
        """A task's stored output in a 1-tuple, None if there is none."""

    async def outputs(self, execution_id: str) -> dict[str, Any]:
        """All outputs by task id, in the order of their first append."""

    async def retire_runs(self, before: float, limit: int) -> int:
        """Forget events, texts, steps and outputs of runs that ended before then, those that ended
        first, at most so many; their rows stay, and their heads. Return how many. Each run is
        forgotten whole or not at all.
        """
