"""Hostile bodies, floods, stores that fail, and what other processes and retention leave over."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.fake_upstream import FakeUpstream
from tests.support.workflow_wire import read
from tests.support.workflows import BASE, Flows, document, flows, task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

HALF = "\ud83d"
ASKING = document(
    {"type": "yield", "id": "ask", "prompt": "?", "schema": {"type": "string", "minLength": 1}}
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows(workflows={"max_runs": 5}) as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "hel", "lo")
    return shared


# -- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "payload", "param"),
    [
        ("POST", "/execute", {"workflow": {HALF: 1}}, "workflow"),
        ("PUT", "/saved", {"workflow": {"name": "w", "tasks": [{HALF: 1}]}}, "workflow.tasks[0]"),
        (
            "POST",
            "/execute",
            {"workflow": document(task("t"), inputs={"x": 1}), "inputs": {"x": {HALF: 1}}},
            "inputs.x",
        ),
    ],
)
async def test_w1_4_half_an_emoji_is_a_400_with_its_place(
    flow: Flows, method: str, path: str, payload: Any, param: str
) -> None:
    status, told = await flow.json(method, BASE + path, payload)
    assert (status, told["error"]["code"]) == (400, "invalid_workflow")
    assert told["error"]["param"] == param


@pytest.mark.parametrize("answer", [HALF, {"a": HALF}, [HALF]])
async def test_an_answer_that_no_schema_can_look_at_is_a_400(flow: Flows, answer: Any) -> None:
    _, run = await flow.stream(ASKING)
    resume = f"{BASE}/executions/{run}/resume"
    status, told = await flow.json("POST", resume, {"answer": answer})
    assert (status, told["error"]["param"]) == (400, "answer")
    assert (await flow.status(run))["status"] == "yielded"
    async with flow.http.post(resume, data=json.dumps({"answer": "ok"})) as response:
        assert read(await response.read()).status == "completed"


@pytest.mark.parametrize(
    ("answer", "param"),
    [(b"1e400", "answer"), (b'{"a": [1, -1e999]}', "answer.a.1"), (b"9" * 5000, "answer")],
)
async def test_an_answer_that_would_be_kept_as_null_is_a_400(
    flow: Flows, answer: bytes, param: str
) -> None:
    """W2.3: JSON has no bound for its numbers, a double has one."""
    _, run = await flow.stream(document({"type": "yield", "id": "ask", "prompt": "?"}))
    resume = f"{BASE}/executions/{run}/resume"
    async with flow.http.post(resume, data=b'{"answer": %b}' % answer) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_request", param)
    assert (await flow.status(run))["status"] == "yielded"


@pytest.mark.parametrize(
    "large",
    [{"id": 123456789012345678901234567890, "ids": [-(2**63) - 1, 2**64]}, [10**400]],
    ids=["beyond 64 bits", "beyond a double"],
)
async def test_a_whole_number_of_any_size_is_kept_exactly(flow: Flows, large: Any) -> None:
    """W2.3: what is answered is what is stored, and what is shown."""
    _, run = await flow.stream(document({"type": "yield", "id": "ask", "prompt": "?"}))
    resume = f"{BASE}/executions/{run}/resume"
    async with flow.http.post(resume, json={"answer": large}) as response:
        assert read(await response.read()).status == "completed"
    async with flow.http.get(f"{BASE}/results/{run}/ask") as response:
        assert json.loads(await response.read())["output"] == large


@pytest.mark.parametrize(
    ("inputs", "path"),
    [
        (b'{"x": 1e400}', "inputs.x"),
        (b'{"x": [{"y": -1e400}]}', "inputs.x[0].y"),
        (b'{"x": 123456789012345678901}', "inputs.x"),
    ],
)
@pytest.mark.parametrize("route", ["/execute", "/kept/execute"])
async def test_w1_4_an_input_that_does_not_fit_is_a_problem_with_its_place(
    flow: Flows, route: str, inputs: bytes, path: str
) -> None:
    workflow = document(task("t"), inputs={"x": 1})
    await flow.json("PUT", f"{BASE}/kept", {"workflow": workflow})
    sent = b'{"inputs": %b}' % inputs
    if route == "/execute":
        sent = sent[:-1] + b', "workflow": %b}' % json.dumps(workflow).encode()
    async with flow.http.post(BASE + route, data=sent) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_workflow", path)


async def test_w1_4_a_document_with_such_a_number_is_not_saved(flow: Flows) -> None:
    sent = b'{"workflow": {"name": "w", "inputs": {"n": 1e400}, "tasks": []}}'
    async with flow.http.put(f"{BASE}/unkept", data=sent) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_workflow")
    assert "workflow.inputs.n" in [each["path"] for each in error["details"]["problems"]]


# -- floods ---------------------------------------------------------------------------------------


async def test_max_runs_holds_for_runs_that_begin_together(flow: Flows) -> None:
    flow.hangs("slow")
    asked = {"workflow": document(task("t", "slow"))}
    told = await asyncio.gather(*(flow.json("POST", f"{BASE}/execute", asked) for _ in range(40)))
    begun = [document["execution_id"] for status, document in told if status == 202]
    refused = [document["error"]["code"] for status, document in told if status == 503]
    assert (len(begun), refused) == (5, ["overloaded"] * 35)
    for run in begun:
        assert (await flow.json("POST", f"{BASE}/executions/{run}/cancel"))[0] == 200


# -- the store ------------------------------------------------------------------------------------


async def test_a_store_that_fails_is_a_503_and_no_fault(flow: Flows) -> None:
    """Nothing is begun then; as soon as it answers again all is as before."""
    _, run = await flow.stream(document(task("t")))
    requests: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("PUT", "/saved", {"workflow": document(task("t"))}),
        ("POST", "/saved/execute", {}),
        ("POST", "/execute", {"workflow": document(task("t"))}),
        ("POST", "/execute-stream", {"workflow": document(task("t"))}),
        ("GET", f"/executions/{run}", None),
        ("GET", f"/executions/{run}/events", None),
        ("POST", f"/executions/{run}/cancel", None),
        ("GET", f"/results/{run}/t", None),
    ]
    with closing(sqlite3.connect(flow.gateway.workdir / "sluicegate.db")) as store:
        for table in ("runs", "workflows"):
            store.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
        store.commit()
        for method, path, payload in requests:
            status, told = await flow.json(method, BASE + path, payload)
            assert (status, told["error"]["code"]) == (503, "store_unavailable"), (method, path)
        for table in ("runs", "workflows"):
            store.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")
        store.commit()
    assert (await flow.status(run))["status"] == "completed"
    assert (await flow.run(document(task("t")))).status == "completed"
    faults = [line for line in flow.gateway.log_lines() if line["event"] == "fault"]
    assert faults == []
    reasons = [line["reason"] for line in flow.gateway.log_lines() if line["event"] == "store"]
    assert len(reasons) == len(requests)


# -- retention, and other processes ---------------------------------------------------------------


async def test_j1_4_a_cursor_of_a_retired_run_is_told_from_one_that_never_was(
    tmp_path: Path,
) -> None:
    """J2.1: 409 `cursor_unusable`, with where to begin instead; the row is still there."""
    async with FakeUpstream() as up:
        async with flows(up, tmp_path) as flow:
            flow.says("one-agent", "hello")
            body, run = await flow.stream(document(task("t")))
            head = len(read(body).events)
            assert len((await flow.events(run, after=2)).events) == head - 2
        await asyncio.sleep(1)
        async with flows(up, tmp_path, journal={"retention_days": 1e-6}) as flow:
            async with asyncio.timeout(10):
                while (await flow.json("GET", f"{BASE}/results/{run}/t"))[0] == 200:
                    await asyncio.sleep(0.05)
            path = f"{BASE}/executions/{run}"
            for after in (0, 2, head - 1):
                status, told = await flow.json("GET", f"{path}/events?after={after}")
                assert (status, told["error"]["code"]) == (409, "cursor_unusable")
                assert "no longer kept" in told["error"]["message"]
                assert told["error"]["details"] == {"snapshot_url": path, "oldest": head + 1}
            status, told = await flow.json("GET", f"{path}/events?after={head + 1}")
            assert (status, told["error"]["code"]) == (409, "cursor_unusable")
            assert (await flow.json("GET", f"{path}/events?after={head}"))[0] == 204
            row = await flow.status(run)
            assert (row["status"], row["position"]) == ("completed", head)


async def test_w1_2_a_cancel_in_another_process_is_a_202(tmp_path: Path) -> None:
    """The process that works on the run ends it; both tell the same afterwards."""
    store = {"url": f"sqlite:///{tmp_path / 'shared.db'}"}
    async with (
        FakeUpstream() as up,
        flows(up, store=store) as here,
        flows(up, store=store) as there,
    ):
        here.hangs("slow", "half ", "of it")
        run = await here.begin(document(task("t", "slow")))
        request = await up.request()
        followed = asyncio.create_task(there.events(run))
        path = f"{BASE}/executions/{run}"
        async with here.http.get(f"{path}/events") as response:
            body = b""
            while b"of it" not in body:
                body += await response.content.readany()
            status, told = await there.json("POST", f"{path}/cancel")
            assert (status, told["status"], told["cancel_requested"]) == (202, "running", True)
            await request.wait_closed(10)
            live = read(body + await response.read(), placed=True)
        seen = await asyncio.wait_for(followed, 10)
        assert live.status == seen.status == "cancelled"
        assert live.events == seen.events
        assert live.texts == seen.texts == {"t": "half of it"}
        for flow in (here, there):
            status, told = await flow.json("POST", f"{path}/cancel")
            assert (status, told["status"]) == (200, "cancelled")
