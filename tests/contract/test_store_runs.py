"""J1.3, W2.4, W2.5: rows of runs, who owns them, and their one end; W1.2: saved workflows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from relay.stores.base import StoreError
from relay.stores.runs import Batch, RunRow, StoredWorkflow
from tests.contract.values import NOW, event, events, new_run, run_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.stores.base import Store

    Gateway = Callable[..., Awaitable[Store]]

STALE = NOW - 300
NOTHING = Batch()
# What JSON can hold and decoders stumble over: lone surrogates, NUL, numbers of any size, depth.
ODD: dict[str, Any] = {
    "cut": "\ud83d", "nul": "a\0b", "line": "\u2028", "big": 2**70, "small": -0.0, "": None,
    "deep": [[[[{"a": [True, False]}]]]], "emoji": "😀", "list": [],
}  # fmt: skip


async def claim(store: Store, owner: str, *, now: float = NOW, limit: int = 10) -> list[str]:
    claimed = await store.runs.claim_runs(owner, now=now, stale_before=STALE, limit=limit)
    assert all(row.owner == owner and row.updated_at == now for row in claimed)
    return [row.execution_id for row in claimed]


async def row_of(store: Store, execution_id: str = "e1") -> RunRow:
    row = await store.runs.get_run(execution_id)
    assert row is not None
    return row


# -- saved workflows ------------------------------------------------------------------------------


async def test_a_workflow_is_saved_overwritten_and_deleted(store: Store) -> None:
    """W1.2."""
    runs = store.runs
    assert await runs.put_workflow("acme", "w", name="one", document="a: 1\n", now=NOW) is True
    saved = StoredWorkflow(
        id="w", org="acme", name="one", document="a: 1\n", created_at=NOW, updated_at=NOW
    )
    assert await runs.get_workflow("acme", "w") == saved
    assert await runs.put_workflow("acme", "w", name="two", document=ODD, now=NOW + 1) is False
    changed = replace(saved, name="two", document=ODD, updated_at=NOW + 1)
    assert await runs.get_workflow("acme", "w") == changed
    assert await runs.list_workflows("acme") == [replace(changed, document=None)]
    assert await runs.delete_workflow("acme", "w") is True
    assert await runs.delete_workflow("acme", "w") is False
    assert await runs.get_workflow("acme", "w") is None
    assert await runs.list_workflows("acme") == []


async def test_a_workflow_belongs_to_its_org(store: Store) -> None:
    runs = store.runs
    for org in ("acme", "b"):
        for workflow in ("y", "x"):
            await runs.put_workflow(org, workflow, name=f"{org} {workflow}", document={}, now=NOW)
    assert [w.name for w in await runs.list_workflows("b")] == ["b x", "b y"]
    assert await runs.delete_workflow("b", "x")
    found = await runs.get_workflow("acme", "x")
    assert found is not None
    assert found.name == "acme x"
    assert await runs.get_workflow("c", "x") is None


# -- rows -----------------------------------------------------------------------------------------


async def test_a_run_comes_back_as_it_was_created(store: Store) -> None:
    run = new_run(trial=True, document=ODD, inputs=ODD)
    await store.runs.create_run(run, events("a", "b"))
    assert await store.runs.get_run("e1") == RunRow(
        execution_id="e1",
        workflow_id="wf_1",
        org="acme",
        key_id="key_a",
        trial=True,
        plane="workflows",
        name="triage",
        source="inline",
        document=ODD,
        inputs=ODD,
        state="running",
        owner="worker_1",
        generation=1,
        attempts=1,
        cancel_requested=False,
        created_at=NOW,
        updated_at=NOW,
        finished_at=None,
        head=2,
        final_task_id=None,
        error=None,
        summary=None,
        usage=None,
        answers={},
        waits_for=None,
    )
    assert await store.runs.get_run("e2") is None


async def test_an_execution_id_is_taken_once(store: Store) -> None:
    """Nothing of the second is there."""
    await store.runs.create_run(new_run(), events("a"))
    with pytest.raises(StoreError, match="'e1' already"):
        await store.runs.create_run(new_run(org="b"), events("b", "c"))
    row = await row_of(store)
    assert (row.org, row.head) == ("acme", 1)


async def test_a_value_is_stored_as_it_was_when_it_was_handed_over(store: Store) -> None:
    inputs = {"n": 1}
    creating = asyncio.create_task(store.runs.create_run(new_run(inputs=inputs), NOTHING))
    await asyncio.sleep(0)
    inputs["n"] = 2
    await creating
    assert (await row_of(store)).inputs == {"n": 1}


async def test_the_newest_run_of_a_workflow(store: Store) -> None:
    """W1.3: by time, then by creation; the org's own."""
    for name, at, org, workflow in (
        ("e1", NOW + 5, "acme", "w"),
        ("e2", NOW, "acme", "w"),
        ("e3", NOW + 9, "b", "w"),
        ("e4", NOW + 9, "acme", "v"),
    ):
        run = new_run(name, created_at=at, org=org, workflow_id=workflow)
        await store.runs.create_run(run, NOTHING)
    assert await store.runs.newest_run("acme", "w") == "e1"
    await store.runs.create_run(new_run("e5", created_at=NOW + 5, workflow_id="w"), NOTHING)
    assert await store.runs.newest_run("acme", "w") == "e5"
    assert await store.runs.newest_run("acme", "u") is None


