"""`sluicegate run` against a gateway that runs: ends, cuts, Ctrl-C, answers."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from bench.ports import free_port
from tests.support.cutting import CuttingProxy
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import KEY, ROOT
from tests.support.script import Send, Wait, chunk, json_answer, openai_stream, sse
from tests.support.workflows import Flows, document, flows, task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKING = document(
    task("draft", "a"),
    {
        "type": "yield",
        "id": "approve",
        "prompt": "Publish {{ tasks.draft.output }}?",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    task("end", "b", prompt="{{ tasks.approve.output.ok }}"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Flows]:
    async with flows() as made:
        yield made


@pytest.fixture
def flow(shared: Flows) -> Flows:
    shared.says("one-agent", "hel", "lo")
    shared.says("a", "from ", "a")
    shared.says("b", "from ", "b")
    shared.up.requests.clear()
    return shared


class Command:
    """A command that runs, what it prints, and its end.

    Args:
        url: in place of the gateway's own.
    """

    def __init__(self, flow: Flows, *arguments: str, url: str = "") -> None:
        self.words = [sys.executable, "-m", "planes.cli", "run", *arguments]
        self.words += ["--server", url or flow.gateway.base_url]
        self._cwd = flow.gateway.workdir
        self.env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "SLUICEGATE_KEY": KEY}

    async def start(self, **pipes: Any) -> asyncio.subprocess.Process:
        streams = {name: asyncio.subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        return await asyncio.create_subprocess_exec(
            *self.words, cwd=self._cwd, env=self.env, **(streams | pipes)
        )

    async def run(self, stdin: str = "") -> tuple[int | None, str, str]:
        """Exit code, standard output and error."""
        child = await self.start()
        out, err = await asyncio.wait_for(child.communicate(stdin.encode()), 60)
        return child.returncode, out.decode(), err.decode()


def written(tmp_path: Path, workflow: Any) -> str:
    path = tmp_path / "w.yaml"
    path.write_text(workflow if isinstance(workflow, str) else yaml.safe_dump(workflow))
    return str(path)


def in_order(text: str, *parts: str) -> None:
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not in {text[at:]!r}"
        at = found + len(part)


async def until_asked(flow: Flows, count: int) -> None:
    async with asyncio.timeout(30):
        while len(flow.up.requests) < count:
            await asyncio.sleep(0.01)


async def text_until(stream: asyncio.StreamReader, part: str) -> str:
    """What a command says up to a word."""
    text = b""
    async with asyncio.timeout(30):
        while part.encode() not in text:
            piece = await stream.read(4096)
            assert piece, text
            text += piece
    return text.decode()


# -- ends -----------------------------------------------------------------------------------------


async def test_a_run_is_told_and_its_output_printed(flow: Flows, tmp_path: Path) -> None:
    file = written(tmp_path, document(task("t1", "a"), task("t2", prompt="{{ tasks.t1.output }}")))
    code, out, err = await Command(flow, file).run()
    assert (code, out) == (0, "hello\n")
    in_order(err, "w: started, execution", "t1  running  a m/a", "t1  completed", "from a")
    in_order(err, "t1  completed", "t2  running", "t2  completed", "w: completed")
    assert "\x1b" not in err


async def test_inputs_are_json_text_or_files(flow: Flows, tmp_path: Path) -> None:
    prompt = "{{ inputs.n }}|{{ inputs.t }}|{{ inputs.f }}"
    wanted = document(task("t1", prompt=prompt), inputs={"n": 0, "t": "", "f": ""})
    (tmp_path / "mail.txt").write_text("[1]\nGrüße")
    given = ['n={"a":[1]}', "t=a=b: c", f"f=@{tmp_path / 'mail.txt'}"]
    arguments = [word for each in given for word in ("--input", each)]
    code, out, err = await Command(flow, "-", *arguments).run(stdin=yaml.safe_dump(wanted))
    assert (code, out) == (0, "hello\n"), err
    assert flow.up.requests[0].json["messages"][-1]["content"] == '{"a":[1]}|a=b: c|[1]\nGrüße'


async def test_an_output_that_is_no_text_is_json(flow: Flows, tmp_path: Path) -> None:
    flow.says("a", '{"label": ', '"bug", "n": [1]}')
    code, out, _ = await Command(
        flow, written(tmp_path, document(task("t1", "a", json=True)))
    ).run()
    assert code == 0
    assert json.loads(out) == {"label": "bug", "n": [1]}


async def test_json_lines_are_the_stream(flow: Flows, tmp_path: Path) -> None:
    """Each line is an event of the run, and nothing else is printed there."""
    file = written(tmp_path, document(task("t1", "a"), task("t2", "b")))
    code, out, err = await Command(flow, file, "--json").run()
    assert (code, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    engine = [each for each in told if each["event"] != "token"]
    assert [each["position"] for each in engine] == list(range(1, len(engine) + 1))
    run = engine[0]["data"]["execution_id"]
    seen = await flow.events(run)
    assert [(each["event"], each["data"]) for each in engine] == seen.events
    tokens = [each for each in told if each["event"] == "token"]
    assert all(list(each) == ["event", "data"] for each in tokens)
    text = "".join(each["data"]["delta"] for each in tokens if each["data"]["task_id"] == "t1")
    assert text == "from a"


async def test_a_failure_is_1_and_says_why(flow: Flows, tmp_path: Path) -> None:
    flow.up.script_for("up-bad", *json_answer({"error": {"message": "no such thing"}}, status=400))
    code, out, err = await Command(flow, written(tmp_path, document(task("t1", "bad")))).run()
    assert (code, out) == (1, "")
    assert re.search(r"\nsluicegate: failed: task t1 failed: \w+: no such thing\n$", err)


async def test_w1_4_a_bad_document_is_2_with_its_places(flow: Flows, tmp_path: Path) -> None:
    text = "workflow:\n  name: w\n  tasks:\n    - {type: task, id: a, agent: nobody, promt: x}\n"
    file = written(tmp_path, text)
    code, out, err = await Command(flow, file, "--input", "x=1").run()
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) >= 3
    for line in lines[:-1]:
        assert re.match(re.escape(file) + r":4:\d+: workflow\.tasks\[0\]\S*: ", line), line
    assert lines[-1].startswith(f"{file}: inputs.x: "), lines[-1]
    (tmp_path / "w.yaml").write_bytes(b"workflow:\n  name: \xff\n")
    code, _, err = await Command(flow, file).run()
    assert (code, err) == (2, f"{file}:2: the document is not UTF-8\n")


async def test_refusals_and_no_gateway_are_1(flow: Flows, tmp_path: Path) -> None:
    file = written(tmp_path, document(task("t1", "a")))
    code, out, err = await Command(flow, file, "--key", "ozk_wrong").run()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"sluicegate: 401 invalid_api_key: .* \(request req_\w+\)\n", err)
    code, _, err = await Command(flow, "--attach", "0" * 32).run()
    assert code == 1
    assert err.startswith("sluicegate: 404 not_found: ")
    url = f"http://127.0.0.1:{free_port()}"
    code, _, err = await Command(flow, file, url=url).run()
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(f"sluicegate: {url}: no connection (connection refused: does a gateway")


# -- cuts -----------------------------------------------------------------------------------------


async def test_w2_6_a_connection_that_breaks_is_taken_up_again(flow: Flows, tmp_path: Path) -> None:
    """Cut by FIN and by RST, in a text and in a head: the events are those of the run."""
    go = asyncio.Event()
    words = [f"wörd{n} " for n in range(300)]
    steps = [Send(sse(chunk(word))) for word in words]
    flow.up.script_for("up-slow", *steps[:250], Wait(go), *steps[250:], *openai_stream([])[1:])
    file = written(tmp_path, document(task("t1", "a"), task("t2", "slow"), task("t3", "b")))
    cuts = [2500, 700, 1500, 100]
    async with CuttingProxy(flow.gateway.host, flow.gateway.port, cuts=cuts) as way:
        child = await Command(flow, file, "--json", url=way.url).start()
        assert child.stdout is not None
        async with asyncio.timeout(60):
            while way.connections < 5:
                await asyncio.sleep(0.01)
        go.set()
        out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    engine = [each for each in told if each["event"] != "token"]
    seen = await flow.events(engine[0]["data"]["execution_id"])
    assert [(each["event"], each["data"]) for each in engine] == seen.events
    texts: dict[str, str] = {}
    for each in told:
        if each["event"] == "token":
            task_id, delta = each["data"]["task_id"], each["data"]["delta"]
            texts[task_id] = texts.get(task_id, "") + delta
    assert texts == seen.texts
    assert texts["t2"] == "".join(words)
    notices = err.decode().splitlines()
    assert len(notices) >= 3, "a cut in a head may be tried again at once"
    for notice in notices:
        assert re.search(r"following again from position \d+ in \d+\.\d s$", notice), notice
    assert [json.loads(request.body)["model"] for request in flow.up.requests] == [
        *("up-a", "up-slow", "up-b")
    ], "each task was run once"


async def test_w2_6_a_restart_of_the_gateway_is_outlived(tmp_path: Path) -> None:
    """It drains and ends in the middle of a text; the next one has the run, and the command too."""
    workdir = tmp_path / "gateway"
    workdir.mkdir()
    file = written(tmp_path, document(task("t1", "a"), task("t2", "slow")))
    server = {"shutdown_grace_s": 0.2}
    async with FakeUpstream() as up, CuttingProxy("", 0, cuts=[]) as way:
        async with flows(up, workdir, server=server) as first:
            way.to = first.gateway.host, first.gateway.port
            first.says("a", "from ", "a")
            first.hangs("slow", "half an ")
            child = await Command(first, file, "--json", url=way.url).start()
            await until_asked(first, 2)
            assert child.stdout is not None
            said = await text_until(child.stdout, "half an ")
            first.gateway.terminate()
            await first.gateway.wait(30)
            assert child.returncode is None
        # Before the next process is there: it takes the run up as it starts.
        first.says("slow", "the whole ", "answer")
        async with flows(up, workdir, server=server) as second:
            way.to = second.gateway.host, second.gateway.port
            out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err
    assert "following again from position" in err.decode()
    told = [json.loads(line) for line in (said + out.decode()).splitlines()]
    names = [(each["event"], each["data"].get("data", {}).get("task_id")) for each in told]
    assert names.count(("task_completed", "t1")) == 1
    assert names.count(("streaming_started", "t2")) == 2
    text = ""
    for each in told:
        if each["event"] == "streaming_started":
            text = ""
        elif each["event"] == "token":
            text += each["data"]["delta"]
    assert text == "the whole answer"
    positions = [each["position"] for each in told if "position" in each]
    assert positions == list(range(1, len(positions) + 1))


async def test_attach_follows_from_the_beginning(flow: Flows) -> None:
    _, run = await flow.stream(document(task("t1", "a"), task("t2", "b")))
    code, out, err = await Command(flow, "--attach", run).run()
    assert (code, out) == (0, "from b\n")
    in_order(err, f"execution {run}", "t1  completed", "t2  completed", "w: completed")


# -- Ctrl-C ---------------------------------------------------------------------------------------


async def test_j2_5_ctrl_c_leaves_the_run_alone(flow: Flows, tmp_path: Path) -> None:
    go = asyncio.Event()
    flow.hangs("slow", "so far", until=go)
    child = await Command(flow, written(tmp_path, document(task("t1", "slow")))).start()
    await until_asked(flow, 1)
    assert child.stderr is not None
    said = await text_until(child.stderr, "t1  running")
    child.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(child.communicate(), 30)
    assert (child.returncode, out) == (1, b"")
    found = re.search(r"execution ([0-9a-f]{32})", said)
    assert found is not None
    run = found[1]
    server = f"--server {flow.gateway.base_url}"
    in_order(
        err.decode(),
        f"  sluicegate run --attach {run} {server}\n",
        f"  sluicegate run --cancel {run} {server}\n",
    )
    assert KEY not in err.decode()
    assert (await flow.status(run))["status"] == "running"
    go.set()
    code, text, _ = await Command(flow, "--attach", run).run()
    assert (code, text) == (0, "so far\n")


async def test_cancel_on_interrupt_and_by_command(flow: Flows, tmp_path: Path) -> None:
    file = written(tmp_path, document(task("t1", "slow")))
    flow.hangs("slow", "so far")
    child = await Command(flow, file, "--cancel-on-interrupt").start()
    await until_asked(flow, 1)
    assert child.stderr is not None
    said = await text_until(child.stderr, "t1  running")
    child.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 1
    in_order(
        said + err.decode(),
        "cancelling the run",
        "w: cancelled",
        "sluicegate: cancelled: the run was",
    )
    run = await flow.begin(document(task("t1", "slow")))
    await until_asked(flow, 2)
    code, out, err_text = await Command(flow, "--cancel", run).run()
    assert (code, out) == (0, "")
    assert "the execution is " in err_text
    async with asyncio.timeout(30):
        while (await flow.status(run))["status"] == "running":
            await asyncio.sleep(0.02)
    assert (await flow.status(run))["status"] == "cancelled"


# -- answers --------------------------------------------------------------------------------------


async def test_w2_3_a_run_that_waits_says_how_to_answer(flow: Flows, tmp_path: Path) -> None:
    code, out, err = await Command(flow, written(tmp_path, ASKING)).run()
    assert (code, out) == (1, "")
    assert "the run waits for an answer: Publish from a?\nJSON that fits {" in err
    found = re.search(r"  sluicegate run --resume (\w{32}) --answer JSON --server \S+\n$", err)
    assert found is not None
    run = found[1]
    code, out, err = await Command(flow, "--resume", run).run()
    assert code == 1
    assert "waits for an answer: Publish from a?" in err
    code, out, err = await Command(flow, "--resume", run, "--answer", "yes").run()
    assert (code, out) == (2, "")
    assert "400" in err
    code, out, err = await Command(flow, "--resume", run, "--answer", '{"ok": true}').run()
    assert (code, out) == (0, "from b\n")
    assert "t1" not in err
    in_order(err, "approve  completed", "end  running", "w: ", "completed")
    assert flow.up.requests[-1].json["messages"][-1]["content"] == "true"
    code, _, err = await Command(flow, "--resume", run, "--answer", '{"ok": true}').run()
    assert code == 1
    assert "409 not_waiting" in err
    code, out, err = await Command(flow, "--attach", run).run()
    assert (code, out) == (0, "from b\n"), err


class Terminal:
    """A terminal of 100 columns, as the command's own input and error."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        os.set_blocking(self.ours, False)
        self.text = ""

    @property
    def plain(self) -> str:
        """What was written, without its colours and moves."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    async def until(self, part: str) -> None:
        async with asyncio.timeout(30):
            while part not in self.plain:
                try:
                    self.text += os.read(self.ours, 65536).decode()
                except BlockingIOError:
                    await asyncio.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


async def test_on_a_terminal_it_draws_and_asks(flow: Flows, tmp_path: Path) -> None:
    terminal = Terminal()
    command = Command(flow, written(tmp_path, ASKING))
    command.env |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    child = await command.start(stdin=terminal.theirs, stderr=terminal.theirs)
    try:
        await terminal.until("answer> ")
        in_order(terminal.plain, "w  yielded", "├── draft  completed  a m/a", "from a")
        in_order(
            terminal.plain,
            "└── approve  waits for an answer",
            "Publish from a?",
            "JSON that fits {",
        )
        for wrong, why in (("yes\n", "that is no JSON"), ('{"ok": 1}\n', "sluicegate: ")):
            terminal.text = ""
            terminal.type(wrong)
            await terminal.until(why)
            await terminal.until("answer> ")
        terminal.text = ""
        terminal.type('{"ok": false}\n')
        assert await asyncio.wait_for(child.wait(), 30) == 0
        assert child.stdout is not None
        assert await child.stdout.read() == b"from b\n"
        await terminal.until("w  completed")
        in_order(terminal.plain, "draft", "approve", "end")
    finally:
        terminal.close()
    assert flow.up.requests[-1].json["messages"][-1]["content"] == "false"


async def test_at_the_prompt_ctrl_c_tells_the_ways(flow: Flows, tmp_path: Path) -> None:
    terminal = Terminal()
    command = Command(flow, written(tmp_path, ASKING))
    command.env["TERM"] = "dumb"
    child = await command.start(stdin=terminal.theirs, stderr=terminal.theirs)
    try:
        await terminal.until("answer> ")
        assert "\x1b" not in terminal.text
        child.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(child.wait(), 30) == 1
        await terminal.until("sluicegate run --cancel ")
    finally:
        terminal.close()
