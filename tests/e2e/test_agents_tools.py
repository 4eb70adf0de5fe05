"""W3.4: tools in the calls of agents, with providers and tools that are scripted."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from relay.agents.base import AgentError
from relay.errors import GatewayShutdown
from tests.support.agents import Sink, agents_on, logging_to
from tests.support.checks import until
from tests.support.fake_upstream import (
    DONE,
    FakeUpstream,
    Head,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    json_answer,
    sse,
)
from tests.support.gateway import MODEL
from tests.support.shapes import EVERY_SHAPE, ToolCall, provider_of, script_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.support.agents import AgentStack

SECRET = "s3cret-tool-key"
ROME = ToolCall("c1", "weather", {"city": "Rome"})
OSLO = ToolCall("c2", "weather", {"city": "Oslo"})


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


@pytest.fixture
async def far() -> AsyncIterator[FakeUpstream]:
    """Where the tools are."""
    async with FakeUpstream() as far:
        yield far


def stack_of(
    up: FakeUpstream,
    far: FakeUpstream,
    tmp_path: Path,
    *,
    shape: str = "openai",
    networks: Sequence[str] = ("127.0.0.0/8",),
    **more: Any,
) -> AbstractAsyncContextManager[AgentStack]:
    weather = {
        "name": "weather",
        "description": "The weather of a city.",
        "url": far.origin + "/weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "headers": {"x-key": SECRET},
    }
    declared = {"type": "function", "function": {"name": "clicker", "parameters": {}}}
    agent = {"model": MODEL, "system": "Be brief.", "tools": [weather, declared], **more}
    return agents_on(
        up,
        tmp_path,
        providers={"fake": provider_of(shape, up)},
        agents={"one": agent},
        agents_plane={
            "tool_hosts": [f"127.0.0.1:{far.port}"],
            "tool_networks": list(networks),
        },
    )


def told(sink: Sink) -> list[tuple[str, str, str]]:
    """Event, id and what became of it."""
    return [
        (name, data["task_id"], data.get("error", {}).get("code", "")) for name, data in sink.steps
    ]


def cut_reply(*calls: ToolCall, text: str = "Let me") -> list[Step]:
    """An answer that stops in the last of these calls, at its output limit."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
    for index, call in enumerate(calls):
        whole = json.dumps(dict(call.arguments))
        arguments = whole[:-3] if call is calls[-1] else whole
        function = {"name": call.name, "arguments": arguments}
        deltas.append(
            {
                "tool_calls": [
                    {"index": index, "id": call.id, "type": "function", "function": function}
                ]
            }
        )
    chunks = [chunk(None, delta=delta) for delta in deltas]
    chunks.append(chunk(None, finish_reason="length"))
    return [Send(b"".join(sse(data) for data in chunks) + DONE)]