async def test_touching_keeps_runs_from_going_stale(store: Store) -> None:
    """W2.4: those of this owner that run."""
    for name, owner in (("e1", "worker_1"), ("e2", "worker_2"), ("e3", "worker_1")):
        await store.runs.create_run(new_run(name, owner=owner), NOTHING)
    await store.runs.finish("e3", 1, NOTHING, run_end(at=NOW + 1))
    await store.runs.touch_runs("worker_1", NOW + 60)
    rows = [await row_of(store, name) for name in ("e1", "e2", "e3")]
    assert [row.updated_at for row in rows] == [NOW + 60, NOW, NOW + 1]


# -- cancels --------------------------------------------------------------------------------------


async def test_the_owner_learns_of_a_cancel(store: Store) -> None:
    for name, owner in (("e1", "worker_1"), ("e2", "worker_2"), ("e3", "worker_1")):
        await store.runs.create_run(new_run(name, owner=owner), NOTHING)
    asked = await store.runs.request_cancel("e1", NOW + 1)
    assert asked == await row_of(store)
    assert asked is not None
    assert asked.cancel_requested
    assert asked.updated_at == NOW  # it shows that the owner lives, and that a client does not
    assert await store.runs.cancels_of("worker_1") == ["e1"]
    assert await store.runs.cancels_of("worker_2") == []
    await store.runs.finish("e1", 1, NOTHING, run_end("cancelled"))
    assert await store.runs.cancels_of("worker_1") == []
    assert await store.runs.request_cancel("e9", NOW) is None


async def test_a_cancel_of_an_ended_run_changes_nothing(store: Store) -> None:
    await store.runs.create_run(new_run(), NOTHING)
    await store.runs.finish("e1", 1, NOTHING, run_end())
    before = await row_of(store)
    assert await store.runs.request_cancel("e1", NOW + 20) == before
    assert not before.cancel_requested


async def test_a_run_that_waits_can_be_cancelled(store: Store) -> None:
    await store.runs.create_run(new_run(), NOTHING)
    await store.runs.finish("e1", 1, NOTHING, run_end("yielded", waits_for={"task_id": "ask"}))
    asked = await store.runs.request_cancel("e1", NOW + 20)
    assert asked is not None
    assert (asked.state, asked.cancel_requested) == ("yielded", True)
    assert await store.runs.finish("e1", None, events("z"), run_end("cancelled")) == 1
    assert await store.runs.resume_run("e1", owner="w", answer=1, now=NOW + 30) is None


