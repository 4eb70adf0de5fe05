"""Runs outlive their clients: they leave, follow again, cancel, are slow, restart it (W2, J2)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from tests.support.books import books_of
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, KEY
from tests.support.script import Wait, json_answer, openai_stream
from tests.support.workflow_wire import read
from tests.support.workflows import BASE, Flows, document, flows, task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

THREE: Final = document(task("t1", "a"), task("t2", "b"), task("t3"))
LINGER: Final = struct.pack("ii", 1, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows(workflows={"heartbeat_s": 0.2}) as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "hel", "lo")
    shared.says("a", "from ", "a")
    shared.says("b", "from ", "b")
    shared.up.requests.clear()
    return shared


async def until_asked(flow: Flows, count: int) -> None:
    async with asyncio.timeout(20):
        while len(flow.up.requests) < count:
            await asyncio.sleep(0.01)


async def ended(flow: Flows, run: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            row = await flow.status(run)
            if row["status"] != "running":
                return row
            await asyncio.sleep(0.02)


# -- leaving --------------------------------------------------------------------------------------


async def test_w2_5_a_client_that_leaves_at_any_byte_changes_nothing(flow: Flows) -> None:
    """By FIN and by RST, after any number of bytes: outcome, outputs and rows are the same."""
    whole, _ = await flow.stream(THREE)
    rng = random.Random(5)
    cuts = [0, 1, *sorted(rng.sample(range(2, len(whole)), 28))]
    runs = []
    for n, cut in enumerate(cuts):
        async with flow.gateway.client() as client:
            await client.request(
                "POST", f"{BASE}/execute-stream", headers=[AUTH], json={"workflow": THREE}
            )
            with contextlib.suppress(Exception):
                while len(client.body) < cut and not client.complete:
                    await client.read_some()
            run = client.header("x-execution-id")
            if n % 2:
                client.reset()
        if run is None:  # it left before the head: the newest run is its
            continue
        runs.append(run)
    assert len(runs) >= 28
    for run in runs:
        row = await ended(flow, run)
        assert (row["status"], row["final_task_id"]) == ("completed", "t3")
        assert row["execution_summary"]["completed"] == 3
        assert [await flow.output(run, t) for t in ("t1", "t2", "t3")] == [
            "from a", "from b", "hello",
        ]  # fmt: skip
        seen = await flow.events(run)
        assert seen.texts == {"t1": "from a", "t2": "from b", "t3": "hello"}
    async with books_of(flow.gateway.workdir) as books:
        rows = [row for row in await books.settled() if row.request_id[:32] in runs]
    assert len(rows) == 3 * len(runs)
    assert {(row.status, row.prompt_tokens, row.completion_tokens) for row in rows} == {(200, 7, 2)}


async def test_w2_6_following_again_from_every_position(flow: Flows) -> None:
    body, run = await flow.stream(THREE)
    first = read(body)
    path = f"{BASE}/executions/{run}/events"
    for after in range(len(first.events)):
        headers = {"Last-Event-ID": str(after)}
        async with flow.http.get(f"{path}?after={max(0, after - 2)}", headers=headers) as response:
            seen = read(await response.read(), placed=True, began=after == 0)
        assert seen.events == first.events[after:]
        assert seen.ids == list(range(after + 1, len(first.events) + 1))
    status, _ = await flow.json("GET", f"{path}?after={len(first.events)}")
    assert status == 204
    status, told = await flow.json("GET", f"{path}?after={len(first.events) + 1}")
    assert (status, told["error"]["code"]) == (409, "cursor_unusable")
    assert told["error"]["details"] == {
        "snapshot_url": f"{BASE}/executions/{run}", "oldest": 1,
    }  # fmt: skip
    for garbage in ("x", "-1", "1.5", "9" * 30):
        assert (await flow.json("GET", f"{path}?after={garbage}"))[0] == 400


async def test_many_followers_of_a_live_run_each_get_it_all_once(flow: Flows) -> None:
    go = asyncio.Event()
    words = [f"{n} " for n in range(50)]
    flow.hangs("slow", *words, until=go)
    run = await flow.begin(document(task("t1", "a"), task("t2", "slow")))
    await until_asked(flow, 2)
    followers = [asyncio.create_task(flow.events(run, after)) for after in [0, 3, 5, 9] * 25]
    await asyncio.sleep(0.5)
    go.set()
    for after, seen in zip([0, 3, 5, 9] * 25, await asyncio.gather(*followers), strict=True):
        assert seen.ids[0] == after + 1
        assert seen.texts["t2"] == "".join(words)
        assert seen.status == "completed"


# -- cancel ---------------------------------------------------------------------------------------


async def test_w1_2_a_cancel_stops_the_step_and_closes_its_upstream(flow: Flows) -> None:
    flow.hangs("slow", "so far")
    async with flow.http.post(
        f"{BASE}/execute-stream", json={"workflow": document(task("t1", "slow"))}
    ) as response:
        run = response.headers["x-execution-id"]
        await until_asked(flow, 1)
        request = flow.up.requests[0]
        while b"so far" not in await response.content.readany():
            pass
        began = time.monotonic()
        status, told = await flow.json("POST", f"{BASE}/executions/{run}/cancel")
        assert (status, told["status"]) == (200, "cancelled")
        assert await request.wait_closed() - began < 1
        rest = await response.read()
    assert b'"code":"cancelled"' in rest
    assert b"event: workflow_result" in rest
    assert time.monotonic() - began < 1
    seen = await flow.events(run)
    assert seen.names[-3:] == ["task_error", "workflow_error", "workflow_result"] or (
        seen.names[-2:] == ["workflow_error", "workflow_result"]
    )
    assert seen.status == "cancelled"
    again, told = await flow.json("POST", f"{BASE}/executions/{run}/cancel")
    assert (again, told["status"]) == (200, "cancelled")
    async with books_of(flow.gateway.workdir) as books:
        (row,) = [row for row in await books.settled() if row.request_id[:32] == run]
    assert (row.status, row.error_code) == (499, "client_abort")
    assert row.completion_tokens > 0


async def test_a_cancel_ends_a_pause_before_a_retry(flow: Flows) -> None:
    flow.up.script_for("up-bad", *json_answer({"error": {"message": "later"}}, status=503))
    run = await flow.begin(document(task("t1", "bad", retries=5)))
    await until_asked(flow, 1)
    began = time.monotonic()
    status, told = await flow.json("POST", f"{BASE}/executions/{run}/cancel")
    assert (status, told["status"]) == (200, "cancelled")
    assert time.monotonic() - began < 1


# -- heartbeats, rows -----------------------------------------------------------------------------


async def test_w2_4_heartbeats_while_a_run_is_silent(flow: Flows) -> None:
    go = asyncio.Event()
    flow.hangs("slow", "a", until=go)
    run = await flow.begin(document(task("t1", "slow")))
    await until_asked(flow, 1)
    began = time.monotonic()
    body = b""
    async with flow.http.get(f"{BASE}/executions/{run}/events") as response:
        while body.count(b"event: heartbeat\n") < 3:
            more = await response.content.readany()
            assert more, body
            body += more
        silent_s = time.monotonic() - began
        go.set()
        body += await response.read()
    beats = read(body, placed=True).data("heartbeat")
    assert 3 <= len(beats) <= silent_s / 0.2 + 3
    assert beats[0] == {"running": ["t1"]}


async def test_w2_4_the_row_is_touched_and_stays_its_owners() -> None:
    async with flows(workflows={"orphan_after_s": 1}) as flow:
        flow.hangs("slow", "a")
        run = await flow.begin(document(task("t1", "slow")))
        await until_asked(flow, 1)
        began = time.monotonic()
        stamps: set[float] = set()
        async with asyncio.timeout(30):
            while len(stamps) <= 3 or time.monotonic() - began < 2.5:
                stamps.add((await flow.status(run))["updated_at"])
                await asyncio.sleep(0.1)
        assert len(flow.up.requests) == 1  # nobody took it over
        await flow.json("POST", f"{BASE}/executions/{run}/cancel")


# -- slow readers ---------------------------------------------------------------------------------


async def test_j2_2_a_follower_that_never_reads_is_reset_and_costs_nobody_else() -> None:
    word = "x" * 1000
    async with flows() as flow:
        flow.says("a", *([word] * 300))
        many = {
            "type": "batch", "id": "bt", "items": list(range(40)), "task": task("it", "a"),
            # One after the other: its queue is not over its bound before the kernel was asked.
            "concurrency": 1,
        }  # fmt: skip
        before = flow.gateway.rss_bytes()
        reader, stuck = await _stuck(flow, {"workflow": document(many)})
        run = await _execution_id(reader)
        seen = await flow.events(run)
        assert seen.status == "completed", seen.events[-3:]
        assert len(seen.texts) == 40
        assert set(seen.texts.values()) == {word * 300}
        await flow.line(f"run {run}: a client that fell behind is told to follow again")
        assert flow.gateway.rss_bytes() - before < 100 * 1024 * 1024
        rest = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(20):
                while not rest.endswith(b"0\r\n\r\n") and (data := await reader.read(1 << 20)):
                    rest += data
        assert b"event: stream_reset\n" in rest
        assert rest.count(b"event: stream_reset\n") == 1
        assert b"event: workflow_result" not in rest
        stuck.close()
        await stuck.wait_closed()


async def test_j2_2_a_follower_that_fell_behind_and_reads_slowly_is_not_reset() -> None:
    """Its kernel takes what it reads, long before ours has room for more."""
    word = "x" * 1000
    go = asyncio.Event()
    async with flows() as flow:
        flow.up.script_for("up-a", Wait(go), *openai_stream([word] * 300))
        items = list(range(10))
        many = {"type": "batch", "id": "bt", "items": items, "task": task("it", "a")}
        run = await flow.begin(document(many))
        async with flow.gateway.client(rcvbuf=4096) as slow:
            await slow.request("GET", f"{BASE}/executions/{run}/events?after=0", headers=[AUTH])
            await slow.read_until(lambda _: b"event: task_dispatched" in slow.body)
            go.set()
            seen = await flow.events(run)
            began = time.monotonic()
            while time.monotonic() - began < 6:  # three times as long as it may take nothing
                await slow.read_some(2048)
                await asyncio.sleep(0.25)
            await slow.read_all(timeout=60)
        told = read(bytes(slow.body), placed=True)
        assert not told.reset
        assert told.events == seen.events
        assert told.texts == seen.texts


async def _stuck(
    flow: Flows, payload: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (flow.gateway.host, flow.gateway.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2048)
    body = json.dumps(payload).encode()
    writer.write(
        f"POST {BASE}/execute-stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def _execution_id(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    (line,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-execution-id:")]
    return line.split(b":")[1].strip().decode()


# -- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    ["term", pytest.param("kill", marks=pytest.mark.slow)],  # a lease of 15 s has to run out
)
@pytest.mark.timeout(120)
async def test_a_run_goes_on_in_the_next_process(tmp_path: Path, how: str) -> None:
    async with FakeUpstream() as up:
        settings: dict[str, Any] = {"server": {"shutdown_grace_s": 0.3}}
        async with flows(up, tmp_path, **settings) as flow:
            flow.says("a", "from ", "a")
            flow.hangs("slow", "half of ")
            run = await flow.begin(document(task("t1", "a"), task("t2", "slow"), task("t3", "a")))
            await until_asked(flow, 2)
            before = await flow.until_said(run, "half of")
            if how == "kill":
                flow.gateway.kill()
            else:
                flow.gateway.terminate()
                await flow.gateway.wait(15)
        assert before.names[-1] == "streaming_started"
        up.requests.clear()
        # Before the next process is there: it takes the run up as it starts.
        flow.says("slow", "all ", "of it")
        async with flows(up, tmp_path, **settings) as flow:
            seen = await flow.events(run)
            assert seen.status == "completed"
            assert seen.events[: len(before.events)] == before.events
            assert seen.texts == {"t1": "from a", "t2": "all of it", "t3": "from a"}
            models = [request.json["model"] for request in up.requests]
            assert models == ["up-slow", "up-a"]  # what was finished is not run again
            error = seen.data("task_error", "t2")
            assert [(e["error"]["code"], e["will_retry"]) for e in error] == [("interrupted", True)]
            rest = await flow.events(run, after=len(before.events))
            assert rest.events == seen.events[len(before.events) :]
            assert await flow.output(run, "t2") == "all of it"


# -- yield ----------------------------------------------------------------------------------------

ASKING: Final = document(
    task("t1", "a"),
    {
        "type": "yield", "id": "ask", "prompt": "ok, {{ tasks.t1.output }}?",
        "schema": {"type": "object", "required": ["ok"]},
    },
    task("t2", "b", prompt="{{ tasks.ask.output.ok }}"),
)  # fmt: skip


async def test_w2_3_a_run_that_waits_is_answered(flow: Flows) -> None:
    body, run = await flow.stream(ASKING)
    first = read(body)
    assert first.names[-2:] == ["workflow_yielded", "workflow_result"]
    assert first.status == "yielded"
    asked = first.data("workflow_yielded")[0]
    assert asked["prompt"] == "ok, from a?"
    row = await flow.status(run)
    assert row["status"] == "yielded"
    resume = asked["resume_url"]
    assert row["waits_for"]["resume_url"] == resume
    assert (await flow.json("GET", f"{BASE}/executions/{run}/events?after={row['position']}"))[
        0
    ] == 204
    status, told = await flow.json("POST", resume, {"answer": {"no": 1}})
    assert (status, told["error"]["param"]) == (400, "answer")
    async with flow.http.post(resume, json={"answer": {"ok": "yes"}}) as response:
        assert response.headers["x-execution-id"] == run
        second = read(await response.read())
    assert second.status == "completed"
    assert "request_received" not in second.names
    assert flow.up.requests[-1].json["messages"][-1]["content"] == "yes"
    whole = await flow.events(run)
    assert whole.events == first.events + second.events
    assert await flow.output(run, "ask") == {"ok": "yes"}
    status, told = await flow.json("POST", resume, {"answer": {"ok": "again"}})
    assert (status, told["error"]["code"]) == (409, "not_waiting")


async def test_a_run_that_waits_is_cancelled(flow: Flows) -> None:
    _, run = await flow.stream(ASKING)
    status, told = await flow.json("POST", f"{BASE}/executions/{run}/cancel")
    assert (status, told["status"]) == (200, "cancelled")
    seen = await flow.events(run)
    assert seen.names[-4:] == [
        "workflow_yielded", "workflow_result", "workflow_error", "workflow_result",
    ]  # fmt: skip


async def test_the_log_of_all_this_has_no_traceback(flow: Flows) -> None:
    log = flow.gateway.stderr()
    assert "Traceback" not in log
    assert "never retrieved" not in log
    assert KEY not in log
