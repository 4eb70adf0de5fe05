"""A gateway that is killed while its runs write: no position that was told is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from relay.stores.runs import Batch
from tests.contract.values import NOW, event, events

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.stores.base import Store
    from tests.contract.backends import Backend

    Gateway = Callable[..., Awaitable[Store]]

ROOT = Path(__file__).parents[2]
KILLS = (1, 60, 500, 2000)
RUNS = 12

# Prints a line for each answer of the store, as soon as it has it. Ends with this test's end.
WRITER = """
import asyncio, os, threading, sys
from relay.stores.runs import Batch
from tests.contract.values import event, events, new_run, piece, run_end

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def one(run):
    n = 0
    while True:
        name = f"{run}_{n}"
        n += 1
        await store.runs.create_run(new_run(name), Batch(events=[
            event("s", "streaming_started", "t1")
        ]))
        tell("begun", name)
        for i in range(6):
            said = Batch(
                events=[event(f"{i}.{k}") for k in range(i % 3)],
                texts=[piece("s", 3 * i, b"%03d" % i)],
                steps={str(i): i},
            )
            tell("said", name, i, await store.runs.append(name, 1, said))
        end = Batch(events=[event("z", "task_completed", "t1")])
        tell("ended", name, await store.runs.finish(name, 1, end, run_end()))

async def main():
    await store.open()
    # The others write in step, and may all be between two runs when the end comes.
    await store.runs.create_run(new_run("open"), Batch())
    await asyncio.gather(*(one(run) for run in range(RUNS)))

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
asyncio.run(main())
"""
APPENDS = 6
FIRSTS = (1, 2, 3, 4, 5, 6)  # where the appends begin; those without an event tell the head
SAID = ("s", "1.0", "2.0", "2.1", "4.0", "5.0", "5.1", "z")


def killed_after(backend: Backend, lines: int) -> list[list[str]]:
    """Run a writer, kill it after so many answers, and return all that it was told."""
    with subprocess.Popen(
        [sys.executable, "-c", backend.code() + WRITER.replace("RUNS", str(RUNS))],
        cwd=ROOT,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        answers = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        answers += writer.stdout.read().splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    return [answer.decode().split() for answer in answers if answer.endswith(b"\n")]


@pytest.mark.parametrize("lines", KILLS)
async def test_a_kill_loses_and_doubles_nothing(
    backend: Backend, gateway: Gateway, lines: int
) -> None:
    """J1.1, J1.2: each append is there whole or not at all; the next owner goes on behind it."""
    survivor = await gateway()
    told = await asyncio.to_thread(killed_after, backend, lines)
    appended: dict[str, int] = {}
    ended = set[str]()
    for what, name, *numbers in told:
        appended.setdefault(name, 0)
        if what == "said":
            assert int(numbers[1]) == FIRSTS[int(numbers[0])]
            appended[name] = int(numbers[0]) + 1
        elif what == "ended":
            assert numbers == ["8"]
            ended.add(name)
    assert appended
    for name, at_least in appended.items():
        await check(survivor, name, at_least=at_least, ended=name in ended)
    await survivor.renew_lease("worker_2", NOW + 15)
    claimed = await survivor.runs.claim_runs("worker_2", now=NOW, stale_before=0.0, limit=10**6)
    assert not {row.execution_id for row in claimed} & ended
    assert 1 <= len(claimed) <= RUNS + 1
    for row in claimed:
        assert await survivor.runs.append(row.execution_id, 1, events("late")) is None
        # It does not know what its predecessor came to, and says the last thing again.
        last = SAID[row.head - 1] if row.head else "s"
        again = Batch(events=[event(last), event("next")])
        assert await survivor.runs.append(row.execution_id, 2, again) == max(row.head, 1)
        (*_, newest) = await survivor.runs.outline(row.execution_id)
        assert (newest.position, newest.frame) == (max(row.head, 1) + 1, event("next").frame)


async def check(store: Store, name: str, *, at_least: int, ended: bool) -> None:
    row = await store.runs.get_run(name)
    assert row is not None
    assert row.state == "completed" if ended else row.state in ("running", "completed")
    steps = await store.runs.steps(name)
    done = len(steps)
    assert steps == {str(i): i for i in range(done)}
    assert at_least <= done <= APPENDS
    found = await store.runs.outline(name)
    assert [e.position for e in found] == list(range(1, row.head + 1))
    said = [id_ for id_ in SAID if id_ == "s" or (id_ != "z" and int(id_[0]) < done)]
    if row.state == "completed":
        assert done == APPENDS
        said.append("z")
    assert [e.frame.split(b'"')[-2].decode() for e in found] == said
    texts = await store.runs.texts(name, first=1, last=row.head)
    assert [t.raw for t in texts] == [b"".join(b"%03d" % i for i in range(done))][: done > 0]
    is_open = done > 0 and row.state == "running"
    assert len(await store.runs.open_texts(name, at=row.head)) == is_open
