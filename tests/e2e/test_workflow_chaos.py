"""Random documents, providers that fail, clients that leave: what a run promises (W2, J1.3)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.books import books_of
from tests.support.script import Rst, Send, Sleep, chunk, json_answer, openai_stream, sse
from tests.support.workflow_wire import read
from tests.support.workflows import BASE, Flows, document, flows, task

if TYPE_CHECKING:
    from tests.support.fake_upstream import Step

AGENTS: Final = ("one-agent", "a", "b", "bad")
_ENDED: Final = {"completed", "failed", "cancelled"}


def some_task(rng: random.Random, number: list[int], depth: int) -> dict[str, Any]:
    number[0] += 1
    id_ = f"t{number[0]}"
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        more["on_error"] = rng.choice(["skip", "continue", "fail"])
    if rng.random() < 0.2:
        more["retries"] = 1
    if rng.random() < 0.1:
        more["when"] = rng.choice([True, False])
    kind = rng.choice(["task"] * 4 + (["sequential", "parallel", "condition", "batch"] * depth))

    def some(count: int) -> list[dict[str, Any]]:
        return [some_task(rng, number, depth - 1) for _ in range(count)]

    match kind:
        case "task":
            return task(id_, rng.choice(AGENTS), **more)
        case "condition":
            branches = {"then": some(1), "else": some(1)}
            return {"type": kind, "id": id_, "if": rng.random() < 0.5, **branches, **more}
        case "batch":
            items = list(range(rng.randrange(1, 6)))
            return {"type": kind, "id": id_, "items": items, "task": some(1)[0], **more}
        case _:
            return {"type": kind, "id": id_, "tasks": some(rng.randrange(1, 4)), **more}


def some_answer(rng: random.Random) -> list[Step]:
    words = [rng.choice(["one ", "zwei ", "🙂", "x" * 300]) for _ in range(rng.randrange(1, 8))]
    match rng.randrange(6):
        case 0:
            return json_answer({"error": {"message": "later"}}, status=rng.choice([429, 500, 503]))
        case 1:
            return json_answer({"error": {"message": "never"}}, status=400)
        case 2:
            half: list[Step] = [Send(sse(chunk(word, role="assistant"))) for word in words]
            return [*half, Rst()]
        case 3:
            slow: list[Step] = []
            for send in openai_stream(words):
                slow += [send, Sleep(rng.random() * 0.02)]
            return slow
        case _:
            return list(openai_stream(words))


async def some_client(flow: Flows, rng: random.Random, workflow: dict[str, Any]) -> str:
    """Begin a run, leave it sometime, or cancel it, or see it to its end; return its id."""
    async with flow.http.post(f"{BASE}/execute-stream", json={"workflow": workflow}) as response:
        assert response.status == 200, await response.read()
        run = response.headers["x-execution-id"]
        how = rng.randrange(4)
        if how == 0:
            body = await response.read()
            assert read(body).status in _ENDED
            return run
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.1):
                async for data in response.content.iter_any():
                    body += data
        read(body, whole=False)
        if how == 1:
            assert (await flow.json("POST", f"{BASE}/executions/{run}/cancel"))[0] == 200
        response.close()
        return run


async def check(flow: Flows, run: str) -> None:
    """The journal, from its beginning and from a cut, and what it says of outputs."""
    seen = await flow.events(run)
    row = await flow.status(run)
    assert row["status"] == seen.status
    assert row["position"] == len(seen.events)
    cut = len(seen.events) // 2
    again = await flow.events(run, after=cut)
    assert again.events == seen.events[cut:]
    for task_id in {data["task_id"] for data in seen.data("task_completed")}:
        output = await flow.output(run, task_id)
        if task_id in seen.texts:
            assert output == seen.texts[task_id]
    dispatched = [data["task_id"] for data in seen.data("task_dispatched")]
    ends = seen.data("task_completed") + seen.data("task_error")
    if row["status"] != "cancelled":
        assert sorted(dispatched) == sorted(data["task_id"] for data in ends)


@pytest.mark.parametrize(("seed", "count"), [(7, 60), pytest.param(8, 600, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
async def test_what_a_run_promises_holds(seed: int, count: int) -> None:
    rng = random.Random(seed)
    async with flows(workflows={"heartbeat_s": 0.05}) as flow:
        for name in AGENTS:
            for _ in range(30 * count):
                flow.up.script_for(f"up-{name}", *some_answer(rng), repeat=False)
        left = iter(range(count))
        runs: list[str] = []

        async def clients() -> None:
            for _ in left:
                tasks = [some_task(rng, [0], 2)]
                runs.append(await some_client(flow, rng, document(*tasks)))

        await asyncio.gather(*(clients() for _ in range(10)))
        for run in runs:
            await check(flow, run)
        async with books_of(flow.gateway.workdir) as books:
            rows = await books.settled()
        assert {row.request_id[:32] for row in rows} <= set(runs)
        for run in runs:
            usage = (await flow.status(run))["usage"]
            mine = [row for row in rows if row.request_id[:32] == run]
            paid = sum(row.completion_tokens for row in mine)
            assert usage["completion_tokens"] == paid, (mine, await flow.events(run))
        log = flow.gateway.stderr()
        assert "Traceback" not in log
        assert "never retrieved" not in log
