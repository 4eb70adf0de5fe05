"""The agents plane: the OpenAI wire over runs, with the real clients (A1)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from bench.ports import free_port
from tests.support.books import books_of
from tests.support.gateway import KEY
from tests.support.node import run_node
from tests.support.script import Rst, Send, chunk, json_answer, sse
from tests.support.workflows import OTHER_KEY, Flows, flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE: Final = "/v1/agents"
EXECUTE: Final = f"{BASE}/one-agent/execute"
CHAT: Final = f"{BASE}/one-agent/chat/completions"
HI: Final = {"messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    dead = {"shape": "openai", "base_url": f"http://127.0.0.1:{free_port()}/v1", "api_key": "k"}
    async with flows(
        agents_plane={"keepalive_s": 0.3, "keepalive_comment": "STILL HERE"},
        workflows={"heartbeat_s": 0.1},
        providers={"dead": dead},
    ) as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "Hel", "lo ", "🙂")
    shared.up.requests.clear()
    return shared


def sdk(flow: Flows, agent: str = "one-agent", **more: Any) -> openai.AsyncOpenAI:
    base_url = f"{flow.gateway.base_url}{BASE}/{agent}"
    return openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0, **more)


async def streamed(
    flow: Flows, payload: dict[str, Any], path: str = EXECUTE, **more: Any
) -> tuple[bytes, Any]:
    async with flow.http.post(path, json={**payload, "stream": True}, **more) as response:
        assert response.status == 200, await response.read()
        return await response.read(), response.headers


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The chunks; nothing but `data:` lines and comments is on this wire (A1.2)."""
    found = []
    for block in body.split(b"\n\n"):
        if not block or block.startswith(b":"):
            assert b"\n" not in block
            continue
        assert block.startswith(b"data: "), block
        assert b"\n" not in block
        if block != b"data: [DONE]":
            found.append(json.loads(block[6:]))
    return found


# -- A1.1 to A1.5 ---------------------------------------------------------------------------------


async def test_the_seeds_example_by_curl(flow: Flows) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [
            "curl", "-s", "-N", f"{flow.gateway.base_url}{EXECUTE}",
            "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json",
            "-d", '{"prompt":"say hi in one word","stream":true,"max_tokens":16}',
        ],
        capture_output=True, timeout=30, check=True,
    )  # fmt: skip
    chunks = chunks_of(done.stdout)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello 🙂"
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
    }  # fmt: skip
    assert done.stdout.endswith(b"data: [DONE]\n\n")
    assert done.stdout.count(b"[DONE]") == 1
    assert all("usage" not in c for c in chunks[:-1])
    assert flow.up.requests[0].json["max_tokens"] == 16
    assert flow.up.requests[0].json["messages"] == [
        {"role": "user", "content": "say hi in one word"}
    ]


async def test_a1_2_ids_and_headers(flow: Flows) -> None:
    body, headers = await streamed(flow, {"prompt": "hi"})
    run = headers["X-Execution-Id"]
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["X-Task-Id"] == "one-agent"
    assert headers["x-request-id"].startswith("req_")
    chunks = chunks_of(body)
    assert {c["id"] for c in chunks} == {f"chatcmpl-{run[:24]}"}
    assert {c["model"] for c in chunks} == {"m/one-agent"}
    for named in (run, headers["X-Workflow-Id"]):
        status, told = await flow.json("GET", f"{BASE}/results/{named}/one-agent")
        assert (status, told["output"]) == (200, "Hello 🙂")
    status, _ = await flow.json("GET", f"{BASE}/results/{run}/one-agent", key=OTHER_KEY)
    assert status == 404
    # the same run, as the engine's events
    seen = await flow.events(run)
    assert seen.texts == {"one-agent": "Hello 🙂"}
    assert seen.data("request_received") == [{"source": "agent"}]
    async with books_of(flow.gateway.workdir) as books:
        (row,) = [row for row in await books.settled() if row.request_id[:32] == run]
    assert (row.plane, row.status, row.completion_tokens) == ("agents", 200, 3)


