"""M4.1: a client that leaves, in every way and at every moment, ends its upstream request at once.

For each: our socket to the upstream closes, one log line says 499 and client_abort, there is no
traceback, the slot is free again (M1.2) and no socket stays open, not even of a client that only
closed its side. B65, B66, B67 and B68 of the hazards.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from bench.ports import free_port
from tests.support.checks import (
    CHAT,
    HANG_UP_BOUND_S,
    Aftermath,
    ask,
    ask_through,
    has_read,
    payload,
    slot_is_free,
    until,
    until_still,
)
from tests.support.fake_upstream import (
    DONE,
    PING,
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
from tests.support.gateway import AUTH, KEY, GatewayProcess, config_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.fake_upstream import RecordedRequest
    from tests.support.wire import RawClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANG_UPS: Final = ("reset", "close", "half-close")
EVENT: Final = sse(chunk("x" * 20))
LARGE_EVENT: Final = sse(chunk("x" * 250_000))
FOR_EVER: Final = 1_000_000
JSON_HEAD: Final = Head(headers={"content-type": "application/json"})

DEAD: Final = "dead/model"
AGGREGATED: Final = "aggregated/model"
STALLED: Final = "stalled/model"
IMPATIENT: Final = "impatient/model"
HEADER_TIMEOUT_S: Final = 0.3


@pytest.fixture(scope="module")
def stalled() -> Iterator[socket.socket]:
    """An upstream that lets everybody connect and reads nothing."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.setblocking(False)
        yield listener


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(up: FakeUpstream, stalled: socket.socket) -> AsyncIterator[GatewayProcess]:
    def provider(base_url: str, **more: Any) -> dict[str, Any]:
        return {"shape": "openai", "base_url": base_url} | more

    mute = "http://{}:{}".format(*stalled.getsockname())
    config = config_for(
        up,
        keys=[{"key": KEY, "org": "test", "max_concurrent": 1}],
        providers={
            "dead": provider(f"http://127.0.0.1:{free_port()}"),
            "aggregated": provider(up.base_url, aggregate=True),
            "stalled": provider(mute),
            "impatient": provider(mute, header_timeout_s=HEADER_TIMEOUT_S),
        },
    )
    async with GatewayProcess(config) as process:
        yield process


def leave(client: RawClient, how: str) -> float:
    """Hangs up and returns when."""
    match how:
        case "reset":
            client.reset()
        case "close":
            client.close()
        case _:
            client.half_close()
    return time.monotonic()


def silence() -> Wait:
    return Wait(asyncio.Event())


async def gone(
    gateway: GatewayProcess, aftermath: Aftermath, asked: RecordedRequest, left_at: float
) -> None:
    """Checks all that M4.1 says, once the client has left."""
    closed_at = await asked.wait_closed(HANG_UP_BOUND_S)
    print(f"the upstream was closed after {1000 * (closed_at - left_at):.1f} ms")
    await aftermath.no_socket_left()
    line = await aftermath.one_request_line(
        status=499, error_code="client_abort", outcome="client_abort"
    )
    assert line["level"] == "info"
    (attempt,) = line["attempts"]
    assert asked.steps_done or "cancelled" in attempt, "an unanswered attempt is not ok"
    await slot_is_free(gateway, DEAD)


