"""The test kit's own tests: the started gateway process and Node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.ports import free_port
from tests.support.fake_upstream import (
    FakeUpstream,
    Send,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import KEY, ROOT, UPSTREAM_KEY, GatewayProcess, config_for
from tests.support.node import run_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EVENT = sse(chunk("Hi"))

STUB = """
import http.server, signal, sys
import aiohttp  # the environment of the tests is there
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        print('{"event": "asked"}\\nnot json', file=sys.stderr)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
_, command, _, config, _, port, *more = sys.argv
if "die" in more:
    sys.exit("no luck today")
print(open(config).read())
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stub_gateway.py").write_text(STUB)
    return {"PYTHONPATH": str(tmp_path)}


async def test_a_gateway_process(up: FakeUpstream, stub: dict[str, str]) -> None:
    config = config_for(up, providers={"fake": {"idle_timeout_s": 1}}, journal={"x": 1})
    async with GatewayProcess(config, env=stub, module="stub_gateway") as gateway:
        assert {"event": "asked"} in gateway.log_lines()
        assert "not json" in gateway.stderr()
        for text in [KEY, UPSTREAM_KEY, up.base_url, "idle_timeout_s: 1", "x: 1"]:
            assert text in gateway.stdout()
        assert gateway.rss_bytes() > 1_000_000
        async with asyncio.timeout(5):
            while gateway.open_sockets() != 1:  # the health check's may still be closing
                await asyncio.sleep(0.01)
        gateway.terminate()
        assert await gateway.wait() == 7
        assert gateway.returncode == 7
    assert not gateway.workdir.exists()


async def test_a_gateway_that_does_not_start_says_why(stub: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="no luck today"):
        async with GatewayProcess({}, env=stub, module="stub_gateway", args=["die"]):
            pass


async def test_an_unasked_death_fails_the_test(stub: dict[str, str]) -> None:
    async def case() -> None:
        async with GatewayProcess({}, env=stub, module="stub_gateway") as gateway:
            os.kill(gateway.pid, signal.SIGKILL)
            assert await gateway.wait() == -signal.SIGKILL

    with pytest.raises(AssertionError, match="died"):
        await case()


def test_ports_are_no_other_process_and_none_that_the_system_gives_away() -> None:
    program = "from bench.ports import free_port; print(*(free_port() for _ in range(600)))"
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    theirs, ours = {int(port) for port in other.stdout.split()}, {free_port() for _ in range(600)}
    assert min(len(theirs), len(ours)) > 400
    assert not theirs & ours
    assert max(theirs | ours) < 32_768  # the first of Linux's own


async def test_a_killed_test_run_leaves_no_gateway(stub: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.support.gateway import GatewayProcess\n"
        "async def main():\n"
        f"    gateway = GatewayProcess({{}}, env={stub!r}, module='stub_gateway',"
        f" workdir=Path({str(tmp_path)!r}), port={free_port()})\n"
        "    async with gateway:\n"
        "        print(gateway.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        while _alive(pid):
            await asyncio.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"  # where nobody reaps it, it stays one


# --- Node -----------------------------------------------------------------------------------------


@pytest.mark.node
async def test_node_sees_what_was_streamed(up: FakeUpstream) -> None:
    payload = {"baseURL": up.base_url, "apiKey": "k", "model": "m", "stream": True}
    up.script(*openai_stream(["Hel", "lo"]))
    seen = await run_node(
        "stream.mjs", payload | {"include_usage": True, "headers": {"x-no-comments": "true"}}
    )
    assert (seen["text"], seen["chunks"], seen["finish_reason"]) == ("Hello", 5, "stop")
    assert (seen["models"], seen["providers"]) == (["upstream-model"], [])
    assert seen["usage"]["completion_tokens"] == 2
    assert seen["error"] is None
    assert up.requests[0].json["stream_options"] == {"include_usage": True}
    assert up.requests[0].headers["x-no-comments"] == "true"


@pytest.mark.node
async def test_node_tells_errors_and_hangs_up(up: FakeUpstream) -> None:
    payload = {"baseURL": up.base_url, "apiKey": "k", "model": "m"}
    wrong = {"error": {"message": "slow down", "code": "c", "type": "t", "param": None}}
    up.script(*json_answer(wrong, status=429))
    seen = await run_node("stream.mjs", payload)
    assert seen["error"] == {"message": "429 slow down", "status": 429, "code": "c"}
    up.script(Send(EVENT), Send(EVENT), Wait(asyncio.Event()))
    seen = await run_node("stream.mjs", payload | {"abort_after": 2})
    assert (seen["chunks"], seen["error"]) == (2, None)
    await (await up.request(1)).wait_closed()
    message = {"role": "assistant", "content": "whole"}
    up.script(*json_answer({"choices": [{"message": message, "finish_reason": "stop"}]}))
    seen = await run_node("stream.mjs", payload | {"stream": False})
    assert (seen["text"], seen["finish_reason"], seen["chunks"]) == ("whole", "stop", 1)
