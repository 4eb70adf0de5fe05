"""Real clients of an agent: what they are sent, byte for byte, and what they make of it (A1)."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.support.gateway import KEY, GatewayProcess
from tests.support.node import run_node
from tests.support.script import Rst, Send, Sleep, Step, chunk, openai_stream, sse
from tests.support.wire import chunks
from tests.support.workflows import Flows, flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hi"}]}
KEEPALIVE: Final = b": OCEAN PROCESSING\n\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flow() -> AsyncIterator[Flows]:
    async with flows(agents_plane={"keepalive_s": 0.2}) as made:
        yield made


def base(flow: Flows, agent: str) -> str:
    return f"{flow.gateway.base_url}/v1/agents/{agent}"


def sdk(flow: Flows, agent: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base(flow, agent), api_key=KEY, max_retries=0)


def breaks(flow: Flows) -> None:
    """The provider of `bad` dies in the middle of its answer."""
    flow.up.script_for("up-bad", Send(sse(chunk("half", role="assistant"))), Sleep(0.1), Rst())


def slowly(flow: Flows, *words: str, gap_s: float = 0.5) -> None:
    """The agent `slow` is silent before each word, and before its end."""
    first, *rest = openai_stream(words)
    script: list[Step] = [first]
    for step in rest:
        script += [Sleep(gap_s), step] if len(script) <= 2 * len(words) + 1 else [step]
    flow.up.script_for("up-slow", *script)


async def test_the_bytes_of_a_stream(flow: Flows) -> None:
    """As the SDK gets them: named fields in their order, no other line than `data:`."""
    flow.says("one-agent", "Hello 🙂")  # words that come together would be one piece of text
    async with (
        sdk(flow, "one-agent") as client,
        client.chat.completions.with_streaming_response.create(
            model="gpt-4o", stream=True, stream_options={"include_usage": True}, **HI
        ) as response,
    ):
        run = response.headers["x-execution-id"]
        body = await response.read()
    created = re.search(rb'"created":(\d+)', body)
    assert created is not None
    assert abs(int(created[1]) - time.time()) < 60
    head = (
        f'data: {{"id":"chatcmpl-{run[:24]}","object":"chat.completion.chunk",'
        f'"created":{created[1].decode()},"model":"m/one-agent","choices":['
    )
    choices = [
        '{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}',
        '{"index":0,"delta":{"content":"Hello 🙂"},"finish_reason":null}]}',
        '{"index":0,"delta":{},"finish_reason":"stop"}]}',
        '],"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8}}',
    ]
    expected = "".join(f"{head}{choice}\n\n" for choice in choices) + "data: [DONE]\n\n"
    assert body.decode() == expected


async def test_b11_b74_keepalives_through_every_silence(flow: Flows) -> None:
    """Before the first token, between tokens and before the end; never after it."""
    slowly(flow, "a", "b")
    asked = {**HI, "model": "slow", "stream": True}
    async with flow.http.post(f"{base(flow, 'slow')}/chat/completions", json=asked) as response:
        body = await response.read()
    first, second, end = (body.index(m) for m in (b'"content":"a"', b'"content":"b"', b'"stop"'))
    for start, stop in ((0, first), (first, second), (second, end)):
        assert body[start:stop].count(KEEPALIVE) >= 1
    assert body.endswith(b"data: [DONE]\n\n")
    async with sdk(flow, "slow") as client:
        slowly(flow, "a", "b")
        stream = await client.chat.completions.create(model="slow", stream=True, **HI)
        parts = [part async for part in stream]
    assert "".join(p.choices[0].delta.content or "" for p in parts) == "ab"
    assert parts[-1].choices[0].finish_reason == "stop"


async def test_a1_4_every_client_raises_what_broke_in_the_middle(flow: Flows) -> None:
    breaks(flow)
    pieces: list[str] = []

    async def read_by_the_sdk() -> None:
        async with sdk(flow, "bad") as client:
            stream = await client.chat.completions.create(model="bad", stream=True, **HI)
            async for part in stream:
                pieces.append(part.choices[0].delta.content or "")  # noqa: PERF401  it raises

    with pytest.raises(openai.APIError) as raised:
        await read_by_the_sdk()
    assert "".join(pieces) == "half"
    assert raised.value.code == "engine_error"
    assert raised.value.type == "server_error"
    chat: dict[str, Any] = {"base_url": base(flow, "bad"), "api_key": KEY, "max_retries": 0}
    pieces.clear()

    async def read_by_langchain() -> None:
        async for piece in ChatOpenAI(model="bad", **chat).astream([HumanMessage("hi")]):
            pieces.append(str(piece.content))  # noqa: PERF401  it raises

    with pytest.raises(openai.APIError):
        await read_by_langchain()
    assert "".join(pieces) == "half"


@pytest.mark.node
@pytest.mark.parametrize("script", ["stream.mjs", "ai_sdk.mjs"])
async def test_a1_4_so_do_those_of_node(flow: Flows, script: str) -> None:
    breaks(flow)
    seen = await run_node(script, {"baseURL": base(flow, "bad"), "apiKey": KEY, "model": "bad"})
    assert seen["text"] == "half"
    assert "task bad failed" in seen["error"]["message"]


@pytest.mark.node
@pytest.mark.parametrize("script", ["stream.mjs", "ai_sdk.mjs"])
async def test_node_reads_over_keepalives_and_gets_its_usage(flow: Flows, script: str) -> None:
    slowly(flow, "a", "b")
    usual = {"baseURL": base(flow, "slow"), "apiKey": KEY, "model": "x", "include_usage": True}
    seen = await run_node(script, usual)
    assert (seen["error"], seen["text"]) == (None, "ab")
    total = seen["usage"].get("total_tokens", seen["usage"].get("totalTokens"))
    assert total == 9


@pytest.mark.node
async def test_node_without_a_stream(flow: Flows) -> None:
    flow.says("one-agent", "Hel", "lo")
    usual = {"baseURL": base(flow, "one-agent"), "apiKey": KEY, "model": "x", "stream": False}
    seen = await run_node("stream.mjs", usual)
    assert (seen["error"], seen["text"], seen["finish_reason"]) == (None, "Hello", "stop")


async def test_a_refusal_is_the_sdks_own_error(flow: Flows) -> None:
    async with sdk(flow, "nobody") as client:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(model="x", **HI)
    assert raised.value.code == "agent_not_found"
    flow.up.script_for("up-bad", Send(sse(chunk("half", role="assistant"))), Rst())
    async with sdk(flow, "bad") as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="x", **HI)
    assert (failed.value.status_code, failed.value.code) == (502, "engine_error")


async def test_a1_1_the_sdk_finds_the_agent_as_its_one_model(flow: Flows) -> None:
    """In the shape of `GET /v1/models`, and what is listed can be called."""
    async with sdk(flow, "one-agent") as client:
        (listed,) = (await client.models.list()).data
        found = await client.models.retrieve(listed.id)
        assert (listed.id, listed.object, listed.owned_by) == ("one-agent", "model", "sluicegate")
        assert abs(listed.created - time.time()) < 600
        assert found == listed
        flow.says("one-agent", "Hello")
        reply = await client.chat.completions.create(model=listed.id, **HI)
        assert reply.choices[0].message.content == "Hello"
        for other in ("m/one-agent", "a", "one-agent/x"):
            with pytest.raises(openai.NotFoundError) as none:
                await client.models.retrieve(other)
            assert none.value.code == "model_not_found"
    _, usual = await flow.json("GET", "/v1/models/m%2Fone-agent")
    _, of_agent = await flow.json("GET", "/v1/agents/one-agent/models")
    assert of_agent["object"] == "list"
    assert of_agent["data"][0].keys() == usual.keys()


async def test_a1_1_models_of_no_agent_and_without_a_key(flow: Flows) -> None:
    async with sdk(flow, "nobody") as client:
        for asked in (client.models.list(), client.models.retrieve("nobody")):
            with pytest.raises(openai.NotFoundError) as raised:
                await asked
            assert raised.value.code == "agent_not_found"
    stranger = openai.AsyncOpenAI(base_url=base(flow, "one-agent"), api_key="no", max_retries=0)
    async with stranger as client:
        for asked in (client.models.list(), client.models.retrieve("one-agent")):
            with pytest.raises(openai.AuthenticationError):
                await asked


@pytest.mark.local_model
async def test_the_local_model_as_an_agent() -> None:
    """The seed's example, and the SDK, on the real model."""
    config = {
        "server": {"host": "127.0.0.1"},
        "keys": [{"key": KEY, "org": "test"}],
        "providers": {"local": {"kind": "local"}},
        "agents": {"one-agent": {"model": "local/smollm2-135m", "system": "Answer briefly."}},
    }
    async with GatewayProcess(config) as gateway:
        url = f"{gateway.base_url}/v1/agents/one-agent"
        done = await asyncio.to_thread(
            subprocess.run,
            [
                "curl", "-s", "-N", f"{url}/execute",
                "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json",
                "-d", '{"prompt":"say hi in one word","stream":true,"max_tokens":16}',
            ],
            capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        told = chunks(done.stdout)
        assert told[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in told)
        assert {c["model"] for c in told} == {"local/smollm2-135m"}
        assert told[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert 0 < told[-1]["usage"]["completion_tokens"] <= 16
        assert done.stdout.endswith(b"data: [DONE]\n\n")
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model="one-agent", max_tokens=16, **HI)
        assert whole.choices[0].message.content
        assert whole.usage is not None
