"""What followers of a run are sent: frames and tokens, grouped by what came at once. [pure]

Rules W2.1, W2.2, W2.6. A group is encoded once for each wire that is in use, however many followers
there are: two thousand of them share its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from encoders import workflow
from encoders.json_text import dumps

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextStream:
    """The text of a task since its `streaming_started`, as far as followers may see it.

    Attributes:
        start: the position of that event. head: `encoders.workflow.token_head` of the task.
        chars: characters so far.
    """

    __slots__ = ("_pieces", "chars", "head", "start", "task_id")

    def __init__(self, task_id: str, start: int) -> None:
        self.task_id = task_id
        self.start = start
        self.head = workflow.token_head(task_id)
        self.chars = 0
        self._pieces: list[bytes] = []

    def add(self, raw: bytes, chars: int) -> None:
        """Take the next piece."""
        self._pieces.append(raw)
        self.chars += chars

    @property
    def raw(self) -> bytes:
        """All of it, as inside of a JSON string."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""


@dataclass(slots=True)
class FrameItem:
    """One durable frame at its position. `stream`: the text that it ends, if it ends one."""

    position: int
    name: str
    frame: bytes
    stream: TextStream | None = None


@dataclass(slots=True)
class TokenItem:
    """One piece of text. `offset`: the characters before it."""

    stream: TextStream
    raw: bytes
    offset: int


Item: TypeAlias = FrameItem | TokenItem


class Wire(Protocol):
    """How a run is written. Equal ones share what they encode."""

    def encode(self, item: Item) -> bytes:
        """Return an item as it leaves; b"" if it does not. Equal items give equal bytes."""

    def reset(self, execution_id: str, after: int) -> bytes:
        """Return what a client is told that took nothing for too long (J2.2).

        Args:
            after: the position of the last frame that it has.
        """

    def cut(self, message: str) -> bytes:
        """Return what a client is told whose stream ends here, whatever becomes of the run."""

    def ends(self, position: int) -> bool:
        """Whether nothing may follow the frame at this position, which was encoded before."""


@dataclass(frozen=True, slots=True)
class EngineWire:
    """Named events, as the engine says them.

    Attributes:
        ids: engine frames bear their position as SSE id. offsets: tokens bear their offset.
    """

    ids: bool
    offsets: bool

    def encode(self, item: Item) -> bytes:
        if isinstance(item, TokenItem):
            if self.offsets:
                return workflow.placed_token(item.stream.head, item.raw, item.offset)
            return workflow.token(item.stream.head, item.raw)
        return workflow.with_id(item.position, item.frame) if self.ids else item.frame

    def reset(self, execution_id: str, after: int) -> bytes:
        told = dumps({"execution_id": execution_id, "after": after})
        return workflow.frame("stream_reset", told)

    def cut(self, message: str) -> bytes:
        return b""  # a stream without `workflow_result` is unfinished, and is followed again

    def ends(self, position: int) -> bool:
        return False


VERBATIM: Final = EngineWire(ids=False, offsets=False)  # the POST stream
NUMBERED: Final = EngineWire(ids=True, offsets=False)  # the same with `?positions=true`
PLACED: Final = EngineWire(ids=True, offsets=True)  # the re-attach route


class Group:
    """Items that leave in one write.

    Attributes:
        last: the position of its last frame, 0 if it has none.
        final: whether the run has ended with it.
    """

    __slots__ = ("_encoded", "final", "items", "last")

    def __init__(self, items: Sequence[Item], *, final: bool = False) -> None:
        self.items = items
        self.final = final
        frames = (item.position for item in reversed(items) if isinstance(item, FrameItem))
        self.last = next(frames, 0)
        self._encoded: dict[Wire, bytes] = {}

    def encoded(self, wire: Wire) -> bytes:
        """Return the bytes for one wire."""
        data = self._encoded.get(wire)
        if data is None:
            encode = wire.encode
            data = self._encoded[wire] = b"".join([encode(item) for item in self.items])
        return data

    def __len__(self) -> int:
        return len(self.items)