# --- nothing flows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Where a request stands when its client leaves.

    Attributes:
        steps: what the upstream has said; then it is silent.
        events: how many events the client has read by then; None: not even the head is to come.
    """

    steps: tuple[Step, ...] = ()
    events: int | None = None
    path: str = CHAT
    body: dict[str, Any] = field(default_factory=dict)


OPENROUTER: Final = "/api/v1/chat/completions"
PLAIN: Final = {"stream": False}
PLAIN_AGGREGATED: Final = {"stream": False, "model": AGGREGATED}

MOMENTS: Final = {
    "no-status": Moment(),
    "headers": Moment((Head(),), 0),
    "comment": Moment((Send(PING),), 0),
    "chunk": Moment((Send(EVENT),), 1),
    "part-of-a-chunk": Moment((Send(EVENT + EVENT[:50]),), 1),
    "error-status": Moment((Head(500, framing="chunked"), Send(b'{"error":'))),
    "json-for-a-stream": Moment((JSON_HEAD, Send(b'{"choices":'))),
    "openrouter-no-status": Moment(path=OPENROUTER),
    "openrouter-headers": Moment((Head(),), 1, path=OPENROUTER),
    "openrouter-chunk": Moment((Send(EVENT),), 2, path=OPENROUTER),
    "plain-no-status": Moment(body=PLAIN),
    "plain-part": Moment((JSON_HEAD, Send(b'{"choices":')), body=PLAIN),
    "aggregated-no-status": Moment(body=PLAIN_AGGREGATED),
    "aggregated-headers": Moment((Head(),), body=PLAIN_AGGREGATED),
    "aggregated-chunk": Moment((Send(EVENT),), body=PLAIN_AGGREGATED),
}


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
async def test_while_the_upstream_is_silent(
    gateway: GatewayProcess, up: FakeUpstream, moment: Moment, how: str
) -> None:
    """M4.1, B65, B66: told by no failing write, for there is none; streams and plain requests."""
    aftermath = Aftermath(gateway)
    up.script(*moment.steps, silence())
    async with gateway.client() as client:
        asked = await ask_through(client, up, path=moment.path, **moment.body)
        if moment.events is None:
            await asyncio.sleep(0.03)  # what the upstream says arrives
        else:
            await client.read_head()
            await client.read_until(lambda c: len(c.events) >= (moment.events or 0))
        await gone(gateway, aftermath, asked, leave(client, how))


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
        fields = ["host: x", f"authorization: Bearer {KEY}", framing]
        head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *fields, "", ""])
        if part and "chunked" in framing:
            part = b"%x\r\n%s\r\n" % (len(part), part)
        await client.send(head.encode() + part)
        await has_read(client.sock)
        leave(client, how)
        await aftermath.no_socket_left()
        await aftermath.one_request_line(status=499, error_code="client_abort")
    assert len(up.requests) == asked
    await slot_is_free(gateway, DEAD)


async def upload(client: RawClient, model: str, size: int) -> None:
    body = json.dumps(payload(model=model, padding="x" * size)).encode()
    await client.request("POST", CHAT, headers=[AUTH], body=body)


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_a_large_request_is_sent_on_to_an_upstream_that_does_not_read(
    gateway: GatewayProcess, stalled: socket.socket, how: str
) -> None:
    """M4.1: closing in good order would first send the rest, for ever."""
    aftermath = Aftermath(gateway)
    async with gateway.client() as client:
        await upload(client, STALLED, 20_000_000)
        upstream, _ = await asyncio.get_running_loop().sock_accept(stalled)
        with upstream:
            await asyncio.sleep(0.1)  # the kernel takes what it can
            left_at = leave(client, how)
            await aftermath.no_socket_left()
            print(f"closed after {1000 * (time.monotonic() - left_at):.1f} ms")
            await aftermath.one_request_line(status=499, error_code="client_abort")
            await slot_is_free(gateway, DEAD)


async def test_an_upstream_that_does_not_read_is_let_go_at_the_header_timeout(
    gateway: GatewayProcess, stalled: socket.socket
) -> None:
    """M1.2: 504, and the connection with the unsent rest of the request is closed."""
    aftermath = Aftermath(gateway)
    async with gateway.client() as client:
        await upload(client, IMPATIENT, 20_000_000)
        upstream, _ = await asyncio.get_running_loop().sock_accept(stalled)
        with upstream:
            await client.read_all()
            assert client.status == 504
            client.close()
            await aftermath.no_socket_left()


# --- something flows, or would --------------------------------------------------------------------


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("block", [EVENT, LARGE_EVENT], ids=["small", "large"])
async def test_in_mid_flow(
    gateway: GatewayProcess, up: FakeUpstream, how: str, block: bytes
) -> None:
    """M4.1, B67: while the upstream sends as fast as it can and the client reads."""
    aftermath = Aftermath(gateway)
    up.script(Flood(block, FOR_EVER))
    async with gateway.client() as client:
        asked = await ask_through(client, up)
        await client.read_until(lambda c: len(c.response.body) > 1_000_000)
        await gone(gateway, aftermath, asked, leave(client, how))


@pytest.mark.parametrize("how", HANG_UPS)
@pytest.mark.parametrize("block", [EVENT, LARGE_EVENT], ids=["small", "large"])
async def test_while_a_write_is_blocked(
    gateway: GatewayProcess, up: FakeUpstream, how: str, block: bytes
) -> None:
    """M4.1, B67: the client does not read, and then it leaves; a half-close too is noticed."""
    aftermath = Aftermath(gateway)
    up.script(Flood(block, FOR_EVER))
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up)
        await until_still(asked)
        await gone(gateway, aftermath, asked, leave(client, how))


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_a_little_is_unsent_and_the_upstream_is_silent(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M4.1: no write is blocked and none will come, but the client has not taken all."""
    aftermath = Aftermath(gateway)
    # The kernel takes some 39 kB of it, and a write would block at some 68 kB.
    up.script(*[Send(EVENT * 20) for _ in range(11)], silence())
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up)
        await until_still(asked)
        await gone(gateway, aftermath, asked, leave(client, how))


