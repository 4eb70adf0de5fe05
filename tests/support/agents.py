"""A gateway in this process with agents on a fake provider, and a sink that takes what they say.

async with FakeUpstream() as up, agents_on(up, tmp_path) as stack:
    up.script(*script_for("openai", words=["Hel", "lo"]))
    reply = await stack.call("one", sink)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from encoders.deltas import decoded
from planes import logs
from planes.agents_caller import make_caller
from planes.app import make_app, make_runner
from planes.gateway import GATEWAY
from planes.settings import Settings
from relay.agents.base import AgentCall
from relay.engines.base import Payer, Usage
from tests.support.books import Books, books_of
from tests.support.gateway import config_for

if TYPE_CHECKING:
    import io
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from planes.gateway import Gateway
    from relay.agents.base import AgentReply
    from relay.agents.caller import Caller
    from tests.support.fake_upstream import FakeUpstream

PAYER = Payer(org="test", key_id="key_test")
ASKED = ({"role": "user", "content": "Say hi"},)


class Sink:
    """An `AgentSink` that keeps all, and can be held up.

    Attributes:
        starts: what `started` was told. raws: pieces of text. steps: events of tools.
        open: cleared while it takes no more. said: set by each text.
        waits: how often `ready` was awaited while it took no more.
    """

    def __init__(self) -> None:
        self.usage = Usage()  # of calls that were cancelled
        self.starts: list[tuple[str, str]] = []
        self.raws: list[bytes] = []
        self.steps: list[tuple[str, Mapping[str, Any]]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.said = asyncio.Event()
        self.waits = 0

    @property
    def whole(self) -> str:
        """All text so far."""
        return decoded(b"".join(self.raws))

    def started(self, model: str, provider: str) -> None:
        self.starts.append((model, provider))

    def text(self, raw: bytes) -> bool:
        assert raw, "an empty piece"
        assert self.starts, "text before `started`"
        self.raws.append(raw)
        self.said.set()
        return self.open.is_set()

    async def ready(self) -> None:
        self.waits += not self.open.is_set()
        await self.open.wait()

    def interrupted(self, usage: Usage) -> None:
        self.usage += usage

    def step(self, name: str, data: Mapping[str, Any]) -> None:
        self.steps.append((name, dict(data)))


class AgentStack:
    """One gateway and what calls its agents."""

    def __init__(self, gateway: Gateway, caller: Caller, workdir: Path) -> None:
        self.gateway = gateway
        self.caller = caller
        self._workdir = workdir
        self._ids = itertools.count(1)

    async def call(self, agent: str, sink: Sink | None = None, **more: Any) -> AgentReply:
        """Call an agent; `more` are fields of `AgentCall`."""
        fields: dict[str, Any] = {
            "call_id": f"call-{next(self._ids)}",
            "agent": agent,
            "messages": ASKED,
            "payer": PAYER,
        }
        return await self.caller.call(AgentCall(**(fields | more)), sink or Sink())

    @asynccontextmanager
    async def books(self) -> AsyncIterator[Books]:
        """The store, opened a second time."""
        async with books_of(self._workdir) as books:
            yield books


@asynccontextmanager
async def agents_on(up: FakeUpstream, workdir: Path, **overrides: Any) -> AsyncIterator[AgentStack]:
    """A gateway that runs, with the agents of `overrides["agents"]`."""
    config = config_for(up, store={"url": f"sqlite:///{workdir / 'sluicegate.db'}"}, **overrides)
    app = make_app(Settings.model_validate(config))
    runner = make_runner(app)
    await runner.setup()
    try:
        gateway = app[GATEWAY]
        yield AgentStack(gateway, make_caller(gateway), workdir)
    finally:
        await runner.cleanup()


@contextmanager
def logging_to(out: io.StringIO) -> Iterator[None]:
    """Log as JSON to `out`, and as before afterwards."""
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = (list(root.handlers), root.level, access.level)
    logs.configure("json", stream=out)
    try:
        yield
    finally:
        logs.configure("console")
        root.handlers, level, access_level = before
        root.setLevel(level)
        access.setLevel(access_level)
        structlog.reset_defaults()


def call_lines(out: io.StringIO) -> list[dict[str, Any]]:
    """The log's lines about calls of models."""
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return [line for line in lines if line["event"] == "call"]
