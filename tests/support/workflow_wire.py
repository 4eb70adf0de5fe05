"""What a client may believe of a run's stream, checked on its bytes alone (W2.1 to W2.3, W2.6).

Nothing of the gateway's own code is used: the vocabulary is the seed's, the parser is strict.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

ENVELOPE: Final = ["workflow_id", "execution_id", "timestamp", "type", "data", "elapsed_ms"]
VOCABULARY: Final = frozenset(
    re.findall(
        "[a-z_]+",
        """
    request_received workflow_loaded workflow_started task_dispatched task_completed task_error
    task_skipped streaming_started streaming_completed output_delivered parallel_start
    parallel_complete sequential_start sequential_complete dynamic_start dynamic_generated
    dynamic_complete batch_start batch_item_start batch_item_complete batch_progress batch_complete
    debate_start debate_round_complete debate_judgment debate_complete condition_evaluated
    workflow_yielded workflow_result workflow_completed workflow_error heartbeat
    """,
    )
)
OUTCOMES: Final = frozenset({"workflow_completed", "workflow_error"})
TEXT_ENDS: Final = frozenset({"streaming_completed", "task_completed", "task_error"})
_BLOCK: Final = re.compile(rb"(?:id: ([0-9]+)\n)?event: ([a-z_]+)\ndata: (\{[^\n\r]*\})")
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@dataclass(frozen=True)
class Block:
    """One event of a stream. `id`: its SSE id, None if it has none."""

    id: int | None
    name: str
    payload: dict[str, Any]


def blocks_of(body: bytes, *, whole: bool = True) -> list[Block]:
    """Read events; `whole`: whether the last must be complete. There are no comments (W2.4)."""
    if not whole:
        body = b"".join(body.rpartition(b"\n\n")[:2])
    parts = body.split(b"\n\n")
    assert parts.pop() == b"", f"the stream ends within an event: {body[-200:]!r}"
    found = []
    for part in parts:
        match = _BLOCK.fullmatch(part)
        assert match is not None, f"no event of this plane: {part[:300]!r}"
        position = int(match[1]) if match[1] is not None else None
        found.append(Block(position, match[2].decode(), json.loads(match[3].decode())))
    return found


@dataclass
class Seen:
    """A stream that was read.

    Attributes:
        events: engine frames in order: name and payload. ids: their SSE ids, empty if none had one.
        texts: of each task, since its last `streaming_started`. reset: it ended by `stream_reset`.
        completed: tasks that completed; their texts are their outputs.
    """

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    reset: bool = False
    open: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def data(self, name: str, task_id: str | None = None) -> list[dict[str, Any]]:
        """The `data` of all events of a name, of one task if named."""
        return [
            payload["data"]
            for said, payload in self.events
            if said == name and task_id in (None, payload["data"].get("task_id"))
        ]

    @property
    def status(self) -> str | None:
        """As the last `workflow_result` says."""
        results = self.data("workflow_result")
        return results[-1]["status"] if results else None


def read(body: bytes, *, placed: bool = False, whole: bool = True, began: bool = True) -> Seen:
    """Read a stream and hold it to the contract.

    Args:
        placed: whether it is of the re-attach route: ids, and tokens with offsets.
        whole: whether it must have its end. began: whether it is there from its beginning.
    """
    seen = Seen()
    blocks = blocks_of(body, whole=whole)
    for block in blocks:
        if block.name == "stream_reset":
            seen.reset = True
            assert block is blocks[-1]
        elif block.name == "token":
            assert block.id is None, "tokens are transient"
            _token(seen, block.payload, placed=placed, began=began)
        else:
            _frame(seen, block, began=began)
    assert len(seen.ids) in (0, len(seen.events))
    assert not placed or len(seen.ids) == len(seen.events)
    if seen.ids:
        first = 1 if began else seen.ids[0]
        assert seen.ids == list(range(first, first + len(seen.ids))), "position n is frame n"
    _ends(seen, whole=whole and not seen.reset, began=began)
    return seen


def _frame(seen: Seen, block: Block, *, began: bool) -> None:
    name, payload = block.name, block.payload
    assert name in VOCABULARY, name
    assert list(payload) == ENVELOPE, payload
    assert payload["type"] == name
    assert isinstance(payload["data"], dict)
    assert _TIMESTAMP.fullmatch(payload["timestamp"]), payload
    assert isinstance(payload["elapsed_ms"], int)
    assert payload["elapsed_ms"] >= 0
    if seen.events:
        for part in ("workflow_id", "execution_id"):
            assert payload[part] == seen.events[0][1][part]
    if block.id is not None:
        seen.ids.append(block.id)
    seen.events.append((name, payload))
    data = payload["data"]
    task_id = str(data.get("task_id"))
    if name == "task_dispatched":
        assert data["attempt"] > seen.attempts.get(task_id, 0) or data["kind"] == "tool"
        seen.attempts[task_id] = data["attempt"]
    elif name == "streaming_started":
        assert task_id not in seen.open, f"{task_id} streams twice at once"
        assert task_id in seen.attempts or not began
        seen.open.add(task_id)
        seen.texts[task_id] = ""
    elif name in TEXT_ENDS:
        seen.open.discard(task_id)
        if name == "streaming_completed" and began:
            assert data["chars"] == len(seen.texts[task_id]), task_id
        elif name == "task_completed":
            seen.completed.add(task_id)


def _token(seen: Seen, payload: dict[str, Any], *, placed: bool, began: bool) -> None:
    seen.tokens += 1
    assert list(payload) == ["task_id", "delta"] + ["offset"] * placed
    task_id, delta = payload["task_id"], payload["delta"]
    assert delta
    assert task_id in seen.open or not began, f"a token of {task_id} outside its text"
    had = seen.texts.get(task_id, "")
    if placed and began:
        assert payload["offset"] == len(had), f"{task_id}: not at {len(had)}"
    if placed:
        had = had[: payload["offset"]]
    seen.texts[task_id] = had + delta


def _ends(seen: Seen, *, whole: bool, began: bool) -> None:
    names = seen.names
    at = [place for place, name in enumerate(names) if name in OUTCOMES]
    assert len(at) <= 1, names
    assert not at or set(names[at[0] + 1 :]) <= {"workflow_result"}, names[at[0] :]
    if not whole:
        return
    assert names[-1] == "workflow_result", names
    results = seen.data("workflow_result")
    assert [each["status"] for each in results[:-1]] == ["yielded"] * (len(results) - 1)
    if seen.status == "yielded":
        assert names[-2:-1] in (["workflow_yielded"], []), names[-3:]
        assert not seen.open
        return
    assert names[-2:-1] == [names[at[0]]] if at else not began and len(names) == 1, names
    outcome = {"completed": "workflow_completed"}.get(str(seen.status), "workflow_error")
    assert not at or names[at[0]] == outcome
    assert not seen.open or seen.status == "cancelled", f"texts left open: {seen.open}"


class Kept:
    """What a client keeps over any number of connections to the re-attach route (W2.6): frames by
    position, and of each text what lies beyond its own length.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.texts: dict[str, str] = {}

    @property
    def after(self) -> int:
        """The position to follow from."""
        return len(self.events)

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        if not self.events:
            return False
        name, payload = self.events[-1]
        return name == "workflow_result" and payload["data"]["status"] != "yielded"

    def feed(self, body: bytes) -> None:
        """Take what one connection brought, up to where it was cut."""
        for block in blocks_of(body, whole=False):
            if block.name == "token":
                self._token(block.payload)
                continue
            assert block.id == self.after + 1, f"{block.id} after {self.after}"
            self.events.append((block.name, block.payload))
            if block.name == "streaming_started":
                self.texts[block.payload["data"]["task_id"]] = ""

    def _token(self, payload: dict[str, Any]) -> None:
        task_id, delta, offset = payload["task_id"], payload["delta"], payload["offset"]
        had = self.texts[task_id]
        assert offset <= len(had), f"a gap in the text of {task_id}"
        again, new = delta[: len(had) - offset], delta[len(had) - offset :]
        assert had[offset : offset + len(again)] == again, "a text is told the same each time"
        self.texts[task_id] = had + new
