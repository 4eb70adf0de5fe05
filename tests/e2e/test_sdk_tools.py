"""M2.6 as the official SDKs see it: streamed tool calls, whatever shape the provider speaks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import openai
import pytest

from tests.support.gateway import KEY
from tests.support.node import run_node
from tests.support.shapes import EVERY_SHAPE, PROMPT_TOKENS, ToolCall, script_for
from tests.support.stack import API_V1, MESSAGES, V1, Stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALLS: Final = [
    ToolCall("call_1", "get_weather", {"city": "Köln", "days": 3}),
    ToolCall("call_2", "get_weather", {"city": "Paris 🙂"}),
    ToolCall("call_3", "get_time", {}),
]
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
]


class Told(NamedTuple):
    """What a client put together from a stream."""

    text: str | None
    calls: list[tuple[str, str, dict[str, Any]]]
    finish_reason: str
    usage: tuple[int, int]


async def python(base_url: str, model: str) -> Told:
    """The `stream()` helper of the Python SDK, which refuses deltas that do not add up."""
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client,
        client.chat.completions.stream(
            model=model,
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=TOOLS,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        completion = await stream.get_final_completion()
    choice = completion.choices[0]
    calls: list[Any] = list(choice.message.tool_calls or [])
    assert completion.usage is not None
    return Told(
        choice.message.content,
        [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls],
        choice.finish_reason,
        (completion.usage.prompt_tokens, completion.usage.completion_tokens),
    )


async def node(base_url: str, model: str) -> Told:
    """The `stream()` helper of the Node.js SDK."""
    seen = await run_node(
        "tools.mjs", {"baseURL": base_url, "apiKey": KEY, "model": model, "tools": TOOLS}
    )
    calls = seen["message"].get("tool_calls") or []
    return Told(
        seen["message"]["content"],
        [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls],
        seen["finish_reason"],
        (seen["usage"]["prompt_tokens"], seen["usage"]["completion_tokens"]),
    )


@EVERY_SHAPE
@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize("client", [python, pytest.param(node, marks=pytest.mark.node)])
async def test_parallel_calls_arrive_whole(
    stack: Stack, client: Callable[[str, str], Awaitable[Told]], base: str, shape: str
) -> None:
    """Text, then three calls in parallel, one of them without arguments."""
    stack.up.script(*script_for(shape, words=["Let me ", "look."], calls=CALLS))
    told = await client(stack.gateway.base_url + base, f"{shape}/upstream-model")
    assert told.text == "Let me look."
    assert [(name, arguments) for _, name, arguments in told.calls] == [
        (call.name, dict(call.arguments)) for call in CALLS
    ]
    assert len({call_id for call_id, _, _ in told.calls}) == len(CALLS)
    if shape != "gemini":  # it has no ids on its wire: they are made
        assert [call_id for call_id, _, _ in told.calls] == [call.id for call in CALLS]
    assert told.finish_reason == "tool_calls"
    assert told.usage == (PROMPT_TOKENS, 5)
