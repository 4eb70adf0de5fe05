"""The page "Workflows" and its examples, run as they stand; the examples on the real model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import TYPE_CHECKING

import openai
import pytest
import pytest_asyncio
import yaml

from tests.support.gateway import ROOT, GatewayProcess
from tests.support.workflow_wire import read
from tests.support.workflows import Flows, flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = ROOT / "docs/workflows"
PAGE = (FOLDER / "README.md").read_text()
DEV_KEY = "ozk_dev_0123456789abcdef"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))


async def run(folder: Path, *command: str) -> tuple[int | None, str, str]:
    """Runs a command in the checkout, where `sluicegate` is its own: exit code and what it says."""
    script = folder / "sluicegate"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m planes.cli "$@"\n')
    script.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=env | {"SLUICEGATE_KEY": DEV_KEY},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), 110)
    return child.returncode, out.decode(errors="replace"), err.decode(errors="replace")


# -- the page -------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows(keys=[{"key": DEV_KEY, "org": "dev", "balance_usd": 9}]) as made:
        made.says("one-agent", "hel", "lo")
        yield made


async def test_what_is_pasted_into_a_shell(shared: Flows, tmp_path: Path) -> None:
    """One shell for all blocks, in their order: what one sets, the next one uses."""
    url = shared.gateway.base_url
    answers = []
    script = "set -e\n"
    for number, block in enumerate(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)):
        answers.append(tmp_path / f"{number}.txt")
        pasted = block.replace("http://127.0.0.1:8080", url)
        pasted = pasted.replace("sluicegate run ", f"sluicegate run --server {url} ")
        script += f"{{\n{pasted}}} > {answers[-1]}\n"
    code, _, err = await run(tmp_path, "bash", "-c", script)
    assert code == 0, err
    command, as_yaml, as_json, waited, again, results, cancel, resumed, saved = (
        path.read_text() for path in answers
    )
    assert command == "hello\n"
    for stream in (as_yaml, as_json):
        assert read(stream.encode()).texts == {"greet": "hello"}
    assert json.loads(waited)["output"] == "hello"
    assert again.startswith("id: 4\nevent: ")
    assert read(again.encode(), placed=True, began=False).status == "completed"
    assert '"status":"completed"' in results
    assert results.endswith('"task_id":"title","output":"hello"}')
    assert json.loads(cancel)["status"] == "completed"
    assert resumed.count("event: workflow_result\n") == 1
    assert '"status":"completed"' in resumed
    assert '"status":"running"' in saved
    assert saved.endswith('"deleted":true}')


# -- the examples ---------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """The built-in defaults: the local model and `one-agent`."""
    defaults = yaml.safe_load((ROOT / "planes/defaults.yaml").read_text())
    for name in set(defaults["providers"]) - {"local"}:
        del defaults["providers"][name]
    async with GatewayProcess(defaults, workdir=tmp_path_factory.mktemp("local")) as gateway:
        yield gateway


@pytest.mark.local_model
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
async def test_every_example_runs_on_the_local_model(
    local: GatewayProcess, path: Path, tmp_path: Path
) -> None:
    """Whatever a model of 135M parameters answers, the run ends well."""
    command = ["sluicegate", "run", "--server", local.base_url]
    code, out, err = await run(tmp_path, *command, str(path))
    if path.stem == "yield":
        assert (code, out) == (1, "")
        found = re.search(r"--resume (\w{32}) ", err)
        assert found is not None, err
        answer = ["--resume", found[1], "--answer", '{"ok": false}']
        code, out, err = await run(tmp_path, *command, *answer)
        assert "rewrite  completed  one-agent local/smollm2-135m" in err
    assert code == 0, err
    assert out.strip()
    assert re.search(r"\d+ tokens", err)
    if path.stem == "dynamic" and "research  failed" in err:
        assert "research  failed  one-agent" in err
        assert "invalid_plan: " in err


@pytest.mark.local_model
async def test_o1_1_what_the_start_prints_can_be_pasted(
    local: GatewayProcess, tmp_path: Path
) -> None:
    commands = re.findall(r"^    (curl .*?[^\\]\n)(?=\n)", local.stdout(), re.DOTALL | re.MULTILINE)
    assert len(commands) == 3, local.stdout()
    chat, workflow, decision = [
        (await run(tmp_path, "bash", "-c", f'curl() {{ command curl -sS "$@"; }}; {command}'))
        for command in commands
    ]
    for code, _, err in (chat, workflow, decision):
        assert (code, err) == (0, "")
    assert chat[1].endswith("data: [DONE]\n\n")
    seen = read(workflow[1].encode())
    assert seen.status == "completed"
    assert seen.texts["t1"]
    assert isinstance(json.loads(decision[1])["answers"]["angry"]["decision"], bool)
    found = re.search(r'base_url="(\S+/v1/agents/one-agent)"', local.stdout())
    assert found is not None
    client = openai.AsyncOpenAI(base_url=found[1], api_key=DEV_KEY)
    async with client:
        answer = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Say hi"}], max_tokens=8
        )
    assert answer.choices[0].message.content
