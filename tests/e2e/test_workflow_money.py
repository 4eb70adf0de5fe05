"""M4.2, W2.5, W3.4: the balance of an org that runs out, or is held, in the middle of a run."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from tests.support.books import books_of
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import KEY
from tests.support.script import DONE, Send, Wait, chunk, json_answer, sse
from tests.support.workflow_wire import read
from tests.support.workflows import Flows, document, flows, task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from relay.money import Settlement
    from tests.support.script import Step

# 8 micro-USD for a token of output, nothing for the prompt.
PRICE: Final = {"prompt_usd_per_mtok": 0, "completion_usd_per_mtok": 8}
CALL: Final = {"name": "weather", "arguments": "{}"}


def answer(tokens: int, **delta: Any) -> list[Step]:
    """A word, or a call of the tool, that its provider counts as so many tokens."""
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    said = delta or {"content": "word"}
    events = [
        chunk(None, role="assistant", delta=said),
        chunk(None, finish_reason="tool_calls" if delta else "stop"),
        chunk(None, choices=[], usage=usage),
    ]
    return [*(Send(sse(event)) for event in events), Send(DONE)]


def calling(tokens: int) -> list[Step]:
    call = {"index": 0, "id": "c1", "type": "function", "function": CALL}
    return answer(tokens, tool_calls=[call])


def gateway(
    up: FakeUpstream, far: FakeUpstream, folder: Path, *, balance_micro_usd: int
) -> AbstractAsyncContextManager[Flows]:
    models = {
        f"m/{name}": {
            "candidates": [{"provider": "fake", "model": f"up-{name}"}],
            "price": PRICE,
        }
        for name in ("a", "b")
    }
    tool = {
        "name": "weather",
        "description": "The weather.",
        "url": f"{far.origin}/weather",
        "parameters": {"type": "object"},
    }
    return flows(
        up,
        folder,
        models=models,
        agents={"a": {"model": "m/a"}, "b": {"model": "m/b", "tools": [tool]}},
        keys=[{"key": KEY, "org": "test", "balance_usd": balance_micro_usd / 1e6}],
        agents_plane={
            "tool_hosts": [f"127.0.0.1:{far.port}"],
            "tool_networks": ["127.0.0.0/8"],
        },
    )


def costs(rows: Sequence[Settlement], run: str) -> list[tuple[int, str | None, int]]:
    """Status, error code and cost of each row of a run's calls, in order."""
    return [
        (row.status, row.error_code, row.cost_micro_usd)
        for row in sorted(rows, key=lambda row: (row.at, row.request_id))
        if row.request_id.startswith(f"{run}/")
    ]


async def test_a_balance_that_runs_out_in_a_workflow_ends_it_and_every_call_is_paid(
    tmp_path: Path,
) -> None:
    async with FakeUpstream() as up, gateway(up, up, tmp_path, balance_micro_usd=1600) as flow:
        up.script_for("up-a", *answer(80))
        tasks = [task(f"t{n}", "a", max_tokens=100, retries=3) for n in range(4)]
        body, run = await flow.stream(document(*tasks))
        seen = read(body)
        assert seen.names.count("task_completed") == 2
        (failed,) = seen.data("task_error")
        assert (failed["task_id"], failed["will_retry"]) == ("t2", False)
        assert failed["error"]["code"] == "insufficient_credits"
        assert (seen.names[-2:], seen.status) == (["workflow_error", "workflow_result"], "failed")
        async with books_of(tmp_path) as books:
            assert costs(await books.settled(), run) == [(200, None, 640)] * 2
            assert await books.balance() == 1600 - 2 * 640
        assert len(up.requests) == 2
        assert (await flow.status(run))["usage"]["completion_tokens"] == 160


async def test_a_balance_that_runs_out_between_rounds_of_tools(tmp_path: Path) -> None:
    """A1.4: an error and no `[DONE]`."""
    async with (
        FakeUpstream() as up,
        FakeUpstream() as far,
        gateway(up, far, tmp_path, balance_micro_usd=1600) as flow,
    ):
        up.script_for("up-b", *calling(80))
        for _ in range(2):
            far.script(*json_answer({"sun": True}))
        asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 100}
        path = "/v1/agents/b/chat/completions"
        async with flow.http.post(path, json=asked) as response:
            run = response.headers["x-execution-id"]
            body = await response.read()
        (event,) = body.split(b"\n\n")[:-1]
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert error["code"] == "engine_error"
        assert "insufficient_credits" in error["message"]
        async with books_of(tmp_path) as books:
            assert costs(await books.settled(), run) == [(200, None, 640)] * 2
            assert await books.balance() == 1600 - 2 * 640
        assert (await flow.status(run))["usage"]["completion_tokens"] == 160


async def test_what_a_lost_process_held_for_a_run_is_free_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    """kill -9 in a call, and in the second round of one: the balance is enough for the calls that
    begin anew, and not for what the dead held beside them. Usage is the sum of the rows.
    """
    held = 100 * 8
    async with FakeUpstream() as up, FakeUpstream() as far:
        begun: list[Step] = [Send(sse(chunk("wo", role="assistant"))), Wait(asyncio.Event())]
        far.script(*json_answer({"sun": True}))
        async with gateway(up, far, tmp_path, balance_micro_usd=3 * held - 1) as flow:
            up.script_for("up-a", *begun)
            one = await flow.begin(document(task("t", "a", max_tokens=100)))
            up.script_for("up-b", *calling(10), repeat=False)
            up.script_for("up-b", *begun)
            two = await flow.begin(document(task("u", "b", max_tokens=100)))
            async with books_of(tmp_path) as books:
                rows = await books.usage(1)
                assert costs(rows, two) == [(200, None, 80)]
            await up.request(2)
            flow.gateway.kill()
            await flow.gateway.wait()
        up.script_for("up-a", *answer(50))
        up.script_for("up-b", *answer(60))
        async with gateway(up, far, tmp_path, balance_micro_usd=0) as flow:
            for run, task_id in ((one, "t"), (two, "u")):
                seen = await flow.events(run)
                assert [data["error"]["code"] for data in seen.data("task_error")] == [
                    "interrupted"
                ]
                assert seen.status == "completed"
                assert await flow.output(run, task_id) == "word"
            async with books_of(tmp_path) as books:
                rows = await books.settled()
                lost = (500, "worker_lost", 0)
                assert costs(rows, one) == [lost, (200, None, 400)]
                assert costs(rows, two) == [(200, None, 80), lost, (200, None, 480)]
                assert await books.balance() == 3 * held - 1 - 400 - 80 - 480
            for run in (one, two):
                calls = [row for row in rows if row.request_id.startswith(f"{run}/")]
                usage = (await flow.status(run))["usage"]
                assert usage["prompt_tokens"] == sum(row.prompt_tokens for row in calls)
                assert usage["completion_tokens"] == sum(row.completion_tokens for row in calls)