# -- claims ---------------------------------------------------------------------------------------


async def test_a_run_is_claimed_when_its_owners_lease_is_over(store: Store) -> None:
    """W2.5: generation and attempts grow."""
    await store.renew_lease("worker_1", NOW + 15)
    await store.runs.create_run(new_run(), events("a"))
    assert await claim(store, "worker_2", now=NOW + 14.9) == []
    claimed = await store.runs.claim_runs("worker_2", now=NOW + 15, stale_before=STALE, limit=10)
    assert claimed == [await row_of(store)]
    row = claimed[0]
    assert (row.owner, row.generation, row.attempts, row.head) == ("worker_2", 2, 2, 1)
    assert row.updated_at == NOW + 15


async def test_a_living_owners_stale_run_is_claimed(store: Store) -> None:
    """W2.5: more than five minutes; its owner itself may be the one that finds it."""
    await store.renew_lease("worker_1", NOW + 1000)
    await store.runs.create_run(new_run("e1", created_at=STALE), NOTHING)
    await store.runs.create_run(new_run("e2", created_at=STALE - 1), NOTHING)
    assert await claim(store, "worker_1") == ["e2"]
    assert await claim(store, "worker_2") == []
    assert (await row_of(store, "e2")).generation == 2


async def test_nobody_claims_its_own_fresh_runs(store: Store) -> None:
    """Also if its lease has run out meanwhile."""
    await store.runs.create_run(new_run(), NOTHING)
    assert await claim(store, "worker_1") == []


async def test_released_runs_are_claimed_at_once(store: Store) -> None:
    await store.renew_lease("worker_1", NOW + 15)
    for name in ("e1", "e2"):
        await store.runs.create_run(new_run(name), NOTHING)
    await store.runs.create_run(new_run("e3", owner="worker_3"), NOTHING)
    await store.renew_lease("worker_3", NOW + 15)
    await store.runs.release_runs("worker_1")
    row = await row_of(store)
    assert (row.owner, row.generation, row.state) == ("", 1, "running")
    assert await claim(store, "worker_1", limit=1) == ["e1"]
    assert await claim(store, "worker_2") == ["e2"]


async def test_runs_that_wait_or_have_ended_are_not_claimed(store: Store) -> None:
    for name, state in (("e1", "yielded"), ("e2", "completed"), ("e3", "failed")):
        await store.runs.create_run(new_run(name, created_at=0.0), NOTHING)
        waits_for = {"task_id": "ask"} if state == "yielded" else None
        await store.runs.finish(name, 1, NOTHING, run_end(state, at=0.0, waits_for=waits_for))
    assert await claim(store, "worker_2") == []


async def test_the_longest_silent_runs_are_claimed_first(store: Store) -> None:
    for name, age in (("e1", 1), ("e2", 3), ("e3", 2)):
        await store.runs.create_run(new_run(name, created_at=NOW - age), NOTHING)
    assert await claim(store, "worker_2", limit=2) == ["e2", "e3"]
    assert await claim(store, "worker_2", limit=2) == ["e1"]


async def test_a_run_goes_to_one_of_many_claimants(gateway: Gateway) -> None:
    """J1.3: two gateways, many sweepers."""
    stores = [await gateway(), await gateway()]
    names = [f"e{n}" for n in range(40)]
    for name in names:
        await stores[0].runs.create_run(new_run(name), NOTHING)
    for n in range(20):
        await stores[0].renew_lease(f"taker_{n}", NOW + 15)
    claims = await asyncio.gather(*(claim(stores[n % 2], f"taker_{n}", limit=3) for n in range(20)))
    assert sorted(name for claimed in claims for name in claimed) == sorted(names)
    assert {(await row_of(stores[1], name)).generation for name in names} == {2}


# -- fencing and the end --------------------------------------------------------------------------


