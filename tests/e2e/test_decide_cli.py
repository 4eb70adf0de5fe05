"""`sluicegate decide` and `sluicegate stream` against a gateway that runs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from system_zero import decisions_for

from tests.support.decisions import MODEL, QUESTIONS, SECOND_KEY, config, gateway, start
from tests.support.gateway import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.gateway import GatewayProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process


async def run(
    process: GatewayProcess, *arguments: str, stdin: str = "", env: dict[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Runs a command; its exit code, standard output and error."""
    command = [sys.executable, "-m", "planes.cli", *arguments, "--url", process.base_url]
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=process.workdir,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | (env or {}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(stdin.encode()), 60)
    return child.returncode, out.decode(), err.decode()


def question(state: str = "Paid.") -> dict[str, Any]:
    return {"model": MODEL, "state": state, "questions": QUESTIONS}


async def test_decide(shared: GatewayProcess, tmp_path: Path) -> None:
    """The key is the configuration's; the reply is printed as it came."""
    file = tmp_path / "q.json"
    file.write_text(json.dumps(question(), indent=1))
    code, out, err = await run(shared, "decide", str(file), "--idempotency-key", "k")
    assert (code, err) == (0, "")
    assert decisions_for(json.loads(out))["ready"].decision is True
    assert (await run(shared, "decide", str(file), "--idempotency-key", "k"))[1] == out
    code, out, _ = await run(shared, "decide", "-", "--events", stdin=json.dumps(question()))
    assert code == 0
    assert out.startswith("event: decision\ndata: {")
    assert out.endswith("event: done\ndata: {}\n\n")


async def test_a_refusal_is_one_line(shared: GatewayProcess) -> None:
    code, out, err = await run(shared, "decide", "-", stdin="{}")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"sluicegate: 400 invalid_request: model is missing \(request req_\w+\)\n", err
    )
    for command in ("decide", "stream"):
        code, _, err = await run(shared, command, "-", stdin="{}", env={"SLUICEGATE_KEY": "no"})
        assert code == 1
        assert err.startswith("sluicegate: 401 invalid_api_key: ")
    failing = json.dumps(question("!delay=0.1 !error=system_zero_timeout"))
    code, out, _ = await run(shared, "decide", "-", "--events", stdin=failing)
    assert code == 1
    assert out.startswith("event: error\n")


def lines(*messages: dict[str, Any]) -> str:
    return "".join(json.dumps(message) + "\n" for message in messages)


async def test_stream(shared: GatewayProcess) -> None:
    """Ids and versions are filled in; what is owed is waited for."""
    first = start("a")
    del first["event_id"]
    said = lines(first, {"type": "append_text", "text": "b"}, {"type": "decide"}) + "\n"
    said += lines({"type": "replace", "state": "c"}, {"type": "decide"})
    code, out, err = await run(shared, "stream", "-", "--json", stdin=said)
    assert (code, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert [each["frame"]["type"] for each in told] == [
        *("hello", "ack", "ack", "scheduled", "decision", "ack", "scheduled", "decision")
    ]
    assert [each["at_s"] for each in told] == sorted(each["at_s"] for each in told)
    assert told[4]["frame"]["covered_event_ids"] == ["evt_1", "evt_2"]
    code, out, _ = await run(
        shared,
        *("stream", "-", "--key", SECOND_KEY),
        stdin=lines(start("!delay=0.3 ", mode="on_change"), {"type": "append_text", "text": "d"}),
    )
    assert code == 0
    rows = [re.fullmatch(r" *(\d+\.\d{3}) ([<>]) (\{.*\})", line) for line in out.splitlines()]
    assert all(rows)
    ways = "".join(row[2] for row in rows if row)
    assert ways.startswith("<><><")
    last = json.loads(rows[-1][3]) if rows[-1] else {}
    assert (last["type"], last["state_version"]) == ("decision", 2)


async def test_a_stream_that_goes_wrong_is_1(shared: GatewayProcess) -> None:
    code, out, _ = await run(shared, "stream", "-", stdin=lines({"type": "append_text"}))
    assert code == 1
    assert '"code":"stream_invalid_message"' in out
    wrong = lines({"type": "no"}, {"type": "no"}, {"type": "no"}, {"type": "decide"})
    code, out, err = await run(shared, "stream", "-", stdin=wrong)
    assert code == 1
    assert '"type":"goodbye"' in out
    assert err == "sluicegate: closed: 1008 policy\n"
