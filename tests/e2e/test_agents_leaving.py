"""Clients of the agents plane that leave, are slow, or are refused (A1.4, A1.6, M1.2, M3.5)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from tests.support.books import books_of
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, KEY
from tests.support.script import Send, Sleep, Wait, chunk, json_answer, sse
from tests.support.wire import chunks
from tests.support.workflows import PLAIN_KEY, Flows, flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.script import Step

pytestmark = pytest.mark.asyncio(loop_scope="module")

BASE: Final = "/v1/agents"
WORKFLOWS: Final = "/v1/workflows"
ENDED: Final = frozenset({"completed", "failed", "cancelled"})
WORDS: Final = ("one ", "two ", "three ", "vier ", "fünf ", "🙂 ", "seven ", "eight")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows(agents_plane={"keepalive_s": 0.2}) as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "Hel", "lo")
    shared.up.requests.clear()
    return shared


def paced(flow: Flows, *, late: asyncio.Event | None = None) -> None:
    """The agent `slow` says its words one by one; the last two when it may."""
    words: list[Step] = []
    for word in WORDS:
        if late is not None and word == WORDS[-2]:
            words.append(Wait(late))
        words += [Send(sse(chunk(word))), Sleep(0.02)]
    usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 15}
    final = Send(sse(json.dumps({"choices": [], "usage": usage})))
    done = Send(b"data: [DONE]\n\n")
    first, last = (
        Send(sse(chunk("", role="assistant"))),
        Send(sse(chunk(None, finish_reason="stop"))),
    )
    flow.up.script_for("up-slow", first, *words, last, final, done)


async def ended(flow: Flows, run: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (row := await flow.status(run))["status"] not in ENDED:
            await asyncio.sleep(0.02)
    return row


async def row_of(flow: Flows, run: str) -> Any:
    """The one usage row of a run."""
    async with asyncio.timeout(20), books_of(flow.gateway.workdir) as books:
        while not (rows := [r for r in await books.settled() if r.request_id[:32] == run]):
            await asyncio.sleep(0.05)
    assert len(rows) == 1
    return rows[0]


def runs_of(flow: Flows) -> set[str]:
    """All runs that there are, whether their clients know of them or not."""
    with sqlite3.connect(flow.gateway.workdir / "sluicegate.db") as database:
        return {str(run) for (run,) in database.execute("SELECT execution_id FROM runs")}


# -- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["continue", "cancel"])
async def test_a1_6_leaving_at_any_byte(flow: Flows, how: str) -> None:
    """By FIN and by RST: the run goes on and is kept, or is stopped with its provider."""
    paced(flow)
    asked = {"prompt": "hi", "stream": True, "on_disconnect": how}
    async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
        whole = await response.read()
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks(whole)) == "".join(
        WORDS
    )
    rng = random.Random(7)
    for n, cut in enumerate([0, 1, *sorted(rng.sample(range(2, len(whole) - 200), 14))]):
        flow.up.requests.clear()
        if how == "cancel":  # who leaves in the first half does so before the last words
            late = asyncio.Event()
            paced(flow, late=late)
            if cut > len(whole) // 2:
                late.set()
        async with flow.gateway.client() as client:
            await client.request("POST", f"{BASE}/slow/execute", headers=[AUTH], json=asked)
            await client.read_head()
            run = str(client.header("x-execution-id"))
            with contextlib.suppress(Exception):
                while len(client.body) < cut and not client.complete:
                    await client.read_some(128)
            if n % 2:
                client.reset()
        row = await ended(flow, run)
        if how == "continue":
            assert row["status"] == "completed"
            assert await flow.output(run, "slow") == "".join(WORDS)
            assert (await row_of(flow, run)).status == 200
            continue
        status, _ = await flow.json("GET", f"{BASE}/results/{run}/slow")
        if status == 200:  # the last bytes were on their way: the task had ended, or the run too
            assert cut > len(whole) // 2
            assert await flow.output(run, "slow") == "".join(WORDS)
            continue
        assert (status, row["status"]) == (404, "cancelled")
        if flow.up.requests:
            await flow.up.requests[0].wait_closed(5)
            paid = await row_of(flow, run)
            assert (paid.status, paid.error_code) == (499, "client_abort")


@pytest.mark.parametrize("how", ["continue", "cancel"])
@pytest.mark.parametrize("path", ["execute", "chat/completions"])
async def test_a1_6_leaving_without_a_stream(flow: Flows, path: str, how: str) -> None:
    paced(flow, late=asyncio.Event() if how == "cancel" else None)
    before = runs_of(flow)
    asked = {"messages": [{"role": "user", "content": "hi"}], "on_disconnect": how}
    async with flow.gateway.client() as client:
        await client.request("POST", f"{BASE}/slow/{path}", headers=[AUTH], json=asked)
        async with asyncio.timeout(20):
            while not flow.up.requests:
                await asyncio.sleep(0.01)
    (run,) = runs_of(flow) - before
    row = await ended(flow, run)
    assert row["status"] == ("cancelled" if how == "cancel" else "completed")
    assert (await row_of(flow, run)).status == (499 if how == "cancel" else 200)


async def test_a1_6_leaving_before_the_head(flow: Flows) -> None:
    """Around the moment in which its run is stored: if it begins, it is stopped again."""
    paced(flow, late=asyncio.Event())
    asked = {"prompt": "hi", "stream": True, "on_disconnect": "cancel"}
    before = runs_of(flow)
    for n in range(20):
        async with flow.gateway.client() as client:
            await client.request("POST", f"{BASE}/slow/execute", headers=[AUTH], json=asked)
            await asyncio.sleep(n / 2000)
            client.reset()
    async with asyncio.timeout(20):
        while not (begun := runs_of(flow) - before):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    begun = runs_of(flow) - before
    assert {(await ended(flow, run))["status"] for run in begun} == {"cancelled"}


@pytest.mark.parametrize("how", ["continue", "cancel"])
@pytest.mark.timeout(90)
async def test_a1_6_a_restart_takes_up_only_what_is_wanted(tmp_path: Path, how: str) -> None:
    """A client of a process that is gone is gone too."""
    async with FakeUpstream() as up:
        settings: dict[str, Any] = {"server": {"shutdown_grace_s": 0.2}}
        async with flows(up, tmp_path, **settings) as flow:
            flow.hangs("slow", "half of ")
            asked = {"prompt": "hi", "stream": True, "on_disconnect": how}
            async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
                run = response.headers["X-Execution-Id"]
                while b"half of" not in await response.content.readany():
                    pass
                flow.gateway.terminate()
                rest = await response.read()
            assert chunks(rest)[-1]["error"]["code"] == "engine_error"
            assert b"[DONE]" not in rest
            await flow.gateway.wait(15)
        up.requests.clear()
        # Before the next process is there: it takes the run up as it starts.
        flow.says("slow", "all ", "of it")
        async with flows(up, tmp_path, **settings) as flow:
            row = await ended(flow, run)
            if how == "cancel":
                assert row["status"] == "cancelled"
                assert up.requests == []
            else:
                assert row["status"] == "completed"
                status, told = await flow.json("GET", f"{BASE}/results/{run}/slow")
                assert (status, told["output"]) == (200, "all of it")


# -- slow readers ---------------------------------------------------------------------------------


async def test_a_reader_that_pauses_gets_all_of_it(flow: Flows) -> None:
    """M3.5: for longer than followers of events may, who can follow again."""
    words = [f"{n:05d}" + "x" * 95 for n in range(8000)]
    flow.says("one-agent", *words)
    async with flow.gateway.client(rcvbuf=4096) as client:
        asked = {"prompt": "hi", "stream": True}
        await client.request("POST", f"{BASE}/one-agent/execute", headers=[AUTH], json=asked)
        await client.read_head()
        run = str(client.header("x-execution-id"))
        assert (await ended(flow, run))["status"] == "completed"  # it waits for no client
        await asyncio.sleep(3)
        body = await client.read_all(60)
    told = chunks(body)
    assert all("error" not in c for c in told)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in told)
    assert text == "".join(words)
    assert sum(c["choices"][0]["delta"] == {"role": "assistant"} for c in told) == 1
    assert body.endswith(b"data: [DONE]\n\n")


# -- refused --------------------------------------------------------------------------------------


async def test_m1_2_what_is_refused_before_it_is_a_run(flow: Flows) -> None:
    for path in ("one-agent/execute", "one-agent/chat/completions"):
        async with flow.gateway.client() as client:
            await client.request("POST", f"{BASE}/{path}", json={"prompt": "x"})
            await client.read_all()
            assert (client.status, client.json["error"]["code"]) == (401, "invalid_api_key")
            assert client.header("x-execution-id") is None
            await client.request("POST", f"{BASE}/{path}", headers=[AUTH], body=b"{nope")
            await client.read_all()
            assert (client.status, client.json["error"]["code"]) == (400, "invalid_json")
    assert flow.up.requests == []


@pytest.mark.parametrize(
    ("config", "status", "code"),
    [
        ({"workflows": {"max_runs": 1}}, 503, "overloaded"),
        (
            {"keys": [{"key": KEY, "org": "test", "balance_usd": 9, "max_concurrent": 1}]},
            429,
            "concurrency_limit_exceeded",
        ),
    ],
)
async def test_m1_2_bounds(config: dict[str, Any], status: int, code: str) -> None:
    async with flows(**config) as flow:
        go = asyncio.Event()
        flow.hangs("slow", until=go)
        asked = {"prompt": "hi", "stream": True}
        async with flow.http.post(f"{BASE}/slow/execute", json=asked) as first:
            for stream in (True, False):
                told = await flow.json(
                    "POST", f"{BASE}/one-agent/execute", {"prompt": "hi", "stream": stream}
                )
                assert (told[0], told[1]["error"]["code"]) == (status, code)
            go.set()
            assert (await first.read()).endswith(b"data: [DONE]\n\n")
        flow.says("one-agent", "free")
        again, body = await flow.json("POST", f"{BASE}/one-agent/execute", {"prompt": "hi"})
        assert (again, body["output"]) == (200, "free")


async def test_a1_1_any_key_calls_agents_and_one_of_ours_follows_them(flow: Flows) -> None:
    status, told = await flow.json(
        "POST", f"{BASE}/one-agent/execute", {"prompt": "hi"}, key=PLAIN_KEY
    )
    assert (status, told["output"]) == (200, "Hello")
    run = told["execution_id"]
    status, told = await flow.json("GET", f"{BASE}/results/{run}/one-agent", key=PLAIN_KEY)
    assert (status, told["output"]) == (200, "Hello")
    status, _ = await flow.json("GET", f"{WORKFLOWS}/executions/{run}", key=PLAIN_KEY)
    assert status == 401
    assert (await flow.status(run))["status"] == "completed"


async def test_a_run_of_an_agent_is_cancelled_as_any(flow: Flows) -> None:
    flow.hangs("slow", "so far")
    asked = {"prompt": "hi", "stream": True}
    async with flow.http.post(f"{BASE}/slow/execute", json=asked) as response:
        run = response.headers["X-Execution-Id"]
        while b"so far" not in await response.content.readany():
            pass
        status, told = await flow.json("GET", f"{BASE}/results/{run}/slow")
        assert (status, told["error"]["code"]) == (404, "not_ready")
        status, told = await flow.json("POST", f"{WORKFLOWS}/executions/{run}/cancel")
        assert (status, told["status"]) == (200, "cancelled")
        rest = await response.read()
    error = chunks(rest)[-1]["error"]
    assert error == {
        "message": "the run was cancelled", "type": "server_error", "code": "engine_error",
    }  # fmt: skip
    assert b"[DONE]" not in rest
    await flow.up.requests[0].wait_closed(5)
    assert (await row_of(flow, run)).status == 499


async def test_a1_4_a_failure_without_a_stream_names_its_run(flow: Flows) -> None:
    flow.up.script_for("up-bad", *json_answer({"error": {"message": "no"}}, status=400))
    status, told = await flow.json("POST", f"{BASE}/bad/execute", {"prompt": "hi"})
    assert (status, told["error"]["code"], told["error"]["type"]) == (
        502, "engine_error", "server_error",
    )  # fmt: skip
    run = told["error"]["details"]["execution_id"]
    row = await flow.status(run)
    assert row["status"] == "failed"
    assert row["error"]["message"] == told["error"]["message"]


async def test_a1_2_usage_that_nobody_reported_is_not_told(flow: Flows) -> None:
    """The row has what was counted; the client would take that for the provider's word."""
    flow.up.script_for(
        "up-one-agent",
        Send(sse(chunk("Hello", role="assistant"))),
        Send(sse(chunk(None, finish_reason="stop"))),
        Send(b"data: [DONE]\n\n"),
    )
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    for path, more in (("execute", {}), ("chat/completions", {"include_usage": True})):
        body = {**asked, "stream_options": more}
        async with flow.http.post(f"{BASE}/one-agent/{path}", json=body) as response:
            run = response.headers["X-Execution-Id"]
            told = await response.read()
        assert b"usage" not in told
        assert told.endswith(b"data: [DONE]\n\n")
        assert (await row_of(flow, run)).completion_tokens > 0
        status, whole = await flow.json(
            "POST", f"{BASE}/one-agent/{path}", {"messages": asked["messages"]}
        )
        assert status == 200
        assert whole.get("usage") is None


async def test_a1_2_execute_has_its_usage_on_the_final_chunk(flow: Flows) -> None:
    """`include_usage` is the alias's, where OpenAI SDKs look for a chunk of its own."""
    asked = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    async with flow.http.post(f"{BASE}/one-agent/execute", json=asked) as response:
        told = chunks(await response.read())
    assert all(c["choices"] for c in told)
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["usage"]["total_tokens"] == 9


async def test_the_log_of_all_this_has_no_traceback(flow: Flows) -> None:
    log = flow.gateway.stderr()
    assert "Traceback" not in log
    assert "never retrieved" not in log
    assert KEY not in log
