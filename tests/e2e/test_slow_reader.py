"""M3.5: a client that reads slowly or not at all slows its own upstream and nothing else.

B69, B81, B82 and B84 of the hazards. A reader that takes a little is served; one that takes
nothing for `server.write_stall_s` has hung up (M4.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import termios
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from tests.support.checks import (
    CHAT,
    Aftermath,
    ask,
    ask_through,
    in_kernel,
    payload,
    until,
    until_still,
)
from tests.support.fake_upstream import (
    FakeUpstream,
    Flood,
    Head,
    Send,
    Wait,
    chunk,
    openai_stream,
    sse,
)
from tests.support.gateway import AUTH, GatewayProcess, config_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.fake_upstream import RecordedRequest
    from tests.support.wire import RawClient

KIB: Final = 1024
FOR_EVER: Final = 1_000_000
SMALL: Final = sse(chunk("x" * 10))  # some 200 bytes
LARGE: Final = sse(chunk("x" * 256 * KIB))
READERS: Final = 50
STALL_S: Final = 0.5
AGGREGATED: Final = "aggregated/model"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(up: FakeUpstream) -> AsyncIterator[GatewayProcess]:
    """One that soon cuts who takes nothing."""
    async with process(up, write_stall_s=STALL_S) as gateway:
        yield gateway


def process(up: FakeUpstream, **server: Any) -> GatewayProcess:
    aggregated = {"shape": "openai", "base_url": up.base_url, "aggregate": True}
    return GatewayProcess(config_for(up, server=server, providers={"aggregated": aggregated}))


async def stuck(
    gateway: GatewayProcess, up: FakeUpstream, stack: contextlib.AsyncExitStack, block: bytes
) -> tuple[RawClient, RecordedRequest]:
    """One reader that reads nothing of a flood."""
    up.script(Flood(block, FOR_EVER))
    client = await stack.enter_async_context(gateway.client(rcvbuf=4096))
    return client, await ask_through(client, up)


async def read_a_stream(gateway: GatewayProcess, up: FakeUpstream, words: int) -> float:
    """Asks for a stream, reads it whole, and returns how long it took."""
    up.script(*openai_stream(["word"] * words))
    started = time.monotonic()
    async with gateway.client() as client:
        await ask(client)
        await client.read_all()
        assert len(client.events) == words + 3
    return time.monotonic() - started


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "bound"),
    [(SMALL, 512 * KIB), (LARGE, 2 * len(LARGE) + 256 * KIB)],
    ids=["200 B events", "256 KiB events"],
)
async def test_a_reader_that_never_reads_costs_little_and_slows_nobody(
    up: FakeUpstream, block: bytes, bound: int
) -> None:
    """M3.5, B81, B82, B84: resident memory, what is undelivered, and the streams beside it."""
    async with process(up) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(5):  # what is allocated once
            await read_a_stream(gateway, up, 500)
        alone_s = await read_a_stream(gateway, up, 500)
        before = gateway.rss_bytes()
        pairs = [await stuck(gateway, up, stack, block) for _ in range(READERS)]
        await until_still(*(asked for _, asked in pairs))
        written = [asked.bytes_written for _, asked in pairs]
        cost = (gateway.rss_bytes() - before) / READERS
        print(f"{cost / KIB:.0f} KiB for each reader")
        assert cost < bound
        for client, asked in pairs:
            # Both ends are read, so this is what the gateway and its kernel hold.
            taken = asked.bytes_written - in_kernel(asked.connection.socket, termios.TIOCOUTQ)
            held = taken - in_kernel(client.sock, termios.FIONREAD)
            assert held <= 2 * len(block) + 256 * KIB + 64 * KIB
        beside_s = await read_a_stream(gateway, up, 500)
        print(f"a stream takes {1000 * beside_s:.0f} ms beside them, {1000 * alone_s:.0f} alone")
        assert beside_s < 10 * alone_s + 1
        assert [asked.bytes_written for _, asked in pairs] == written, "the reading has stopped"


async def test_a_reader_that_begins_to_read_gets_everything(up: FakeUpstream) -> None:
    """M3.5: held back, not dropped; every event in order and the proper end."""
    words = [f"{number:06d}" for number in range(5000)]
    async with process(up) as gateway, gateway.client(rcvbuf=4096) as client:
        up.script(*openai_stream(words))
        await until_still(await ask_through(client, up))
        await client.read_all(timeout=30)
        text = [json.loads(e[6:])["choices"][0]["delta"].get("content") for e in client.events[:-1]]
        assert text == ["", *words, None]
        assert client.complete


# --- who has hung up ------------------------------------------------------------------------------


async def test_a_reader_that_takes_a_little_is_not_cut(
    gateway: GatewayProcess, up: FakeUpstream
) -> None:
    """M3.5: now and then some 2 kB, each time before write_stall_s is over."""
    aftermath = Aftermath(gateway)
    up.script(Flood(SMALL, FOR_EVER))
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up)
        until_at = time.monotonic() + 6 * STALL_S
        while time.monotonic() < until_at:
            taken = 0
            while taken < 2000:
                assert await client.read_some(2000 - taken)
                taken += client.arrivals[-1][1]
            await asyncio.sleep(STALL_S / 10)
        assert not asked.closed.is_set()
    await aftermath.one_request_line()


@pytest.mark.parametrize("block", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("reads_first", [False, True], ids=["never-read", "stopped"])
async def test_a_reader_that_takes_nothing_is_cut(
    gateway: GatewayProcess, up: FakeUpstream, block: bytes, reads_first: bool
) -> None:
    """M3.5, M4.1, B67: after write_stall_s, not before; its upstream is aborted."""
    aftermath = Aftermath(gateway)
    up.script(Flood(block, FOR_EVER))
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up)
        if reads_first:
            await client.read_until(lambda c: len(c.body) > 600_000)
        # A client that never reads is waited for since its answer began, however late we look.
        stopped_at = time.monotonic() if reads_first else asked.received_at
        waited = await asked.wait_closed(10 * STALL_S) - stopped_at
        print(f"cut after {waited:.2f} s")
        assert waited >= STALL_S
        await aftermath.no_socket_left()
        await aftermath.one_request_line(
            status=499, error_code="client_abort", outcome="client_abort"
        )


async def test_a_reader_that_takes_nothing_of_the_last_bytes_is_cut(
    gateway: GatewayProcess, up: FakeUpstream
) -> None:
    """M3.5: the answer is complete and its request over, but the client's socket does not stay."""
    aftermath = Aftermath(gateway)
    # As much as neither the kernel takes nor makes a write block.
    up.script(Head(framing="close"), *[Send(SMALL * 20) for _ in range(11)], *openai_stream([]))
    async with gateway.client(rcvbuf=4096) as client:
        asked_at = time.monotonic()
        await ask(client)
        await aftermath.one_request_line(status=200, outcome="completed")
        await until(lambda: aftermath.new_sockets == 0, 10 * STALL_S, what="the cut")
        assert time.monotonic() - asked_at >= STALL_S


