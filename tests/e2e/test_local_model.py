"""O1.1: the real local model, llama.cpp with SmolLM2-135M in a child process.

Replies are kept at 16 tokens (32 for tool calls): the model makes about 100 tokens a second.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from relay.errors import UpstreamUnavailable
from relay.upstreams import weights
from relay.upstreams.llama_child import usable_cores
from relay.upstreams.local import LlamaProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.local_model,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp has no wheel for this platform",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASK_FOR_TOOL: dict[str, Any] = {
    "model": "smollm2-135m",
    "temperature": 0,
    "max_tokens": 32,
    "tools": [TOOL],
    "messages": [
        {
            "role": "user",
            "content": "Call get_weather for Paris. Begin your reply with <tool_call>",
        }
    ],
}


@pytest.fixture
async def process() -> AsyncIterator[LlamaProcess]:
    process = LlamaProcess()
    await process.start()
    yield process
    await process.close()
    assert process.pid is None


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def state(pid: int) -> str:
    """The kernel's letter for a process; X if there is none. A signal 0 would reach a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_up(process: LlamaProcess) -> bool:
    try:
        return bool(process.address)
    except UpstreamUnavailable:
        return False


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while state(pid) not in "ZX":
            await asyncio.sleep(0.02)


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def say_hello(session: aiohttp.ClientSession, process: LlamaProcess) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
    return await post(session, process.base_url + "/chat/completions", body)


async def test_it_answers_under_its_alias(
    process: LlamaProcess, session: aiohttp.ClientSession
) -> None:
    answer = await say_hello(session, process)
    assert answer["model"] == "smollm2-135m"
    assert answer["choices"][0]["message"]["content"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 4


async def test_it_is_polite_and_shut_to_others(
    process: LlamaProcess, session: aiohttp.ClientSession
) -> None:
    pid = process.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert usable_cores() >= 1
    async with session.get(process.address + "/slots") as response:
        assert response.status == 501, "slots show the prompts of others"
    origin = {"origin": "https://a.page.example"}
    async with session.get(process.base_url + "/models", headers=origin) as response:
        assert response.headers.get("access-control-allow-origin", "") == ""
    async with session.get(process.address + "/") as response:
        assert response.status == 404, "no user interface"


async def test_the_template_renders_tools_calls_and_results(
    process: LlamaProcess, session: aiohttp.ClientSession
) -> None:
    def call(id_: str, city: str) -> dict[str, Any]:
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        return {"id": id_, "type": "function", "function": function}

    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Paris? Århus?"},
        {"role": "assistant", "content": None, "tool_calls": [call("a", "Paris"), call("b", "Å")]},
        {"role": "tool", "tool_call_id": "a", "content": "18 C"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "9 C"}]},
    ]
    body = {"model": "smollm2-135m", "tools": [TOOL], "messages": messages}
    answer = await post(session, process.address + "/apply-template", body)
    system, _, rest = str(answer["prompt"]).partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(listed) == TOOL
    assert rest == (
        "<|im_start|>user\nParis? Århus?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Å"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n18 C\n</tool_response>\n"
        "<tool_response>\n9 C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_tools_give_real_tool_calls_whole_and_streamed(
    process: LlamaProcess, session: aiohttp.ClientSession
) -> None:
    url = process.base_url + "/chat/completions"
    answer = await post(session, url, ASK_FOR_TOOL)
    function = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert function["name"] == "get_weather"

    deltas: list[dict[str, Any]] = []
    async with session.post(url, json={**ASK_FOR_TOOL, "stream": True}) as response:
        body = await response.text()
    for line in body.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                deltas += choice["delta"].get("tool_calls", [])
    assert deltas[0]["function"]["name"] == "get_weather"
    arguments = "".join(d["function"].get("arguments", "") for d in deltas if d["index"] == 0)
    assert arguments.lstrip().startswith("{")
    assert "Paris" in arguments


async def test_a_killed_child_is_restarted_at_another_address(
    process: LlamaProcess, session: aiohttp.ClientSession
) -> None:
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until_gone(pid)
    async with asyncio.timeout(10):
        while process.pid == pid:  # the loop hears of the end of a process a moment later
            await asyncio.sleep(0.005)
    with pytest.raises(UpstreamUnavailable) as caught:
        _ = process.base_url
    assert caught.value.retry_after_s == 1
    async with asyncio.timeout(30):
        while process.pid in (None, pid):
            await asyncio.sleep(0.05)
        while not is_up(process):
            await asyncio.sleep(0.05)
    answer = await say_hello(session, process)
    assert answer["choices"][0]["message"]["content"]


PARENT = """
import asyncio
from relay.upstreams.local import LlamaProcess

async def main():
    process = LlamaProcess()
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_no_child_outlives_a_parent_that_is_killed() -> None:
    weights.ensure_weights()
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        line = await asyncio.wait_for(parent.stdout.readline(), 60)
        child = int(line)
        assert state(child) not in "ZX"
    finally:
        parent.kill()
        await parent.wait()
    await until_gone(child)


async def test_a_child_whose_parent_is_gone_already_ends_at_once(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relay.upstreams.llama_child", "--parent", "2147483647"),
        *("--weights", str(tmp_path / "none.gguf"), "--alias", "x"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(child.communicate(), 10)
    assert child.returncode == 1
    assert b"the parent process 2147483647 is gone" in err


async def test_weights_that_are_no_model_are_said(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really")
    process = LlamaProcess(weights_path=bad)
    with pytest.raises(UpstreamUnavailable, match="Failed to init server"):
        await process.start()
