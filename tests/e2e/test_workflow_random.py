"""Random documents, providers that fail, clients that do as they like: the contract holds (W2)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.books import books_of
from tests.support.chaos import ChaosUpstream, Documents
from tests.support.gateway import AUTH
from tests.support.workflow_wire import Kept, Seen, read
from tests.support.workflows import BASE, flows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.wire import RawClient
    from tests.support.workflows import Flows

RUNS: Final = 300
AT_ONCE: Final = 16
LEGS_MAX: Final = 8


class Chaos:
    """One run and its client.

    Attributes:
        run: its execution id. seen: what a client read that stayed to the end of the first leg.
    """

    def __init__(self, flow: Flows, dice: random.Random) -> None:
        self._flow = flow
        self._dice = dice
        self.document = Documents(dice).document()
        self.run = ""
        self.seen: Seen | None = None
        self.kept = Kept()
        self.leave = 0

    async def play(self) -> None:
        """Begin it in some way, and see it to its end."""
        ways: list[Callable[[], Awaitable[None]]] = [
            self._stays, self._leaves, self._leaves, self._follows, self._follows,
            self._cancels, self._is_slow,
        ]  # fmt: skip
        await self._dice.choice(ways)()
        for leg in range(LEGS_MAX):
            await self._follow(0.3)
            state = (await self._flow.status(self.run))["status"]
            if state != "yielded":
                break
            if leg == LEGS_MAX - 1 or self._dice.random() < 0.1:
                await self._cancel()
            else:
                await self._answer()
        await self._follow(0.0)

    async def _stays(self) -> None:
        query = self._dice.choice(["", "?positions=true"])
        asked = {"workflow": self.document}
        async with self._flow.http.post(f"{BASE}/execute-stream{query}", json=asked) as response:
            assert response.status == 200, await response.read()
            self.run = response.headers["x-execution-id"]
            self.seen = read(await response.read())

    async def _leaves(self) -> None:
        async with self._begun(None) as client:
            cut = self._dice.choice([0, self._dice.randint(0, 300), self._dice.randint(0, 9000)])
            with contextlib.suppress(ConnectionError):
                while len(client.body) < cut and not client.complete:
                    assert await client.read_some(self._dice.randint(1, 400))
            if self._dice.random() < 0.5:
                client.reset()

    async def _is_slow(self) -> None:
        async with self._begun(4096) as client:
            while not client.complete:
                assert await client.read_some(2000, timeout=120)
                await asyncio.sleep(0.002)
            self.seen = read(client.body)

    @contextlib.asynccontextmanager
    async def _begun(self, rcvbuf: int | None) -> Any:
        client: RawClient
        async with self._flow.gateway.client(rcvbuf=rcvbuf) as client:
            asked = {"workflow": self.document}
            await client.request("POST", f"{BASE}/execute-stream", headers=[AUTH], json=asked)
            await client.read_head()
            run = client.header("x-execution-id")
            assert run is not None, client.body
            self.run = run
            yield client

    async def _follows(self) -> None:
        self.run = await self._flow.begin(self.document)

    async def _cancels(self) -> None:
        await self._follows()
        await asyncio.sleep(self._dice.choice([0, 0.01, 0.1, 0.4]))
        await self._cancel()

    async def _cancel(self) -> None:
        path = f"{BASE}/executions/{self.run}/cancel"
        done = await asyncio.gather(*(self._flow.json("POST", path) for _ in range(2)))
        assert {status for status, _ in done} == {200}
        assert all(told["status"] != "running" for _, told in done)

    async def _answer(self) -> None:
        asked = {"answer": self._dice.choice(["yes", {"n": [1, None]}, 7])}
        path = f"{BASE}/executions/{self.run}/resume"
        async with self._flow.http.post(path, json=asked) as response:
            assert response.status == 200, await response.read()
            if self._dice.random() < 0.5:
                read(await response.read(), began=False)

    async def _follow(self, cuts: float) -> None:
        """Follow again and again, each time to some byte, until the end of a leg."""
        while not self.kept.ended:
            path = f"{BASE}/executions/{self.run}/events?after={self.kept.after}"
            body = b""
            async with self._flow.http.get(path) as response:
                if response.status == 204:
                    return
                assert response.status == 200, await response.read()
                cut = self._dice.randint(1, 8000) if self._dice.random() < cuts else 1 << 40
                while len(body) < cut and (data := await response.content.read(cut - len(body))):
                    body += data
            self.kept.feed(body)


async def check(flow: Flows, chaos: Chaos, rows: list[Any]) -> None:
    """Hold a run that has ended to everything at once."""
    whole = await flow.events(chaos.run)
    assert chaos.kept.events == whole.events
    assert chaos.kept.texts == whole.texts
    if chaos.seen is not None and not chaos.seen.reset:
        assert chaos.seen.events == whole.events[: len(chaos.seen.events)]
    row = await flow.status(chaos.run)
    assert row["status"] == whole.status
    assert row["position"] == len(whole.events)
    for task_id in whole.completed & whole.texts.keys():
        assert await flow.output(chaos.run, task_id) == whole.texts[task_id], task_id
    spent = (sum(r.prompt_tokens for r in rows), sum(r.completion_tokens for r in rows))
    used = row["usage"]
    assert spent == (used["prompt_tokens"], used["completion_tokens"]), (whole.names, rows)
    assert row["execution_summary"]["usage"] == used
    told = whole.data("workflow_completed")
    assert not told or told[0]["execution_summary"]["usage"] == used


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [8])
async def test_random_runs_and_clients(seed: int) -> None:
    async with ChaosUpstream(seed) as up, flows(up, workflows={"heartbeat_s": 0.3}) as flow:
        all_runs = [Chaos(flow, random.Random(f"{seed}/{n}")) for n in range(RUNS)]
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(chaos: Chaos) -> None:
            async with gate:
                await chaos.play()

        await asyncio.gather(*(one(chaos) for chaos in all_runs))
        async with books_of(flow.gateway.workdir) as books:
            by_run = defaultdict(list)
            for row in await books.settled():
                by_run[row.request_id[:32]].append(row)
        for chaos in all_runs:
            await check(flow, chaos, by_run[chaos.run])
        states = {chaos.kept.events[-1][1]["data"]["status"] for chaos in all_runs}
        assert states == {"completed", "failed", "cancelled"}
        log = flow.gateway.stderr()
        assert "Traceback" not in log
        assert "never retrieved" not in log
        assert "engine failed" not in log
