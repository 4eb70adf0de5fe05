"""`sluicegate balance`: what organisations have left, and how it is changed (O2)."""

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

import orjson
from pydantic import ValidationError

from planes.cli_common import (
    FAILED,
    OK,
    USAGE,
    WHERE,
    Commands,
    add_command,
    add_config,
    load_settings,
    table,
    usd,
    with_store,
)
from planes.settings import Key, explain

if TYPE_CHECKING:
    from relay.stores.base import Org, Store


def add_commands(commands: Commands) -> None:
    """Add `balance`."""
    balance = add_command(
        commands,
        "balance",
        "Show or change what organisations have left.\n\nHELD_USD is what running requests may "
        "cost; a new one is served from the rest. An\norganisation is there once it has a key in "
        "the database, or a gateway was started with\none in its configuration. A running gateway "
        f"takes a change at once.\n\n{WHERE}",
        """\
  sluicegate balance
  sluicegate balance acme --add-usd 25
  sluicegate balance acme --set-usd 0
  sluicegate balance acme --no-limit""",
    )
    balance.add_argument("org", metavar="ORG", nargs="?", help="this organisation only")
    add_config(balance)
    change = balance.add_mutually_exclusive_group()
    change.add_argument("--set-usd", metavar="X", help="what it has left from now on")
    change.add_argument("--add-usd", metavar="X", help="what it gets in addition")
    change.add_argument("--no-limit", action="store_true", help="it has no balance to keep to")
    balance.add_argument("--json", action="store_true", help="as a JSON array")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    settings, _ = load_settings(options.config)
    amounts = {"set": options.set_usd, "add": options.add_usd}
    given = next(((flag, value) for flag, value in amounts.items() if value is not None), None)
    if options.org is None and (given or options.no_limit):
        options.parser.error("say whose balance: sluicegate balance ORG …")
    micro_usd = _micro_usd(*given) if given else None

    async def work(store: "Store") -> int:
        if options.org is not None and await store.get_org(options.org) is None:
            print(
                "sluicegate: there is no such organisation; `sluicegate balance` shows them",
                file=sys.stderr,
            )
            return FAILED
        if micro_usd is not None or options.no_limit:
            changed = await _change(store, options, micro_usd)
            if changed is None:
                return FAILED
        held: Counter[str] = Counter()
        for hold in await store.open_holds():
            if not hold.trial:
                held[hold.org] += hold.amount_micro_usd
        orgs = [org for org in await store.list_orgs() if options.org in (None, org.id)]
        _show(orgs, held, as_json=options.json)
        return OK

    return with_store(settings, work, make=False)


def _micro_usd(flag: str, value: str) -> int:
    """Check an amount as the file's `balance_usd` is checked; exits with 2 if it is wrong."""
    try:
        amount = Key.model_validate({"key": "k", "org": "o", "balance_usd": value}).balance_usd
    except ValidationError as error:
        for _, message in explain(error, Key):
            print(f"sluicegate balance: --{flag}-usd: {message}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    assert amount is not None
    return round(amount * 1_000_000)


async def _change(
    store: "Store", options: argparse.Namespace, micro_usd: int | None
) -> "Org | None":
    if options.add_usd is None:
        return await store.change_org(options.org, {"balance_micro_usd": micro_usd})
    assert micro_usd is not None
    org = await store.add_balance(options.org, micro_usd)
    if org is not None and org.balance_micro_usd is None:
        print(
            "sluicegate: it has no limit, so there is nothing to add to; --set-usd gives it one",
            file=sys.stderr,
        )
        return None
    return org


def _show(orgs: "list[Org]", held: Counter[str], *, as_json: bool) -> None:
    if as_json:
        documents = [
            {
                "org": org.id,
                "balance_micro_usd": org.balance_micro_usd,
                "held_micro_usd": held[org.id],
            }
            for org in orgs
        ]
        print(orjson.dumps(documents, option=orjson.OPT_INDENT_2).decode())
        return
    rows = [("ORG", "BALANCE_USD", "HELD_USD")]
    for org in orgs:
        balance = org.balance_micro_usd
        left = "no limit" if balance is None else usd(balance)
        rows.append((org.id, left, usd(held[org.id])))
    print(table([*rows], right=frozenset({1, 2})))
