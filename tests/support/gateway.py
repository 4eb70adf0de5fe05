"""The gateway as its users run it: a process of its own, started from the command line.

async with FakeUpstream() as up, GatewayProcess(config_for(up)) as gateway:
    async with gateway.client() as client:
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=payload)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from bench.ports import free_port
from tests.support.wire import RawClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from tests.support.fake_upstream import FakeUpstream

ROOT = Path(__file__).resolve().parents[2]

KEY = "ozk_test_0123456789abcdef"
UPSTREAM_KEY = "sk-upstream-secret-0123456789"
MODEL = "test/model"
UPSTREAM_MODEL = "upstream-model"
AUTH = ("authorization", f"Bearer {KEY}")

_START_TIMEOUT_S = 60.0

# In the child, before Python is replaced by Python: a test run that is killed takes the gateway
# with it. (Not `preexec_fn`: Python 3.12 warns about it wherever a thread is running.)
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def config_for(up: FakeUpstream, **overrides: Any) -> dict[str, Any]:
    """A configuration with one provider, the fake one, and one model on it.

    Args:
        overrides: laid over it, mappings key by key: `providers={"fake": {"idle_timeout_s": 1}}`.
    """
    base: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "workers": 1},
        "keys": [{"key": KEY, "org": "test", "balance_usd": 1000, "max_concurrent": 1000}],
        "providers": {
            "fake": {"shape": "openai", "base_url": up.base_url, "api_key": UPSTREAM_KEY},
        },
        "models": {MODEL: {"candidates": [{"provider": "fake", "model": UPSTREAM_MODEL}]}},
        "telemetry": {"log": "json"},
    }
    return _merged(base, overrides)


class GatewayProcess:
    """A running server; an async context manager.

    A death that no test asked for fails the test at the end, with what the process said.

    Args:
        config: what goes into its YAML file.
        args: more arguments of `serve`, as `["--workers", "2"]`.
        env: laid over the environment of the tests.
        workdir: its working directory, where the default database lies; give one to start again
            on the same data. Without it, a temporary one.
        module: what is run in place of the gateway; for the tests of this class.
    """

    _process: subprocess.Popen[bytes]

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: Path | None = None,
        port: int | None = None,
        module: str = "planes.cli",
    ) -> None:
        self.host = "127.0.0.1"
        self.port = port or free_port()
        self._config = dict(config)
        self._args = list(args)
        self._env = dict(env or {})
        self._module = module
        self._cleanup = contextlib.ExitStack()
        self._workdir = workdir
        self._asked_to_end = False

    @property
    def base_url(self) -> str:
        """The address without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def workdir(self) -> Path:
        """Where it runs."""
        assert self._workdir is not None, "not started"
        return self._workdir

    def client(self, *, rcvbuf: int | None = None) -> RawClient:
        """A raw client to it, not yet connected."""
        return RawClient(self.host, self.port, rcvbuf=rcvbuf)

    async def __aenter__(self) -> Self:
        if self._workdir is None:
            temporary = tempfile.TemporaryDirectory(prefix="sluicegate-test-")
            self._workdir = Path(self._cleanup.enter_context(temporary))
        self._start()
        try:
            await self._wait_healthy()
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
        code = self.returncode
        said = f"the gateway died ({code}):\n{self.stderr()}"
        self._end()
        if code is not None and not self._asked_to_end and error is None:
            raise AssertionError(said)

    def stdout(self) -> str:
        """All it has printed."""
        return self._output("stdout")

    def stderr(self) -> str:
        """All it has logged, as text: also what is no JSON line, as a traceback."""
        return self._output("stderr")

    def log_lines(self) -> list[dict[str, Any]]:
        """The JSON lines of its log so far."""
        out = []
        for line in self.stderr().splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    out.append(value)
        return out

    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def open_sockets(self) -> int:
        """How many sockets it holds, those that listen and its own pairs included."""
        count = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                count += os.readlink(entry).startswith("socket:")
        return count

    def terminate(self) -> None:
        """SIGTERM: a drain; a second one stops at once."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL of the server process: a crash."""
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Any signal that ends it."""
        self._asked_to_end = True
        os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        """Exit code, a negative signal number, or None while it runs."""
        # It stays a zombie until the end, so that its id and its group's cannot be another's.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    async def wait(self, timeout: float = 10.0) -> int:
        """Waits for its end and returns the exit code."""
        try:
            async with asyncio.timeout(timeout):
                while (code := self.returncode) is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise TimeoutError(f"still running after {timeout} s:\n{self.stderr()}") from None
        return code

    def _start(self) -> None:
        config = self.workdir / "sluicegate.yaml"
        config.write_text(yaml.safe_dump(self._config, allow_unicode=True, sort_keys=False))
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        command += ["-m", self._module, "serve", "--config", str(config), "--port", str(self.port)]
        paths = [str(ROOT), self._env.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""]
        env = os.environ | self._env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with (
            open(self.workdir / "stdout", "ab") as stdout,
            open(self.workdir / "stderr", "ab") as stderr,
        ):
            self._process = subprocess.Popen(
                command + self._args,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self.workdir,
                env=env | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a group of its own, ended whole
            )

    async def _wait_healthy(self) -> None:
        until = time.monotonic() + _START_TIMEOUT_S
        while not await self._healthy():
            if (code := self.returncode) is not None:
                raise RuntimeError(f"the gateway ended at its start ({code}):\n{self.stderr()}")
            if time.monotonic() > until:
                raise RuntimeError(f"not healthy in {_START_TIMEOUT_S} s:\n{self.stderr()}")
            await asyncio.sleep(0.02)

    async def _healthy(self) -> bool:
        try:
            async with self.client() as client:
                await client.request("GET", "/health", headers=[("connection", "close")])
                # To the end: this socket is none of those that a test counts.
                await client.read_to_eof(timeout=2.0)
                return client.status == 200
        except OSError:  # refused, reset, or (TimeoutError) accepted and mute
            return False

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._cleanup.close()

    def _output(self, name: str) -> str:
        return (self.workdir / name).read_text(errors="replace")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        nested = isinstance(old, dict) and isinstance(value, dict)
        out[key] = _merged(out[key], value) if nested else value
    return out
