"""The bench in its smallest size: that it runs and what it prints, never its figures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench import __main__ as bench
from bench import report, targets
from bench.process import cpu_s, rss_kib, started_program, tree
from bench.report import COLUMNS, Figures
from tests.support.gateway import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_the_smallest_run_prints_the_whole_table() -> None:
    command = [sys.executable, "-m", "bench", "--quick", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--targets", f"{targets.OURS},{targets.PASS_THROUGH}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 rounds, medians; ")
    for name in (targets.NGINX, targets.LITELLM):
        assert f"left out: {name}: not asked for" in lines
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert [cell.strip() for cell in table[0]] == ["target", *(column[1] for column in COLUMNS)]
    assert [row[0].strip() for row in table[2:]] == [targets.OURS, targets.PASS_THROUGH]
    for row in table[2:]:
        assert [cell for cell in row[1:] if not re.fullmatch(r" -?[\d,]+(\.\d+)? ", cell)] == []
        rate, first_token_ms = float(row[4].replace(",", "")), float(row[6])
        assert rate > 0
        assert first_token_ms > 0
    verdicts = lines[-5:]
    assert all(re.match(r"(holds|MISSED|not measured) +\w", line) for line in verdicts), verdicts
    assert sum(line.startswith("not measured") and "LiteLLM" in line for line in verdicts) == 2


def figures(**values: float) -> Figures:
    out = Figures()
    for name, value in values.items():
        out.add(name, value)
    return out


def test_the_verdicts_follow_the_medians() -> None:
    """Ours against the pass-through and LiteLLM; what was not run is neither met nor missed."""
    ours = figures(paced_cpu_s=130, burst_cpu_s=13, idle_kib=84)
    ours.add("paced_cpu_s", 10_000)  # one bad round of three
    ours.add("paced_cpu_s", 100)
    plain = figures(paced_cpu_s=100, burst_cpu_s=9.9, idle_kib=20)
    found = report.verdicts({targets.OURS: ours, targets.PASS_THROUGH: plain})
    assert [verdict.holds for verdict in found] == [True, False, None, None, True]
    peer = figures(paced_cpu_s=1299, burst_cpu_s=130)
    found = report.verdicts({targets.OURS: ours, targets.LITELLM: peer})
    assert [verdict.holds for verdict in found] == [None, None, False, True, None]


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--targets", "sluicegate,apache"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            bench.parse_options(wrong)
        assert "error:" in capsys.readouterr().err


def test_a_process_is_measured_with_what_it_started(tmp_path: Path) -> None:
    """CPU of children, running or ended, and memory of running ones."""
    program = tmp_path / "parent.py"
    program.write_text(
        "import subprocess, sys\n"
        "spin = 'import time\\nwhile time.process_time() < 0.3: pass\\n'\n"
        "subprocess.run([sys.executable, '-c', spin])\n"
        "child = subprocess.Popen([sys.executable, '-c',\n"
        '    spin + \'held = b"x" * 50_000_000\\nprint("ready", flush=True)\\ninput()\'],\n'
        "    stdin=subprocess.PIPE)\n"
        "try:\n"
        "    sys.stdin.read()\n"
        "    child.wait()\n"
        "finally:\n"
        "    child.kill()\n"
    )
    # The child ends when its parent does: it reads from a pipe of the parent's.
    with started_program(sys.executable, str(program)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(tree(process.pid)) == 2
        assert cpu_s(process.pid) >= 0.6
        assert rss_kib(process.pid) >= 50_000_000 // 1024


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "PEERS", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    for start in (targets.litellm, targets.nginx):
        with pytest.raises(targets.LeftOut, match=r"--peers|apt-get"), start(1):
            pass
