"""Other people's gateways, run in `.venv-peers` (`scripts/peers` makes it).

async with LiteLLM({"smol": "http://127.0.0.1:9000/v1"}) as litellm:
    ...                                     # speaks the Gemini API at `litellm.origin`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import yaml

from bench.ports import free_port
from tests.support.gateway import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

PEERS = ROOT / ".venv-peers"

_SETUP_TIMEOUT_S = 900.0
_START_TIMEOUT_S = 120.0
# As the gateway of `tests.support.gateway`: a test run that is killed takes it with it.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class PeersMissing(RuntimeError):
    """`.venv-peers` cannot be made here; the message says why."""


def install_peers() -> None:
    """Makes `.venv-peers` unless it is there.

    Raises:
        PeersMissing: `scripts/peers` failed.
    """
    try:
        done = subprocess.run(
            [str(ROOT / "scripts/peers")],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=_SETUP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeersMissing(f"scripts/peers: {error}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise PeersMissing(f"scripts/peers failed: {said[-1]}")


class LiteLLM:
    """LiteLLM's proxy; an async context manager.

    Args:
        models: base URLs of OpenAI-compatible servers by the names that it serves them under; the
            servers are asked for `upstream_model`.
    """

    key = "sk-peer-0123456789"
    _process: subprocess.Popen[bytes]

    def __init__(self, models: Mapping[str, str], *, upstream_model: str) -> None:
        self._models = models
        self._upstream_model = upstream_model
        self._cleanup = contextlib.ExitStack()
        self._folder = Path()
        self._port = free_port()

    @property
    def origin(self) -> str:
        """Its address without a path."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        temporary = tempfile.TemporaryDirectory(prefix="sluicegate-litellm-")
        self._folder = Path(self._cleanup.enter_context(temporary))
        try:
            self._start()
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

    def _start(self) -> None:
        served = [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{self._upstream_model}",
                    "api_base": base_url,
                    "api_key": "none",
                },
            }
            for name, base_url in self._models.items()
        ]
        config: dict[str, Any] = {"model_list": served, "litellm_settings": {"telemetry": False}}
        (self._folder / "config.yaml").write_text(yaml.safe_dump(config))
        log = self._cleanup.enter_context((self._folder / "log").open("wb"))
        command = [PEERS / "bin/litellm", "--config", "config.yaml", "--host", "127.0.0.1"]
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", _LAUNCHER, str(os.getpid()),
                *map(str, command), "--port", str(self._port),
            ],
            cwd=self._folder,
            env={
                "HOME": str(self._folder),
                "PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}",
                "LITELLM_MASTER_KEY": self.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it downloads one
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    async def _wait_alive(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_START_TIMEOUT_S):
            while self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.origin}/health/liveliness") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        said = (self._folder / "log").read_text(errors="replace")
        raise AssertionError(f"LiteLLM died ({self._process.returncode}):\n{said[-2000:]}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._cleanup.close()
