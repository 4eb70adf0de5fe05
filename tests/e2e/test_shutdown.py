"""M3.6, O2: how the process ends, on one signal, on two, and on none.

Expected times are some 0.1 s beside the grace; bounds are ten times wider or more. B110 of the
hazards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from relay.upstreams.weights import SMOLLM2_135M
from tests.support.checks import CHAT, Aftermath, ask, ask_through, has_read, until, until_still
from tests.support.fake_upstream import (
    DONE,
    FakeUpstream,
    Flood,
    Head,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    openai_stream,
    sse,
)
from tests.support.gateway import AUTH, KEY, GatewayProcess, config_for
from tests.support.wire import chunks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.wire import RawClient

GRACE_S: Final = 0.5
LONG_S: Final = 30.0
EVENT: Final = sse(chunk("x" * 20))
FOR_EVER: Final = 1_000_000
AGGREGATED: Final = "aggregated/model"


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


def process(up: FakeUpstream, grace_s: float = GRACE_S, **more: Any) -> GatewayProcess:
    aggregated = {"shape": "openai", "base_url": up.base_url, "aggregate": True}
    server = {"shutdown_grace_s": grace_s}
    return GatewayProcess(
        config_for(up, server=server, providers={"aggregated": aggregated}), **more
    )


def silence() -> Wait:
    return Wait(asyncio.Event())


async def get(gateway: GatewayProcess, path: str) -> int:
    async with gateway.client() as client:
        await client.request("GET", path, headers=[AUTH])
        await client.read_all()
        return client.status


async def draining(gateway: GatewayProcess) -> None:
    """Waits until a SIGTERM has arrived."""
    await until(lambda: '"event":"draining"' in gateway.stderr(), what="the drain")


def ends_in_shutdown(client: RawClient) -> None:
    """Checks M3.4's end of a stream with the code of M3.6: one chunk, `[DONE]`, proper framing."""
    assert client.complete, "the chunked body was not ended"
    assert client.body.count(DONE) == 1
    assert client.body.endswith(DONE)
    last = chunks(client.body)[-1]
    assert last["error"]["code"] == "gateway_shutdown"
    assert last["choices"][0]["finish_reason"] == "error"


# --- the first signal -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_gateway_ends_at_once(up: FakeUpstream, number: signal.Signals) -> None:
    """M3.6: exit code 0; a client's idle connection and a pooled one do not hold it."""
    async with process(up, LONG_S) as gateway, gateway.client() as idle:
        up.script(*openai_stream(["Hi"]))
        await ask(idle)
        await idle.read_all()
        started = time.monotonic()
        gateway.signal(number)
        assert await gateway.wait() == 0
        print(f"ended after {1000 * (time.monotonic() - started):.0f} ms")
        assert time.monotonic() - started < 2
        assert "Traceback" not in gateway.stderr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_requests_complete_within_the_grace(
    up: FakeUpstream, number: signal.Signals
) -> None:
    """M3.6: whole, as if nothing were; then the process ends without waiting longer."""
    go = asyncio.Event()
    first, *rest = openai_stream(["a", "b", "c"])
    async with (
        process(up, LONG_S) as gateway,
        gateway.client() as streaming,
        gateway.client() as plain,
    ):
        for client, stream in ((streaming, True), (plain, False)):
            up.script(first, Wait(go), *rest)
            await ask_through(client, up, model=AGGREGATED, stream=stream)
        gateway.signal(number)
        await draining(gateway)
        await asyncio.sleep(0.2)
        assert gateway.returncode is None
        started = time.monotonic()
        go.set()
        await streaming.read_all()
        await plain.read_all()
        text = [c["choices"][0]["delta"].get("content") for c in chunks(streaming.body)]
        assert text == ["", "a", "b", "c", None]
        assert streaming.body.endswith(DONE)
        assert streaming.complete
        assert plain.json["choices"][0]["message"]["content"] == "abc"
        assert await gateway.wait() == 0
        assert time.monotonic() - started < 3


