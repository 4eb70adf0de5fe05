"""A gateway whose agents answer as a test says: one agent, one model of the fake provider."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tests.support.checks import until
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import KEY, GatewayProcess, config_for
from tests.support.script import Send, Wait, chunk, openai_stream, sse
from tests.support.workflow_wire import Seen, read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

OTHER_KEY: Final = "ozk_other_0123456789abcdef"
PLAIN_KEY: Final = "sk_plain_0123456789abcdef"
BASE: Final = "/v1/workflows"
AGENTS: Final = ("one-agent", "a", "b", "c", "planner", "slow", "bad")


class Flows:
    """One gateway, its provider, and a client."""

    def __init__(self, up: FakeUpstream, gateway: GatewayProcess) -> None:
        self.up = up
        self.gateway = gateway
        self.http = aiohttp.ClientSession(
            base_url=gateway.base_url, headers={"authorization": f"Bearer {KEY}"}
        )

    def says(self, agent: str, *words: str, **more: Any) -> None:
        """Every call of the agent is answered so."""
        self.up.script_for(f"up-{agent}", *openai_stream(words, **more))

    def hangs(self, agent: str, *words: str, until: asyncio.Event | None = None) -> None:
        """Every call of the agent says these words and then nothing, until the event."""
        sends = [Send(sse(chunk("", role="assistant"))), *(Send(sse(chunk(w))) for w in words)]
        rest = openai_stream([])[1:] if until is not None else []
        self.up.script_for(f"up-{agent}", *sends, Wait(until or asyncio.Event()), *rest)

    async def run(self, workflow: Any, **inputs: Any) -> Seen:
        """Run a document to its end, over the wire checker."""
        body, _ = await self.stream(workflow, **inputs)
        return read(body)

    async def stream(self, workflow: Any, **inputs: Any) -> tuple[bytes, str]:
        """Run a document; return all bytes and the execution's id."""
        asked = {"workflow": workflow, "inputs": inputs}
        async with self.http.post(f"{BASE}/execute-stream", json=asked) as response:
            body = await response.read()
            assert response.status == 200, body
            return body, response.headers["x-execution-id"]

    async def begin(self, workflow: Any, **inputs: Any) -> str:
        """Begin a run that nobody watches; return its id."""
        asked = {"workflow": workflow, "inputs": inputs}
        status, told = await self.json("POST", f"{BASE}/execute", asked)
        assert status == 202, told
        return str(told["execution_id"])

    async def events(self, run: str, after: int = 0) -> Seen:
        """Follow a run to its end on the re-attach route."""
        path = f"{BASE}/executions/{run}/events?after={after}"
        async with self.http.get(path) as response:
            assert response.status == 200, await response.read()
            return read(await response.read(), placed=True, began=after == 0)

    async def until_said(self, run: str, text: str) -> Seen:
        """Follow a run until some text of it is there, and leave; what was seen until then."""
        body = b""
        async with self.http.get(f"{BASE}/executions/{run}/events") as response:
            while text.encode() not in body:
                more = await response.content.readany()
                assert more, body
                body += more
        return read(body, placed=True, whole=False)

    async def json(
        self, method: str, path: str, payload: Any = None, *, key: str = KEY, **more: Any
    ) -> tuple[int, Any]:
        """Ask for something that is no stream."""
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        if payload is not None:
            more["data"] = io.BytesIO(json.dumps(payload).encode())
        async with self.http.request(method, path, headers=headers, **more) as response:
            told = await response.json() if response.status != 204 else None
            return response.status, told

    async def status(self, run: str) -> dict[str, Any]:
        """The row of a run."""
        status, told = await self.json("GET", f"{BASE}/executions/{run}")
        assert status == 200
        return dict(told)

    async def line(self, event: str, **fields: Any) -> dict[str, Any]:
        """The one line of the log about something, once it is written."""

        def found() -> list[dict[str, Any]]:
            wanted = {"event": event, **fields}
            return [
                line
                for line in self.gateway.log_lines()
                if all(line.get(name) == value for name, value in wanted.items())
            ]

        await until(lambda: bool(found()), timeout=30, what=f"a line {event} of {fields}")
        (line,) = found()
        return line

    async def output(self, run: str, task_id: str) -> Any:
        """A stored output."""
        status, told = await self.json("GET", f"{BASE}/results/{run}/{task_id}")
        assert status == 200, told
        return told["output"]


@contextlib.asynccontextmanager
async def flows(
    up: FakeUpstream | None = None, workdir: Path | None = None, **config: Any
) -> AsyncIterator[Flows]:
    """A gateway; over a provider of its own unless one is given."""
    async with contextlib.AsyncExitStack() as stack:
        if up is None:
            up = await stack.enter_async_context(FakeUpstream())
        models = {
            f"m/{name}": {"candidates": [{"provider": "fake", "model": f"up-{name}"}]}
            for name in AGENTS
        }
        keys = [
            {"key": KEY, "org": "test", "balance_usd": 1000, "max_concurrent": 1000},
            {"key": OTHER_KEY, "org": "other"},
            {"key": PLAIN_KEY, "org": "test"},
        ]
        agents = {name: {"model": f"m/{name}"} for name in AGENTS}
        made_of: dict[str, Any] = {"models": models, "agents": agents, "keys": keys}
        for name in ("models", "agents"):
            config[name] = made_of[name] | config.get(name, {})
        settings = config_for(up, **{**made_of, **config})
        gateway = await stack.enter_async_context(GatewayProcess(settings, workdir=workdir))
        made = Flows(up, gateway)
        stack.push_async_callback(made.http.close)
        yield made


def document(*tasks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A document as an object."""
    return {"workflow": {"name": "w", **more, "tasks": list(tasks)}}


def task(id_: str, agent: str = "one-agent", prompt: str = "say it", **more: Any) -> dict[str, Any]:
    """One task of kind `task`."""
    return {"type": "task", "id": id_, "agent": agent, "prompt": prompt, **more}
