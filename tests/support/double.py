"""dev-double, somebody else's server of `POST /v1/systemone`, and somebody else's client of it.

async with DevDouble("--engine", "mock") as double:
    ...                                     # serves at `double.origin`

They run in `.venv-double`, which is made when it is asked for: 12 wheels, a quarter of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from bench.ports import free_port
from tests.support.gateway import ROOT

if TYPE_CHECKING:
    from types import TracebackType

VENV = ROOT / ".venv-double"
PACKAGES = ("dev-double==0.2.0", "systemone-client==0.1.0")

_SETUP_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 60.0
# As the gateway of `tests.support.gateway`: a test run that is killed takes it with it.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_CLIENT = """
import json, sys
from systemone import Client
with Client(sys.argv[1]) as client:
    reply = client.system_one(**json.load(sys.stdin))
print(json.dumps({
    "noul": {name: answer.noul for name, answer in reply.nouls.items()},
    "choice": {name: answer.probabilities for name, answer in reply.choices.items()},
    "score": {name: answer.probabilities for name, answer in reply.scores.items()},
}))
"""


class DoubleMissing(RuntimeError):
    """`.venv-double` cannot be made here; the message says why."""


def install_double() -> None:
    """Makes `.venv-double` unless it is there.

    Raises:
        DoubleMissing: pip failed.
    """
    stamp, wanted = VENV / ".stamp", f"{ROOT} {PACKAGES}"
    with (ROOT / "tests/support/double.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one set-up at a time
        if stamp.exists() and stamp.read_text() == wanted:
            return
        try:
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(VENV)],
                [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check",
                 "--no-input", "install", "--quiet", *PACKAGES],
            ):  # fmt: skip
                subprocess.run(command, capture_output=True, check=True, timeout=_SETUP_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise DoubleMissing(f"{' '.join(PACKAGES)}: {error}") from None
        stamp.write_text(wanted)


class DevDouble:
    """`dev-double serve`; an async context manager.

    Args:
        options: of its command line.
    """

    _process: subprocess.Popen[bytes]

    def __init__(self, *options: str) -> None:
        self._options = options
        self._cleanup = contextlib.ExitStack()
        self._folder = Path()
        self._port = free_port()

    @property
    def origin(self) -> str:
        """Its address without a path."""
        return f"http://127.0.0.1:{self._port}"

    def ask(self, state: Any, questions: dict[str, Any]) -> dict[str, Any]:
        """What `systemone-client` reads of it: the odds by kind and question."""
        asked = json.dumps({"model": "m", "state": state, "questions": questions})
        done = subprocess.run(
            [str(VENV / "bin/python"), "-c", _CLIENT, self.origin],
            input=asked, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    async def __aenter__(self) -> Self:
        temporary = tempfile.TemporaryDirectory(prefix="sluicegate-double-")
        self._folder = Path(self._cleanup.enter_context(temporary))
        log = self._cleanup.enter_context((self._folder / "log").open("wb"))
        command = [str(VENV / "bin/python"), str(VENV / "bin/dev-double"), "serve"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *command,
             "--port", str(self._port), *self._options],
            cwd=self._folder,
            env={"HOME": str(self._folder), "PATH": os.environ["PATH"]},
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            await self._wait_alive()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    async def _wait_alive(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_START_TIMEOUT_S):
            while self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.origin}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.1)
        said = (self._folder / "log").read_text(errors="replace")
        raise AssertionError(f"dev-double died ({self._process.returncode}):\n{said[-2000:]}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._cleanup.close()
