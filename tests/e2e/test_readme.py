"""The README's commands, run as they stand there (O1.1)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.ports import free_port
from planes.config_file import load_text
from tests.support.node import node_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway on its built-in defaults, as `scripts/serve` runs it."""
    port = free_port()
    command = [sys.executable, "-m", "planes.cli", "serve", "--port", str(port)]
    with subprocess.Popen(
        command,
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        banner = ""
        for line in process.stdout:
            banner += line
            if "OpenAI SDK" in line:
                break
        assert "by local" in banner, f"the local model did not start:\n{banner}"
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(30) == 0


def run(*command: str, cwd: Path | None = None) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.local_model
def test_curl(base: str) -> None:
    curls = [
        block.replace("http://127.0.0.1:8080", base)
        for block in blocks("sh")
        if block.startswith("curl")
    ]
    chat, workflow, agent, decide = (run("bash", "-c", block) for block in curls)
    assert chat.endswith("data: [DONE]\n\n")
    assert '"provider":"local"' in chat
    assert workflow.count("event: streaming_started") == 2
    assert "event: token" in workflow
    assert '"status":"completed","final_task_id":"short"' in workflow.split("event: ")[-1]
    assert agent.endswith("data: [DONE]\n\n")
    assert '"model":"local/smollm2-135m"' in agent
    answers = json.loads(decide)["answers"]
    assert isinstance(answers["angry"]["decision"], bool)


@pytest.mark.local_model
def test_the_run_of_an_example(base: str) -> None:
    (command,) = re.findall(r"^\.venv/bin/sluicegate (run .*)", README, re.MULTILINE)
    words = [*shlex.split(command), "--server", base, "--key", "ozk_dev_0123456789abcdef"]
    assert run(sys.executable, "-m", "planes.cli", *words, cwd=ROOT).strip()


def libraries(programs: list[str]) -> list[str]:
    """What each program imports first from elsewhere: its name in the test's id."""
    return [re.findall(r"from \"?([@\w/-]+)\"?", program)[0] for program in programs]


@pytest.mark.local_model
@pytest.mark.parametrize("program", blocks("python"), ids=libraries(blocks("python")))
def test_python_clients(base: str, program: str) -> None:
    """Each program as it stands: it prints an answer, and its count of tokens if it asks for it."""
    out = run(sys.executable, "-c", program.replace("http://127.0.0.1:8080", base))
    assert out.strip()
    if "total_tokens" in program:
        assert re.search(r"\n\d+ tokens\n$", out)


@pytest.mark.local_model
@pytest.mark.node
@pytest.mark.parametrize("program", blocks("js"), ids=libraries(blocks("js")))
def test_node_clients(base: str, program: str) -> None:
    script = ROOT / "tests/node/readme.generated.mjs"  # beside its node_modules
    script.write_text(program.replace("http://127.0.0.1:8080", base))
    try:
        assert run(str(node_binary()), str(script)).strip()
    finally:
        script.unlink()


def test_the_example_configuration_is_right(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    settings = load_text(example, {})
    assert list(settings.models) == ["fast"]
    (tmp_path / "sluicegate.yaml").write_text(example)
    commands = re.findall(r"^\.venv/bin/sluicegate (?!run )(.*)", README, re.MULTILINE)
    told = {}
    for command in commands:  # in their order: what one creates the next one lists
        words = shlex.split(command)
        told[" ".join(words[:2])] = run(sys.executable, "-m", "planes.cli", *words, cwd=tmp_path)
    assert "sluicegate.yaml: ok" in told["check sluicegate.yaml"]
    assert "vllm/meta-llama" in told["models --config"]
    assert told["keys create"].strip().startswith("ozk_")
    assert "acme" in told["keys list"]
    assert "acme    10.000000" in told["balance acme"]
    assert "usage --since" in told


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings; no page has two alike that are named."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_anchor_is_a_heading() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    checked = 0
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            meant = (page.parent / target) if target else page
            assert anchor in anchors(meant.resolve()), f"{page}: {target}#{anchor}"
            checked += 1
    assert checked


def test_every_provider_key_named_is_a_default() -> None:
    defaults = (ROOT / "planes/defaults.yaml").read_text()
    named = set(re.findall(r"`([A-Z]+_API_KEY)`", README))
    assert named
    assert {name for name in named if f"${{{name}:-}}" not in defaults} == set()


def test_what_must_run_is_executable() -> None:
    for name in ("scripts/serve", "scripts/test", ".ci/run"):
        assert (ROOT / name).stat().st_mode & 0o100, name