async def test_at_the_end_of_the_grace_a_stream_is_told_in_band(up: FakeUpstream) -> None:
    """M3.6, M3.4: the chunk, `[DONE]`, the end of the body; the upstream is closed; exit code 0."""
    moments: dict[str, tuple[Step, ...]] = {
        "no chunk": (Head(), silence()),
        "silent": (Send(EVENT), silence()),
        "paced": (Send(EVENT), *(Sleep(0.02), Send(EVENT)) * 500),
        "flood": (Flood(EVENT, FOR_EVER),),
    }
    async with process(up) as gateway, AsyncExitStack() as stack:
        aftermath = Aftermath(gateway)
        clients = [await stack.enter_async_context(gateway.client()) for _ in moments]
        for client, steps in zip(clients, moments.values(), strict=True):
            up.script(*steps)
            await ask_through(client, up)
            await client.read_head()
        started = time.monotonic()
        gateway.terminate()
        await asyncio.gather(*(client.read_all(timeout=GRACE_S + 5) for client in clients))
        assert time.monotonic() - started >= GRACE_S * 0.9
        for client in clients:
            ends_in_shutdown(client)
        for asked in up.requests:
            await asked.wait_closed()
        assert await gateway.wait() == 0
        ends = [(x["error_code"], x["outcome"]) for x in aftermath.lines if x["event"] == "request"]
        assert ends == [("gateway_shutdown", "shutdown")] * len(moments)


async def test_at_the_end_of_the_grace_who_has_seen_nothing_gets_503(up: FakeUpstream) -> None:
    """M3.6, M1.2: JSON, with `Retry-After`: another gateway, or this one soon, can do it."""
    json_head = Head(headers={"content-type": "application/json"})
    moments: tuple[tuple[dict[str, Any], tuple[Step, ...]], ...] = (
        ({}, ()),
        ({"stream": False}, ()),
        ({"stream": False}, (json_head, Send(b"{"))),
        ({"stream": False, "model": AGGREGATED}, (Send(EVENT),)),
    )
    async with process(up) as gateway, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(gateway.client()) for _ in moments]
        for client, (body, steps) in zip(clients, moments, strict=True):
            up.script(*steps, silence())
            await ask_through(client, up, **body)
        gateway.terminate()
        for client in clients:
            await client.read_all(timeout=GRACE_S + 5)
            assert client.status == 503
            assert client.json["error"]["code"] == "gateway_shutdown"
            assert int(client.header("retry-after") or 0) >= 1
        for asked in up.requests:
            await asked.wait_closed()
        assert await gateway.wait() == 0


async def test_at_the_end_of_the_grace_an_upload_gets_503(up: FakeUpstream) -> None:
    """M3.6: a request whose body is still coming was admitted before; it too is told, at once."""
    async with process(up) as gateway, gateway.client() as client:
        head = [f"POST {CHAT} HTTP/1.1", "host: x", f"authorization: Bearer {KEY}"]
        await client.send("\r\n".join([*head, "content-length: 1000", "", "{"]).encode())
        await has_read(client.sock)
        started = time.monotonic()
        gateway.terminate()
        await client.read_all(timeout=GRACE_S + 5)
        assert time.monotonic() - started < GRACE_S + 1.5
        assert client.status == 503
        assert client.json["error"]["code"] == "gateway_shutdown"
        assert await gateway.wait() == 0


async def test_no_grace_at_all(up: FakeUpstream) -> None:
    """M3.6: `shutdown_grace_s: 0` tells every stream at once."""
    up.script(Send(EVENT), silence())
    async with process(up, 0) as gateway, gateway.client() as client:
        await ask(client)
        await client.read_until(lambda c: c.events)
        gateway.terminate()
        await client.read_all()
        ends_in_shutdown(client)
        assert await gateway.wait() == 0


async def test_new_requests_during_the_drain(up: FakeUpstream) -> None:
    """M3.6, O3: 503 with Retry-After on new and on kept connections; /ready says no, /health yes.

    What ran goes on, and a hang-up ends the drain early.
    """
    up.script(*openai_stream(["Hi"]))
    up.script(Send(EVENT), silence())
    async with (
        process(up, LONG_S) as gateway,
        gateway.client() as running,
        gateway.client() as kept,
        gateway.client() as fresh,
    ):
        await ask(kept)
        await kept.read_all()
        await ask(running)
        await running.read_until(lambda c: c.events)
        assert await get(gateway, "/ready") == 200
        gateway.terminate()
        await draining(gateway)
        for client in (kept, fresh):
            await ask(client)
            await client.read_all()
            assert client.status == 503
            assert client.json["error"]["code"] == "gateway_shutdown"
            assert 1 <= int(client.header("retry-after") or 0) <= LONG_S
        assert await get(gateway, "/ready") == 503
        assert await get(gateway, "/health") == 200
        assert len(up.requests) == 2
        assert gateway.returncode is None
        running.close()
        started = time.monotonic()
        assert await gateway.wait() == 0
        assert time.monotonic() - started < 2


