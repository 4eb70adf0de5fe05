"""M2.1, M2.4, M2.6, M3.4, M4.1 as the Vercel AI SDK sees them, whatever the provider speaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest

from tests.support.fake_upstream import Send, Wait, chunk, json_answer, sse
from tests.support.gateway import KEY
from tests.support.node import run_node
from tests.support.shapes import (
    EVERY_SHAPE,
    PROMPT_TOKENS,
    ToolCall,
    broken_script_for,
    script_for,
)
from tests.support.stack import API_V1, V1, Stack

pytestmark = [pytest.mark.node, pytest.mark.asyncio(loop_scope="session")]

BOTH_BASES: Final = pytest.mark.parametrize("base", [V1, API_V1])
CALLS: Final = [
    ToolCall("call_1", "get_weather", {"city": "Köln", "days": 3}),
    ToolCall("call_2", "get_weather", {"city": "Paris 🙂"}),
]


async def stream_text(stack: Stack, shape: str, *, base: str = V1, **asked: Any) -> dict[str, Any]:
    """What one `streamText` saw; `asked` as in tests/node/ai_sdk.mjs."""
    usual = {
        "baseURL": stack.gateway.base_url + base,
        "apiKey": KEY,
        "model": f"{shape}/upstream-model",
    }
    return await run_node("ai_sdk.mjs", usual | asked)


@EVERY_SHAPE
@pytest.mark.parametrize(("base", "usage"), [(V1, False), (V1, True), (API_V1, True)])
async def test_text(stack: Stack, shape: str, base: str, usage: bool) -> None:
    """M2.1, M2.4: in the pieces in which it was said, with usage only if it was asked for."""
    stack.up.script(*script_for(shape, words=["Hel", "lo ", "🙂"]))
    seen = await stream_text(stack, shape, base=base, include_usage=usage)
    assert seen["error"] is None
    assert (seen["text"], seen["deltas"], seen["finish_reason"]) == ("Hello 🙂", 3, "stop")
    counts = seen["usage"].get("inputTokens"), seen["usage"].get("outputTokens")
    assert counts == ((PROMPT_TOKENS, 3) if usage else (None, None))


@EVERY_SHAPE
@BOTH_BASES
async def test_tool_calls(stack: Stack, shape: str, base: str) -> None:
    """M2.6: two at once after some text, put together from what was streamed."""
    stack.up.script(*script_for(shape, words=["Let me see. "], calls=CALLS))
    seen = await stream_text(stack, shape, base=base, tools=True)
    assert seen["error"] is None
    assert seen["text"] == "Let me see. "
    said = [(call["name"], call["input"]) for call in seen["calls"]]
    assert said == [(call.name, dict(call.arguments)) for call in CALLS]
    ids = [call["id"] for call in seen["calls"]]
    assert all(ids)
    assert len(set(ids)) == 2
    if shape != "gemini":
        assert ids == [call.id for call in CALLS]
        assert seen["input_deltas"] > len(CALLS)  # as fragments, not in one piece
    assert seen["finish_reason"] == "tool-calls"


@EVERY_SHAPE
async def test_a_tool_call_and_its_answer(stack: Stack, shape: str) -> None:
    """M2.6, M5: the SDK runs the tool and asks again by itself."""
    stack.up.script(*script_for(shape, calls=CALLS[:1]))
    stack.up.script(*script_for(shape, words=["Sunny."]))
    seen = await stream_text(stack, shape, tools=True, steps=2)
    assert seen["error"] is None
    assert (seen["results"], seen["text"]) == (["Sunny in Köln"], "Sunny.")
    assert seen["finish_reason"] == "stop"
    assert "Sunny in Köln" in json.dumps((await stack.request(1)).json, ensure_ascii=False)


@EVERY_SHAPE
async def test_a_failure_in_mid_stream_is_told(stack: Stack, shape: str) -> None:
    """M3.4: after the text that came, as an error, never as a silent end."""
    stack.up.script(*broken_script_for(shape, words=["Hel", "lo"]))
    seen = await stream_text(stack, shape)
    assert seen["text"] == "Hello"
    assert "broke off" in seen["error"]["message"]
    assert seen["finish_reason"] == "error"


async def test_a_refusal_and_a_hang_up(stack: Stack) -> None:
    """M1.2, M4.1: a status is an error with that status; an abort closes the provider."""
    stack.up.script(*json_answer({"error": {"message": "Too many"}}, status=429))
    stack.up.script(Send(sse(chunk("a", role="assistant"))), Wait(asyncio.Event()))
    refused = await stream_text(stack, "openai")
    assert refused["error"]["status"] == 429
    left = await stream_text(stack, "openai", abort_after=1)
    assert (left["text"], left["aborted"]) == ("a", True)
    await (await stack.request(1)).wait_closed()
