"""M5: a real server that speaks the Gemini API, through the real OpenAI SDK.

LiteLLM's `generateContent` wire in front of the local model. Replies are kept short: the model
makes about 100 tokens a second.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio

from relay.upstreams.local import LlamaProcess
from tests.support.gateway import KEY, GatewayProcess
from tests.support.peers import LiteLLM, PeersMissing, install_peers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.local_model,
    pytest.mark.timeout(1200),  # the first time, LiteLLM is installed
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp has no wheel for this platform",
    ),
]

SLUG: Final = "google/smol"
TOOLS: Final[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
HELLO: Final[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Say hello in one sentence."}]},
]
CALL: Final = "Call get_weather for Paris. Begin your reply with <tool_call>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    try:
        await asyncio.to_thread(install_peers)
    except PeersMissing as missing:
        pytest.skip(str(missing))
    llama = LlamaProcess()
    await llama.start()
    try:
        models = {"smol": llama.base_url}
        async with LiteLLM(models, upstream_model="smollm2-135m") as litellm:
            provider = {"shape": "gemini", "base_url": litellm.origin, "api_key": litellm.key}
            config: dict[str, Any] = {
                "server": {"host": "127.0.0.1", "workers": 1},
                "keys": [{"key": KEY, "org": "test"}],
                "providers": {"peer": provider},
                "models": {SLUG: {"candidates": [{"provider": "peer", "model": "smol"}]}},
                "telemetry": {"log": "json"},
            }
            async with (
                GatewayProcess(config) as gateway,
                openai.AsyncOpenAI(
                    base_url=f"{gateway.base_url}/v1", api_key=KEY, max_retries=0, timeout=60
                ) as client,
            ):
                yield client
    finally:
        await llama.close()


async def test_a_stream_and_a_plain_reply_say_the_same(client: openai.AsyncOpenAI) -> None:
    """M2.2 to M2.5."""
    asked: dict[str, Any] = {"model": SLUG, "messages": HELLO, "temperature": 0, "max_tokens": 8}
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert len(chunks) > 5
    assert {chunk.model for chunk in chunks} == {SLUG}
    assert [c.choices[0].delta.role for c in chunks if c.choices][:2] == ["assistant", None]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    reply = await client.chat.completions.create(**asked)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == chunks[-1].usage.prompt_tokens


async def test_a_call_and_the_answer_to_its_result(client: openai.AsyncOpenAI) -> None:
    """M2.6, M5: tools there, a call back, its result there."""
    messages: list[Any] = [{"role": "user", "content": CALL}]
    stream = await client.chat.completions.create(
        model=SLUG, messages=messages, tools=TOOLS, temperature=0, max_tokens=32, stream=True
    )
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for part in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(part.index, {"type": "function", "function": {}})
            assert part.function is not None
            if part.id:
                call["id"] = part.id
                call["function"] |= {"name": part.function.name, "arguments": ""}
            call["function"]["arguments"] += part.function.arguments or ""
    assert calls
    assert calls[0]["function"]["name"] == "get_weather"
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Paris"}
    assert len({call["id"] for call in calls.values()}) == len(calls)
    messages.append({"role": "assistant", "content": None, "tool_calls": list(calls.values())})
    messages += [
        {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 18}'}
        for call in calls.values()
    ]
    reply = await client.chat.completions.create(
        model=SLUG, messages=messages, tools=TOOLS, temperature=0, max_tokens=8
    )
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls


async def test_a_schema_for_the_reply(client: openai.AsyncOpenAI) -> None:
    """M5: the schema arrives at the model's grammar."""
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "green"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    reply = await client.chat.completions.create(
        model=SLUG,
        messages=[{"role": "user", "content": "What colour has the sky?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}},
        temperature=0,
        max_tokens=24,
    )
    answer = json.loads(reply.choices[0].message.content or "")
    assert answer["sky"] in ("blue", "green")


async def test_a_refusal(client: openai.AsyncOpenAI) -> None:
    """M1.2: the client's own fault keeps its status and words."""
    with pytest.raises(openai.BadRequestError, match="no-such-model"):
        await client.chat.completions.create(
            model="peer/no-such-model", messages=[{"role": "user", "content": "x"}]
        )