async def test_a_plain_reply_that_is_not_read_is_cut(
    gateway: GatewayProcess, up: FakeUpstream
) -> None:
    """M3.5: the rule is no matter of streams."""
    aftermath = Aftermath(gateway)
    up.script(Head(framing="close"), *openai_stream(["x" * 1_000_000] * 8))
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up, model=AGGREGATED, stream=False)
        await asked.answered.wait()
        await until(lambda: aftermath.lines, 10 * STALL_S, what="the cut")
        await aftermath.no_socket_left()


async def test_a_silent_upstream_is_no_stalled_reader(
    gateway: GatewayProcess, up: FakeUpstream
) -> None:
    """M3.5: there is no idle timeout of ours: a client that took all is waited for."""
    aftermath = Aftermath(gateway)
    more = asyncio.Event()
    first = openai_stream(["a"], finish=None, usage=False, done=False)
    up.script(Head(framing="close"), *first, Wait(more), *openai_stream(["b"]))
    async with gateway.client() as client:
        await ask(client)
        await asyncio.sleep(4 * STALL_S)
        more.set()
        await client.read_all()
        assert client.complete
    await aftermath.one_request_line(status=200)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_stopped_process_is_cut(gateway: GatewayProcess, up: FakeUpstream) -> None:
    """M3.5, B69: curl under SIGSTOP, as a suspended laptop; its kernel still answers for it."""
    aftermath = Aftermath(gateway)
    up.script(Flood(SMALL, FOR_EVER))
    index = len(up.requests)
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sN", "-H", ": ".join(AUTH), "-H", "content-type: application/json"),
        *("-d", json.dumps(payload()), gateway.base_url + CHAT),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert curl.stdout is not None
        await curl.stdout.readexactly(100_000)
        curl.send_signal(signal.SIGSTOP)
        asked = await up.request(index)
        waited = await asked.wait_closed(10 * STALL_S)
        await aftermath.no_socket_left()
        await aftermath.one_request_line(status=499, error_code="client_abort")
        print(f"cut {waited - asked.received_at:.2f} s after the request")
        curl.send_signal(signal.SIGCONT)
        while await curl.stdout.read(1 << 20):
            pass
        assert await curl.wait() != 0, "curl must see that the stream was cut"
    finally:
        with contextlib.suppress(ProcessLookupError):
            curl.kill()
        await curl.wait()