@EVERY_SHAPE
async def test_calls_are_run_and_the_model_is_asked_again(
    shape: str, up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    async with stack_of(up, far, tmp_path, shape=shape) as stack:
        up.script(*script_for(shape, words=["I ", "look. "], calls=[ROME, OSLO]))
        up.script(*script_for(shape, words=["Sun", "ny"]))
        for _ in range(2):
            far.script(*json_answer({"sky": "blue", "echo": SECRET}))
        sink = Sink()
        reply = await stack.call("one", sink, call_id="c", plane="agents")
        assert reply.text == sink.whole == "I look. Sunny"
        assert reply.finish_reason == "stop"
        assert reply.usage.completion_tokens == 4 + 2
        async with stack.books() as books:
            rows = await books.rows(2)
    assert {row.request_id for row in rows} == {"c", "c/2"}
    assert {row.plane for row in rows} == {"agents"}
    assert sorted(request.json["city"] for request in far.requests) == ["Oslo", "Rome"]
    assert {request.headers["x-key"] for request in far.requests} == {SECRET}
    second = up.requests[1].body
    assert second.count(b"blue") == 2
    assert SECRET.encode() not in second
    assert sorted(told(sink)) == [
        ("task_completed", "tool.1", ""),
        ("task_completed", "tool.2", ""),
        ("task_dispatched", "tool.1", ""),
        ("task_dispatched", "tool.2", ""),
    ]
    assert len(sink.starts) == 1


async def test_what_the_model_is_told(up: FakeUpstream, far: FakeUpstream, tmp_path: Path) -> None:
    """Results come in the order of the calls, whichever is first; steps hold no word of them."""
    async with stack_of(up, far, tmp_path, parameters={"tool_choice": "required"}) as stack:
        up.script(*script_for("openai", words=["Hm"], calls=[ROME, OSLO]))
        up.script(*script_for("openai", words=["ok"]))
        far.script(Sleep(0.2), *json_answer("slow answer"))
        far.script(*json_answer("fast answer"))
        sink = Sink()
        await stack.call("one", sink)
    first, second = (request.json for request in up.requests)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["weather", "clicker"]
    assert (first["tool_choice"], "tool_choice" in second) == ("required", False)
    system, user, assistant, *results = second["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert assistant["content"] == "Hm"
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert [(said["role"], said["tool_call_id"]) for said in results] == [
        ("tool", "c1"),
        ("tool", "c2"),
    ]
    by_city = {request.json["city"]: at for at, request in enumerate(far.requests)}
    expected = ['"slow answer"', '"fast answer"']
    assert [said["content"] for said in results] == [expected[by_city[c]] for c in ("Rome", "Oslo")]
    assert {data["kind"] for _, data in sink.steps} == {"tool"}
    assert {data["name"] for _, data in sink.steps} == {"weather"}
    assert {data["host"] for _, data in sink.steps} == {"127.0.0.1"}
    steps = json.dumps(sink.steps)
    for secret in (SECRET, "Rome", "answer", "/weather"):
        assert secret not in steps


async def test_each_call_has_a_line_and_none_of_its_words(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    """An operator sees there why a tool does nothing; what is the model's doing is no warning."""
    out = io.StringIO()
    bad = ToolCall("c3", "weather", {"city": 1})
    with logging_to(out):
        async with stack_of(up, far, tmp_path) as stack:
            up.script(*script_for("openai", words=["Hm"], calls=[ROME]))
            up.script(*script_for("openai", words=["Hm"], calls=[OSLO]))
            up.script(*script_for("openai", words=["Hm"], calls=[bad]))
            up.script(*script_for("openai", words=["ok"]))
            far.script(*json_answer("sunny"))
            far.script(*json_answer({"error": "broken"}, status=500))
            await stack.call("one", execution_id="e1")
    lines = [line for line in map(json.loads, out.getvalue().splitlines()) if "tool" in line]
    assert [(line["level"], line.get("error_code")) for line in lines] == [
        ("info", None),
        ("warning", "failed_status"),
        ("info", "invalid_arguments"),
    ]
    for line in lines:
        assert (line["event"], line["agent"], line["tool"]) == ("tool", "one", "weather")
        assert (line["execution_id"], line["org"]) == ("e1", "test")
        assert line["host"] == "127.0.0.1"
        assert line["duration_ms"] >= 0
    for secret in (SECRET, "Rome", "Oslo", "sunny", "broken", "/weather"):
        assert secret not in json.dumps(lines)


async def test_an_address_that_is_refused_names_the_setting(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    out = io.StringIO()
    with logging_to(out):
        async with stack_of(up, far, tmp_path, networks=["10.0.0.0/8"]) as stack:
            up.script(*script_for("openai", words=["Hm"], calls=[ROME]))
            up.script(*script_for("openai", words=["ok"]))
            await stack.call("one")
    (line,) = [line for line in map(json.loads, out.getvalue().splitlines()) if "tool" in line]
    assert (line["level"], line["error_code"]) == ("warning", "refused")
    assert line["hint"] == "see `agents_plane.tool_networks`"
    assert far.requests == []


async def test_a_cut_reply_runs_none_of_its_calls(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    async with stack_of(up, far, tmp_path) as stack:
        up.script(*cut_reply(ROME, OSLO))
        up.script(*script_for("openai", words=[" see"]))
        sink = Sink()
        reply = await stack.call("one", sink)
    assert (reply.text, reply.finish_reason) == ("Let me see", "stop")
    assert far.requests == []
    *_, assistant, one, two = up.requests[1].json["messages"]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        '{"city": "Rome"}',
        "{}",
    ]
    assert [said["tool_call_id"] for said in (one, two)] == ["c1", "c2"]
    assert {json.loads(said["content"])["error"] for said in (one, two)} == {"cut_short"}
    errors = [step for step in told(sink) if step[0] == "task_error"]
    assert errors == [("task_error", "tool.1", "cut_short"), ("task_error", "tool.2", "cut_short")]


@pytest.mark.parametrize(
    ("call", "word", "named"),
    [
        (ToolCall("c", "nobody", {}), "unknown_tool", False),
        (ToolCall("c", "clicker", {}), "not_runnable", True),
        (ToolCall("c", "weather", {"city": 7}), "invalid_arguments", True),
    ],
)
async def test_a_call_that_cannot_be_run_is_an_error_to_the_model(
    call: ToolCall, word: str, named: bool, up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    async with stack_of(up, far, tmp_path) as stack:
        up.script(*script_for("openai", calls=[call]))
        up.script(*script_for("openai", words=["well"]))
        sink = Sink()
        assert (await stack.call("one", sink)).text == "well"
    assert far.requests == []
    result = json.loads(up.requests[1].json["messages"][-1]["content"])
    assert result["error"] == word
    (_, dispatched), (_, error) = sink.steps
    assert error["error"]["code"] == word
    assert error["will_retry"] is False
    assert ("name" in dispatched) is named


async def test_rounds_are_bounded(up: FakeUpstream, far: FakeUpstream, tmp_path: Path) -> None:
    async with stack_of(up, far, tmp_path, tool_rounds=2) as stack:
        for _ in range(3):
            up.script(*script_for("openai", words=["again "], calls=[ROME]))
        for _ in range(2):
            far.script(*json_answer({}))
        sink = Sink()
        with pytest.raises(AgentError) as caught:
            await stack.call("one", sink)
        async with stack.books() as books:
            await books.rows(3)
    assert (caught.value.code, caught.value.retryable) == ("tool_rounds", False)
    assert caught.value.usage.completion_tokens == 6
    assert sink.whole == "again " * 3
    assert [data["task_id"] for name, data in sink.steps if name == "task_completed"] == [
        "tool.1",
        "tool.2",
    ]


async def test_few_are_run_at_once(up: FakeUpstream, far: FakeUpstream, tmp_path: Path) -> None:
    go = asyncio.Event()
    calls = [ToolCall(f"c{n}", "weather", {"city": "x"}) for n in range(40)]
    async with stack_of(up, far, tmp_path) as stack:
        up.script(*script_for("openai", calls=calls))
        up.script(*script_for("openai", words=["done"]))
        for _ in range(32):
            far.script(Wait(go), *json_answer({}))
        sink = Sink()
        task = asyncio.create_task(stack.call("one", sink))
        await far.request(3)
        await asyncio.sleep(0.2)
        assert len(far.requests) == 4
        go.set()
        await task
    assert len(far.requests) == 32
    results = [json.loads(said["content"]) for said in up.requests[1].json["messages"][3:]]
    assert len(results) == 40
    assert [result.get("error") for result in results] == [None] * 32 + ["too_many_calls"] * 8


async def test_a_cancellation_ends_running_tools(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    async with stack_of(up, far, tmp_path) as stack:
        up.script(*script_for("openai", calls=[ROME]))
        far.script(Wait(asyncio.Event()), Head())
        task = asyncio.create_task(stack.call("one"))
        request = await far.request(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await request.wait_closed(timeout=1.0)
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert row.status == 200  # the model had answered


async def shut_down_in_a_tool(stack: AgentStack, up: FakeUpstream, far: FakeUpstream) -> None:
    """End the grace of a shutdown while the agent's tool does not answer."""
    up.script(*script_for("openai", calls=[ROME]))
    far.script(Wait(asyncio.Event()), Head())

    async def run() -> None:
        with stack.gateway.inflight.request():
            await stack.call("one")

    task = asyncio.create_task(run())
    await far.request(0)
    await stack.gateway.inflight.drain(0.05)
    with pytest.raises(GatewayShutdown):
        await task


async def test_a_shutdown_ends_running_tools(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    async with stack_of(up, far, tmp_path) as stack:
        await shut_down_in_a_tool(stack, up, far)
        await far.requests[0].wait_closed(timeout=1.0)


@pytest.mark.parametrize(
    ("why", "outcome"), [("timeout", "timeout"), ("cancelled", "cancelled"), (None, "cancelled")]
)
async def test_a_tool_that_is_cut_off_has_a_line_too(
    why: str | None, outcome: str, up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    """J3.4: one for each call that was begun; the one that ended has its own, as ever."""
    out = io.StringIO()
    with logging_to(out):
        async with stack_of(up, far, tmp_path) as stack:
            up.script(*script_for("openai", calls=[ROME, OSLO]))
            far.script(*json_answer("sunny"))
            far.script(Wait(asyncio.Event()), Head())
            sink = Sink()
            task = asyncio.create_task(
                stack.call("one", sink, execution_id="e1", why_cancelled=lambda: why)
            )
            await far.request(1)
            await until(lambda: len(sink.steps) == 3, what="the end of one of the two")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    lines = [line for line in map(json.loads, out.getvalue().splitlines()) if "tool" in line]
    assert [(line["event"], line.get("outcome")) for line in lines] == [
        ("tool", None),
        ("tool", outcome),
    ]
    cut = lines[1]
    assert (cut["level"], cut["agent"], cut["tool"]) == ("info", "one", "weather")
    assert (cut["execution_id"], cut["org"], cut["host"]) == ("e1", "test", "127.0.0.1")
    assert cut["duration_ms"] >= 0
    assert "error_code" not in cut


async def test_a_tool_that_a_shutdown_cuts_off_has_a_line_too(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    out = io.StringIO()
    with logging_to(out):
        async with stack_of(up, far, tmp_path) as stack:
            await shut_down_in_a_tool(stack, up, far)
    (line,) = [line for line in map(json.loads, out.getvalue().splitlines()) if "tool" in line]
    assert (line["event"], line["outcome"]) == ("tool", "shutdown")


async def test_reasoning_that_a_provider_wants_back_is_given_back(
    up: FakeUpstream, far: FakeUpstream, tmp_path: Path
) -> None:
    """Anthropic refuses the results of calls whose thinking is missing."""
    block = {"type": "thinking", "thinking": ""}
    deltas = [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "sig=="},
    ]
    thinking: list[dict[str, Any]] = [
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
    ]
    answer = script_for("anthropic", calls=[ROME])
    begun, *rest = [step.data for step in answer if isinstance(step, Send)]
    shifted = [part.replace(b'"index":0', b'"index":1') for part in rest]
    events = [
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in thinking
    ]
    async with stack_of(up, far, tmp_path, shape="anthropic") as stack:
        up.script(*map(Send, [begun, *events, *shifted]))
        up.script(*script_for("anthropic", words=["ok"]))
        far.script(*json_answer({}))
        assert (await stack.call("one")).text == "ok"
    _, assistant, result = up.requests[1].json["messages"]
    assert [block["type"] for block in assistant["content"]] == ["thinking", "tool_use"]
    assert assistant["content"][0]["signature"] == "sig=="
    assert result["content"][0]["type"] == "tool_result"
