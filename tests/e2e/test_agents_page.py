"""The page "Agents": what it says to paste is run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from planes.config_file import load_text
from planes.settings import notices
from planes.settings.tools import tool_name
from tests.support.gateway import ROOT
from tests.support.node import NODE_DIR, node_binary
from tests.support.workflows import Flows, flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAGE: Final = (ROOT / "docs/agents.md").read_text()
PAGE_KEY: Final = "ozk_change_me"
SAID: Final = "Hello 🙂"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flow() -> AsyncIterator[Flows]:
    async with flows(keys=[{"key": PAGE_KEY, "org": "test"}]) as made:
        made.says("one-agent", "Hel", "lo ", "🙂")
        yield made


async def run(flow: Flows, *command: str) -> str:
    """Run a program of the page against this gateway; standard output."""
    child = await asyncio.create_subprocess_exec(
        *(word.replace("http://127.0.0.1:8080", flow.gateway.base_url) for word in command),
        cwd=NODE_DIR,
        env={"PATH": os.environ["PATH"], "MY_GATEWAY_KEY": PAGE_KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err.decode()
    return out.decode()


def test_its_configurations_are_right() -> None:
    text, tools = blocks("yaml")
    settings = load_text(text, {})
    assert list(settings.agents) == ["one-agent"]
    assert settings.agents["one-agent"].model == "local/smollm2-135m"
    settings = load_text(text.partition("agents:")[0] + tools, {})
    (tool,) = settings.agents["forecaster"].tools
    assert tool_name(tool) == "weather"
    assert notices(settings) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_curl(flow: Flows) -> None:
    (command,) = blocks("sh")
    assert (await run(flow, "sh", "-c", command)).endswith("data: [DONE]\n\n")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("program", blocks("python"), ids=["openai", "langchain"])
async def test_python(flow: Flows, program: str) -> None:
    assert await run(flow, sys.executable, "-c", program) == SAID


@pytest.mark.node
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("program", blocks("js"), ids=["openai", "ai-sdk"])
async def test_node(flow: Flows, program: str) -> None:
    command = [str(node_binary()), "--input-type=module", "-e", program]
    assert await run(flow, *command) == SAID
