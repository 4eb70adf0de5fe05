"""A gateway that is killed while it writes: what it was told is there, and the sums are right."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from relay.stores.base import Org
from tests.contract.values import balance, hold

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from relay.stores.base import Store
    from tests.contract.backends import Backend

    Gateway = Callable[..., Awaitable[Store]]

ROOT = Path(__file__).parents[2]
OPENING = 10**9
KILLS = (1, 50, 400, 1500)

# Prints a line for each answer of the store, as soon as it has it. Ends with this test's end.
WRITER = """
import asyncio, os, threading, sys
from tests.contract.values import hold, row, progress

def tell(what, name):
    os.write(1, f"{what} {name}\\n".encode())

async def one(task):
    n = 0
    while True:
        name = f"req_{os.getpid()}_{task}_{n}"
        assert await store.place_hold(hold(name))
        tell("held", name)
        await store.write_progress([progress(name)])
        await store.settle([row(name, 1 + n % 7)])
        tell("settled", name)
        n += 1

async def main():
    await store.open()
    await asyncio.gather(*(one(task) for task in range(20)))

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
asyncio.run(main())
"""


def killed_after(backend: Backend, lines: int) -> dict[str, set[str]]:
    """Run a writer, kill it after so many answers, and return all that it was told."""
    with subprocess.Popen(
        [sys.executable, "-c", backend.code() + WRITER],
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
    told: dict[str, set[str]] = {"held": set(), "settled": set()}
    for answer in answers:
        if answer.endswith(b"\n"):
            what, name = answer.decode().split()
            told[what].add(name)
    return told


@pytest.mark.parametrize("lines", KILLS)
async def test_a_kill_loses_nothing_that_was_told(
    backend: Backend, gateway: Gateway, lines: int
) -> None:
    """Every request has a row or an open hold, never both; the balance is the rows' sum."""
    store = await gateway()
    await store.put_org(Org(id="acme", balance_micro_usd=OPENING))
    told = await asyncio.to_thread(killed_after, backend, lines)
    assert len(told["held"] | told["settled"]) > 0
    # As the other gateway sees it, that was open all the time, and as a new one does.
    for survivor in (store, await gateway()):
        rows = await survivor.usage()
        settled = {r.request_id for r in rows}
        open_holds = {h.request_id for h in await survivor.open_holds()}
        assert len(settled) == len(rows)
        assert told["settled"] <= settled
        assert told["held"] <= settled | open_holds
        assert settled & open_holds == set()
        assert await balance(survivor) == OPENING - sum(r.cost_micro_usd for r in rows)


async def test_a_kill_holds_nobody_up(backend: Backend, gateway: Gateway) -> None:
    """Whatever lock it had is gone with it."""
    store = await gateway()
    for _ in range(3):
        await asyncio.to_thread(killed_after, backend, 30)
        async with asyncio.timeout(5):
            assert await store.place_hold(hold(f"req_{os.urandom(4).hex()}"))
