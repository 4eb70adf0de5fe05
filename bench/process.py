"""The processes of a measurement: how they are started, how they run, and what they cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
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
    from collections.abc import Callable, Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parents[1]
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_START_TIMEOUT_S: Final = 20.0
_END_TIMEOUT_S: Final = 10.0


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


@contextmanager
def started(
    *arguments: str, stdout: Path | None = None, stderr: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program of this repository for the length of the block.

    Args:
        arguments: of `python`.
        stdout: where its output goes; else it is piped. stderr: the same; else it is ours.
    """
    with started_program(sys.executable, *arguments, stdout=stdout, stderr=stderr) as process:
        yield process


@contextmanager
def started_program(
    *command: str,
    env: Mapping[str, str] | None = None,
    stdout: Path | None = None,
    stderr: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run any program for the length of the block; its output as for `started`.

    Args:
        env: laid over the environment, in which this repository can be imported.
    """
    named = {"stdout": stdout, "stderr": stderr}
    opened = {name: path.open("w") for name, path in named.items() if path is not None}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=opened.get("stdout", subprocess.PIPE),
        stderr=opened.get("stderr"),
        env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(env or {}),
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
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


def wait_until_it_serves(port: int, timeout_s: float = _START_TIMEOUT_S) -> None:
    """Wait for an HTTP answer of any kind."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except urllib.error.HTTPError as answer:
            answer.close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def tree(pid: int) -> list[int]:
    """A process and those that it started and that still run, and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended since it was listed
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = [pid]
    for parent in found:  # grows as it is read
        found += [child for child, its in parents.items() if its == parent]
    return found


def cpu_s(pid: int) -> float:
    """CPU time that a process and all that it started have used, user and system."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):  # it has ended, and is in its parent's sum
            # utime, stime, and those of children that have ended (proc_pid_stat(5)).
            ticks += sum(int(field) for field in _stat(member)[11:15])
    return ticks / _TICKS_PER_S


def settled_cpu_s(pid: int, *, quiet_s: float = 0.25, timeout_s: float = 10.0) -> float:
    """As `cpu_s`, once it stands still: what is done after the last byte belongs to a request."""
    until = time.monotonic() + timeout_s
    seen = cpu_s(pid)
    while time.monotonic() < until:
        time.sleep(quiet_s)
        now = cpu_s(pid)
        if now == seen:
            break
        seen = now
    return seen


def rss_kib(pid: int) -> int:
    """Resident memory of a process and all that it started."""
    pages = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * _PAGE_BYTES // 1024


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold spaces: the first is field 3."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
