"""The rooms hold: planes → relay → encoders, and what is pure stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"encoders": {"encoders"}, "relay": {"relay", "encoders"}}
IMPURE = {
    "asyncio", "aiohttp", "aiohttp_sse", "pydantic", "time", "os", "logging", "socket", "sqlite3",
    "threading", "subprocess", "random", "secrets", "datetime", "uvloop", "structlog", "pathlib",
}  # fmt: skip
# Modules of relay/ that obey the rule of encoders: values in, values out, `now` as an argument.
PURE_IN_RELAY = {
    "agents/addresses", "agents/spec", "cooldown", "deciders/failures", "engines/past",
    "engines/remote/frames", "engines/remote/outline", "engines/remote/substream",
    "engines/remote/texts", "errors", "lifecycle", "meter", "money", "ordering", "redact",
    "refusals", "request", "retry_after", "routing", "runs/groups", "runs/hub", "runs/lane",
    "stream",
}  # fmt: skip
PURE_IN_DECISIONS = {
    "budgets", "clocks", "dispatch", "effects", "intake", "limits", "outlet", "results", "session",
    "state", "tariff",
}  # fmt: skip
PURE_IN_ENGINES = {
    "answers", "building", "checking", "compiling", "evaluation", "expressions", "failures",
    "filters", "limits", "memory", "places", "problems", "reading", "schemas", "scope", "syntax",
}  # fmt: skip


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The top-level names of every module that the file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the rooms"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_below(room: str) -> None:
    above = {"planes", "relay", "encoders", "tests", "bench"} - ROOMS[room]
    wrong = {str(path): imports(path) & above for path in sources(room)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_pure_modules_do_no_io_and_have_no_clock() -> None:
    pure = sources("encoders") + [ROOT / "relay" / f"{name}.py" for name in sorted(PURE_IN_RELAY)]
    pure += [ROOT / "relay/decisions" / f"{name}.py" for name in sorted(PURE_IN_DECISIONS)]
    pure += [ROOT / "relay/engines/embedded" / f"{name}.py" for name in sorted(PURE_IN_ENGINES)]
    wrong = {str(path): imports(path) & IMPURE for path in pure}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_planes_do_not_import_each_other() -> None:
    planes = {path.parent.name for path in (ROOT / "planes").glob("*/routes.py")}
    assert "models" in planes
    for plane in planes:
        for path in sources(f"planes/{plane}"):
            text = path.read_text()
            for other in planes - {plane}:
                assert f"planes.{other}" not in text, f"{path} imports the plane {other}"


@pytest.mark.parametrize("room", ["encoders", "relay", "planes"])
def test_files_stay_small(room: str) -> None:
    sizes = {str(path): len(path.read_text().splitlines()) for path in sources(room)}
    assert {path: lines for path, lines in sizes.items() if lines > 400} == {}


@pytest.mark.parametrize("room", ["encoders", "relay", "planes"])
def test_functions_stay_small(room: str) -> None:
    long: dict[str, int] = {}
    for path in sources(room):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > 60:
                    long[f"{path}:{node.name}"] = lines
    assert long == {}


def test_importing_starts_nothing() -> None:
    """No thread, no task, no socket, no log configuration by import alone."""
    program = (
        "import logging, threading, planes.app, planes.server, planes.cli;"
        "assert threading.active_count() == 1;"
        "assert logging.getLogger().handlers == []"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_modules_say_what_they_are_for() -> None:
    for room in ("encoders", "relay", "planes"):
        for path in sources(room):
            tree = ast.parse(path.read_text())
            assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
