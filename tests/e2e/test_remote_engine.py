"""The workflows plane in front of a remote engine: two processes and their sub-streams (W3.2)."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from encoders.sse import SseDecoder
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, GatewayProcess, config_for
from tests.support.remote_engine import Gate, RemoteEngine, ended, outcome, result, said, started
from tests.support.script import Head, Rst, Send, json_answer
from tests.support.shapes import script_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.wire import RawClient

ENGINE_KEY = "sk-engine-0123456789"
BODY = {"workflow": "workflow: {name: w, tasks: []}", "inputs": {"n": 1}}
EXECUTE = "/v1/workflows/execute-stream"


@asynccontextmanager
async def gateway_over(
    engine: RemoteEngine, workdir: Path | None = None
) -> AsyncIterator[GatewayProcess]:
    async with FakeUpstream() as up:
        remote = {"kind": "http", "base_url": engine.base_url, "api_key": ENGINE_KEY}
        config = config_for(up, workflows={"engine": remote})
        async with GatewayProcess(config, workdir=workdir) as gateway:
            yield gateway


async def ask(client: RawClient, method: str, path: str, payload: Any = None) -> None:
    await client.request(method, path, headers=[AUTH], json=payload)


async def fetched(gateway: GatewayProcess, method: str, path: str, payload: Any = None) -> Any:
    async with gateway.client() as client:
        await ask(client, method, path, payload)
        await client.read_all()
        return client.json


def told(body: bytes) -> list[tuple[str, Any]]:
    """Names and payloads of a stream."""
    return [(event.event.decode(), json.loads(event.data)) for event in SseDecoder().feed(body)]


def texts(body: bytes) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, payload in told(body):
        if name == "token":
            assert payload.keys() == {"task_id", "delta"}
            out[payload["task_id"]] = out.get(payload["task_id"], "") + payload["delta"]
    return out


def without_tokens(body: bytes) -> bytes:
    events = body.split(b"\n\n")
    return b"\n\n".join(event for event in events if not event.startswith(b"event: token\n"))


async def test_w2_the_stream_is_the_engines_with_the_text_of_its_providers() -> None:
    async with RemoteEngine() as engine, gateway_over(engine) as gateway:
        frames = said("workflow_started", inputs={}) + said("made_up", x=1.50)
        frames += started("a", engine.stream("a"), "anthropic") + said("heartbeat", running=["a"])
        frames += started("b", engine.stream("b"), "gemini")
        end = ended("b") + ended("a") + outcome("a") + result()
        await engine.script("/execute", Send(frames + end))
        for name, shape in (("a", "anthropic"), ("b", "gemini")):
            await engine.script(f"/streams/{name}", *script_for(shape, words=["one ", f"{name}\n"]))
        async with gateway.client() as client:
            await ask(client, "POST", EXECUTE, BODY)
            body = await client.read_all(timeout=30)
            run = client.header("x-execution-id")
            workflow = client.header("x-workflow-id")
        request = await engine.request("/execute")
        output = await fetched(gateway, "GET", f"/v1/workflows/results/{run}/b")
        replayed = await replay(gateway, str(run))
    assert without_tokens(body) == frames + end
    assert texts(body) == {"a": "one a\n", "b": "one b\n"}
    order = [payload.get("task_id") or f"{name} {payload['data'].get('task_id', '')}".strip()
             for name, payload in told(body)]  # fmt: skip
    for task in "ab":
        first, last = (
            order.index(f"streaming_started {task}"),
            order.index(f"task_completed {task}"),
        )
        assert {at for at, what in enumerate(order) if what == task} <= set(range(first, last))
    assert request.json == {**BODY, "workflow_id": workflow, "execution_id": run}
    assert request.headers["authorization"] == f"Bearer {ENGINE_KEY}"
    assert output["output"] == "one b\n"
    assert [payload for name, payload in told(replayed) if name != "token"] == [
        payload for name, payload in told(body) if name != "token"
    ]


async def replay(gateway: GatewayProcess, run: str) -> bytes:
    async with gateway.client() as client:
        await ask(client, "GET", f"/v1/workflows/executions/{run}/events?after=0")
        return await client.read_all(timeout=30)


async def test_w2_3_an_engine_that_dies_is_told_of_in_the_stream() -> None:
    async with RemoteEngine() as engine, gateway_over(engine) as gateway:
        await engine.script("/execute", Send(said("workflow_started") + b"event: hea"), Rst())
        async with gateway.client() as client:
            await ask(client, "POST", EXECUTE, BODY)
            found = told(await client.read_all(timeout=30))
    assert [name for name, _ in found] == ["workflow_started", "workflow_error", "workflow_result"]
    assert found[1][1]["data"]["error"]["code"] == "engine_error"
    assert found[2][1]["data"]["status"] == "failed"


async def test_w1_2_a_cancel_reaches_the_engine_and_ends_the_stream() -> None:
    async with RemoteEngine() as engine, gateway_over(engine) as gateway:
        await engine.script("/execute", Send(started("a", engine.stream("a"))), Gate("never"))
        await engine.script("/streams/a", Head(), Gate("never"))
        async with gateway.client() as client:
            await ask(client, "POST", EXECUTE, BODY)
            await client.read_until(lambda c: b"streaming_started" in c.body)
            run = client.header("x-execution-id")
            await engine.request("/streams/a")
            cancel = f"/executions/{run}/cancel"
            await engine.script(cancel, *json_answer({}))
            await fetched(gateway, "POST", f"/v1/workflows{cancel}")
            names = [name for name, _ in told(await client.read_all(timeout=30))]
        assert names == ["streaming_started", "workflow_error", "workflow_result"]
        assert len(await engine.seen(cancel)) == 1
        for path in ("/execute", "/streams/a"):
            await engine.request(path, closed=True)


async def test_w2_3_a_run_that_waits_is_resumed_at_the_engine() -> None:
    waits = said("workflow_yielded", task_id="ask", prompt="Well?", schema={"type": "string"})
    async with RemoteEngine() as engine, gateway_over(engine) as gateway:
        await engine.script("/execute", Send(said("workflow_started") + waits + result("yielded")))
        await engine.script("/execute", Send(said("task_completed", task_id="ask")),
                            Send(outcome(None) + result()))  # fmt: skip
        async with gateway.client() as client:
            await ask(client, "POST", EXECUTE, BODY)
            body = await client.read_all(timeout=30)
            run = client.header("x-execution-id")
        assert body == said("workflow_started") + waits + result("yielded")
        async with gateway.client() as client:
            await ask(client, "POST", f"/v1/workflows/executions/{run}/resume", {"answer": "yes"})
            body = await client.read_all(timeout=30)
        assert body == said("task_completed", task_id="ask") + outcome(None) + result()
        second = await engine.request("/execute", 1)
        assert second.json["answers"] == {"ask": "yes"}
        assert second.json["execution_id"] == run


@pytest.mark.slow  # the lease of the killed process has to run out
async def test_w2_5_a_run_of_a_killed_gateway_is_ended_as_an_orphan(tmp_path: Path) -> None:
    async with RemoteEngine() as engine:
        await engine.script("/execute", Send(said("workflow_started")), Gate("never"))
        async with gateway_over(engine, tmp_path) as gateway:
            async with gateway.client() as client:
                await ask(client, "POST", EXECUTE, BODY)
                await client.read_until(lambda c: b"workflow_started" in c.body)
                run = client.header("x-execution-id")
            gateway.kill()
            await gateway.wait()
        async with gateway_over(engine, tmp_path) as gateway:
            async with asyncio.timeout(90):
                while True:
                    row = await fetched(gateway, "GET", f"/v1/workflows/executions/{run}")
                    if row["status"] != "running":
                        break
                    await asyncio.sleep(0.5)
            assert row["error"]["code"] == "orphaned"
        assert len(await engine.seen("/execute")) == 1
        assert len(await engine.seen(f"/executions/{run}/cancel")) == 1
