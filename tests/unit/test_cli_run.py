"""`sluicegate run`: the command lines that are wrong, its help, and what it imports."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.ports import free_port
from planes import cli
from planes.cli_gateway import gateway_of, no_connection
from planes.cli_run import why
from planes.cli_run_given import read_value
from planes.cli_run_link import Refused
from planes.cli_run_tree import RunTree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)
    monkeypatch.delenv("SLUICEGATE_KEY", raising=False)
    return tmp_path


def ended(arguments: list[str]) -> Any:
    try:
        return cli.main(arguments)
    except SystemExit as exit_:
        return exit_.code


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:\n  sluicegate run triage.yaml\n" in text
    for option in ("--input", "--attach", "--resume", "--answer", "--cancel-on-interrupt"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give FILE, or one of --attach, --resume and --cancel"),
        (["-", "--attach", "x"], "give FILE, or one of"),
        (["--attach", "x", "--resume", "y"], "give FILE, or one of"),
        (["no.yaml"], "no.yaml: cannot be read: No such file"),
        (["-", "--input", "a"], "--input must be NAME=VALUE, not 'a'"),
        (["-", "--input", "=a"], "--input must be NAME=VALUE"),
        (["-", "--input", "a=1", "--input", "a=2"], "--input a is given twice"),
        (["-", "--input", "a=@none.txt"], "none.txt: cannot be read: No such file"),
        (["--attach", "x", "--input", "a=1"], "--input is for a run that begins"),
        (["-", "--input", "a=[1e400]"], "--input a: a number is larger than a double holds"),
        (["-", "--answer", "1"], "--answer is for --resume"),
        (["-", "--server", "localhost", "--key", "k"], "--server must begin with http"),
        (["-", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_a_wrong_command_line_is_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"workflow: {}")))
    assert ended(["run", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("a", "a"),
        ("", ""),
        ('"a"', "a"),
        ("[1, {}]", [1, {}]),
        ("null", None),
        ("a=b", "a=b"),
        ("{a: 1}", "{a: 1}"),
        ("@in.json", '{"a": 1}\n'),
        ('"@in.json"', "@in.json"),
        ("NaN", "NaN"),
        ("[123456789012345678901]", [123456789012345678901]),
    ],
)
def test_values_are_json_text_or_files(workdir: Path, text: str, value: Any) -> None:
    (workdir / "in.json").write_text('{"a": 1}\n')
    options = argparse.Namespace(parser=argparse.ArgumentParser())
    assert read_value(options, "--input x", text) == value


def test_with_server_and_key_no_configuration_is_read(
    capsys: pytest.CaptureFixture[str], workdir: Path
) -> None:
    """That of a gateway on this machine may be broken: it is none of this command's business."""
    (workdir / "sluicegate.yaml").write_text("nonsense: [")
    (workdir / "w.yaml").write_text("workflow: {}")
    server = f"http://127.0.0.1:{free_port()}"
    assert ended(["run", "w.yaml", "--server", server, "--key", "k"]) == 1
    told = "no connection (connection refused: does a gateway run there?)"
    assert capsys.readouterr().err == f"sluicegate: {server}: {told}\n"
    assert ended(["run", "w.yaml", "--server", server]) == 2
    assert "sluicegate.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_of_the_sdks_is_an_address_too(base: str) -> None:
    given = argparse.Namespace(server=base, key="k", config=None)
    assert gateway_of(given) == ("http://h:1", "k")


def test_why_there_is_no_connection_is_told_in_plain_words() -> None:
    assert no_connection(OSError(errno.EHOSTUNREACH, "Connect call failed ('h', 1)")) == (
        os.strerror(errno.EHOSTUNREACH)
    )
    assert no_connection(socket.gaierror(-2, "Name or service not known")) == (
        "Name or service not known"
    )
    assert no_connection(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        ("cancelled", ("cancelled", "it was", None), "cancelled: it was"),
        ("failed", ("task_failed", "task a failed: x: y", "a"), "failed: task a failed: x: y"),
        ("failed", ("timeout", "too long", None), "failed: timeout: too long"),
        ("failed", ("task_failed", "task ab broke", "a"), "failed: task ab broke (task a)"),
        ("failed", ("engine_error", "broke", "a"), "failed: engine_error: broke (task a)"),
    ],
)
def test_how_a_run_ended_says_nothing_twice(
    status: str, error: tuple[str, str, str | None], told: str
) -> None:
    tree = RunTree(None)
    tree.status = status
    tree.error = dict(zip(("code", "message", "task_id"), error, strict=True))
    assert why(tree) == told


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "no"}', b'{"error": null}'])
def test_a_refusal_of_something_else_is_told_too(body: bytes) -> None:
    refused = Refused(502, body, "")
    assert str(refused) == "502 http_502: HTTP 502"
    assert refused.may_pass
    assert not Refused(404, body, "").may_pass


def test_only_the_live_tree_imports_rich() -> None:
    """No other module of ours does, and this one does it where it draws."""
    found = []
    for path in sorted(ROOT.glob("planes/**/*.py")) + sorted(ROOT.glob("relay/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.partition(".")[0] == "rich" for name in names):
                found.append(path.name)
    assert set(found) == {"cli_run_view.py"}


def test_serve_and_check_import_nothing_of_the_live_tree() -> None:
    """structlog imports rich by itself where it finds it, so `serve` is watched without it."""
    program = (
        "import sys\n"
        "from planes import cli\n"
        "assert cli.main(['check']) == 0\n"
        "assert not {'rich', 'aiohttp', 'planes.cli_run_view'} & set(sys.modules)\n"
        "import structlog\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'rich']:\n"
        "    del sys.modules[name]\n"
        "import planes.server, planes.app\n"
        "assert not {'rich', 'planes.cli_run_view', 'planes.cli_run_link'} & set(sys.modules)\n"
    )
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
