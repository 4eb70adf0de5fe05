"""One run: what it says, what is open, and how long it may be silent (W2.4)."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from relay.engines.base import Usage
from relay.engines.embedded.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from relay.agents.base import AgentCaller
    from relay.engines.base import Envelope, Outlet
    from relay.engines.embedded.document import Task
    from relay.engines.embedded.lives import Job, Life, OnError
    from relay.engines.embedded.places import Places
    from relay.engines.embedded.scope import Scope

PREVIEW_CHARS: Final = 512


class Run:
    """What all tasks of a run share.

    Attributes:
        caller: calls its agents. models: the slugs of its agents, for what is said.
        places: of its document's tasks.
        job: makes the job of a task of the document.
        memory: what it knows of itself. jitter: gives numbers from 0 to 1.
        leg: in the ids of its calls; what a former owner did last may not be known.
        running: the tasks that were dispatched and have not ended, in that order.
    """

    def __init__(
        self,
        envelope: Envelope,
        outlet: Outlet,
        caller: AgentCaller,
        *,
        places: Places,
        job: Callable[[Task, Scope, OnError | None], Job],
        jitter: Callable[[], float],
    ) -> None:
        self.envelope = envelope
        self.outlet = outlet
        self.caller = caller
        self.models = caller.agents()
        self.memory = Memory(envelope.past)
        self.places = places
        self.job = job
        self.jitter = jitter
        self.running: dict[str, Life] = {}
        self._items: dict[str, int] = {}
        self._items_in_all = 0
        self.leg = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._spoke_at = self._clock()

    def now(self) -> float:
        """Seconds on the clock of the loop."""
        return self._clock()

    def unsaid(self) -> Usage:
        """What attempts that are open have used; it stands in no step yet."""
        return sum((life.usage for life in self.running.values()), Usage())

    def count_items(self, batch: str, items: int) -> int:
        """Note how many items a batch has, in each attempt; return those of all batches."""
        self._items_in_all += items - self._items.get(batch, 0)
        self._items[batch] = items
        return self._items_in_all

    # -- what is said ---------------------------------------------------------------------------

    def emit(
        self, name: str, data: Mapping[str, Any], steps: Mapping[str, Any] | None = None
    ) -> None:
        """Say an event, with the steps that become durable with it (J1.4)."""
        self._spoke_at = self._clock()
        if steps:
            self.outlet.emit(name, data, steps=steps)
            for key, step in steps.items():
                self.memory.learn(key, step)
        else:
            self.outlet.emit(name, data)

    def once(
        self,
        name: str,
        data: Mapping[str, Any],
        *,
        index: int = 0,
        steps: Mapping[str, Any] | None = None,
    ) -> None:
        """Say an event that a run says once, takeovers and retries included."""
        if self.memory.first(name, data.get("task_id", ""), index):
            self.emit(name, data, steps)

    def token(self, task_id: str, raw: bytes) -> bool:
        """Say a piece of text; whether more may follow at once."""
        self._spoke_at = self._clock()
        return self.outlet.token(task_id, raw)

    @contextmanager
    def beating(self, every_s: float) -> Iterator[None]:
        """Say a `heartbeat` after each silence of so many seconds within the block."""
        self._heart = self._loop.call_later(every_s, self._beat, every_s)
        try:
            yield
        finally:
            self._heart.cancel()

    def _beat(self, every_s: float) -> None:
        if self._clock() >= self._spoke_at + every_s:
            self.emit("heartbeat", {"running": list(self.running)})
        self._heart = self._loop.call_at(self._spoke_at + every_s, self._beat, every_s)


def measured(output: Any) -> tuple[int, str]:
    """The bytes of an output, and the first of its characters.

    Text counts as UTF-8, anything else as compact JSON.
    """
    if isinstance(output, str):
        return len(output.encode("utf-8", "surrogatepass")), output[:PREVIEW_CHARS]
    encoded = dumps(output)
    # A character has at most 4 bytes; what is cut in two at the end is beyond the preview.
    return len(encoded), encoded[: 4 * PREVIEW_CHARS].decode("utf-8", "ignore")[:PREVIEW_CHARS]
