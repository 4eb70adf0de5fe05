"""M2.1, M2.4, M2.6, M3.4, M4.1 as LangChain sees them, whatever shape the provider speaks."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
from langchain_core.messages import (
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    message_chunk_to_message,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.support.fake_upstream import Send, Wait, chunk, json_answer, sse
from tests.support.gateway import KEY
from tests.support.shapes import (
    EVERY_SHAPE,
    PROMPT_TOKENS,
    ToolCall,
    broken_script_for,
    script_for,
)
from tests.support.stack import API_V1, V1, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.runnables import Runnable

pytestmark = pytest.mark.asyncio(loop_scope="session")

BOTH_BASES: Final = pytest.mark.parametrize("base", [V1, API_V1])
HELLO: Final = [HumanMessage("Hello")]
CALLS: Final = [
    ToolCall("call_1", "get_weather", {"city": "Köln", "days": 3}),
    ToolCall("call_2", "get_weather", {"city": "Paris 🙂"}),
]


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"Sunny in {city}"


def model(stack: Stack, shape: str, *, base: str = V1, usage: bool = False) -> ChatOpenAI:
    """The chat model of a LangChain program."""
    options: dict[str, Any] = {
        "model": f"{shape}/upstream-model",
        "base_url": stack.gateway.base_url + base,
        "api_key": KEY,
        "max_retries": 0,
        "stream_usage": usage,
    }
    return ChatOpenAI(**options)


async def stream(
    chat: Runnable[Any, Any], messages: Sequence[BaseMessage] = HELLO
) -> tuple[list[AIMessageChunk], AIMessageChunk]:
    """Every chunk, and their sum."""
    pieces = [piece async for piece in chat.astream(list(messages))]
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    return pieces, total


def told(calls: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of tool calls."""
    return [(call["name"], call["args"]) for call in calls]


@EVERY_SHAPE
@BOTH_BASES
@pytest.mark.parametrize("usage", [False, True])
async def test_text(stack: Stack, shape: str, base: str, usage: bool) -> None:
    """M2.1, M2.4: in the pieces in which it was said, with usage only if it was asked for."""
    stack.up.script(*script_for(shape, words=["Hel", "lo ", "🙂"]))
    chunks, total = await stream(model(stack, shape, base=base, usage=usage))
    assert [chunk.text for chunk in chunks if chunk.text] == ["Hel", "lo ", "🙂"]
    assert total.response_metadata["finish_reason"] == "stop"
    assert total.response_metadata["model_name"] == f"{shape}/upstream-model"
    assert not total.tool_calls
    if usage:
        assert total.usage_metadata is not None
        counts = total.usage_metadata["input_tokens"], total.usage_metadata["output_tokens"]
        assert counts == (PROMPT_TOKENS, 3)
    else:
        assert total.usage_metadata is None


@EVERY_SHAPE
async def test_text_without_asyncio(stack: Stack, shape: str) -> None:
    """The same through the blocking client."""
    stack.up.script(*script_for(shape, words=["Hel", "lo"]))
    chat = model(stack, shape)
    chunks = await asyncio.to_thread(lambda: list(chat.stream(HELLO)))
    assert [chunk.text for chunk in chunks if chunk.text] == ["Hel", "lo"]


@EVERY_SHAPE
@BOTH_BASES
@pytest.mark.parametrize("words", [[], ["Let me see. "]], ids=["calls", "text-and-calls"])
async def test_tool_calls(stack: Stack, shape: str, base: str, words: list[str]) -> None:
    """M2.6: two at once, put together from what was streamed."""
    stack.up.script(*script_for(shape, words=words, calls=CALLS))
    chat = model(stack, shape, base=base).bind_tools([get_weather])
    chunks, total = await stream(chat)
    assert total.text == "".join(words)
    assert not total.invalid_tool_calls
    assert told(total.tool_calls) == [(call.name, dict(call.arguments)) for call in CALLS]
    ids = [call["id"] for call in total.tool_calls]
    assert all(ids)
    assert len(set(ids)) == 2
    if shape != "gemini":
        assert ids == [call.id for call in CALLS]
        # As fragments, not at the end in one piece.
        assert sum(len(chunk.tool_call_chunks) for chunk in chunks) > 2 * len(CALLS)
    assert total.response_metadata["finish_reason"] == "tool_calls"


@EVERY_SHAPE
async def test_a_tool_call_and_its_answer(stack: Stack, shape: str) -> None:
    """M2.6, M5: what a program sends back after a call is a request that the provider gets."""
    stack.up.script(*script_for(shape, calls=CALLS[:1]))
    stack.up.script(*script_for(shape, words=["Sunny."]))
    chat = model(stack, shape).bind_tools([get_weather])
    _, asked = await stream(chat)
    (call,) = asked.tool_calls
    answer = get_weather.invoke(call)
    assert isinstance(answer, ToolMessage)
    messages = [*HELLO, message_chunk_to_message(asked), answer]
    _, said = await stream(chat, messages)
    assert (said.text, said.tool_calls) == ("Sunny.", [])
    assert "Sunny in Köln" in (await stack.request(1)).body.decode()


@EVERY_SHAPE
async def test_a_failure_in_mid_stream_is_raised(stack: Stack, shape: str) -> None:
    """M3.4: after the text that came, never a silent end."""
    stack.up.script(*broken_script_for(shape, words=["Hel", "lo"]))
    seen: list[str] = []

    async def read() -> None:
        async for piece in model(stack, shape).astream(HELLO):
            seen.append(piece.text)  # noqa: PERF401  # what came before the error is kept

    with pytest.raises(openai.APIError) as raised:
        await read()
    assert "".join(seen) == "Hello"
    assert raised.value.message


async def test_a_refusal_is_raised(stack: Stack) -> None:
    """M1.2: with its status."""
    stack.up.script(*json_answer({"error": {"message": "Too many"}}, status=429))
    with pytest.raises(openai.RateLimitError):
        await stream(model(stack, "openai"))


async def test_leaving_in_mid_stream(stack: Stack) -> None:
    """M4.1: a program that stops reading closes the provider's connection."""
    stack.up.script(Send(sse(chunk("a", role="assistant"))), Wait(asyncio.Event()))
    async with aclosing(model(stack, "openai").astream(HELLO)) as chunks:  # type: ignore[type-var]
        async for piece in chunks:
            assert piece.text == "a"
            break
    await (await stack.request()).wait_closed()
