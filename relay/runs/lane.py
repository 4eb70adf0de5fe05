"""The order in which a run's frames and tokens leave, and what of them is made durable. [pure]

    emit ─▶ ┌──────────────┐ take() ─▶ Batch ─▶ the store ─▶ committed(first position) ─▶ items
    token ─▶│ lane, ordered │
            └──────────────┘ tokens with no frame before them leave at once

Rules W2.2, W2.6, J1.2, J1.4. A frame leaves when it is committed, under the position that the store
gave it. A token leaves at once unless a frame stands before it. Text is due every
`CHECKPOINT_CHARS` characters, and is made durable with the next frame or a moment later; never
token by token.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from encoders.json_text import dumps, loads
from encoders.workflow import TEXT_ENDS
from relay.stores.runs import Batch, JournalEvent, TextPiece

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECKPOINT_CHARS: Final = 512
# Text that is due alone waits so long for a frame, or for more of it: nobody waits for its commit.
CHECKPOINT_WAIT_S: Final = 0.1
_DUE_MAX: Final = 16  # pieces; more do not wait
TASK: Final = "task/"  # the step of a finished task is this and its id
# What may wait for the store: beyond it whoever makes text is asked to wait.
WAITING_ITEMS_MAX: Final = 1000
WAITING_BYTES_MAX: Final = 1024 * 1024
_HIGH_SURROGATE: Final = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})\Z")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}".encode()


def count_chars(raw: bytes) -> int:
    """Characters (code points) of the inside of a JSON string."""
    if b"\\" not in raw:
        return len(raw) if raw.isascii() else len(raw.decode("utf-8", "replace"))
    return len(loads(b'"' + raw + b'"'))


def well_formed(raw: bytes) -> bytes:
    """The inside of a JSON string whose lone surrogates have become U+FFFD (B20)."""
    text: str = loads(b'"' + raw + b'"')
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return dumps(whole)[1:-1]


@dataclass(slots=True)
class CommittedFrame:
    """A frame that may leave now."""

    position: int
    event: JournalEvent


@dataclass(slots=True)
class Text:
    """A piece of text that may leave now."""

    task_id: str
    raw: bytes
    chars: int


Leaving: TypeAlias = CommittedFrame | Text


@dataclass(slots=True)
class _Open:
    """The text of an open stream that is not durable yet."""

    event_id: str
    offset: int = 0  # characters before `pieces`
    chars: int = 0
    pieces: list[bytes] = field(default_factory=list)
    held: bytes = b""  # half of a surrogate pair, until its other half comes

    def take(self, task_id: str) -> TextPiece:
        raw, chars = b"".join(self.pieces), self.chars
        piece = TextPiece(
            event_id=self.event_id, task_id=task_id, offset=self.offset, raw=raw, chars=chars
        )
        self.offset += chars
        self.chars = 0
        self.pieces = []
        return piece


class Lane:
    """The lane of one run, under one generation.

    Args:
        generation: makes event ids that no other generation makes.
    """

    def __init__(self, generation: int) -> None:
        self._prefix = f"{generation}."
        self._made = 0
        self._waiting: deque[JournalEvent | Text] = deque()
        self._waiting_bytes = 0
        self._taken = 0  # events in `_waiting` that the store has been given
        self._events = 0  # events in `_waiting`
        self._open: dict[str, _Open] = {}
        self._due: list[TextPiece] = []
        self._steps: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}

    @property
    def full(self) -> bool:
        """Whether too much waits for the store."""
        return len(self._waiting) > WAITING_ITEMS_MAX or self._waiting_bytes > WAITING_BYTES_MAX

    @property
    def idle(self) -> bool:
        """Whether there is nothing for the store to do, and nothing that it does."""
        return not self._waiting and not self._due and not self._steps

    @property
    def has_work(self) -> bool:
        """Whether `take` would return something."""
        return self._events > self._taken or bool(self._due) or bool(self._steps)

    @property
    def can_wait(self) -> bool:
        """Whether what `take` would return is a little text."""
        return self._events == self._taken and not self._steps and len(self._due) < _DUE_MAX

    def emit(
        self, name: str, frame: bytes, task_id: str = "", steps: Mapping[str, Any] | None = None
    ) -> None:
        """Admit a frame.

        Args:
            task_id: whose event it is, "" if nobody's.
        """
        self._made += 1
        event_id = f"{self._prefix}{self._made}"
        if task_id and name in TEXT_ENDS:
            self._end(task_id)
        event = JournalEvent(event_id=event_id, name=name, frame=frame, task_id=task_id)
        self._waiting.append(event)
        self._waiting_bytes += len(frame)
        self._events += 1
        if task_id and name == "streaming_started":
            self._open[task_id] = _Open(event_id)
        if steps:
            self._take_steps(steps)

    def _take_steps(self, steps: Mapping[str, Any]) -> None:
        """The output of a task is stored once, where it is read by its task (W1.3)."""
        for key, value in steps.items():
            kept = value
            if key.startswith(TASK) and isinstance(value, dict) and "output" in value:
                self._outputs[key.removeprefix(TASK)] = value["output"]
                kept = {name: part for name, part in value.items() if name != "output"}
            self._steps[key] = kept

    def token(self, task_id: str, raw: bytes) -> Text | None:
        """Admit a piece of text; return it if it leaves at once.

        A text without an open stream is nobody's and is dropped (J1.4).
        """
        stream = self._open.get(task_id)
        if stream is None:
            return None
        if stream.held:
            raw, stream.held = stream.held + raw, b""
        if b"\\" in raw and (half := _HIGH_SURROGATE.search(raw)):
            stream.held = half[1]
            raw = raw[: half.start(1)]
            if not raw:
                return None
        if b"\\" in raw and _SURROGATE.search(raw):
            raw = well_formed(raw)
        return self._admit(task_id, stream, raw)

    def _admit(self, task_id: str, stream: _Open, raw: bytes) -> Text | None:
        chars = count_chars(raw)
        stream.pieces.append(raw)
        stream.chars += chars
        if stream.chars >= CHECKPOINT_CHARS:
            self._due.append(stream.take(task_id))
        text = Text(task_id, raw, chars)
        if self._waiting:
            self._waiting.append(text)
            self._waiting_bytes += len(raw)
            return None
        return text

    def _end(self, task_id: str) -> None:
        stream = self._open.pop(task_id, None)
        if stream is None:
            return
        if stream.held:  # its other half never came; it leaves before the end, or not live at all
            text = self._admit(task_id, stream, _REPLACEMENT)
            if text is not None:
                self._waiting.append(text)
                self._waiting_bytes += len(_REPLACEMENT)
        if stream.chars:
            self._due.append(stream.take(task_id))

    def take(self, *, last: bool = False) -> Batch:
        """Return what the store has to do next; `committed` must be called before the next one.

        Args:
            last: of the leg: its terminal is written with it.
        """
        events = [item for item in self._waiting if isinstance(item, JournalEvent)]
        fresh = events[self._taken :]
        if fresh or last:  # a durable frame flushes the transient ones admitted before it (J1.4)
            self._due += [
                stream.take(task_id) for task_id, stream in self._open.items() if stream.chars
            ]
        self._taken = len(events)
        texts, self._due = self._due, []
        steps, self._steps = self._steps, {}
        outputs, self._outputs = self._outputs, {}
        return Batch(events=fresh, texts=texts, steps=steps, outputs=outputs)

    def committed(self, first: int) -> list[Leaving]:
        """The store has done what `take` returned; return what may leave now, in order.

        Args:
            first: the position of its first event.
        """
        leaving: list[Leaving] = []
        waiting, position = self._waiting, first
        while waiting:
            item = waiting[0]
            if isinstance(item, Text):
                self._waiting_bytes -= len(item.raw)
                leaving.append(item)
            elif self._taken:
                self._taken -= 1
                self._events -= 1
                self._waiting_bytes -= len(item.frame)
                leaving.append(CommittedFrame(position, item))
                position += 1
            else:
                break
            waiting.popleft()
        return leaving
