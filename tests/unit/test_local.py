"""O1.1: the local model's process is watched, restarted and ended; with stand-ins for llama.cpp."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from relay.errors import UpstreamRefused, UpstreamUnavailable
from relay.upstreams import local, weights
from relay.upstreams.base import UpstreamRequest
from relay.upstreams.local import LlamaProcess, LocalUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.upstreams.base import Upstream, UpstreamReply

SERVES = """
import json, os, time
print(json.dumps({"address": f"http://127.0.0.1:{os.getpid()}"}), flush=True)
"""
STAYS = SERVES + "time.sleep(60)"
HANGS = "import time; time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYS


def program(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source)


def running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_up(process: LlamaProcess) -> bool:
    try:
        return bool(process.address)
    except UpstreamUnavailable:
        return False


def only_this_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_it_serves_and_is_gone_after_close() -> None:
    process = LlamaProcess(command=program(STAYS))
    with pytest.raises(UpstreamUnavailable) as caught:
        _ = process.base_url
    assert caught.value.retry_after_s == 1
    await process.start()
    await process.start()
    pid = process.pid
    assert pid is not None
    assert process.base_url == f"http://127.0.0.1:{pid}/v1"
    await process.close()
    await process.close()
    assert not running(pid)
    assert not is_up(process)
    assert only_this_task()
    with pytest.raises(UpstreamUnavailable, match="closed"):
        await process.start()


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TERMINATE_WAIT_S", 0.1)
    process = LlamaProcess(command=program(STUBBORN))
    await process.start()
    pid = process.pid
    assert pid is not None
    await process.close()
    assert not running(pid)


async def test_a_cancelled_close_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_TERMINATE_WAIT_S", 60.0)
    process = LlamaProcess(command=program(STUBBORN))
    await process.start()
    child = process._child
    assert child is not None
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: child.returncode is not None)  # the loop has seen it, so it is reaped


async def test_a_dead_child_is_restarted_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BACKOFF_MIN_S", 0.05)
    process = LlamaProcess(command=program(SERVES + "time.sleep(0.05)"))
    loop = asyncio.get_running_loop()
    starts: list[tuple[float, int | None]] = []
    await process.start()
    while len(starts) < 4:
        starts.append((loop.time(), process.pid))
        await until(lambda: not is_up(process))
        await until(lambda: is_up(process))
    await process.close()
    assert len({pid for _, pid in starts}) == 4
    gaps = [after - before for (before, _), (after, _) in pairwise(starts)]
    for gap, backoff in zip(gaps, (0.05, 0.1, 0.2), strict=True):
        assert gap >= backoff
    assert only_this_task()


async def test_a_restart_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_BACKOFF_MIN_S", 0.02)
    count = tmp_path / "count"
    source = f"""