async def test_a1_1_model_pins(flow: Flows) -> None:
    flow.says("a", "I am a")
    body, _ = await streamed(flow, {"prompt": "hi", "model": "m/a", "temperature": 0.5})
    assert {c["model"] for c in chunks_of(body)} == {"m/a"}
    assert flow.up.requests[-1].json["temperature"] == 0.5
    flow.up.script_for("default", *[Send(sse(chunk("d", role="assistant"))), Send(sse(chunk(
        None, finish_reason="length")))])  # fmt: skip
    body, _ = await streamed(flow, {"prompt": "hi", "provider": "fake"})
    assert {c["model"] for c in chunks_of(body)} == {"fake/default"}
    assert chunks_of(body)[-1]["choices"][0]["finish_reason"] == "length"
    for pin in ({"model": "nobody/x"}, {"provider": "nobody"}):
        status, told = await flow.json("POST", EXECUTE, {"prompt": "hi", **pin})
        assert (status, told["error"]["code"]) == (404, "model_not_found")
    for name in ("one-agent", "gpt-4o", ""):  # what SDKs make one write
        body, _ = await streamed(flow, {**HI, "model": name}, CHAT)
        assert {c["model"] for c in chunks_of(body)} == {"m/one-agent"}


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", **HI}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "on_disconnect": "explode"}, "on_disconnect"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    ],
)
async def test_bad_requests_name_their_field(flow: Flows, payload: Any, param: str) -> None:
    status, told = await flow.json("POST", EXECUTE, payload)
    assert (status, told["error"]["param"]) == (400, param)
    assert " a integer" not in told["error"]["message"]
    assert flow.up.requests == []


async def test_a1_1_agents_are_listed_and_unknown_ones_are_not_there(flow: Flows) -> None:
    status, told = await flow.json("GET", BASE)
    assert status == 200
    assert {"id": "one-agent", "object": "agent", "model": "m/one-agent", "max_tokens": None} in (
        told["data"]
    )
    status, told = await flow.json("GET", f"{BASE}/one-agent")
    assert (status, told["id"]) == (200, "one-agent")
    for method, path in (("GET", "nope"), ("POST", "nope/execute"), ("POST", "x/chat/completions")):
        status, told = await flow.json(method, f"{BASE}/{path}", HI if method == "POST" else None)
        assert (status, told["error"]["code"]) == (404, "agent_not_found")


async def test_a1_5_without_a_stream(flow: Flows) -> None:
    status, told = await flow.json("POST", EXECUTE, {"prompt": "hi"})
    assert status == 200
    assert (told["output"], told["finish_reason"], told["model"]) == (
        "Hello 🙂", "stop", "m/one-agent",
    )  # fmt: skip
    assert told["usage"]["total_tokens"] == 10
    assert told["task_id"] == "one-agent"
    assert (await flow.status(told["execution_id"]))["status"] == "completed"


# -- A1.4: errors ---------------------------------------------------------------------------------


async def test_a1_4_an_error_after_the_head_has_no_done(flow: Flows) -> None:
    flow.up.script_for("up-bad", Send(sse(chunk("half", role="assistant"))), Rst())
    body, headers = await streamed(flow, {"prompt": "hi"}, f"{BASE}/bad/execute")
    last = chunks_of(body)[-1]
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == "engine_error"
    assert b"[DONE]" not in body
    run = headers["X-Execution-Id"]
    assert (await flow.status(run))["status"] == "failed"
    # The head was a 200; the log has what came of it, as of streams of the models plane.
    line = await flow.line("request", path=f"{BASE}/bad/execute", execution_id=run)
    assert (line["status"], line["outcome"], line["level"]) == (502, "upstream_error", "warning")
    assert (line["error_code"], line["error"]) == ("engine_error", last["error"]["message"])
    async with sdk(flow, "bad") as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(
                model="bad",
                stream=True,
                **HI,  # type: ignore[call-overload]
            ):
                pass
    flow.up.script_for("up-bad", *json_answer({"error": {"message": "no"}}, status=400))
    body, _ = await streamed(flow, {"prompt": "hi"}, f"{BASE}/bad/execute")
    assert [list(c) for c in chunks_of(body)] == [["error"]]
    status, told = await flow.json("POST", f"{BASE}/bad/execute", {"prompt": "hi"})
    assert (status, told["error"]["code"]) == (502, "engine_error")


