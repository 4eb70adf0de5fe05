"""The workflows plane over real processes: routes, documents, results, bad input (W1, W2, W3.1)."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
import pytest_asyncio

from tests.support.books import books_of
from tests.support.gateway import KEY
from tests.support.script import json_answer
from tests.support.workflow_wire import read
from tests.support.workflows import (
    BASE,
    OTHER_KEY,
    PLAIN_KEY,
    Flows,
    document,
    flows,
    task,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED: Final = (
    "workflow:\n  name: doc-stream\n  tasks:\n    - type: task\n      id: t1\n"
    "      agent: one-agent\n      prompt: say hi"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows() as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "hel", "lo")
    shared.says("a", "from ", "a")
    shared.says("b", "from ", "b")
    shared.up.script_for("up-bad", *json_answer({"error": {"message": "no"}}, status=400))
    shared.up.requests.clear()
    return shared


# -- W1.1, W1.5: routes, bodies, headers ----------------------------------------------------------


async def test_the_seeds_example_by_curl(flow: Flows) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [
            "curl", "-s", "-N", f"{flow.gateway.base_url}/v1/workflows/execute-stream",
            "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json",
            "-d", json.dumps({"workflow": SEED}),
        ],
        capture_output=True, timeout=30, check=True,
    )  # fmt: skip
    seen = read(done.stdout)
    assert seen.names == [
        "request_received", "workflow_loaded", "workflow_started", "task_dispatched",
        "streaming_started", "streaming_completed", "task_completed", "output_delivered",
        "workflow_completed", "workflow_result",
    ]  # fmt: skip
    assert seen.texts == {"t1": "hello"}
    assert seen.data("workflow_loaded") == [{"name": "doc-stream", "task_count": 1}]
    assert seen.data("task_completed")[0]["usage"]["total_tokens"] == 9
    summary = seen.data("workflow_completed")[0]["execution_summary"]
    assert (summary["tasks"], summary["completed"], summary["failed"]) == (1, 1, 0)


BODIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "yaml in JSON": (f"{BASE}/execute-stream", {"json": {"workflow": SEED}}),
    "an object": (f"{BASE}/execute-stream", {"json": {"workflow": document(task("t1"))}}),
    "its inside": (
        f"{BASE}/execute-stream", {"json": {"workflow": document(task("t1"))["workflow"]}},
    ),
    "YAML": (
        f"{BASE}/execute-stream",
        {"data": SEED.encode(), "headers": {"content-type": "application/yaml"}},
    ),
    "legacy": ("/v1/cnl/execute-stream", {"json": {"workflow": SEED}}),
}  # fmt: skip


@pytest.mark.parametrize("form", BODIES)
async def test_w1_1_every_form_of_body(flow: Flows, form: str) -> None:
    path, more = BODIES[form]
    async with flow.http.post(path, **more) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"].startswith("req_")
        run = response.headers["x-execution-id"]
        assert len(run) == 32
        assert set(run) <= set("0123456789abcdef")
        assert response.headers["x-workflow-id"] == f"wf_{run[:24]}"
        seen = read(await response.read())
    assert seen.texts == {"t1": "hello"}
    assert await flow.output(run, "t1") == "hello"
    assert await flow.output(f"wf_{run[:24]}", "t1") == "hello"


async def test_w1_1_without_a_stream(flow: Flows) -> None:
    status, told = await flow.json("POST", f"{BASE}/execute?wait=true", {"workflow": SEED})
    assert status == 200
    assert (told["status"], told["final_task_id"], told["output"]) == ("completed", "t1", "hello")
    assert told["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    status, told = await flow.json("POST", f"{BASE}/execute", {"workflow": SEED})
    assert (status, told["status"]) == (202, "running")
    seen = await flow.events(told["execution_id"])
    assert seen.texts == {"t1": "hello"}


async def test_w1_2_saved_workflows(flow: Flows) -> None:
    workflow = document(task("t1", prompt="hi {{ inputs.name }}"), inputs={"name": "you"})
    status, told = await flow.json("PUT", f"{BASE}/greet", {"workflow": workflow})
    assert (status, told["id"], told["name"]) == (201, "greet", "w")
    status, _ = await flow.json("PUT", f"{BASE}/greet", {"workflow": workflow})
    assert status == 200
    status, told = await flow.json("GET", f"{BASE}/greet")
    assert (status, told["workflow"]) == (200, workflow)
    status, told = await flow.json("GET", BASE)
    assert [each["id"] for each in told["data"]] == ["greet"]
    for path in ("execute-stream", "execute-stream?positions=true"):
        async with flow.http.post(
            f"{BASE}/greet/{path}", json={"inputs": {"name": "Ada"}}
        ) as response:
            assert response.headers["x-workflow-id"] == "greet"
            body = await response.read()
            assert (b"id: 1\n" in body) == ("positions" in path)
    assert flow.up.requests[-1].json["messages"][-1]["content"] == "hi Ada"
    assert await flow.output("greet", "t1") == "hello"
    # another org has none of it
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/execute-stream")):
        status, told = await flow.json(method, f"{BASE}/greet{path}", key=OTHER_KEY)
        assert (status, told["error"]["code"]) == (404, "not_found")
    status, told = await flow.json("GET", f"{BASE}/results/greet/t1", key=OTHER_KEY)
    assert status == 404
    status, told = await flow.json("DELETE", f"{BASE}/greet")
    assert (status, told["deleted"]) == (200, True)
    assert (await flow.json("GET", f"{BASE}/greet"))[0] == 404
    for reserved in ("execute", "execute-stream", "executions", "results", "schema"):
        status, told = await flow.json("PUT", f"{BASE}/{reserved}", {"workflow": workflow})
        assert status in (400, 405), reserved


async def test_w1_the_plane_needs_a_key_of_its_kind(flow: Flows) -> None:
    for key in (PLAIN_KEY, "ozk_unknown", ""):
        status, told = await flow.json(
            "POST", f"{BASE}/execute-stream", {"workflow": SEED}, key=key
        )
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
    assert flow.up.requests == []


async def test_other_orgs_runs_are_not_there(flow: Flows) -> None:
    run = await flow.begin(SEED)
    await flow.events(run)
    for method, path in (
        ("GET", f"executions/{run}"), ("GET", f"executions/{run}/events"),
        ("POST", f"executions/{run}/cancel"), ("POST", f"executions/{run}/resume"),
        ("GET", f"results/{run}/t1"),
    ):  # fmt: skip
        status, told = await flow.json(method, f"{BASE}/{path}", key=OTHER_KEY)
        assert (status, told["error"]["code"]) == (404, "not_found"), path


async def test_the_schema_is_served(flow: Flows) -> None:
    status, told = await flow.json("GET", f"{BASE}/schema")
    assert status == 200
    assert told["$schema"] == "https://json-schema.org/draft/2020-12/schema"


# -- W3.1: kinds ----------------------------------------------------------------------------------


async def test_kinds_together(flow: Flows) -> None:
    tasks: list[dict[str, Any]] = [
        {"type": "sequential", "id": "s", "tasks": [task("s1", "a"), task("s2", "b")]},
        {"type": "parallel", "id": "p", "tasks": [task("p1", "a"), task("p2", "b")]},
        {
            "type": "condition", "id": "c", "if": "tasks.s1.output == 'from a'",
            "then": [task("yes")], "else": [task("no")],
        },
        {
            "type": "batch", "id": "bt", "items": ["x", "y", "z"], "concurrency": 2,
            "task": task("it", "a", prompt="do {{ item }}"),
        },
    ]  # fmt: skip
    body, run = await flow.stream(document(*tasks, output="p"))
    seen = read(body)
    assert seen.status == "completed"
    assert seen.data("workflow_completed")[0]["final_task_id"] == "p"
    assert await flow.output(run, "p") == {"p1": "from a", "p2": "from b"}
    assert await flow.output(run, "s") == ["from a", "from b"]
    assert await flow.output(run, "bt") == ["from a"] * 3
    assert seen.texts["it.1"] == "from a"
    assert seen.data("task_skipped") == [{"task_id": "no", "kind": "task", "reason": "branch"}]
    prompts = [request.json["messages"][-1]["content"] for request in flow.up.requests]
    assert sorted(p for p in prompts if p.startswith("do")) == ["do x", "do y", "do z"]
    for task_id, text in seen.texts.items():
        assert await flow.output(run, task_id) == text
    async with books_of(flow.gateway.workdir) as books:
        rows = [row for row in await books.settled() if row.request_id.startswith(run)]
    assert {row.plane for row in rows} == {"workflows"}
    assert {row.status for row in rows} == {200}
    usage = (await flow.status(run))["usage"]
    assert usage["prompt_tokens"] == sum(row.prompt_tokens for row in rows)
    assert usage["completion_tokens"] == sum(row.completion_tokens for row in rows)


async def test_a_failed_task_ends_the_run_or_not(flow: Flows) -> None:
    seen = await flow.run(document(task("t1", "bad"), task("t2")))
    assert seen.names[-3:] == ["task_error", "workflow_error", "workflow_result"]
    error = seen.data("workflow_error")[0]["error"]
    assert (error["code"], error["task_id"]) == ("task_failed", "t1")
    assert seen.status == "failed"
    line = await flow.line("run", execution_id=seen.events[-1][1]["execution_id"])
    assert (line["status"], line["plane"], line["tasks_failed"]) == ("failed", "workflows", 1)
    assert (line["error_code"], line["error"]) == ("task_failed", error["message"])
    seen = await flow.run(document(task("t1", "bad", on_error="continue"), task("t2")))
    assert seen.status == "completed"
    line = await flow.line("run", execution_id=seen.events[-1][1]["execution_id"])
    assert (line["status"], line["tasks_completed"]) == ("completed", 1)
    assert "error" not in line
    assert seen.texts == {"t2": "hello"}


async def test_w1_3_results_are_there_at_once(flow: Flows) -> None:
    """The GET leaves in the call that read `workflow_result`."""
    for _ in range(200):
        asked = {"workflow": document(task("t1"))}
        async with flow.http.post(f"{BASE}/execute-stream", json=asked) as response:
            run = response.headers["x-execution-id"]
            body = b""
            async for data in response.content.iter_any():
                body += data
                if b"event: workflow_result" in body:
                    status, told = await flow.json("GET", f"{BASE}/results/{run}/t1")
                    assert (status, told["output"]) == (200, "hello")


async def test_w1_3_a_run_in_flight_is_not_ready(flow: Flows) -> None:
    go = asyncio.Event()
    flow.hangs("slow", "so ", "far", until=go)
    run = await flow.begin(document(task("t0"), task("t1", "slow")))
    while len(flow.up.requests) < 2:
        await asyncio.sleep(0.01)
    status, told = await flow.json("GET", f"{BASE}/results/{run}/t0")
    assert (status, told["error"]["code"]) == (404, "not_ready")
    go.set()
    assert (await flow.events(run)).texts == {"t0": "hello", "t1": "so far"}
    status, told = await flow.json("GET", f"{BASE}/results/{run}/nope")
    assert (status, told["error"]["code"]) == (404, "not_found")


# -- W1.4: bad input ------------------------------------------------------------------------------

BOMB: Final = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD: Final[dict[str, tuple[Any, str]]] = {
    "a YAML bomb": (BOMB, "line 1"),
    "no YAML": ("workflow: [", "line 2, column 1"),
    "10 MB": ("workflow:\n  name: w\n  # " + "x" * 10_000_000, "256 KiB"),
    "unknown agent": (document(task("t1", "one-agnt")), "one-agent"),
    "unknown key": (document({**task("t1"), "promt": "x"}), "prompt"),
    "a reference to itself": (document(task("t1", prompt="{{ tasks.t1.output }}")), "t1"),
    "a cycle": (
        document(
            task("a1", prompt="{{ tasks.b1.output }}"), task("b1", prompt="{{ tasks.a1.output }}")
        ),
        "b1",
    ),
    "a bad template": (document(task("t1", prompt="{{ inputs.x")), "t1"),
    "an import": (document(task("t1", prompt="{% import 'x' as y %}")), "import"),
    "too many tasks": (document(*(task(f"t{n}") for n in range(501))), "500"),
    "unknown input": (document(task("t1")), "nope"),
    "no document": (7, "workflow"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_w1_4_bad_input_names_its_place_and_starts_nothing(flow: Flows, case: str) -> None:
    workflow, named = BAD[case]
    inputs = {"nope": 1} if case == "unknown input" else {}
    asked = {"workflow": workflow, "inputs": inputs}
    status, told = await flow.json("POST", f"{BASE}/execute-stream", asked)
    assert status == 400, told
    assert named in told["error"]["message"]
    assert len(told["error"]["message"]) < 20_000
    if isinstance(workflow, str):
        assert told["error"]["details"]["problems"][0]["line"] is not None or "256" in named
    assert flow.up.requests == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_request"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"workflw": ""}', "invalid_request"),
        (b'{"workflow": "x", "inputs": []}', "invalid_request"),
    ],
)
async def test_bodies_that_are_none(flow: Flows, body: bytes, code: str) -> None:
    status, told = await flow.json("POST", f"{BASE}/execute-stream", data=body)
    assert (status, told["error"]["code"]) == (400, code)


@pytest.mark.parametrize("content_type", ["", "application/json", "text/plain"])
async def test_yaml_that_is_sent_as_something_else_is_told_how(
    flow: Flows, content_type: str
) -> None:
    """curl's `--data-binary @file` says that it is a form."""
    headers = {"Content-Type": content_type} if content_type else {}
    for method, path in (("POST", "execute"), ("PUT", "mine")):
        async with flow.http.request(
            method, f"{BASE}/{path}", data=b"workflow:\n  name: w\n", headers=headers
        ) as response:
            told = await response.json()
            assert (response.status, told["error"]["code"]) == (400, "invalid_json")
            assert told["error"]["message"].endswith(
                "; YAML needs `Content-Type: application/yaml`"
            )
    status, told = await flow.json("POST", f"{BASE}/execute", data=b'{"workflow": ')
    assert (status, "YAML" in told["error"]["message"]) == (400, False)


