"""Runs of one agent: one task, whose id is the agent's (A1.5).

Its document is what the agents plane was asked: `{agent, messages, max_tokens?, model?, provider?,
overrides?, on_disconnect?}`. Events, checkpoints and takeovers are those of any run.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from relay.engines.base import Checked
from relay.engines.embedded.calls import call_agent
from relay.engines.embedded.engine import EmbeddedEngine
from relay.engines.embedded.limits import TIMEOUT_S
from relay.engines.embedded.lives import Job
from relay.engines.embedded.loading import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.engines.base import Ending, Envelope, Outlet
    from relay.engines.embedded.document import Task
    from relay.engines.embedded.lives import Life, OnError
    from relay.engines.embedded.loading import Loaded
    from relay.engines.embedded.scope import Scope

_UNUSED: Final = "its messages are asked instead"


class AgentEngine(EmbeddedEngine):
    """Runs one call of an agent as a run; see `relay.engines.base.Engine`."""

    def check(self, document: str | Mapping[str, Any], inputs: Mapping[str, Any]) -> Checked:
        """Nothing is left to look at: the agents plane has read the request."""
        assert not isinstance(document, str)
        return Checked(name=document["agent"], task_count=1, inputs=inputs)

    async def run(self, envelope: Envelope, outlet: Outlet) -> Ending:
        """Call the agent. What a client has got cannot be taken back: there is no retry."""
        asked = envelope.document
        assert not isinstance(asked, str)
        agent = asked["agent"]

        def job(task: Task, scope: Scope, on_error: OnError | None) -> Job:
            return Job(task_id=agent, kind="task", agent=agent, work=partial(_call, asked))

        return await self.work(envelope, outlet, _document_of(agent), job)


@lru_cache(maxsize=256)
def _document_of(agent: str) -> Loaded:
    """Return the document of all runs of an agent."""
    task = {"type": "task", "id": agent, "agent": agent, "prompt": _UNUSED}
    workflow = {"name": agent, "timeout_s": TIMEOUT_S, "tasks": [task]}
    return load({"workflow": workflow}, {}, agents=[agent])


async def _call(asked: Mapping[str, Any], life: Life) -> str:
    reply = await call_agent(
        life,
        asked["agent"],
        asked["messages"],
        max_tokens=asked.get("max_tokens"),
        model=asked.get("model"),
        provider=asked.get("provider"),
        overrides=asked.get("overrides") or {},
    )
    life.tells_usage = reply.reported  # what was only counted is for the bill (A1.2)
    return reply.text