# -- A1.3: keepalive ------------------------------------------------------------------------------


async def test_a1_3_comments_after_silence_only(flow: Flows) -> None:
    go = asyncio.Event()
    flow.hangs("slow", until=go)
    asked = {"prompt": "hi", "stream": True}
    began, body = time.monotonic(), b""
    async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
        while body.count(b": STILL HERE\n\n") < 3:
            more = await response.content.readany()
            assert more, body
            body += more
        silent_s = time.monotonic() - began
        go.set()
        body += await response.read()
        run = response.headers["X-Execution-Id"]
    assert body.count(b": STILL HERE\n\n") <= silent_s / 0.3 + 3
    assert body.endswith(b"data: [DONE]\n\n")
    assert (await flow.events(run)).data("heartbeat")  # in the journal only
    body, _ = await streamed(flow, {"prompt": "hi"})
    assert b":" not in [line[:1] for line in body.split(b"\n")]
    go = asyncio.Event()
    flow.hangs("slow", until=go)
    asyncio.get_running_loop().call_later(1, go.set)
    quiet = {"X-No-Comments": "true"}
    body, _ = await streamed(flow, {"prompt": "hi"}, f"{BASE}/slow/execute", headers=quiet)
    assert b"STILL" not in body


async def test_b11_the_sdk_reads_over_comments(flow: Flows) -> None:
    go = asyncio.Event()
    flow.hangs("slow", "a", "b", until=go)
    asyncio.get_running_loop().call_later(1, go.set)
    text = ""
    async with sdk(flow, "slow") as client:
        async for part in await client.chat.completions.create(
            model="slow",
            stream=True,
            **HI,  # type: ignore[call-overload]
        ):
            text += part.choices[0].delta.content or ""
    assert text == "ab"


# -- A1.6: leaving --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["continue", "cancel", None])
async def test_a1_6_a_client_that_leaves(flow: Flows, how: str | None) -> None:
    go = asyncio.Event()
    flow.hangs("slow", "so far", until=go)
    asked = {"prompt": "hi", "stream": True} | ({"on_disconnect": how} if how else {})
    async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
        run = response.headers["X-Execution-Id"]
        while b"so far" not in await response.content.readany():
            pass
        response.close()
    request = flow.up.requests[-1]
    if how == "cancel":
        await request.wait_closed(5)
        go.set()
    else:
        await asyncio.sleep(0.3)
        assert not request.closed.is_set()
        go.set()
    seen = await flow.events(run)
    assert seen.status == ("cancelled" if how == "cancel" else "completed")
    async with books_of(flow.gateway.workdir) as books:
        (row,) = [row for row in await books.settled() if row.request_id[:32] == run]
    if how == "cancel":
        assert (row.status, row.error_code) == (499, "client_abort")
        assert row.completion_tokens > 0
    else:
        assert (row.status, row.error_code) == (200, None)
        status, told = await flow.json("GET", f"{BASE}/results/{run}/slow")
        assert (status, told["output"]) == (200, "so far")


