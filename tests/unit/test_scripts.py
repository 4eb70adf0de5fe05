"""The scripts of O1 find their repository however they are called."""

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
