"""The page "Decisions": what it says to paste is run as it stands there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest_asyncio

from planes.config_file import load_text
from planes.settings.decision import ChatLogprobsBackend
from tests.support.decisions import config, gateway
from tests.support.gateway import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.gateway import GatewayProcess

PAGE = (ROOT / "docs/decisions-plane.md").read_text()
DEV_KEY = "ozk_dev_0123456789abcdef"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    over = config()
    over["keys"].append({"key": DEV_KEY, "org": "dev"})
    async with gateway(over) as process:
        yield process


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


async def run(process: GatewayProcess, folder: Path, *command: str) -> str:
    """Runs a command where `sluicegate` is this checkout's; standard output."""
    script = folder / "sluicegate"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m planes.cli "$@"\n')
    script.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=process.workdir,
        env=env | {"SLUICEGATE_KEY": DEV_KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err.decode()
    return out.decode(errors="replace")


def test_its_configuration_is_right() -> None:
    (text,) = blocks("yaml")
    openai = '{shape: openai, base_url: "https://api.openai.com/v1", api_key: k}'
    settings = load_text(f"providers: {{openai: {openai}}}\n{text}", {})
    assert isinstance(settings.decision.backend, ChatLogprobsBackend)


async def test_what_is_pasted_into_a_shell(shared: GatewayProcess, tmp_path: Path) -> None:
    once, events, opening, stream = (
        block.replace("http://127.0.0.1:8080", shared.base_url) for block in blocks("sh")
    )
    stream = stream.replace("sluicegate stream -", f"sluicegate stream - --url {shared.base_url}")

    async def shell(text: str) -> str:
        return await run(shared, tmp_path, "sh", "-c", text)

    assert json.loads(await shell(once))["answers"]["ready"]["type"] == "boolean"
    assert (await shell(events)).startswith("event: decision\ndata: {")
    assert '{"type":"hello","stream_id":"szws_' in await shell(opening)
    rows = (await shell(stream)).splitlines()
    kinds = [json.loads(row.partition("< ")[2])["type"] for row in rows if " < " in row]
    assert kinds == ["hello", "ack", "ack", "scheduled", "decision"]


async def test_what_is_pasted_into_python(shared: GatewayProcess, tmp_path: Path) -> None:
    (program,) = blocks("python")
    program = program.replace("http://127.0.0.1:8080", shared.base_url)
    assert await run(shared, tmp_path, sys.executable, "-c", program) == "True\n"


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