# -- the real clients -----------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [True, False])
async def test_the_openai_sdk_for_python(flow: Flows, usage: bool) -> None:
    client = sdk(flow)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    stream = await client.chat.completions.create(
        model="one-agent",
        stream=True,
        **HI,
        **options,  # type: ignore[call-overload]
    )
    parts = [part async for part in stream]
    text = "".join(c.delta.content or "" for part in parts for c in part.choices)
    assert text == "Hello 🙂"
    if usage:
        assert parts[-1].choices == []
        assert parts[-1].usage.total_tokens == 10
        assert parts[-2].usage is None
    else:
        assert parts[-1].choices[0].finish_reason == "stop"
    whole = await client.chat.completions.create(
        model="one-agent",
        **HI,  # type: ignore[call-overload]
    )
    assert whole.choices[0].message.content == "Hello 🙂"
    assert whole.usage.total_tokens == 10
    plain = openai.OpenAI(base_url=str(client.base_url), api_key=KEY, max_retries=0)

    def blocking() -> str:
        with plain:
            stream = plain.chat.completions.create(
                model="x",
                stream=True,
                **HI,  # type: ignore[call-overload]
            )
            return "".join(part.choices[0].delta.content or "" for part in stream)

    assert await asyncio.to_thread(blocking) == "Hello 🙂"
    await client.close()


async def test_langchain(flow: Flows) -> None:
    options: dict[str, Any] = {
        "model": "one-agent", "base_url": f"{flow.gateway.base_url}{BASE}/one-agent",
        "api_key": KEY, "max_retries": 0, "stream_usage": True,
    }  # fmt: skip
    model = ChatOpenAI(**options)
    parts = [part async for part in model.astream([HumanMessage("hi")])]
    assert "".join(str(part.content) for part in parts) == "Hello 🙂"
    totals = [m["total_tokens"] for part in parts if (m := part.usage_metadata) is not None]
    assert 10 in totals
    assert (await model.ainvoke([HumanMessage("hi")])).content == "Hello 🙂"


@pytest.mark.node
@pytest.mark.parametrize("script", ["stream.mjs", "ai_sdk.mjs"])
async def test_the_sdks_for_node(flow: Flows, script: str) -> None:
    """The official SDK, and the Vercel AI SDK."""
    usual = {
        "baseURL": f"{flow.gateway.base_url}{BASE}/one-agent", "apiKey": KEY,
        "model": "one-agent", "include_usage": True,
    }  # fmt: skip
    seen = await run_node(script, usual)
    assert seen["error"] is None
    assert (seen["text"], seen["finish_reason"]) == ("Hello 🙂", "stop")


async def test_a_restart_ends_the_stream_with_an_error_and_keeps_the_run() -> None:
    async with flows(server={"shutdown_grace_s": 0.2}) as flow:
        flow.hangs("slow", "a")
        asked = {"prompt": "hi", "stream": True}
        async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
            while b'"content":"a"' not in await response.content.readany():
                pass
            flow.gateway.terminate()
            rest = await response.read()
        assert chunks_of(rest)[-1]["error"]["code"] == "engine_error"
        assert b"[DONE]" not in rest
        await flow.gateway.wait(15)


async def test_the_log_of_all_this_has_no_traceback(flow: Flows) -> None:
    log = flow.gateway.stderr()
    assert "Traceback" not in log
    assert "never retrieved" not in log
    assert KEY not in log


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"temperature": 1e400', "temperature"),
        (b'"metadata": {"a": [-1e400]}', "metadata.a.0"),
    ],
)
@pytest.mark.parametrize("path", [EXECUTE, CHAT])
async def test_a_number_that_would_be_kept_as_null_is_a_400(
    flow: Flows, path: str, field: bytes, param: str
) -> None:
    """A1.1: JSON has no bound for its numbers, a double has one."""
    sent = json.dumps(HI).encode()[:-1] + b", " + field + b"}"
    async with flow.http.post(path, data=sent) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_request", param)
    assert not flow.up.requests


async def test_a_whole_number_of_any_size_reaches_the_model(flow: Flows) -> None:
    """A1.1: through the stored document of the run."""
    async with flow.http.post(EXECUTE, json={**HI, "seed": 123456789012345678901}) as response:
        assert response.status == 200
    assert b'"seed":123456789012345678901' in flow.up.requests[0].body
