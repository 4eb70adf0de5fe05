"""M4.1: a client that leaves, in every way and at every moment, ends its upstream request at once.

For each: our socket to the upstream closes, one log line says 499 and client_abort, there is no
traceback, the slot is free again (M1.2) and no socket stays open, not even of a client that only
closed its side. B65, B66, B67 and B68 of the hazards.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from tests.support.checks import (
    CHAT,
    HANG_UP_BOUND_S,
    Aftermath,
    ask,
    payload,
    slot_is_free,
    until,
    until_still,
)
from tests.support.fake_upstream import (
    DONE,
    FakeUpstream,
    Flood,
    Head,
    Send,
    Step,
    Wait,
    chunk,
    openai_stream,
    sse,
)
from tests.support.gateway import AUTH, KEY, GatewayProcess, config_for, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.fake_upstream import RecordedRequest
    from tests.support.wire import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANG_UPS: Final = ("reset", "close", "half-close")
EVENT: Final = sse(chunk("x" * 20))
LARGE_EVENT: Final = sse(chunk("x" * 250_000))
DEAD: Final = "dead/model"
AGGREGATED: Final = "aggregated/model"
FOR_EVER: Final = 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(up: FakeUpstream) -> AsyncIterator[GatewayProcess]:
    config = config_for(
        up,
        keys=[{"key": KEY, "org": "test", "max_concurrent": 1}],
        providers={
            "dead": {"shape": "openai", "base_url": f"http://127.0.0.1:{free_port()}"},
            "aggregated": {"shape": "openai", "base_url": up.base_url, "aggregate": True},
        },
    )
    async with GatewayProcess(config) as process:
        yield process


def leave(client: RawClient, how: str) -> None:
    match how:
        case "reset":
            client.reset()
        case "close":
            client.close()
        case _:
            client.half_close()


def silence() -> Wait:
    return Wait(asyncio.Event())


async def gone(
    gateway: GatewayProcess, aftermath: Aftermath, asked: RecordedRequest, left_at: float
) -> None:
    """Checks all that M4.1 says, once the client has left."""
    closed_at = await asked.wait_closed(HANG_UP_BOUND_S)
    print(f"upstream closed after {1000 * (closed_at - left_at):.1f} ms")
    await aftermath.no_socket_left()
    line = await aftermath.one_request_line(
        status=499, error_code="client_abort", outcome="client_abort", path=CHAT
    )
    assert line["level"] == "info"
    await slot_is_free(gateway, DEAD)


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("part", [b"", b'{"model":'], ids=["none", "some"])
@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_before_the_body_is_complete(
    gateway: GatewayProcess, up: FakeUpstream, how: str, part: bytes, framing: str
) -> None:
    """M4.1: nothing was asked of an upstream yet, and nothing is."""
    asked = len(up.requests)
    aftermath = Aftermath(gateway)
    async with gateway.client() as client:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{framing}\r\n\r\n"
        if part and "chunked" in framing:
            part = b"%x\r\n%s\r\n" % (len(part), part)
        await client.send(head.encode() + part)
        await asyncio.sleep(0.05)  # the gateway waits for the rest
        leave(client, how)
        await aftermath.one_request_line(status=499, error_code="client_abort")
        await aftermath.no_socket_left()
    assert len(up.requests) == asked
    await slot_is_free(gateway, DEAD)


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_the_upstream_has_sent_no_headers(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1, B65: also during the wait for the status."""
    aftermath = Aftermath(gateway)
    up.script(silence())
    async with gateway.client() as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
