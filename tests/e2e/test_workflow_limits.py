"""What bounds runs, and what stops, cancels and late answers do to them (W1, W2.3, W2.5)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.books import books_of
from tests.support.checks import has_read
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH
from tests.support.workflow_wire import read
from tests.support.workflows import BASE, document, flows, task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.workflows import Flows

SLOW: Final = document(task("t1", "slow"))


async def until_asked(flow: Flows, count: int) -> None:
    async with asyncio.timeout(20):
        while len(flow.up.requests) < count:
            await asyncio.sleep(0.01)


async def test_w1_max_runs_of_one_process() -> None:
    async with flows(workflows={"max_runs": 2}) as flow:
        flow.hangs("slow", "x")
        runs = [await flow.begin(SLOW) for _ in range(2)]
        for path in ("execute", "execute-stream"):
            status, told = await flow.json("POST", f"{BASE}/{path}", {"workflow": SLOW})
            assert (status, told["error"]["code"]) == (503, "overloaded")
        await until_asked(flow, 2)
        assert len(flow.up.requests) == 2
        status, _ = await flow.json("POST", f"{BASE}/executions/{runs[0]}/cancel")
        assert status == 200
        await flow.begin(SLOW)


async def test_w1_4_bad_input_stores_no_row() -> None:
    async with flows() as flow:
        for bad in (document(task("t1", "nobody")), document(task("t1", prompt="{{ x")), "a: ["):
            for path in ("execute", "execute-stream"):
                assert (await flow.json("POST", f"{BASE}/{path}", {"workflow": bad}))[0] == 400
        with sqlite3.connect(flow.gateway.workdir / "sluicegate.db") as database:
            assert database.execute("SELECT count(*) FROM runs").fetchone() == (0,)
            assert database.execute("SELECT count(*) FROM journals").fetchone() == (0,)


async def test_a_stop_ends_streams_within_its_grace_and_counts_what_was_used(
    tmp_path: Path,
) -> None:
    """The stream has no `workflow_result`; the next process goes on, and its usage has both."""
    async with FakeUpstream() as up:
        settings: dict[str, Any] = {"server": {"shutdown_grace_s": 0.5}}
        async with flows(up, tmp_path, **settings) as flow:
            flow.hangs("slow", "half of ", "it ")
            async with flow.gateway.client() as client:
                await client.request(
                    "POST", f"{BASE}/execute-stream", headers=[AUTH], json={"workflow": SLOW}
                )
                await client.read_until(lambda c: b"half of " in c.body and b"it " in c.body)
                run = str(client.header("x-execution-id"))
                began = time.monotonic()
                flow.gateway.terminate()
                body = await client.read_all(15)
                assert time.monotonic() - began < 5
                assert client.complete
            seen = read(body, whole=False)
            assert seen.names[-1] == "streaming_started"
            assert seen.texts == {"t1": "half of it "}
            assert await flow.gateway.wait(15) == 0
        # Before the next process is there: it takes the run up as it starts.
        flow.says("slow", "all ", "of it")
        async with flows(up, tmp_path, **settings) as flow:
            assert (await flow.events(run)).status == "completed"
            usage = (await flow.status(run))["usage"]
            async with books_of(tmp_path) as books:
                rows = [row for row in await books.settled() if row.request_id[:32] == run]
        assert len(rows) == 2
        assert usage["prompt_tokens"] == sum(row.prompt_tokens for row in rows)
        assert usage["completion_tokens"] == sum(row.completion_tokens for row in rows)


async def test_a_cancelled_run_tells_what_it_did_and_used() -> None:
    async with flows() as flow:
        flow.says("a", "from ", "a")
        flow.hangs("slow", "so ", "far ")
        run = await flow.begin(document(task("t1", "a"), task("t2", "slow")))
        await until_asked(flow, 2)
        await flow.until_said(run, "far ")
        await flow.json("POST", f"{BASE}/executions/{run}/cancel")
        row = await flow.status(run)
        async with books_of(flow.gateway.workdir) as books:
            rows = [row for row in await books.settled() if row.request_id[:32] == run]
        assert [r.status for r in rows] == [200, 499]
        assert row["execution_summary"]["completed"] == 1
        assert row["usage"]["prompt_tokens"] == sum(r.prompt_tokens for r in rows)
        assert row["usage"]["completion_tokens"] == sum(r.completion_tokens for r in rows)
        assert row["usage"]["completion_tokens"] > 2


async def test_w2_3_an_answer_is_for_the_yield_that_it_was_checked_against() -> None:
    """A body that comes slowly, while another answers: its run waits for something else by then."""
    number: dict[str, Any] = {"type": "yield", "prompt": "?", "schema": {"type": "number"}}
    text: dict[str, Any] = {"type": "yield", "prompt": "?", "schema": {"type": "string"}}
    async with flows() as flow:
        _, run = await flow.stream(document({**number, "id": "n"}, {**text, "id": "s"}))
        path = f"{BASE}/executions/{run}/resume"
        body = json.dumps({"answer": 7}).encode()
        async with flow.gateway.client() as late:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{AUTH[0]}: {AUTH[1]}\r\n"
            await late.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
            await has_read(late.sock)
            async with flow.http.post(path, json={"answer": 1}) as response:
                assert read(await response.read(), began=False).status == "yielded"
            await late.send(body[5:])
            await late.read_all()
            assert (late.status, late.json["error"]["param"]) == (400, "answer")
        row = await flow.status(run)
        assert row["waits_for"]["task_id"] == "s"
        async with flow.http.post(path, json={"answer": "x"}) as response:
            assert read(await response.read(), began=False).status == "completed"
        assert await flow.output(run, "n") == 1


async def test_answers_at_once_are_taken_once() -> None:
    async with flows() as flow:
        flow.says("a", "done")
        _, run = await flow.stream(document({"type": "yield", "id": "ask", "prompt": "?"}))
        path = f"{BASE}/executions/{run}/resume"

        async def answer(n: int) -> tuple[int, str | None]:
            async with flow.http.post(path, json={"answer": n}) as response:
                body = await response.read()
                if response.status == 200:
                    return 200, read(body, began=False).status
                return response.status, json.loads(body)["error"]["code"]

        told = await asyncio.gather(*(answer(n) for n in range(20)))
        assert sorted(told)[0] == (200, "completed")
        assert set(sorted(told)[1:]) == {(409, "not_waiting")}
        assert await flow.output(run, "ask") == told.index((200, "completed"))


async def test_j2_two_hundred_followers_of_one_run() -> None:
    async with flows() as flow:
        go = asyncio.Event()
        words = [f"{n} " for n in range(200)]
        flow.hangs("slow", *words, until=go)
        run = await flow.begin(SLOW)
        await until_asked(flow, 1)
        followers = [asyncio.create_task(flow.events(run)) for _ in range(200)]
        await asyncio.sleep(0.5)
        go.set()
        for seen in await asyncio.gather(*followers):
            assert seen.texts["t1"] == "".join(words)
            assert seen.status == "completed"


@pytest.mark.local_model
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp has no wheel here"
)
@pytest.mark.timeout(120)
async def test_a_document_on_the_real_local_model() -> None:
    settings: dict[str, Any] = {
        "providers": {"local": {"kind": "local", "model": "smollm2-135m"}},
        "models": {
            "local/smollm2-135m": {"candidates": [{"provider": "local", "model": "smollm2-135m"}]}
        },
        "agents": {
            "a": {"model": "local/smollm2-135m", "max_tokens": 16},
            "b": {"model": "local/smollm2-135m", "max_tokens": 16, "system": "Be brief."},
        },
    }
    tasks: list[dict[str, Any]] = [
        {"type": "parallel", "id": "p", "tasks": [task("p1", "a", "Say hi"), task("p2", "b")]},
        {"type": "batch", "id": "bt", "items": ["red", "blue"],
         "task": task("it", "a", "{{ item }}")},
        task("end", "b", "Sum up: {{ tasks.p1.output }}"),
    ]  # fmt: skip
    async with flows(**settings) as flow:
        body, run = await flow.stream(document(*tasks))
        seen = read(body)
        assert seen.status == "completed", seen.events[-3:]
        assert {"p1", "p2", "it.0", "it.1", "end"} == set(seen.texts)
        assert any(seen.texts.values())
        for task_id, said in seen.texts.items():
            assert await flow.output(run, task_id) == said
        assert seen.tokens > 5
        assert (await flow.status(run))["usage"]["completion_tokens"] > 5