@pytest.mark.parametrize("how", HANG_UPS)
async def test_while_a_plain_reply_is_not_read(
    gateway: GatewayProcess, up: FakeUpstream, how: str
) -> None:
    """M1.2: a reply too large for the buffers; the slot of a client that left is freed.

    The answer was complete, so it counts as such.
    """
    aftermath = Aftermath(gateway)
    up.script(Head(framing="close"), *openai_stream(["x" * 1_000_000] * 8))
    async with gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up, model=AGGREGATED, stream=False)
        await asked.answered.wait()
        # Its first bytes are here, so it was put together; it is written as far as it goes.
        await until(lambda: select.select([client.sock], [], [], 0)[0], 20, what="the reply")
        assert not aftermath.lines
        leave(client, how)
        await aftermath.no_socket_left()
        await aftermath.one_request_line(status=200, outcome="completed")
        await slot_is_free(gateway, DEAD)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HANG_UPS)
async def test_after_done(gateway: GatewayProcess, up: FakeUpstream, how: str) -> None:
    """M4.1: the answer was whole, so it is no hang-up; a silent upstream is still closed."""
    aftermath = Aftermath(gateway)
    up.script(*openai_stream(["Hi"]), silence())
    async with gateway.client() as client:
        asked = await ask_through(client, up)
        await client.read_all()
        assert client.body.endswith(DONE)
        leave(client, how)
        await asked.wait_closed(HANG_UP_BOUND_S)
        await aftermath.no_socket_left()
        await aftermath.one_request_line(status=200, error_code=None, outcome="completed")
    await slot_is_free(gateway, DEAD)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_the_slot_is_free_when_the_client_has_its_end(
    gateway: GatewayProcess, up: FakeUpstream, stream: bool
) -> None:
    """M1.2: also if the upstream then keeps its connection open without a word."""
    aftermath = Aftermath(gateway)
    for _ in range(5):
        up.script(*openai_stream(["Hi"]), silence())
        async with gateway.client() as first, gateway.client() as second:
            await ask(first, model=AGGREGATED, stream=stream)
            await first.read_all()
            assert first.status == 200
            await ask(second, model=DEAD)
            await second.read_all()
            assert second.status == 503, second.body
    await until(lambda: all(r.closed.is_set() for r in up.requests), what="closing the upstream")
    await until(lambda: len(aftermath.lines) == 10, what="a line for each")