@pytest.mark.parametrize("path", ["execute", "execute-stream"])
async def test_a_get_of_what_takes_a_post_is_405(flow: Flows, path: str) -> None:
    status, told = await flow.json("GET", f"{BASE}/{path}")
    assert (status, told["error"]["code"]) == (405, "method_not_allowed")
    assert told["error"]["message"] == f"{BASE}/{path} takes POST, not GET"


async def test_a_template_flood_is_bounded(flow: Flows) -> None:
    flood = "{% for x in inputs.i %}{% for y in inputs.i %}{{ x }}{% endfor %}{% endfor %}"
    workflow = document(task("t1", prompt=flood), inputs={"i": []})
    seen = await flow.run(workflow, i=list(range(5000)))
    assert seen.status == "failed"
    assert "200,000" in seen.data("workflow_error")[0]["error"]["message"] or "steps" in str(
        seen.data("workflow_error")
    )


async def test_slots_and_runs_are_bounded() -> None:
    async with flows(
        keys=[{"key": KEY, "org": "test", "max_concurrent": 2}], workflows={"max_runs": 3}
    ) as flow:
        flow.hangs("slow", "x")
        runs = [await flow.begin(document(task("t1", "slow"))) for _ in range(2)]
        status, told = await flow.json("POST", f"{BASE}/execute", {"workflow": SEED})
        assert (status, told["error"]["code"]) == (429, "concurrency_limit_exceeded")
        for run in runs:
            assert (await flow.json("POST", f"{BASE}/executions/{run}/cancel"))[0] == 200
        flow.says("one-agent", "ok")
        assert (await flow.run(SEED)).status == "completed"


async def test_the_local_client_library_is_not_needed(flow: Flows) -> None:
    """aiohttp reads the stream line by line, as a naive client does."""
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
        session.post(
            f"{flow.gateway.base_url}{BASE}/execute-stream", json={"workflow": SEED}
        ) as response,
    ):
        lines = [line async for line in response.content]
    assert sum(line.startswith(b"event: ") for line in lines) == sum(
        line.startswith(b"data: ") for line in lines
    )
