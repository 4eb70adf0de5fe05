"""`sluicegate decide` and `sluicegate stream`: the command lines that are wrong, and the helps."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.ports import free_port
from planes import cli
from planes.cli_decide import Conversation

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)
    monkeypatch.delenv("SLUICEGATE_KEY", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", ["decide", "stream"])
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  sluicegate {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["decide"], "required: FILE"),
        (["decide", "no.json"], "no.json: cannot be read: No such file"),
        (["decide", "-", "--url", "localhost"], "--server must begin with http"),
        (["stream", "-", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_a_wrong_command_line_is_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    code: Any
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", '"text"'])
def test_a_line_that_is_no_message_is_named(
    capsys: pytest.CaptureFixture[str], workdir: Path, line: str
) -> None:
    (workdir / "m.jsonl").write_text(f'{{"type": "start"}}\n\n{line}\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["stream", "m.jsonl"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "m.jsonl:3: not a JSON object\n"


@pytest.mark.parametrize("command", [["decide"], ["stream"], ["run"], ["run", "--attach"]])
@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--key", ""], "--key is empty; leave it out to use $SLUICEGATE_KEY or the conf"),
        (["--key= "], "--key is empty"),
        (["--server", ""], "--server is empty; leave it out to use the configuration's"),
        (["--url="], "--server is empty"),
    ],
)
def test_an_option_that_is_empty_is_no_option_left_out(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workdir: Path,
    command: list[str],
    option: list[str],
    told: str,
) -> None:
    """Of a variable that is not set: neither another key nor another gateway is used instead."""
    monkeypatch.setenv("SLUICEGATE_KEY", "ozk_of_the_environment")
    (workdir / "sluicegate.yaml").write_text("keys: [{key: ozk_first, org: o}]\n")
    (workdir / "q.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "q.json", *option])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_no_key_is_told(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    (workdir / "sluicegate.yaml").write_text("keys: [{key: k1, org: o, status: revoked}]\n")
    (workdir / "q.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["decide", "q.json"])
    assert ended.value.code == 2
    assert "give --key or $SLUICEGATE_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decide", "stream"])
def test_no_gateway_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], workdir: Path, command: str
) -> None:
    (workdir / "q").write_text('{"type": "start"}')
    url = f"http://127.0.0.1:{free_port()}"
    assert cli.main([command, "q", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluicegate: {url}: ")


def frame(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_what_is_owed_is_waited_for() -> None:
    said = Conversation()
    start = said.complete(frame("start", decision_mode="on_change"))
    assert start["event_id"] == "evt_1"
    assert said.take(frame("ack", state_version=1, scheduled=True))
    assert said.complete(frame("append_text", text="x"))["event_id"] == "evt_2"
    assert said.complete(frame("append_text", event_id="evt_7"))["event_id"] == "evt_7"
    assert said.complete(frame("decide"))["state_version"] == 1
    assert said.complete(frame("pong", nonce=1)) == frame("pong", nonce=1)
    assert said.take(frame("ack", state_version=2, scheduled=True))
    assert not said.take(frame("decision", state_version=1))
    assert said.owed == 2
    retry = {"should_retry": True}
    assert not said.take(frame("error", phase="decide", retry=retry, fatal=False))
    assert said.owed == 2  # the gateway tries again by itself
    assert not said.take(frame("decision", state_version=2))
    assert (said.owed, said.failed) == (0, True)


def test_a_failure_that_nobody_tries_again_is_not_waited_for() -> None:
    said = Conversation()
    said.complete(frame("start", decision_mode="on_request"))
    said.take(frame("ack", state_version=1, scheduled=False))
    assert said.owed == 0
    assert said.take(frame("scheduled", state_version=1))
    said.take(frame("error", phase="decide", retry={"should_retry": True}, fatal=False))
    assert said.owed == 0
    said.take(frame("goodbye"))
    assert said.over
