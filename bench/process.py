"""The processes of a measurement: how they are started, how they run, and what they cost."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_START_TIMEOUT_S: Final = 20.0


def raise_file_limit() -> None:
    """Take as many descriptors as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(factory: Callable[[], asyncio.Protocol]) -> None:
    """Serve a protocol on a free port, which is printed, until the process is ended."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(factory, "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    raise_file_limit()
    uvloop.run(serve())


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(*arguments: str, **files: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program of this repository for the length of the block.

    Args:
        arguments: of `python`. files: `stdout`, `stderr`: where its output goes, else it is piped
            or, for standard error, ours.
    """
    opened = {name: path.open("w") for name, path in files.items()}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=opened.get("stdout", subprocess.PIPE),
        stderr=opened.get("stderr"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for file in opened.values():
            file.close()


@contextmanager
def upstream() -> Iterator[int]:
    """Run the upstream and yield its port."""
    with started("-m", "bench.upstream") as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def wait_until_it_serves(port: int) -> None:
    """Wait for an HTTP answer of any kind."""
    until = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, all its threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_kib(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES // 1024