# --- readers --------------------------------------------------------------------------------------


async def test_stuck_readers_do_not_hold_the_exit(up: FakeUpstream) -> None:
    """M3.6, M3.5: they get their time to read the end, and no more; a stream and a plain reply."""
    async with (
        process(up) as gateway,
        gateway.client(rcvbuf=4096) as streaming,
        gateway.client(rcvbuf=4096) as plain,
    ):
        up.script(Flood(EVENT, FOR_EVER))
        up.script(*openai_stream(["x" * 1_000_000] * 8))
        await ask_through(streaming, up)
        await ask_through(plain, up, model=AGGREGATED, stream=False)
        await until_still(*up.requests)
        started = time.monotonic()
        gateway.terminate()
        assert await gateway.wait(20) == 0
        print(f"ended {time.monotonic() - started - GRACE_S:.2f} s after the grace")
        assert time.monotonic() - started < GRACE_S + 10
        assert "Traceback" not in gateway.stderr()


async def test_a_slow_reader_gets_the_whole_end(up: FakeUpstream) -> None:
    """M3.6, M3.5: its write was blocked at the end of the grace; then it reads all that is left."""
    up.script(Flood(EVENT, FOR_EVER))
    async with process(up) as gateway, gateway.client(rcvbuf=4096) as client:
        asked = await ask_through(client, up)
        await until_still(asked)
        gateway.terminate()
        await asked.wait_closed(GRACE_S + 5)
        await client.read_all()
        ends_in_shutdown(client)
        assert await gateway.wait() == 0


# --- more signals, or none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)],
)
async def test_a_second_signal_stops_at_once(
    up: FakeUpstream, first: signal.Signals, second: signal.Signals
) -> None:
    """M3.6, O2: exit code 1, whatever runs."""
    up.script(Send(EVENT), silence())
    async with process(up, LONG_S) as gateway, gateway.client() as client:
        await ask(client)
        await client.read_until(lambda c: c.events)
        gateway.signal(first)
        await draining(gateway)
        started = time.monotonic()
        gateway.signal(second)
        assert await gateway.wait() == 1
        assert time.monotonic() - started < 1
        await (await up.request()).wait_closed()


STUB = """
import os, pathlib, time
class _Any:
    def __getattr__(self, name):
        self.__dict__[name] = _Any()
        return self.__dict__[name]
CommonParams = _Any
def Server(params):
    pathlib.Path(os.environ["STUB_PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_during_the_start(
    up: FakeUpstream, tmp_path: Path, number: signal.Signals
) -> None:
    """M3.6, O1.1: while the local model loads; exit code 0 and no child is left."""
    weights = tmp_path / SMOLLM2_135M.file_name
    weights.write_bytes(b"GGUF")
    weights.with_name(weights.name + ".sha256").write_text(f"4 {SMOLLM2_135M.sha256}\n")
    (tmp_path / "xllamacpp.py").write_text(STUB)
    pid_file = tmp_path / "pid"
    env = {
        "PYTHONPATH": str(tmp_path),
        "SLUICEGATE_CACHE": str(tmp_path),
        "STUB_PID_FILE": str(pid_file),
    }
    config = config_for(up, providers={"local": {"kind": "local"}})
    gateway = GatewayProcess(config, env=env)
    starting = asyncio.create_task(gateway.__aenter__())
    await until(lambda: pid_file.exists() and pid_file.read_text(), 20, what="the model's start")
    gateway.signal(number)
    with pytest.raises(RuntimeError, match=r"ended at its start \(0\)"):
        await starting
    await until(lambda: not runs(int(pid_file.read_text())), what="the child's end")


def runs(pid: int) -> bool:
    """Whether the process runs; a signal 0 would reach a zombie too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@pytest.mark.local_model
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_no_child_outlives_the_gateway(up: FakeUpstream, number: signal.Signals) -> None:
    """O1.1: killed or ended in order, the local model's process goes with it."""
    config = config_for(up, providers={"local": {"kind": "local"}})
    async with GatewayProcess(config, env=dict(os.environ)) as gateway:
        (child,) = children(gateway.pid)
        gateway.signal(number)
        assert await gateway.wait() == (0 if number == signal.SIGTERM else -number)
        await until(lambda: not runs(child), what="the child's end")