import pathlib, sys
count = pathlib.Path({str(count)!r})
count.write_text(count.read_text() + "x" if count.exists() else "x")
if 1 < len(count.read_text()) < 4: sys.exit("not yet")
{SERVES}
if len(count.read_text()) == 1: sys.exit(1)
time.sleep(60)"""
    process = LlamaProcess(command=program(source))
    await process.start()
    await until(lambda: count.read_text() == "xxxx" and is_up(process))
    await process.close()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import sys; sys.stderr.write('x' * 9000); sys.exit('no such tensor')", "no such tensor$"),
        ("import sys; sys.exit(3)", "exit status 3$"),
        ("print('hello'); import time; time.sleep(60)", "printed no address"),
        (HANGS, r"no address: in 0\.5 s"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(source: str, complaint: str) -> None:
    hangs = source == HANGS
    process = LlamaProcess(command=program(source), start_timeout_s=0.5 if hangs else 30.0)
    with pytest.raises(UpstreamUnavailable, match=complaint) as caught:
        await process.start()
    assert len(caught.value.message) < 4096 + 200
    assert process.pid is None
    assert only_this_task()
    await process.close()


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(UpstreamUnavailable, match="cannot start"):
        await LlamaProcess(command=("/nonexistent/program",)).start()


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_start_that_is_interrupted_leaves_no_child(how: str) -> None:
    process = LlamaProcess(command=program(HANGS))
    starting = asyncio.create_task(process.start())
    await until(lambda: process.pid is not None)
    pid = process.pid
    assert pid is not None
    if how == "cancel":
        starting.cancel()
    else:
        await process.close()
    with suppress(asyncio.CancelledError, UpstreamUnavailable):
        await starting
    assert not running(pid)
    assert not is_up(process)
    await process.close()
    assert only_this_task()


async def test_without_xllamacpp_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(UpstreamUnavailable, match=r"scripts/serve"):
        await LlamaProcess().start()


async def test_weights_that_cannot_be_had_are_unavailable_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("SLUICEGATE_CACHE", str(blocker / "cache"))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: object())  # type: ignore[attr-defined]
    with pytest.raises(UpstreamUnavailable, match="Set SLUICEGATE_CACHE"):
        await LlamaProcess().start()


async def test_a_fetch_that_is_cancelled_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    slow = tmp_path / "slow.py"
    slow.write_text(f"import os, pathlib, time\npathlib.Path({str(note)!r}).write_text"
                    "(str(os.getpid()))\ntime.sleep(60)\n")  # fmt: skip
    monkeypatch.setattr(weights, "cached_weights", lambda: None)
    monkeypatch.setattr(weights, "__file__", str(slow))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda _: object())  # type: ignore[attr-defined]
    starting = asyncio.create_task(LlamaProcess().start())
    await until(lambda: note.exists() and note.read_text() != "")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not running(int(note.read_text()))


class StubHttp:
    """Stands in for the HTTP upstream: notes what it is asked, and at which base URL."""

    def __init__(self, base_url: Callable[[], str], *, fails: bool = False) -> None:
        self.base_url = base_url
        self.fails = fails
        self.calls: list[str] = []

    @property
    def name(self) -> str:
        return "http"

    async def start(self) -> None:
        self.calls.append("start")
        if self.fails:
            raise UpstreamUnavailable("no")

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        self.calls.append(f"open {request.body['model']} at {self.base_url()}")
        raise UpstreamUnavailable("a stub")

    async def close(self) -> None:
        self.calls.append("close")


REQUEST = UpstreamRequest(
    model="smollm2-135m", body={"model": "smollm2-135m", "stream": True}, stream=True
)


async def test_the_upstream_dials_the_child_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_BACKOFF_MIN_S", 0.01)
    made: list[StubHttp] = []

    def make(base_url: Callable[[], str]) -> Upstream:
        made.append(StubHttp(base_url))
        return made[0]

    process = LlamaProcess(command=program(STAYS))
    upstream = LocalUpstream("local", process, make)
    assert upstream.name == "local"
    with pytest.raises(UpstreamUnavailable) as caught:
        await upstream.open(REQUEST)
    assert caught.value.retry_after_s == 1
    await upstream.start()
    dialled = []
    for _ in range(2):
        pid = process.pid
        assert pid is not None
        dialled.append(f"open smollm2-135m at http://127.0.0.1:{pid}/v1")
        with pytest.raises(UpstreamUnavailable, match="a stub"):
            await upstream.open(REQUEST)
        (process._child or pytest.fail("no child")).kill()
        await until(lambda old=pid: is_up(process) and process.pid != old)  # type: ignore[misc]
    await upstream.close()
    await upstream.close()
    assert made[0].calls == ["start", *dialled, "close", "close"]
    assert not is_up(process)


async def test_another_models_name_is_refused() -> None:
    """llama.cpp would answer under any name."""
    upstream = LocalUpstream("local", LlamaProcess(command=program(STAYS)), StubHttp)
    with pytest.raises(UpstreamRefused) as caught:
        await upstream.open(UpstreamRequest(model="gpt-5", body={"model": "gpt-5"}, stream=True))
    assert caught.value.status == 404
    await upstream.close()


async def test_an_http_upstream_that_cannot_start_leaves_no_child() -> None:
    process = LlamaProcess(command=program(STAYS))
    upstream = LocalUpstream("local", process, lambda url: StubHttp(url, fails=True))
    with pytest.raises(UpstreamUnavailable):
        await upstream.start()
    assert process.pid is None
    assert only_this_task()
