"""How the commands name themselves in what they tell one to paste (O2)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from planes.cli_common import program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        (".venv/bin/sluicegate", "", ".venv/bin/sluicegate"),
        (".venv/bin/sluicegate", "other", ".venv/bin/sluicegate"),
        (".venv/bin/sluicegate", ".venv/bin", "sluicegate"),
        ("planes/cli.py", "", "sluicegate"),
        ("sluicegate", "", "sluicegate"),
    ],
)
def test_a_command_to_paste_begins_as_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: str, shown: str
) -> None:
    """In a clone nothing is on the PATH, or another installation is."""
    for folder in (".venv/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "sluicegate").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setenv("PATH", str(tmp_path / on_path) if on_path else "/nowhere")
    assert program() == shown
