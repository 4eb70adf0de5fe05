"""What the commands share: exit codes, ways to configuration and store, forms of output (O2)."""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from planes.config_file import FILE_NAME, FILE_VARIABLE, Further, find_config, load
from planes.config_file import load_defaults as load_built_in
from planes.settings import Settings

if TYPE_CHECKING:
    from relay.stores.base import Store

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OK, FAILED, USAGE = 0, 1, 2

WHERE = f"""\
The configuration is the file of --config, else that of ${FILE_VARIABLE}, else ./{FILE_NAME},
else built-in defaults."""


def load_settings(flag: str | None, *, also: Further | None = None) -> tuple[Settings, Path | None]:
    """Return the configuration and its file; None for the built-in defaults.

    Args:
        also: finds further problems of a file that has none by itself.

    Raises:
        ConfigError: it cannot be used.
    """
    path = find_config(flag, os.environ, Path())
    if path is None:
        return load_built_in(os.environ), None
    return load(path, os.environ, also=also), path


def add_command(
    commands: Commands, name: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples."""
    command = commands.add_parser(
        name,
        help=description.partition("\n")[0].partition(":")[0].partition(";")[0].rstrip("."),
        description=description,
        epilog=f"examples:\n{examples}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(parser=command)  # whose usage is shown for what nobody knows
    return command


def add_config(command: argparse.ArgumentParser) -> None:
    """Add `--config`."""
    command.add_argument("--config", metavar="FILE", help="the YAML file to load")


def program() -> str:
    """Return how this program is called in a command to paste: as it was, unless `sluicegate` by
    itself is the same one.
    """
    called = Path(sys.argv[0])
    if called.name != "sluicegate" or not called.exists():  # python -m planes.cli
        return "sluicegate"
    found = shutil.which("sluicegate")
    return "sluicegate" if found and Path(found).samefile(called) else str(called)


def table(rows: list[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> str:
    """Return rows as columns of text.

    Args:
        right: the columns that are aligned at their right.
    """
    shown = [tuple(map(_printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in shown
    )
    return "\n".join(line.rstrip() for line in lines)


def usd(micro_usd: int) -> str:
    """Return an amount in US dollars, to the last micro-dollar."""
    sign = "-" if micro_usd < 0 else ""
    whole, micros = divmod(abs(micro_usd), 1_000_000)
    return f"{sign}{whole}.{micros:06d}"


def _printable(text: str) -> str:
    # Names of models come from clients: they must not speak to the operator's terminal.
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def iso(at: float) -> str:
    """Return Unix seconds as ISO-8601 in UTC."""
    moment = datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def with_store(
    settings: Settings, work: Callable[["Store"], Awaitable[int]], *, make: bool = True
) -> int:
    """Run `work` with the open store and return its exit code; a failure is told in one line.

    Args:
        make: whether a database that is not there is made. If not, `work` gets one that is empty
            and gone afterwards: a command that only looks leaves nothing behind where it was
            started by mistake.
    """
    from relay.stores.base import StoreError
    from relay.stores.sqlite import SqliteStore

    async def run(path: str | Path) -> int:
        store = SqliteStore(path)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    path = Path(settings.store.sqlite_path)
    try:
        if make or path.exists():
            return asyncio.run(run(path))
        print(f"sluicegate: note: there is no database {path.absolute()} yet", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(run(Path(folder, "empty.db")))
    except StoreError as error:
        print(f"sluicegate: {error}", file=sys.stderr)
        return FAILED
