"""Runs of the embedded engine on a loop whose time is its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relay.engines.embedded.engine import EmbeddedEngine
from tests.support.clock import run_virtually
from tests.support.runs import RecordingOutlet, ScriptedAgents, by_task, envelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.engines.base import Ending
    from tests.support.runs import Step


@dataclass
class Played:
    """A run that has ended, or was cut."""

    outlet: RecordingOutlet
    agents: ScriptedAgents
    ending: Ending


def task(task_id: str, agent: str = "a", **fields: Any) -> dict[str, Any]:
    """A task of kind `task`."""
    return {"type": "task", "id": task_id, "agent": agent, "prompt": f"do {task_id}", **fields}


def play(
    document: Any,
    replies: Mapping[str, Sequence[Step] | str] | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    answers: Mapping[str, Any] | None = None,
    after: Played | None = None,
    outlet: RecordingOutlet | None = None,
    heartbeat_s: float = 15.0,
    jitter: float = 0.5,
) -> Played:
    """Run a document to its end.

    Args:
        document: a list is the tasks of one. after: the leg before, of the same run.
        answers: to yields.
    """
    outlet = outlet or (after.outlet if after else RecordingOutlet())
    agents = after.agents if after else ScriptedAgents(by_task(replies or {}))
    engine = EmbeddedEngine(agents, heartbeat_s=heartbeat_s, jitter=lambda: jitter)
    run = envelope(document, inputs, past=outlet.past(answers))
    ending = run_virtually(engine.run(run, outlet))
    outlet.ended(ending)
    assert getattr(ending, "code", None) != "invalid_workflow", ending
    assert agents.active == 0
    return Played(outlet, agents, ending)


def play_cut(document: Any, agents: ScriptedAgents, outlet: RecordingOutlet) -> Ending | None:
    """Run a leg that its outlet cuts; None if it was cut."""

    async def main() -> Ending | None:
        work = asyncio.current_task()
        assert work is not None
        outlet.on_cut = work.cancel
        engine = EmbeddedEngine(agents, jitter=lambda: 0.5)
        return await engine.run(envelope(document, past=outlet.past()), outlet)

    async def whole() -> Ending | None:
        leg = asyncio.create_task(main())
        try:
            return await leg
        except asyncio.CancelledError:
            assert outlet.dead
            return None

    ending = run_virtually(whole())
    assert agents.active == 0
    return ending
