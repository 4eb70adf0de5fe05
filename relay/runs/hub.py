"""The live end of one run: its open texts, and whoever follows it now. [pure]

Rules W2.6, J2.1, J2.2. Everything that becomes visible goes through here, in order. What becomes
visible at once leaves in one write for each follower, in the call that made it visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from encoders.workflow import TEXT_ENDS
from relay.runs.groups import FrameItem, Group, TextStream, TokenItem
from relay.runs.lane import CommittedFrame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.runs.groups import Item
    from relay.runs.lane import Leaving


class Listener(Protocol):
    """One who follows a run live."""

    def offer(self, group: Group) -> None:
        """Take the next items. Must not block nor raise."""

    def over(self) -> None:
        """Nothing more comes from this hub."""


class Hub:
    """Where one run becomes visible.

    Args:
        head: the position of the newest frame that is visible already.
    """

    def __init__(self, head: int) -> None:
        self._head = head
        self._listeners: dict[Listener, None] = {}
        self._streams: dict[str, TextStream] = {}
        self._closed = False
        self.complete = False  # the leg has ended, and all of it was shown

    @property
    def head(self) -> int:
        """The position of the newest frame that listeners have."""
        return self._head

    @property
    def closed(self) -> bool:
        """Whether nothing more comes."""
        return self._closed

    @property
    def streams(self) -> Mapping[str, TextStream]:
        """The texts that are open, by task id."""
        return self._streams

    @property
    def listeners(self) -> int:
        """How many follow."""
        return len(self._listeners)

    def publish(self, leaving: list[Leaving], *, final: bool = False) -> None:
        """Make items visible.

        Args:
            final: the run has ended with them: followers are sent nothing after these.
        """
        if not leaving or self._closed:
            return
        items: list[Item] = []
        for item in leaving:
            if isinstance(item, CommittedFrame):
                event = item.event
                self._head = item.position
                ended: TextStream | None = None
                if event.task_id:
                    if event.name == "streaming_started":
                        self._streams[event.task_id] = TextStream(event.task_id, item.position)
                    elif event.name in TEXT_ENDS:
                        ended = self._streams.pop(event.task_id, None)
                items.append(FrameItem(item.position, event.name, event.frame, ended))
                continue
            stream = self._streams.get(item.task_id)
            if stream is not None:
                items.append(TokenItem(stream, item.raw, stream.chars))
                stream.add(item.raw, item.chars)
        if self._listeners and items:
            group = Group(items, final=final)
            for listener in self._listeners:
                listener.offer(group)

    def join(self, listener: Listener) -> None:
        """Follow from here: what is visible now is not offered any more."""
        self._listeners[listener] = None

    def leave(self, listener: Listener) -> None:
        """Stop following. Idempotent."""
        self._listeners.pop(listener, None)

    def close(self, *, complete: bool) -> None:
        """Nothing more comes from here. Idempotent.

        Args:
            complete: whether the leg has ended and all of it was shown; if not, the run is
                somebody else's now, and its followers find it in the journal.
        """
        if self._closed:
            return
        self._closed = True
        self.complete = complete
        listeners, self._listeners = self._listeners, {}
        for listener in listeners:
            listener.over()
