"""J1.3, W2.5: several processes race for the ends and the claims of runs on one database."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relay.stores.runs import Batch
from tests.contract.values import NOW, event, new_run

if TYPE_CHECKING:
    from relay.stores.base import Store
    from tests.contract.backends import Backend

ROOT = Path(__file__).parents[2]
RACERS = 3
RUNS = 60

# Opens the database, says so, waits for the start, races, and prints what it was told.
RACER = """
import asyncio, json, sys
from tests.contract.values import NOW, events, new_run, run_end

async def finishes(me, names):
    async def one(n, name):
        generation = None if n % 2 else 1
        return await store.runs.finish(
            name, generation, events(f"end_{me}"), run_end("failed", final_task_id=me)
        )
    return dict(zip(names, await asyncio.gather(*map(one, range(len(names)), names))))

async def claims(me, names):
    found = []
    while rows := await store.runs.claim_runs(me, now=NOW, stale_before=0.0, limit=3):
        found += [row.execution_id for row in rows]
    return found

async def main(me, race, *names):
    await store.open()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(await globals()[race](me, names)), flush=True)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def raced(backend: Backend, race: str, names: list[str]) -> dict[str, Any]:
    """Run the racers at once; return what each was told."""
    racers = {
        f"racer_{n}": subprocess.Popen(
            [sys.executable, "-c", backend.code() + RACER, f"racer_{n}", race, *names],
            cwd=ROOT,
            env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(RACERS)
    }
    try:
        for racer in racers.values():
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers.values():
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        told = {me: json.loads(racer.communicate(timeout=60)[0]) for me, racer in racers.items()}
    finally:
        for racer in racers.values():
            racer.kill()
            racer.communicate()
    assert {racer.returncode for racer in racers.values()} == {0}
    return told


async def begun(store: Store) -> list[str]:
    names = [f"e{n}" for n in range(RUNS)]
    said = Batch(events=[event("a")])
    await asyncio.gather(*(store.runs.create_run(new_run(name), said) for name in names))
    return names


async def test_one_process_ends_a_run(backend: Backend, store: Store) -> None:
    names = await begun(store)
    told = await asyncio.to_thread(raced, backend, "finishes", names)
    for name in names:
        (winner,) = [me for me, ends in told.items() if ends[name] is not None]
        assert told[winner][name] == 2
        row = await store.runs.get_run(name)
        assert row is not None
        assert (row.state, row.final_task_id, row.head) == ("failed", winner, 2)
        said = await store.runs.outline(name)
        assert [e.frame for e in said] == [event("a").frame, event(f"end_{winner}").frame]


async def test_one_process_takes_a_run_over(backend: Backend, store: Store) -> None:
    names = await begun(store)
    for n in range(RACERS):
        await store.renew_lease(f"racer_{n}", NOW + 15)
    told = await asyncio.to_thread(raced, backend, "claims", names)
    assert Counter(name for claimed in told.values() for name in claimed) == Counter(names)
    for me, claimed in told.items():
        for name in claimed:
            row = await store.runs.get_run(name)
            assert row is not None
            assert (row.owner, row.generation, row.attempts) == (me, 2, 2)
