"""A workflow engine of somebody else's: a process of its own that says what a test tells it to.

    async with RemoteEngine() as engine:
        await engine.script("/execute", Send(started("a", engine.stream("a"))), Gate("go"), Rst())
        await engine.script("/streams/a", *openai_stream(["Hi"]))
        ...                                   # a gateway executes a document at `engine.base_url`
        await engine.open_gate("go")
        request = await engine.request("/execute")

Paths stand below the engine's base URL. The process is `FakeUpstream` with scripts by path; its
steps are those of `tests.support.script`, to the byte, and `Gate`, which waits for the test. What
has no script is answered 404. It is told by its standard input what to do, and answers there.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import pickle
import signal
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.fake_upstream import FakeUpstream, RecordedRequest
from tests.support.script import Step, Wait, completed, json_answer

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
BASE = "/engine/v1"

_TIMEOUT_S = 20.0
_LINE_MAX = 256 * 1024 * 1024


@dataclass(frozen=True)
class Gate:
    """Silence until the test opens the gate of this name."""

    name: str


@dataclass(frozen=True)
class Seen:
    """One request as the engine got it, and how far its answer is.

    Attributes:
        path: with its query. headers: names in lower case. answered: whether its script is done.
        closed: whether the peer closed the connection. written: bytes that the kernel took.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    answered: bool
    closed: bool
    written: int

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)


class RemoteEngine:
    """The process, as a test holds it; an async context manager."""

    _process: asyncio.subprocess.Process

    def __init__(self) -> None:
        self.port = 0
        self._lock = asyncio.Lock()

    @property
    def origin(self) -> str:
        """Its address without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """Its address as `workflows.engine.base_url`."""
        return self.origin + BASE

    def stream(self, name: str) -> str:
        """The URL of a sub-stream, whose path is `/streams/<name>`."""
        return f"{self.base_url}/streams/{name}"

    async def script(self, path: str, *steps: Step | Gate) -> None:
        """Queues the answer to the next request for a path below the base URL."""
        await self._tell("script", path, steps)

    async def open_gate(self, name: str) -> None:
        """Lets all that waits at this gate go on, now and later."""
        await self._tell("open", name)

    async def seen(self, path: str) -> list[Seen]:
        """The requests for a path so far."""
        found: list[Seen] = await self._tell("seen", path)
        return found

    async def request(self, path: str, index: int = 0, *, closed: bool = False) -> Seen:
        """The request of that number for a path, waited for; `closed`: until its peer left."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                found = await self.seen(path)
                if len(found) > index and (found[index].closed or not closed):
                    return found[index]
                await asyncio.sleep(0.01)

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.remote_engine", str(os.getpid()),
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_LINE_MAX,
        )  # fmt: skip
        try:
            self.port = await self._answer()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def _tell(self, what: str, *arguments: object) -> Any:
        async with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(_packed((what, arguments)))
            await self._process.stdin.drain()
            return await self._answer()

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(_TIMEOUT_S):
            line = await self._process.stdout.readline()
        assert line, "the engine's process has died"
        return pickle.loads(base64.b64decode(line))


# --- what an engine says --------------------------------------------------------------------------


def said(name: str, **data: object) -> bytes:
    """A frame as engines write them: the envelope of W2.1 around `data`."""
    payload = {
        "workflow_id": "wf_1",
        "execution_id": "e" * 32,
        "timestamp": "2026-11-30T12:00:00.000Z",
        "type": name,
        "data": data,
        "elapsed_ms": 1.50,
    }
    # Spaces and escapes as no encoder of ours writes them.
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n".encode()


def started(task: str, url: str | None = None, shape: str | None = None) -> bytes:
    """A `streaming_started`, with a sub-stream if it has a URL."""
    more = {"stream_url": url, "shape": shape}
    return said(
        "streaming_started",
        task_id=task,
        **{key: value for key, value in more.items() if value is not None},
    )


def ended(task: str) -> bytes:
    """A `streaming_completed` and a `task_completed`."""
    return said("streaming_completed", task_id=task) + said("task_completed", task_id=task)


def outcome(final: str | None = "a") -> bytes:
    """A `workflow_completed`."""
    summary = {"tasks": 1, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    return said("workflow_completed", final_task_id=final, execution_summary=summary)


def result(status: str = "completed") -> bytes:
    """A `workflow_result`."""
    return said("workflow_result", status=status)


# --- the process ----------------------------------------------------------------------------------


@dataclass
class _Scripts:
    """What the process knows."""

    by_path: defaultdict[str, deque[tuple[Step, ...]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    gates: defaultdict[str, asyncio.Event] = field(
        default_factory=lambda: defaultdict(asyncio.Event)
    )


class _Played(FakeUpstream):
    """A `FakeUpstream` whose scripts belong to paths."""

    def __init__(self, scripts: _Scripts) -> None:
        super().__init__()
        self._by_path = scripts.by_path

    def record(self, request: RecordedRequest) -> tuple[Step, ...]:
        self.requests.append(request)
        queue = self._by_path[_path_of(request)]
        missing = json_answer({"error": {"message": "no script for this"}}, status=404)
        return queue.popleft() if queue else completed(missing)


def _path_of(request: RecordedRequest) -> str:
    return request.path.partition("?")[0].removeprefix(BASE)


def _packed(value: object) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


async def _serve() -> None:
    scripts = _Scripts()
    async with _Played(scripts) as played:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE_MAX)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        _reply(played.port)
        while line := await reader.readline():
            what, arguments = pickle.loads(base64.b64decode(line))
            _reply(_obey(scripts, played, what, *arguments))


def _obey(scripts: _Scripts, played: _Played, what: str, *arguments: Any) -> object:
    if what == "script":
        path, steps = arguments
        made = [Wait(scripts.gates[s.name]) if isinstance(s, Gate) else s for s in steps]
        scripts.by_path[path].append(completed(made))
    elif what == "open":
        scripts.gates[arguments[0]].set()
    elif what == "seen":
        return [
            Seen(
                request.method,
                request.path,
                request.headers,
                request.body,
                answered=request.answered.is_set(),
                closed=request.closed.is_set(),
                written=request.bytes_written,
            )
            for request in played.requests
            if _path_of(request) == arguments[0]
        ]
    return None


def _reply(value: object) -> None:
    sys.stdout.buffer.write(_packed(value))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run takes it along
    if os.getppid() == int(sys.argv[1]):
        # Pickles name the module; as the program it has another name.
        from tests.support import remote_engine

        asyncio.run(remote_engine._serve())
