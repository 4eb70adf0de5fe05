"""The scripts of O1 find their repository however they are called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = '#!/usr/bin/env bash\necho "$(basename "$0") $*"\n'


def stub(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STUB)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ("serve", ["setup serve", "sluicegate serve --port 1"]),
        ("test", ["setup test", "python -m pytest --port 1"]),
    ],
)
def test_a_script_runs_through_a_symlink(tmp_path: Path, script: str, ends: list[str]) -> None:
    """`ln -s …/scripts/serve ~/bin/gateway`."""
    home = tmp_path / "home"
    for name in ("scripts/setup", ".venv/bin/sluicegate", ".venv/bin/python"):
        stub(home / name)
    (home / "scripts" / script).write_bytes((ROOT / "scripts" / script).read_bytes())
    link = tmp_path / "bin/gateway"
    link.parent.mkdir()
    link.symlink_to(f"../home/scripts/{script}")
    done = subprocess.run(
        ["bash", str(link), "--port", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ends


OLD = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n'


@pytest.mark.parametrize(
    ("there", "asked", "told"),
    [
        ("python3", "", "python3 is Python 3.9.2."),
        ("", "", "python3 is not there."),
        ("python3", "/nowhere/python", "/nowhere/python is not there."),
        ("old", "old", "old is Python 3.9.2."),
    ],
)
def test_a_python_that_is_too_old_is_told_by_its_version(
    tmp_path: Path, there: str, asked: str, told: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "env", "head", "readlink", "rm", "tr"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if there:
        (tools / there).write_text(OLD)
        (tools / there).chmod(0o755)
    home = tmp_path / "home"
    (home / "scripts/lock").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    for name in ("serve-local", "serve", "test"):
        (home / f"scripts/lock/{name}.txt").touch()
    (home / "scripts/setup").write_bytes((ROOT / "scripts/setup").read_bytes())
    environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"PATH": str(tools)}
    done = subprocess.run(
        [str(tools / "bash"), str(home / "scripts/setup"), "serve"],
        env=environment | ({"PYTHON": asked} if asked else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"setup: Python 3.11 or newer is needed; {told} "
        "Install one and set PYTHON=/path/to/python3 if it is not on the PATH.\n"
    )
    assert not (home / ".venv").exists()
