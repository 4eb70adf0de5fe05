"""`sluicegate usage`: the rows of the ledger, for people and for programs (O2)."""

import argparse
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

from planes.cli_common import (
    OK,
    WHERE,
    Commands,
    add_command,
    add_config,
    iso,
    load_settings,
    table,
    usd,
    with_store,
)

if TYPE_CHECKING:
    from relay.money import Settlement
    from relay.stores.base import Store

_SPAN = re.compile(r"(\d{1,9})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_commands(commands: Commands) -> None:
    """Add `usage`."""
    usage = add_command(
        commands,
        "usage",
        "Show what was used: one row for each request that ended, oldest first, and their sum.\n\n"
        "Costs are in US dollars, with --json in micro-dollars. An amount of 0 with source `none`\n"
        f"is a request of which nothing came.\n\n{WHERE}",
        """\
  sluicegate usage --since 1h
  sluicegate usage --since 2026-11-01 --org acme
  sluicegate usage --since 2026-11-29T08:00:00+01:00 --json""",
    )
    add_config(usage)
    usage.add_argument(
        "--since",
        metavar="T",
        type=_since,
        default=0.0,
        help="from when: ISO-8601 (UTC unless it says otherwise), or so long ago: 30m, 1h, 2d, 1w; "
        "without it everything is shown",
    )
    usage.add_argument("--org", metavar="O", help="of this organisation only")
    usage.add_argument("--json", action="store_true", help="as a JSON array")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    settings, _ = load_settings(options.config)

    async def show(store: "Store") -> int:
        rows = await store.usage(since=options.since, org=options.org)
        if options.json:
            documents = [_document(row) for row in rows]
            print(orjson.dumps(documents, option=orjson.OPT_INDENT_2).decode())
        else:
            print(_table(rows))
        return OK

    return with_store(settings, show, make=False)


def _since(text: str) -> float:
    """Return Unix seconds for `--since`."""
    span = _SPAN.fullmatch(text.strip())
    if span is not None:
        return time.time() - int(span[1]) * _SECONDS[span[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither ISO-8601 (2026-11-29, 2026-11-29T08:00:00Z) nor so long ago "
            "(30m, 1h, 2d)"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _document(row: "Settlement") -> dict[str, object]:
    return {
        "request_id": row.request_id,
        "at": iso(row.at),
        "org": row.org,
        "key_id": row.key_id,
        "plane": row.plane,
        "model": row.model,
        "provider": row.provider,
        "status": row.status,
        "error_code": row.error_code,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "source": row.source.value,
        "cost_micro_usd": row.cost_micro_usd,
        "attempts": list(row.attempts),
        "duration_ms": row.duration_ms,
    }


_HEAD: tuple[str, ...] = (
    *("AT", "REQUEST_ID", "ORG", "KEY_ID", "PLANE", "MODEL", "PROVIDER", "STATUS", "ERROR_CODE"),
    *("PROMPT", "COMPLETION", "SOURCE", "COST_USD", "ATTEMPTS", "DURATION_MS"),
)
_NUMBERS = ("STATUS", "PROMPT", "COMPLETION", "COST_USD", "ATTEMPTS", "DURATION_MS")


def _table(rows: Sequence["Settlement"]) -> str:
    lines = [_HEAD, *map(_cells, rows)]
    requests = "1 request" if len(rows) == 1 else f"{len(rows)} requests"
    total = dict.fromkeys(_HEAD, "") | {
        "AT": "TOTAL",
        "REQUEST_ID": requests,
        "PROMPT": str(sum(row.prompt_tokens for row in rows)),
        "COMPLETION": str(sum(row.completion_tokens for row in rows)),
        "COST_USD": usd(sum(row.cost_micro_usd for row in rows)),
    }
    lines.append(tuple(total.values()))
    return table(lines, right=frozenset(map(_HEAD.index, _NUMBERS)))


def _cells(row: "Settlement") -> tuple[str, ...]:
    return (
        *(iso(row.at), row.request_id, row.org, row.key_id, row.plane, row.model),
        *(row.provider or "", str(row.status), row.error_code or ""),
        *(str(row.prompt_tokens), str(row.completion_tokens), row.source.value),
        *(usd(row.cost_micro_usd), str(len(row.attempts)), str(row.duration_ms)),
    )