async def test_an_older_generation_changes_nothing(store: Store) -> None:
    """J1.3: who lost a run is told so, and nothing of what it says is stored."""
    await store.runs.create_run(new_run(), events("a"))
    await claim(store, "worker_2")
    said = Batch(events=[event("b")], steps={"task/t1": 1}, outputs={"t1": 1})
    assert await store.runs.append("e1", 1, said) is None
    assert await store.runs.finish("e1", 1, said, run_end()) is None
    assert await store.runs.append("e1", 3, said) is None
    assert await store.runs.append("e9", 1, said) is None
    row = await row_of(store)
    assert (row.state, row.head) == ("running", 1)
    assert await store.runs.steps("e1") == {}
    assert await store.runs.outputs("e1") == {}
    assert await store.runs.append("e1", 2, events("b")) == 2


async def test_an_end_is_stored_with_its_events(store: Store) -> None:
    await store.runs.create_run(new_run(), events("a"))
    end = run_end(
        "failed", at=NOW + 9, final_task_id="t1", error=ODD, summary={"tasks": 1}, usage={"n": 2}
    )
    assert await store.runs.finish("e1", 1, events("b", "c"), end) == 2
    row = await row_of(store)
    assert (row.state, row.owner, row.head, row.final_task_id) == ("failed", "", 3, "t1")
    assert (row.error, row.summary, row.usage) == (ODD, {"tasks": 1}, {"n": 2})
    assert (row.finished_at, row.updated_at, row.waits_for) == (NOW + 9, NOW + 9, None)
    assert await store.runs.append("e1", 1, events("d")) is None
    assert await store.runs.finish("e1", None, events("d"), run_end()) is None
    assert await row_of(store) == row


async def test_a_run_does_not_end_by_running(store: Store) -> None:
    await store.runs.create_run(new_run(), NOTHING)
    with pytest.raises(ValueError, match="running"):
        await store.runs.finish("e1", 1, NOTHING, run_end("running"))
    with pytest.raises(ValueError, match="waits for something"):
        await store.runs.finish("e1", 1, NOTHING, run_end("yielded"))
    assert (await row_of(store)).state == "running"


async def test_one_of_all_ends_is_the_end(gateway: Gateway) -> None:
    """J1.3: two gateways; callback, cancel, timeout and recovery."""
    stores = [await gateway(), await gateway()]
    for round_ in range(10):
        name = f"e{round_}"
        await stores[0].runs.create_run(new_run(name), events("a"))
        ends = await asyncio.gather(
            *(
                stores[n % 2].runs.finish(
                    name,
                    1 if n % 3 else None,
                    events(f"end_{n}"),
                    run_end("failed", final_task_id=str(n)),
                )
                for n in range(16)
            )
        )
        assert sorted(filter(None, ends)) == [2]
        winner = next(n for n, position in enumerate(ends) if position)
        row = await row_of(stores[1], name)
        assert (row.head, row.final_task_id) == (2, str(winner))
        page = await stores[0].runs.read(name, after=1, limit=9)
        assert page is not None
        assert [e.frame for e in page.events] == [event(f"end_{winner}").frame]


# -- legs -----------------------------------------------------------------------------------------


async def test_a_run_that_waits_is_answered(store: Store) -> None:
    """W2.3: positions go on; the next leg is another generation."""
    await store.runs.create_run(new_run(), events("a"))
    asks = {"task_id": "ask", "prompt": "Go on?", "schema": None}
    assert await store.runs.finish("e1", 1, events("b"), run_end("yielded", waits_for=asks)) == 2
    row = await row_of(store)
    assert (row.state, row.owner, row.waits_for) == ("yielded", "", asks)
    assert await store.runs.append("e1", 1, events("c")) is None
    assert await store.runs.finish("e1", 1, events("c"), run_end()) is None
    resumed = await store.runs.resume_run("e1", owner="worker_2", answer=ODD, now=NOW + 50)
    assert resumed == await row_of(store)
    assert resumed is not None
    assert (resumed.state, resumed.owner, resumed.generation) == ("running", "worker_2", 2)
    assert (resumed.attempts, resumed.updated_at) == (1, NOW + 50)
    assert (resumed.answers, resumed.waits_for) == ({"ask": ODD}, None)
    assert await store.runs.append("e1", 1, events("c")) is None
    assert await store.runs.append("e1", 2, events("c")) == 3
    await store.runs.finish("e1", 2, NOTHING, run_end("yielded", waits_for={"task_id": "more"}))
    again = await store.runs.resume_run("e1", owner="worker_1", answer=None, now=NOW + 60)
    assert again is not None
    assert again.answers == {"ask": ODD, "more": None}