async def test_after_headers_without_a_chunk(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1: the status has left, the first event never came."""
    aftermath = Aftermath(gateway)
    up.script(Head(), silence())
    async with gateway.client() as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await client.read_head()
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
async def test_between_chunks_of_a_silent_upstream(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1, B66: noticed by no failing write, for there is none."""
    aftermath = Aftermath(gateway)
    up.script(Send(EVENT), silence())
    async with gateway.client() as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await client.read_until(lambda c: c.events)
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("block", [EVENT, LARGE_EVENT], ids=["small", "large"])
async def test_in_mid_flow(
    gateway: GatewayProcess, up: FakeUpstream, how: str, block: bytes
) -> None:
    """M4.1, B67: while the upstream sends as fast as it can and the client reads."""
    aftermath = Aftermath(gateway)
    up.script(Flood(block, FOR_EVER))
    async with gateway.client() as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await client.read_until(lambda c: len(c.response.body) > 1_000_000)
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("block", [EVENT, LARGE_EVENT], ids=["small", "large"])
async def test_while_a_write_is_blocked(
    gateway: GatewayProcess, up: FakeUpstream, how: str, block: bytes
) -> None:
    """M4.1, B67: the client does not read, and then it leaves; a half-close too is noticed."""
    aftermath = Aftermath(gateway)
    up.script(Flood(block, FOR_EVER))
    async with gateway.client(rcvbuf=4096) as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await until_still(asked)
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_a_little_is_unsent_and_the_upstream_is_silent(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1: no write is blocked and none will come, but the client has not taken all."""
    aftermath = Aftermath(gateway)
    # The kernel takes some of it; what is left lies between nothing and where a write blocks.
    sends: list[Step] = [Send(EVENT * 40) for _ in range(9)]
    up.script(*sends, silence())
    async with gateway.client(rcvbuf=4096) as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await until_still(asked)
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


# --- plain requests -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("fake/m", ()),
        ("fake/m", (Head(headers={"content-type": "application/json"}), Send(b'{"choices":'))),
        (AGGREGATED, ()),
        (AGGREGATED, (Head(),)),
        (AGGREGATED, (Send(EVENT),)),
    ],
    ids=["no-status", "mid-body", "aggregated-no-status", "aggregated-head", "aggregated-event"],
)
async def test_during_a_plain_request(
    gateway: GatewayProcess, up: FakeUpstream, how: str, model: str, steps: tuple[Step, ...]
) -> None:
    """M4.1: `stream:false`, sent on as such or dialled as a stream and aggregated."""
    aftermath = Aftermath(gateway)
    up.script(*steps, silence())
    async with gateway.client() as client:
        await ask(client, model=model, stream=False)
        asked = await up.request(len(up.requests))
        await asyncio.sleep(0.05)  # what the upstream says arrives
        leave(client, how)
        await gone(gateway, aftermath, asked, time.monotonic())


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_a_plain_reply_is_not_read(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1, M1.2: a reply too large for the buffers; the slot of a client that left is freed."""
    aftermath = Aftermath(gateway)
    up.script(*openai_stream(["x" * 1_000_000] * 8))
    async with gateway.client(rcvbuf=4096) as client:
        await ask(client, model=AGGREGATED, stream=False)
        asked = await up.request(len(up.requests))
        await asked.answered.wait()
        await asyncio.sleep(0.2)
        leave(client, how)
        await aftermath.no_socket_left()
        await slot_is_free(gateway, DEAD)
    print(aftermath.lines)


@pytest.mark.parametrize("how", HANG_UPS)
async def test_after_done(gateway: GatewayProcess, up: FakeUpstream, how: str) -> None:
    """M4.1: the answer was whole, so it is no hang-up; a silent upstream is still closed."""
    aftermath = Aftermath(gateway)
    up.script(*openai_stream(["Hi"]), silence())
    async with gateway.client() as client:
        await ask(client)
        asked = await up.request(len(up.requests))
        await client.read_all()
        assert client.body.endswith(DONE)
        leave(client, how)
        await asked.wait_closed(HANG_UP_BOUND_S)
        await aftermath.no_socket_left()
        await aftermath.one_request_line(status=200, error_code=None, outcome="completed")
    await slot_is_free(gateway, DEAD)
