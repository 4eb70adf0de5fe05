"""D4.7, D5.7, D6.2, D6.7: keys and money of decides on the socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.books import books_of
from tests.support.checks import until
from tests.support.decisions import (
    MODEL,
    QUESTIONS,
    SECOND_KEY,
    config,
    decides,
    gateway,
    opened,
    real_client,
    start,
)
from tests.support.gateway import KEY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.gateway import GatewayProcess
    from tests.support.websocket import RawSocket

BILLED = 110  # micro-USD of a call with one question and no text price
CACHE = {"prompt_cache_key": "mine"}


async def decided(ws: RawSocket) -> dict[str, Any]:
    """The next decision or error."""
    while (frame := await ws.json())["type"] not in ("decision", "error"):
        pass
    return frame


async def keyed(process: GatewayProcess, state: str, **more: Any) -> dict[str, Any]:
    """What a new stream says to a state under the key `k`."""
    async with opened(process, key=KEY) as ws:
        await ws.say(
            **start(state, mode="on_change", idempotency_key="k", **({"request": CACHE} | more))
        )
        return await decided(ws)


async def test_a_lost_socket_is_settled_and_its_version_replayed(tmp_path: Path) -> None:
    """Reconnect and replay: one dispatch and one billed row, after a restart too."""
    state = "!delay=0.7 lost"
    async with gateway(config(), workdir=tmp_path) as process, books_of(tmp_path) as books:
        async with opened(process, key=KEY) as ws:
            first = start(state, mode="on_change", idempotency_key="k", request=CACHE)
            await ws.say(**first)
            await until(lambda: decides(process))
        frame = await keyed(process, state)
        while frame["type"] == "error":
            assert frame["envelope"]["error"]["code"] == "idempotency_conflict"
            assert frame["retry"] == {
                "should_retry": True,
                "retry_after_ms": 3000,
                "retry_after": "3",
            }
            frame = await keyed(process, state)
        assert frame["covered_event_ids"] == ["evt_1"]
        (row,) = await books.rows(1)
        assert (row.plane, row.cost_micro_usd, row.org) == ("decision", BILLED, "test")
        assert (await keyed(process, state))["reply"] == frame["reply"]
        process.terminate()
        assert await process.wait() == 0
    async with gateway(config(), workdir=tmp_path) as process, books_of(tmp_path) as books:
        assert (await keyed(process, state))["reply"] == frame["reply"]
        assert len(decides(process)) == 1
        await books.rows(1)


async def test_a_stream_without_a_cache_key_of_its_own_cannot_replay() -> None:
    """The seed: the body then holds the new stream's id, and the key belongs to another body."""
    async with gateway(config()) as process:
        assert (await keyed(process, "x", request={}))["type"] == "decision"
        frame = await keyed(process, "x", request={})
        assert frame["type"] == "error"
        assert (frame["http_status"], frame["envelope"]["error"]["code"]) == (
            *(400, "idempotency_key_reuse"),
        )
        assert frame["retry"]["should_retry"] is False


async def test_each_decide_of_a_stream_is_one_row() -> None:
    """Without a key each one is billed; a failed one is not; a trial is not debited."""
    over = config()
    over["keys"][1] |= {"trial": True, "balance_usd": 1}
    async with gateway(over) as process, books_of(process.workdir) as books:
        async with opened(process, key=SECOND_KEY) as ws:
            await ws.say(**start("a"))
            for version in (1, 1):
                await ws.say(type="decide", state_version=version)
                assert (await decided(ws))["type"] == "decision"
            await ws.say(type="replace", event_id="evt_2", state="!error=system_zero_timeout")
            await ws.say(type="decide", state_version=2)
            assert (await decided(ws))["type"] == "error"
        rows = await books.rows(3)
        assert [(r.cost_micro_usd, r.status, r.debit) for r in rows] == [
            (BILLED, 200, False),
            (BILLED, 200, False),
            (0, 504, False),
        ]
        assert await books.balance("second") == 1_000_000


async def test_an_account_with_nothing_left_ends_the_real_client_for_good() -> None:
    """D5.6, D6.7: 402 is said only where the caller cannot go on."""
    over = config()
    over["keys"][0] |= {"balance_usd": 0.0001}
    async with gateway(over) as process, real_client(process, key=KEY) as client:
        events = client.events()
        what: Any = {"model": MODEL, "state": "x", "questions": QUESTIONS}
        await client.start(what, decision_mode="on_change")
        async for event in events:
            if event["type"] == "error":
                assert event["http_status"] == 402
                assert event["envelope"]["error"]["code"] == "insufficient_credits"
                break
        assert decides(process) == []
