"""What a client may believe of a run's stream, checked on its bytes alone (W2.1 to W2.3, W2.6)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from encoders.sse import SseDecoder
from encoders.workflow import OUTCOMES, TEXT_ENDS, VOCABULARY

ENVELOPE: Final = ["workflow_id", "execution_id", "timestamp", "type", "data", "elapsed_ms"]


@dataclass
class Seen:
    """A stream that was read.

    Attributes:
        events: engine frames in order: name and payload. ids: their SSE ids, empty if none had one.
        texts: of each task, since its last `streaming_started`. reset: it ended by `stream_reset`.
    """

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    reset: bool = False

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
    open_texts: set[str] = set()
    for line in body.split(b"\n"):
        assert not line.startswith(b":"), "no comments on this plane (W2.4)"
    if not whole:
        body = body[: body.rfind(b"\n\n") + 2]
    blocks = [block for block in body.split(b"\n\n") if block]
    events = SseDecoder().feed(body)
    assert len(blocks) == len(events)
    for block, event in zip(blocks, events, strict=True):
        name, payload = event.event.decode(), json.loads(event.data)
        assert block.count(b"\ndata: ") == 1
        if name == "stream_reset":
            seen.reset = True
            assert event is events[-1]
            break
        if name == "token":
            assert b"id:" not in block.split(b"\n")[0]
            _token(seen, payload, open_texts, placed=placed, began=began)
            continue
        assert name in VOCABULARY, name
        assert list(payload) == ENVELOPE, payload
        assert payload["type"] == name
        if placed:
            seen.ids.append(int(block.split(b"\n")[0].removeprefix(b"id: ")))
        seen.events.append((name, payload))
        task_id = payload["data"].get("task_id")
        if name == "streaming_started":
            open_texts.add(task_id)
            seen.texts[task_id] = ""
        elif name in TEXT_ENDS:
            open_texts.discard(task_id)
    _ends(seen, whole=whole and not seen.reset, began=began)
    if seen.ids:
        assert seen.ids == list(range(seen.ids[0], seen.ids[0] + len(seen.ids)))
    return seen


def _token(
    seen: Seen, payload: dict[str, Any], open_texts: set[str], *, placed: bool, began: bool
) -> None:
    seen.tokens += 1
    task_id, delta = payload["task_id"], payload["delta"]
    fields = ["task_id", "delta", "offset"] if placed else ["task_id", "delta"]
    assert list(payload) == fields
    assert delta
    if began:
        assert task_id in open_texts, f"a token of {task_id} outside its text"
    had = seen.texts.get(task_id, "")
    if placed:
        assert payload["offset"] <= len(had) or not began
        had = had[: payload["offset"]]
    seen.texts[task_id] = had + delta


def _ends(seen: Seen, *, whole: bool, began: bool) -> None:
    names = seen.names
    outcomes = [name for name in names if name in OUTCOMES]
    assert len(outcomes) <= 1, names
    if not whole:
        return
    assert names[-1] == "workflow_result", names
    if seen.status == "yielded":
        assert "workflow_yielded" in names or names == ["workflow_result"]
        return
    if not began and len(names) == 1:
        return
    assert len(outcomes) == 1, names
    assert names[-2] in OUTCOMES
    results = seen.data("workflow_result")
    assert [each["status"] for each in results[:-1]] == ["yielded"] * (len(results) - 1)
