"""Nothing stays behind: no task, no connection, no descriptor, no memory (M4.1; B35, B68, B71)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
from aiohttp import web

from bench.ports import free_port
from planes.app import make_app, make_runner
from planes.settings import Settings
from tests.support.books import books_of
from tests.support.checks import ask, until
from tests.support.fake_upstream import (
    FakeUpstream,
    Fin,
    Flood,
    Head,
    Rst,
    Send,
    Sleep,
    Step,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import GatewayProcess, config_for
from tests.support.wire import RawClient, WireError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

EVENT: Final = sse(chunk("x" * 20))
SILENCE: Final = Sleep(3600)
CLOSING: Final = Head(framing="close")  # nothing is left in the pool, so what is open is a leak

# What upstreams do, by the name of the model that is asked for.
SCRIPTS: Final[dict[str, tuple[Step, ...]]] = {
    "whole": (CLOSING, *openai_stream(["a", "b"])),
    "paced": (
        CLOSING,
        *(step for send in openai_stream(["a"] * 8) for step in (send, Sleep(0.002))),
    ),
    "flood": (CLOSING, Flood(EVENT * 10, 2000), *openai_stream(["end"])),
    "mute": (SILENCE,),
    "headless": (Head(), SILENCE),
    "silent": (Send(EVENT), SILENCE),
    "after-done": (*openai_stream(["a"]), SILENCE),
    "dies": (Send(EVENT), Rst()),
    "ends": (CLOSING, Send(EVENT)),
    "cut": (Send(EVENT[:30]), Fin()),
    "refuses": tuple(json_answer({"error": {"message": "no"}}, status=400, connection="close")),
    "fails": tuple(json_answer({"error": {"message": "no"}}, status=500, connection="close")),
    "slow-error": (Head(500), Send(b"{"), SILENCE),
}
PROVIDERS: Final = ("fake", "aggregated", "dead")


def config(up: FakeUpstream, folder: Path) -> dict[str, Any]:
    for name, script in SCRIPTS.items():
        up.script_for(name, *script)
    base = {"shape": "openai", "base_url": up.base_url}
    return config_for(
        up,
        server={"write_stall_s": 0.3},
        store={"url": f"sqlite:///{folder}/test.db"},
        providers={
            "aggregated": base | {"aggregate": True},
            "dead": base | {"base_url": f"http://127.0.0.1:{free_port()}"},
        },
    )


async def visit(host: str, port: int, dice: random.Random) -> None:
    """One client: asks for something, reads for a while or to the end, and leaves in some way."""
    model = f"{dice.choice(PROVIDERS)}/{dice.choice(list(SCRIPTS))}"
    base = dice.choice(["/v1", "/api/v1"])
    patience_s = dice.choice([0.001, 0.01, 0.03, 0.1])
    rcvbuf = dice.choice([None, 4096])
    async with RawClient(host, port, rcvbuf=rcvbuf) as client:
        with contextlib.suppress(WireError, TimeoutError, ConnectionError):
            await ask(
                client,
                path=f"{base}/chat/completions",
                model=model,
                stream=dice.random() < 0.7,
            )
            if dice.random() < 0.2:
                await asyncio.sleep(patience_s)  # reads nothing
            else:
                await client.read_all(timeout=patience_s)
            if dice.random() < 0.3 and client.complete:
                await ask(client, model=model)  # and leaves before it is answered
        how = dice.randrange(3)
        if how == 0:
            client.reset()
        elif how == 1 and not client.eof:
            client.half_close()
            await asyncio.sleep(0.005)


async def visits(host: str, port: int, dice: random.Random, count: int, at_once: int) -> None:
    """Many clients, so many at a time."""
    left = count

    async def one_after_the_other() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await visit(host, port, dice)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one_after_the_other())


def open_connections(up: FakeUpstream) -> int:
    return sum(not connection.lost.is_set() for connection in up.connections)


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


async def test_no_task_and_no_upstream_connection_is_left(
    up: FakeUpstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """M4.1, B68: after several hundred mixed requests and hang-ups, in the test's own loop."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    runner = make_runner(make_app(Settings.model_validate(config(up, tmp_path))))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    before = asyncio.all_tasks()

    def others() -> set[asyncio.Task[Any]]:
        """Tasks that are new and not the fake upstream's."""
        theirs = {connection.task for connection in up.connections}
        return {task for task in asyncio.all_tasks() - before - theirs if not task.done()}

    try:
        dice = random.Random(1)
        await visits(host, port, dice, 600, 20)
        while len(up.requests) <= 100:  # where all is slow, most leave before they get that far
            await visits(host, port, dice, 100, 20)
        await until(lambda: not others(), 5, what=f"the end of {others()}")
        await until(lambda: not open_connections(up), 5, what="the end of upstream connections")
    finally:
        await runner.cleanup()
    gc.collect()
    await asyncio.sleep(0)
    assert not complaints
    assert "never retrieved" not in caplog.text


async def test_a_process_is_as_before_after_many_hang_ups(up: FakeUpstream, tmp_path: Path) -> None:
    """M4.1, M3.5: descriptors are back, and nothing in the log but one line for each request."""
    async with GatewayProcess(config(up, tmp_path)) as gateway:
        sockets = gateway.open_sockets()
        await visits(gateway.host, gateway.port, random.Random(2), 600, 20)
        await until(lambda: gateway.open_sockets() <= sockets, 5, what="the end of all sockets")
        await until(lambda: not open_connections(up), 5)
        assert "Traceback" not in gateway.stderr()
        assert not [line for line in gateway.log_lines() if line["level"] == "error"]


# What hang-ups leave in cycles waits for the collector, which comes rarely: tens of MiB, and they
# would hide a leak.
COLLECTING: Final = """
import gc, threading, time

def collect():
    while True:
        time.sleep(0.5)
        gc.collect()

threading.Thread(target=collect, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_twenty_four_thousand_hang_ups(up: FakeUpstream, tmp_path: Path) -> None:
    """M4.1, M3.5, M4.2: memory and descriptors are flat, no hold is left, no row is doubled."""
    dice = random.Random(3)
    (tmp_path / "sitecustomize.py").write_text(COLLECTING)
    env = {"PYTHONPATH": str(tmp_path)}
    async with GatewayProcess(config(up, tmp_path), env=env) as gateway:
        sockets = gateway.open_sockets()
        sizes = []
        for _ in range(12):
            started = time.monotonic()
            await visits(gateway.host, gateway.port, dice, 2000, 20)
            await until(lambda: gateway.open_sockets() <= sockets, 5, what="the end of sockets")
            up.requests.clear()
            up.connections[:] = [c for c in up.connections if not c.task.done()]
            sizes.append(gateway.rss_bytes() // 1024)
            print(f"{sizes[-1]} KiB after {time.monotonic() - started:.1f} s more")
        assert "Traceback" not in gateway.stderr()
        async with books_of(tmp_path, "test.db") as books:
            rows = await books.settled()
        assert len({row.request_id for row in rows}) == len(rows)
        assert len(rows) >= 12_000  # those that left before their request was whole have none
        # The low points count. A stream that is kept costs 20 KiB, so one in thirty of the 12,000
        # between the halves would be seen.
        assert min(sizes[6:]) - min(sizes[:6]) < 8192
