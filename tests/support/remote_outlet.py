"""Keeps what a remote engine's run says, and checks its order by W2.2 and W2.3."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.engines.base import Usage

ENDS = ("streaming_completed", "task_completed", "task_error")


class KeepingOutlet:
    """An `Outlet` that keeps all, in order.

    Args:
        slow: whether `ready` waits until the test calls `catch_up`.

    Attributes:
        said: (name, frame) and ("token", (task_id, raw)) in order. outputs: what is stored.
    """

    def __init__(self, *, slow: bool = False) -> None:
        self.said: list[tuple[str, Any]] = []
        self.outputs: dict[str, Any] = {}
        self.token_bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        if not slow:
            self._room.set()

    def emit(
        self, name: str, data: Mapping[str, Any], *, steps: Mapping[str, Any] | None = None
    ) -> None:
        raise AssertionError("a remote engine's frames pass as they came")

    def frame(
        self, name: str, frame: bytes, task_id: str = "", *, steps: Mapping[str, Any] | None = None
    ) -> None:
        assert task_id == _about(frame).strip()
        self.said.append((name, frame))
        for key, value in (steps or {}).items():
            self.outputs[key.removeprefix("task/")] = value["output"]
        self._change()

    def token(self, task_id: str, raw: bytes) -> bool:
        assert raw
        self.token_bytes += len(raw)
        self.said.append(("token", (task_id, raw)))
        self._change()
        return self._room.is_set()

    async def ready(self) -> None:
        await self._room.wait()

    def came_to(self, summary: Mapping[str, Any], usage: Usage, *, unsaid: Usage) -> None:
        self.left = (summary, usage)

    async def settled(self) -> None:
        await self._room.wait()

    def catch_up(self) -> None:
        """The journal has caught up, for good."""
        self._room.set()

    # --- for tests

    @property
    def frames(self) -> list[bytes]:
        """The frames without the tokens."""
        return [what for name, what in self.said if name != "token"]

    @property
    def order(self) -> list[str]:
        """Names of frames, with their task if they are about one, and `task:text` for tokens that
        follow each other."""
        out: list[str] = []
        task, raw = "", b""
        for name, what in [*self.said, ("", b"")]:
            if raw and (name != "token" or what[0] != task):
                out.append(f"{task}:{_text(raw)}")
                raw = b""
            if name == "token":
                task, raw = what[0], raw + what[1]
            elif name:
                out.append(name + _about(what))
        return out

    @property
    def texts(self) -> dict[str, str]:
        """The text of each task since its last `streaming_started`."""
        raws: defaultdict[str, bytes] = defaultdict(bytes)
        for name, what in self.said:
            if name == "token":
                raws[what[0]] += what[1]
            elif name == "streaming_started":
                raws.pop(_about(what).strip(), None)
        return {task: _text(raw) for task, raw in raws.items()}

    async def until(self, *names: str) -> None:
        """Waits until the last frames have these names; tokens do not count."""
        async with asyncio.timeout(20):
            while [name for name, _ in self.said if name != "token"][-len(names) :] != [*names]:
                self._changed.clear()
                await self._changed.wait()

    async def until_text(self, task: str, text: str) -> None:
        """Waits until a task's text is this."""
        async with asyncio.timeout(20):
            while self.texts.get(task) != text:
                self._changed.clear()
                await self._changed.wait()

    def check(self) -> None:
        """W2.2: each token between its task's `streaming_started` and end; no terminal frame."""
        open_tasks: set[str] = set()
        for name, what in self.said:
            if name == "token":
                assert what[0] in open_tasks, self.order
            elif name == "streaming_started":
                open_tasks.add(_about(what).strip())
            elif name in ENDS:
                open_tasks.discard(_about(what).strip())
            assert name not in ("workflow_completed", "workflow_error", "workflow_result")

    def _change(self) -> None:
        self._changed.set()


def _text(raw: bytes) -> str:
    text: str = json.loads(b'"%b"' % raw)
    return text


def _about(frame: bytes) -> str:
    try:
        lines = [line[6:] for line in frame.split(b"\n") if line.startswith(b"data: ")]
        data = json.loads(b"\n".join(lines))["data"]
    except (ValueError, KeyError):
        return ""
    task = data.get("task_id")
    return f" {task}" if task else ""
