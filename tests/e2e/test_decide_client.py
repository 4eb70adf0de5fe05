"""D6.1 to D6.3: the published client `SystemZero`, unmodified, and OpenAI's beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from system_zero import InvalidRequestError, SystemZero, SystemZeroError, decisions_for
from system_zero.batch import run_batch
from system_zero.flows import run_flow

from bench.ports import free_port
from tests.support.books import books_of
from tests.support.checks import until
from tests.support.decisions import (
    MODEL,
    QUESTIONS,
    config,
    decides,
    fresh_key,
    gateway,
    let_end,
)
from tests.support.gateway import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.gateway import GatewayProcess

BILLED = 110  # micro-USD of a call with one question and no text price
ALL_QUESTIONS: dict[str, Any] = {
    "ready": {"type": "boolean", "instructions": "Is it ready?"},
    "lane": {"type": "choice", "instructions": "Which?", "criteria": {"é": None, "a": "A"}},
    "mood": {"type": "score", "instructions": "How?", "criteria": ["low", "mid", "high"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process
        assert "Traceback" not in process.stderr()


def request(state: Any, **more: Any) -> Any:
    return {"model": MODEL, "state": state, "questions": QUESTIONS} | more


async def using(
    process: GatewayProcess,
    work: Callable[[SystemZero], Any],
    *,
    key: str | None = None,
    port: int | None = None,
    **more: Any,
) -> Any:
    """Runs `work` with a client, in a thread: it blocks."""
    url = f"http://127.0.0.1:{port or process.port}/v1"

    def run() -> Any:
        with SystemZero(key or fresh_key(), base_url=url, **more) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_decide(shared: GatewayProcess) -> None:
    what = request({"order": 7}, questions=ALL_QUESTIONS, session_id="s", attachments=None)
    found = await using(
        shared,
        lambda c: c.decide_with_response(what, client_request_id="trace", danger_zone="accept"),
        key=KEY,
    )
    decisions = decisions_for(found.data, what)
    assert [decisions[name].decision for name in ALL_QUESTIONS] == [True, "a", "0"]
    told = found.metadata
    assert (told.client_request_id, told.replayed) == ("trace", False)
    assert (told.rate_limit.limit, told.rate_limit.remaining) == (4, 4)
    assert told.latency_ms >= 0
    assert told.request_id.startswith("req_")


@pytest.mark.parametrize(
    "failure", ["capacity_exhausted:30", "system_zero_unavailable:30", "starting:30"]
)
async def test_it_tries_again_under_one_key(shared: GatewayProcess, failure: str) -> None:
    """A failed try has left its key, so the next one is dispatched and billed."""
    state = f"!error={failure} !times=2"
    slept: list[float] = []
    found = await using(
        shared,
        lambda c: c.decide_with_response(request(state)),
        sleep=slept.append,
        random=lambda: 0,
    )
    assert found.data["answers"].keys() == {"ready"}
    assert found.metadata.replayed is False
    calls = [call for call in decides(shared) if state in call["state"]]
    assert len(calls) == 3
    assert len({call["key"] for call in calls}) == 1
    assert slept == [0.03, 0.03]


async def test_what_cannot_be_tried_again_is_told_at_once(shared: GatewayProcess) -> None:
    for what, error in (
        (request("x", model="other"), "model_not_found"),
        (request("!error=system_zero_timeout"), "system_zero_timeout"),
        (request("!error=maintenance"), "maintenance"),
    ):
        with pytest.raises(SystemZeroError) as raised:
            await using(shared, lambda c, what=what: c.decide(what))  # type: ignore[misc]
        assert raised.value.code == error
        assert raised.value.request_id
    with pytest.raises(InvalidRequestError) as refused:
        await using(shared, lambda c: c.decide(request("x"), idempotency_key="k" * 256))
    assert refused.value.code == "invalid_idempotency_key"


async def test_a_replay_across_a_restart(tmp_path: Path) -> None:
    key, port = fresh_key(), free_port()

    def ask(client: SystemZero) -> Any:
        return client.decide_with_response(request("restart"), idempotency_key="order-7")

    async with gateway(config(), workdir=tmp_path, port=port) as process:
        first = await using(process, ask, key=key)
        process.terminate()
        await process.wait()
    async with (
        gateway(config(), workdir=tmp_path, port=port) as process,
        books_of(tmp_path) as books,
    ):
        again = await using(process, ask, key=key)
        assert (first.metadata.replayed, again.metadata.replayed) == (False, True)
        assert again.data == first.data
        with pytest.raises(InvalidRequestError) as refused:
            await using(
                process, lambda c: c.decide(request("x"), idempotency_key="order-7"), key=key
            )
        assert refused.value.code == "idempotency_key_reuse"
        assert len(decides(process)) == 1
        (row,) = await books.rows(1)
        assert row.cost_micro_usd == BILLED


async def test_it_outlives_a_kill(tmp_path: Path) -> None:
    """kill -9 with its decide in flight: its own retries come to the answer, billed once."""
    over = config(limits={"idempotency_lease_ms": 3000, "idempotency_renew_interval_ms": 1000})
    port, state, back = free_port(), "!until=killed", threading.Event()

    def sleep(seconds: float) -> None:
        """It tries six times, and a start may take longer than its waits."""
        back.wait(60)
        time.sleep(seconds)

    async with gateway(over, workdir=tmp_path, port=port) as process:
        client = asyncio.create_task(
            using(process, lambda c: c.decide_with_response(request(state)), key=KEY, sleep=sleep)
        )
        await until(lambda: decides(process))
        process.kill()
        await process.wait()
        let_end(process, "killed")
    # A connection that breaks after its request was sent is tried again under the same key.
    async with gateway(over, workdir=tmp_path, port=port) as process, books_of(tmp_path) as books:
        back.set()
        found = await asyncio.wait_for(client, 60)
        assert found.data["answers"].keys() == {"ready"}
        calls = decides(process)
        assert len(calls) == 2
        assert len({call["key"] for call in calls}) == 1
        replay = await using(
            process,
            lambda c: c.decide_with_response(
                request(state), idempotency_key=found.metadata.idempotency_key
            ),
            key=KEY,
        )
        assert replay.metadata.replayed is True
        async with asyncio.timeout(10):
            while [row.cost_micro_usd for row in await books.store.usage()] != [BILLED]:
                await asyncio.sleep(0.05)


async def test_run_batch(shared: GatewayProcess, tmp_path: Path) -> None:
    """Ten items, two at a time; run again it asks nothing, and lost results are replays."""
    key = fresh_key()
    items = [
        {
            "id": f"item-{i}",
            "request": request(f"batch {i}", questions=ALL_QUESTIONS),
            "expected": {"ready": True, "lane": "a", "mood": "0"},
        }
        for i in range(10)
    ]
    results = tmp_path / "results.jsonl"

    def run(client: SystemZero) -> Any:
        return run_batch(
            client, items, run_id="run-1", results_path=results, deadline_ms=600_000, concurrency=2
        )

    found = await using(shared, run, key=key)
    assert found["stopped"] is None
    assert [record["outcome"] for record in found["records"]] == ["completed"] * 10
    assert len([call for call in decides(shared) if "batch" in call["state"]]) == 10
    again = await using(shared, run, key=key)
    assert [record["outcome"] for record in again["records"]] == ["completed"] * 10
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:4]))
    third = await using(shared, run, key=key)
    assert [record["outcome"] for record in third["records"]] == ["completed"] * 10
    assert len([call for call in decides(shared) if "batch" in call["state"]]) == 10


async def test_run_flow(shared: GatewayProcess) -> None:
    """Two steps by a rule; run again with the same id every step is a replay."""
    key = fresh_key()
    flow = {
        "version": 1,
        "request": {"model": MODEL, "state": "flow", "session_id": "s"},
        "steps": [
            {
                "id": "first",
                "questions": ALL_QUESTIONS,
                "next": {
                    "rules": [
                        {
                            "when": {
                                "step": "first",
                                "question": "ready",
                                "op": "eq",
                                "value": True,
                            },
                            "next": "second",
                        }
                    ],
                    "default": None,
                },
            },
            {
                "id": "second",
                "questions": QUESTIONS,
                "state_template": {
                    "object": {
                        "was": {"state": True},
                        "lane": {
                            "answer": {"step": "first", "question": "lane", "field": "decision"}
                        },
                    }
                },
                "next": {"rules": [], "default": None},
            },
        ],
    }

    def run(client: SystemZero) -> Any:
        return run_flow(client, flow, run_id="flow-1", deadline_ms=1_000_000)

    for replayed in (False, True):
        trace = await using(shared, run, key=key)
        assert trace["status"] == "completed"
        assert [step["status"] for step in trace["steps"]] == ["completed"] * 2
        assert [step["replayed"] for step in trace["steps"]] == [replayed] * 2
    states = [call["body"] for call in decides(shared) if '"lane":"a"' in call["body"]]
    assert len(states) == 1


async def test_models(shared: GatewayProcess) -> None:
    """D6.3: the same list for both clients."""
    listed = await using(shared, lambda c: c.models.list(), key=KEY)
    model, alias = listed["data"]
    assert (model["id"], model["alias_for"]) == (MODEL, None)
    assert (alias["id"], alias["alias_for"]) == ("system-zero", MODEL)
    assert model["limits"]["questions"] == 1024
    assert model["limits"]["choice_options"] == {
        kind: {"min": 1, "max": 255} for kind in ("text", "media")
    }
    assert model["limits"]["body_bytes"] == 3_665_920
    assert model["held_routes"] == ["committee", "deliberate"]
    async with AsyncOpenAI(api_key=KEY, base_url=f"{shared.base_url}/v1") as client:
        found = [entry async for entry in client.models.list()]
        assert [entry.id for entry in found] == [MODEL, "system-zero"]
        assert (await client.models.retrieve(MODEL)).owned_by == "sluicegate"
    async with AsyncOpenAI(api_key=KEY, base_url=f"{shared.base_url}/api/v1") as client:
        assert [entry async for entry in client.models.list()] == []
