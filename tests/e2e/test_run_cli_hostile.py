"""`sluicegate run` against servers that are no gateways, and one that has to let it go (J2.2)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import KEY, ROOT
from tests.support.script import (
    Fin,
    Flood,
    Head,
    Raw,
    Send,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.workflows import document, flows, task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.script import Step

RUN: Final = "0" * 32


async def started(url: str, *arguments: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "planes.cli", "run", *arguments, "--server", url),
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "SLUICEGATE_KEY": KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def refusal(error: Any) -> list[Step]:
    return json_answer({"error": error}, status=400)


def events(*told: tuple[str, Any]) -> list[Step]:
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told)
    return [Head(headers={"content-type": "text/event-stream"}), Send(body.encode())]


BAD: Final = {"code": "invalid_workflow", "message": "\x1b[2J\x9b2J no"}
ENDS: Final = [("workflow_result", {"data": {"status": "failed"}})]
ROW: Final = {"status": "yielded", "waits_for": [1], "position": "x", "name": {}}


@pytest.mark.parametrize(
    ("arguments", "steps", "told"),
    [
        (["w"], events(("task_error", {"data": {"task_id": "t", "error": 1}}), *ENDS), "failed"),
        (["w"], events(("workflow_error", {"data": {"error": "\x1b"}}), *ENDS), "fail"),
        (["w"], refusal({**BAD, "details": {"problems": [1, "\x1b"]}}), "w: 1"),
        (["w"], refusal({**BAD, "details": {"problems": 7}}), "no"),
        (["w"], refusal([1]), "400 http_400"),
        (["w"], json_answer([[]], status=403), "403 http_403"),
        (["w"], [Head(status=404), Flood(b"x" * 65536, 100_000)], "404 http_404"),
        (["w"], [Raw(b"HTTP/1.1 4\x1b]0;x\x07 no\r\n\r\n"), Fin()], "no connection"),
        (["--cancel", RUN], json_answer([1]), "is this a gateway?"),
        (["--cancel", RUN], json_answer({"status": "\x1b[2J"}), "the execution is"),
        (["--resume", RUN], json_answer(ROW), "to answer"),
        (["--attach", "../x?\x1b#"], refusal({"message": "none"}), "none"),
    ],
)  # fmt: skip
async def test_whatever_a_server_answers_there_is_a_message(
    arguments: Sequence[str], steps: Sequence[Step], told: str, tmp_path: Path
) -> None:
    """No traceback, nothing that speaks to the terminal, and an end."""
    (tmp_path / "w").write_text("workflow: {}")
    async with FakeUpstream() as server:
        server.script(*steps)
        child = await started(server.origin, *arguments, cwd=tmp_path)
        _, err = await asyncio.wait_for(child.communicate(), 60)
        path = server.requests[0].path
    text = err.decode()
    assert told in text
    assert "Traceback" not in text
    assert not set(text) & set("\x1b\x07\x9b")
    assert child.returncode in ((0, 1, 2) if "--cancel" in arguments else (1, 2))
    assert path.startswith("/v1/workflows/execut")
    assert "/../" not in path


async def test_a_retry_after_that_is_no_number_is_none(tmp_path: Path) -> None:
    """It is followed again after a pause all the same."""
    async with FakeUpstream() as server:
        server.script(Raw("HTTP/1.1 503 no\r\nretry-after: ²\r\n\r\n".encode()), Fin())
        server.script(*events(*ENDS))
        child = await started(server.origin, "--attach", RUN, cwd=tmp_path)
        _, err = await asyncio.wait_for(child.communicate(), 60)
    assert b"following again from position 0" in err
    assert b"Traceback" not in err
    assert child.returncode == 1


async def test_j2_2_a_command_that_was_reset_follows_again(tmp_path: Path) -> None:
    """It is stopped while the run goes on, is let go by the gateway, and misses nothing."""
    word = "x" * 1000
    many = {
        "type": "batch", "id": "bt", "items": list(range(40)), "task": task("it", "a"),
        # One after the other: its queue is not over its bound before the kernel was asked.
        "concurrency": 1,
    }  # fmt: skip
    go = asyncio.Event()
    async with flows() as flow:
        sends = [Send(sse(chunk(word)))] * 300
        flow.up.script_for("up-a", Wait(go), *sends, *openai_stream([])[1:])
        (tmp_path / "w.json").write_text(json.dumps(document(many)))
        url = flow.gateway.base_url
        child = await started(url, "w.json", "--json", cwd=tmp_path)
        assert child.stdout is not None
        first = await asyncio.wait_for(child.stdout.readline(), 30)
        run = json.loads(first)["data"]["execution_id"]
        os.kill(child.pid, signal.SIGSTOP)  # nothing was said yet: its socket takes but little
        try:
            go.set()
            seen = await flow.events(run)
            await flow.line(f"run {run}: a client that fell behind is told to follow again")
        finally:
            os.kill(child.pid, signal.SIGCONT)
        out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err
    (notice,) = err.decode().splitlines()
    assert "the stream ended early; following again from position" in notice
    told = [json.loads(line) for line in (first + out).splitlines()]
    engine = [(each["event"], each["data"]) for each in told if each["event"] != "token"]
    assert engine == seen.events
    texts: dict[str, str] = {}
    for each in told:
        if each["event"] == "token":
            task_id, delta = each["data"]["task_id"], each["data"]["delta"]
            texts[task_id] = texts.get(task_id, "") + delta
    assert texts == seen.texts
    assert set(texts.values()) == {word * 300}
