"""The seam between a run and whatever works on its document (W3).

    Engine.run(envelope, outlet) ──emit()/token()──▶ outlet ──▶ journal ──▶ followers
             └──▶ Ending                                    (`relay.runs` writes the terminal, once)

An engine says what happens; it never writes the outcome frame or `workflow_result` itself, knows no
store, no follower and no socket of a client. Engines: `embedded` (W3.1), `http` (W3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["inline", "saved", "agent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payer:
    """Who pays for a run: the key that started it."""

    org: str
    key_id: str
    trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a run that is taken up again has behind it; empty for a new one.

    Attributes:
        emitted: structural events that were journaled: (name, task_id, index or round or 0).
        steps: finished steps by key, and their values; a finished task's key is `task/<id>`.
        open: tasks that had `task_dispatched` and no end, with their last attempt.
        answers: answers to yields by task id (`POST …/resume`).
        left: what calls of those open tasks used whose process was lost; it stands in no step.
    """

    emitted: frozenset[tuple[str, str, int]] = frozenset()
    steps: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, Usage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One run as an engine gets it.

    Attributes:
        execution_id: 32 lower-case hex. workflow_id: of the saved workflow, else made.
        document: as received: YAML text, or an object. inputs: as received.
        source: where the document comes from. plane: for the usage rows.
        created_at: Unix seconds.
        past: empty for a run that begins. left: whether its process died, or gave it up, while an
            engine worked on it.
    """

    execution_id: str
    workflow_id: str
    document: str | Mapping[str, Any]
    inputs: Mapping[str, Any]
    source: Source
    payer: Payer
    created_at: float
    plane: str = "workflows"
    past: Past = field(default_factory=Past)
    left: bool = False


class Outlet(Protocol):
    """Takes what an engine says, in order, and never blocks it for a client's sake.

    All calls but `ready` and `settled` are plain: they come from the call that read an upstream's
    bytes. After the run has ended (cancelled, lost its lease) they do nothing.
    """

    def emit(
        self, name: str, data: Mapping[str, Any], *, steps: Mapping[str, Any] | None = None
    ) -> None:
        """Say one event of the vocabulary (W2.1); becomes one frame at the next position.

        Args:
            data: its `data`, see cnl; `task_id` where there is one. JSON values only.
            steps: made durable together with the frame (J1.4): a task that is finished is not run
                again. Keys as in `Past.steps`.
        """

    def frame(
        self, name: str, frame: bytes, task_id: str = "", *, steps: Mapping[str, Any] | None = None
    ) -> None:
        """Say one frame of a remote engine, byte for byte as it came (W2.1): `event:` and `data:`
        lines and the blank line.

        Args:
            task_id: its `data.task_id`, "" if it has none.
        """

    def token(self, task_id: str, raw: bytes) -> bool:
        """Say a piece of a task's text, between its `streaming_started` and its end (W2.2).

        Args:
            raw: what stands between the quotes of a JSON string; never empty.

        Returns:
            Whether more may be said at once; if not, await `ready` first.
        """

    def came_to(self, summary: Mapping[str, Any], usage: Usage, *, unsaid: Usage) -> None:
        """Say what a run came to whose engine is being stopped: it has no `Ending` to tell.

        Args:
            unsaid: the part of `usage` that stands in no step; kept for who takes the run up.
        """

    async def ready(self) -> None:
        """Wait until the journal has caught up (not the clients)."""

    async def settled(self) -> None:
        """Wait until all that was said is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a run or a task, summed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_micro_usd: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost_micro_usd=self.cost_micro_usd + other.cost_micro_usd,
        )

    def step(self) -> dict[str, int]:
        """As it stands in steps."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_micro_usd": self.cost_micro_usd,
        }

    def document(self) -> dict[str, int]:
        """As it stands in events and results."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


# Name and bytes of each: the outcome (or `workflow_yielded`) first, `workflow_result` last unless
# the engine did not say it. Empty for an engine that leaves them to `relay.runs`.
Verbatim: TypeAlias = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The run did all that its document says.

    Attributes:
        final_task_id: the task whose output is the run's; None if none ran.
        summary: `execution_summary` without `duration_ms` and `usage`, which `relay.runs` adds.
        verbatim: the last frames of a remote engine; see `Verbatim`.
    """

    final_task_id: str | None
    summary: Mapping[str, Any]
    usage: Usage = field(default_factory=Usage)
    verbatim: Verbatim = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run cannot go on.

    Attributes:
        code: `task_failed`, `timeout`, `engine_error`, `orphaned`, `cancelled`, …
        message: for the client; names the task and the bound.
    """

    code: str
    message: str
    task_id: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    verbatim: Verbatim = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Yielded:
    """The run waits for an answer (W2.3).

    Attributes:
        task_id: the `yield` that waits. schema: of the answer, None for any.
    """

    task_id: str
    prompt: str
    schema: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    verbatim: Verbatim = ()


Ending: TypeAlias = Completed | Failed | Yielded


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a document or its inputs (W1.4).

    Attributes:
        message: what is wrong and what to do; names the bound if it is one.
        path: `workflow.tasks[0].prompt`; "" for the text as a whole.
        line, column: in YAML text, from 1; None where there is no text.
        task_id: the task that it stands in, None if in none.
    """

    message: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    task_id: str | None = None


class DocumentError(Exception):
    """A document, or what a run is asked to do with it, cannot be used; nothing was started."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is known of a document before it runs.

    Attributes:
        name: `workflow.name`. task_count: tasks written in it.
        inputs: its defaults with those of the request over them.
    """

    name: str
    task_count: int
    inputs: Mapping[str, Any]


class Engine(Protocol):
    """Works on documents."""

    def check(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Checked:
        """Look at a document before anything is started. May take tens of milliseconds.

        Raises:
            DocumentError: it cannot be run.
        """

    async def run(self, envelope: Envelope, outlet: Outlet) -> Ending:
        """Work on a document until it is done.

        A cancellation ends it within a second, its upstream connections closed; it propagates.

        Raises:
            Exception: a bug; the run ends with `engine_error`.
        """

    async def cancelled(self, execution_id: str) -> None:
        """Be told that the run was cancelled by its client, after `run` was (W3.2)."""

    async def close(self) -> None:
        """Free everything. Idempotent."""
