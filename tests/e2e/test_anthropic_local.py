"""Issue 4: llama.cpp's own `/v1/messages` as an anthropic upstream, through the OpenAI SDK.

Replies are kept short: the model makes about 100 tokens a second.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio

from relay.upstreams.local import LlamaProcess
from tests.e2e.test_local_model import ASK_FOR_TOOL, TOOL
from tests.support.gateway import KEY, GatewayProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.local_model,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp has no wheel for this platform",
    ),
]

MODEL: Final = "llama/smollm2-135m"
HELLO: Final[dict[str, Any]] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 12,
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Say hello in one sentence."},
    ],
}
CALL: Final[dict[str, Any]] = {**ASK_FOR_TOOL, "model": MODEL, "max_tokens": 40}
USAGE: Final = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    process = LlamaProcess()
    await process.start()
    try:
        config = {
            "keys": [{"key": KEY, "org": "test"}],
            "providers": {"llama": {"shape": "anthropic", "base_url": process.address}},
        }
        async with GatewayProcess(config) as gateway:
            yield gateway
    finally:
        await process.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.base_url}/v1", api_key=KEY, max_retries=0
    ) as client:
        yield client


async def test_a_whole_reply(client: openai.AsyncOpenAI) -> None:
    """M1.1, M2.4: cached prompt tokens are prompt tokens, and told as such."""
    await client.chat.completions.create(**HELLO)
    reply = await client.chat.completions.create(**HELLO)  # most of its prompt is cached
    assert reply.model == MODEL
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 20
    assert 1 <= reply.usage.completion_tokens <= 12
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.prompt_tokens_details.cached_tokens or 0) > 20


async def test_a_stream_says_what_a_whole_reply_says(client: openai.AsyncOpenAI) -> None:
    """M2.3 to M2.5, at temperature 0."""
    whole = await client.chat.completions.create(**HELLO)
    streamed: dict[str, Any] = HELLO | USAGE
    stream = await client.chat.completions.create(**streamed, stream=True)
    chunks = [chunk async for chunk in stream]
    *said, counted = chunks
    assert "".join(c.choices[0].delta.content or "" for c in said) == (
        whole.choices[0].message.content
    )
    assert [c.choices[0].delta.role for c in said] == ["assistant", *[None] * (len(said) - 1)]
    assert said[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert counted.choices == []
    assert counted.usage is not None
    assert whole.usage is not None
    assert counted.usage.total_tokens == whole.usage.total_tokens
    assert {c.model for c in chunks} == {MODEL}


async def test_tool_calls_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    """M2.6: through the template of the local model."""
    reply = await client.chat.completions.create(**CALL)
    (call, *_) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    stream = await client.chat.completions.create(**CALL, stream=True)
    deltas = [
        delta
        async for chunk in stream
        for delta in chunk.choices[0].delta.tool_calls or []
        if delta.index == 0
    ]
    first, *rest = deltas
    assert first.function is not None
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert first.id
    assert {delta.id for delta in rest} == {None}
    arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert json.loads(arguments) == {"city": "Paris"}


async def test_a_turn_after_a_call(client: openai.AsyncOpenAI) -> None:
    """M5: calls and results go back in the API's words."""
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    said: list[Any] = [
        *CALL["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, sunny"},
    ]
    tools: list[Any] = [TOOL]
    reply = await client.chat.completions.create(
        model=MODEL, messages=said, tools=tools, max_tokens=8, temperature=0
    )
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert reply.usage is not None
    assert reply.usage.completion_tokens >= 1