async def test_one_of_all_answers_is_taken(gateway: Gateway) -> None:
    stores = [await gateway(), await gateway()]
    await stores[0].runs.create_run(new_run(), NOTHING)
    assert await stores[1].runs.resume_run("e1", owner="w", answer=1, now=NOW) is None
    await stores[0].runs.finish("e1", 1, NOTHING, run_end("yielded", waits_for={"task_id": "a"}))
    answered = await asyncio.gather(
        *(
            stores[n % 2].runs.resume_run("e1", owner=f"worker_{n}", answer=n, now=NOW)
            for n in range(10)
        )
    )
    (row,) = filter(None, answered)
    assert row.owner == f"worker_{row.answers['a']}"
    assert await stores[1].runs.resume_run("e9", owner="w", answer=1, now=NOW) is None


# -- retention ------------------------------------------------------------------------------------


async def test_what_ended_long_ago_is_forgotten(store: Store) -> None:
    """J2.1: the row stays, and says from where on a cursor is usable."""
    said = Batch(events=[event("a"), event("b")], steps={"task/t": 1}, outputs={"t": 1})
    for n in range(4):
        await store.runs.create_run(new_run(f"e{n}"), said)
        await store.runs.finish(f"e{n}", 1, events("z"), run_end(at=NOW + n))
    await store.runs.create_run(new_run("e4"), said)
    await store.runs.create_run(new_run("e5"), said)
    asks = run_end("yielded", at=NOW, waits_for={"task_id": "ask"})
    await store.runs.finish("e5", 1, events("z"), asks)
    before = await row_of(store, "e0")
    assert await store.runs.retire_runs(NOW + 3, 2) == 2
    assert await store.runs.retire_runs(NOW + 3, 2) == 1
    assert await store.runs.retire_runs(NOW + 3, 2) == 0
    assert await row_of(store, "e0") == before
    for n, kept in enumerate((0, 0, 0, 3, 2, 3)):
        page = await store.runs.read(f"e{n}", after=0, limit=10)
        assert page is not None
        assert (len(page.events), page.head) == (kept, 2 if n == 4 else 3)
        assert page.oldest == (1 if kept else 4)
        assert await store.runs.outputs(f"e{n}") == ({"t": 1} if kept else {})
        assert await store.runs.steps(f"e{n}") == ({"task/t": 1} if kept else {})
        assert len(await store.runs.outline(f"e{n}")) == kept
    assert await store.runs.finish("e0", None, NOTHING, run_end()) is None


async def test_a_run_that_waits_is_kept_until_it_has_ended(store: Store) -> None:
    await store.runs.create_run(new_run(), events("a"))
    asks = run_end("yielded", at=NOW, waits_for={"task_id": "ask"})
    await store.runs.finish("e1", 1, NOTHING, asks)
    await store.runs.resume_run("e1", owner="w", answer=1, now=NOW + 1)
    assert await store.runs.retire_runs(NOW + 1000, 10) == 0
    await store.runs.finish("e1", 2, NOTHING, run_end(at=NOW + 500))
    assert await store.runs.retire_runs(NOW + 500, 10) == 0
    assert await store.runs.retire_runs(NOW + 501, 10) == 1
