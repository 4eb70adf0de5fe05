"""`sluicegate keys`: create, list and revoke the keys that live in the store (O2).

A key's text is shown once, when it is made; only its SHA-256 digest is stored.
"""

import argparse
import hashlib
import re
import secrets
import string
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    iso,
    load_settings,
    table,
    usd,
    with_store,
)
from planes.settings import Key, Settings, explain

if TYPE_CHECKING:
    from relay.stores.base import OrgChange, Store, StoredKey

_ALPHABET = string.ascii_letters + string.digits
_KEY_CHARACTERS = 40
_ID = re.compile(r"key_[0-9a-f]{12}")


def add_commands(commands: Commands) -> None:
    """Add `keys` and what belongs to it."""
    keys = add_command(
        commands,
        "keys",
        "Create, list and revoke keys of clients.\n\nThey live in the database of `store.url`, "
        "beside the static keys of the configuration.\nA running gateway obeys within 5 s.",
        """\
  sluicegate keys create --org acme --name laptop
  sluicegate keys list
  sluicegate keys revoke key_0123456789ab""",
    ).add_subparsers(dest="keys_command", metavar="COMMAND", required=True)
    _add_create(keys)
    listing = add_command(
        keys,
        "list",
        "List all keys of the database, revoked ones too, oldest first; static keys of the\n"
        f"configuration are not among them.\n\n{WHERE}",
        """\
  sluicegate keys list
  sluicegate keys list --json""",
    )
    add_config(listing)
    listing.add_argument("--json", action="store_true", help="as a JSON array")
    revoke = add_command(
        keys,
        "revoke",
        f"Revoke a key for good: its requests get 401. Exit 1 if there is no such key.\n\n{WHERE}",
        """\
  sluicegate keys revoke key_0123456789ab""",
    )
    add_config(revoke)
    revoke.add_argument(
        "id", metavar="ID", help="its id, as `keys list` shows it, or the key itself"
    )


def _add_create(keys: Commands) -> None:
    create = add_command(
        keys,
        "create",
        "Create a key and print it: once, only its digest is stored.\n\n"
        "An organisation that is not there is created with what is said of it here. For one that\n"
        "is there, --balance-usd sets its balance, --trial and --max-concurrent set those; what\n"
        "is not said stays as it is. Standard output is the key alone; standard error names the\n"
        f"database that it went into. A running gateway takes it within 5 s.\n\n{WHERE}",
        """\
  sluicegate keys create --org acme
  sluicegate keys create --org acme --name laptop --balance-usd 25 --max-concurrent 8
  KEY=$(sluicegate keys create --org visitors --trial)
  sluicegate keys create --org acme --json""",
    )
    add_config(create)
    create.add_argument("--org", metavar="O", required=True, help="the organisation that it is of")
    create.add_argument("--name", metavar="N", help="a name to tell keys apart")
    create.add_argument(
        "--trial",
        action=argparse.BooleanOptionalAction,
        help="whether the organisation's usage is logged but never debited",
    )
    create.add_argument(
        "--balance-usd", metavar="X", help="the organisation's balance; a new one has no limit"
    )
    create.add_argument(
        "--max-concurrent", metavar="N", help="requests of the organisation in flight at once"
    )
    create.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Run a command of `keys` and return its exit code."""
    settings, _ = load_settings(options.config)
    match options.keys_command:
        case "create":
            return _create(options, settings)
        case "list":
            return _list(options, settings)
        case _:
            return _revoke(options, settings)


def _create(options: argparse.Namespace, settings: Settings) -> int:
    text = "ozk_" + "".join(secrets.choice(_ALPHABET) for _ in range(_KEY_CHARACTERS))
    wanted = _wanted(options, text)
    digest = _digest(text)
    database = Path(settings.store.sqlite_path).absolute()
    new = "" if database.exists() else " (new)"

    async def create(store: "Store") -> int:
        from relay.stores.base import StoredKey

        org = await store.change_org(wanted.org, _change(options, wanted))
        key = StoredKey(
            id=_key_id(digest),
            digest=digest,
            org=org,
            name=wanted.name,
            status="active",
            created_at=time.time(),
        )
        await store.create_key(key)
        if options.json:
            _print_json({"key": text, **_document(key)})
        else:
            print(text)
        # Not on standard output, so that `KEY=$(sluicegate keys create …)` is the key.
        print(
            f"{_words(key)}, in {database}{new}\n"
            "The key is shown this once only. A running gateway takes it within 5 s.",
            file=sys.stderr,
        )
        return OK

    return with_store(settings, create)


def _wanted(options: argparse.Namespace, text: str) -> Key:
    """Check the flags as the file's `keys:` are checked; exits with 2 if one is wrong."""
    fields = ("org", "name", "max_concurrent", "balance_usd")
    given = {f: getattr(options, f) for f in fields if getattr(options, f) is not None}
    try:
        return Key.model_validate({"key": text, **given})
    except ValidationError as error:
        for path, message in explain(error, Key):
            flag = str(path[0]).replace("_", "-")
            print(f"sluicegate keys create: --{flag}: {message}", file=sys.stderr)
        raise SystemExit(USAGE) from None


def _change(options: argparse.Namespace, wanted: Key) -> "OrgChange":
    change: OrgChange = {}
    if wanted.balance_usd is not None:
        change["balance_micro_usd"] = round(wanted.balance_usd * 1_000_000)
    if options.trial is not None:
        change["trial"] = options.trial
    if wanted.max_concurrent is not None:
        change["max_concurrent"] = wanted.max_concurrent
    return change


def _list(options: argparse.Namespace, settings: Settings) -> int:
    async def list_keys(store: "Store") -> int:
        keys = await store.list_keys()
        if options.json:
            _print_json([_document(key) for key in keys])
            return OK
        head = ("ID", "ORG", "NAME", "STATUS", "BALANCE_USD", "TRIAL", "MAX_CONCURRENT", "CREATED")
        rows = [
            (
                *(key.id, key.org.id, key.name or "", key.status, _balance(key)),
                *("yes" if key.org.trial else "no", str(key.org.max_concurrent or "no limit")),
                iso(key.created_at),
            )
            for key in keys
        ]
        print(table([head, *rows], right=frozenset({4, 6})))
        return OK

    return with_store(settings, list_keys, make=False)


def _revoke(options: argparse.Namespace, settings: Settings) -> int:
    # What is no id is taken for the text of a key, and never shown again.
    is_id = _ID.fullmatch(options.id) is not None
    key_id: str = options.id if is_id else _key_id(_digest(options.id))

    async def revoke(store: "Store") -> int:
        if await store.revoke_key(key_id):
            print(f"{key_id} is revoked; a running gateway obeys within 5 s")
            return OK
        if key_id in (_key_id(_digest(key.key.get_secret_value())) for key in settings.keys):
            why = f"{key_id} is a key of the configuration: set `status: revoked` there and restart"
        else:
            what = key_id if is_id else "what was given"
            why = f"{what} is no key of this database; `sluicegate keys list` shows them"
        print(f"sluicegate: {why}", file=sys.stderr)
        return FAILED

    return with_store(settings, revoke, make=False)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _key_id(digest: bytes) -> str:
    # As `planes.auth` names the keys of the configuration; that module takes long to import.
    return f"key_{digest.hex()[:12]}"


def _balance(key: "StoredKey") -> str:
    balance = key.org.balance_micro_usd
    return "no limit" if balance is None else usd(balance)


def _words(key: "StoredKey") -> str:
    limits = [f"balance {_balance(key)}"]
    if key.org.trial:
        limits.append("trial")
    if key.org.max_concurrent is not None:
        limits.append(f"{key.org.max_concurrent} requests at once")
    return f"{key.id} of {key.org.id} ({', '.join(limits)})"


def _document(key: "StoredKey") -> dict[str, object]:
    return {
        "id": key.id,
        "org": key.org.id,
        "name": key.name,
        "status": key.status,
        "balance_micro_usd": key.org.balance_micro_usd,
        "trial": key.org.trial,
        "max_concurrent": key.org.max_concurrent,
        "created_at": iso(key.created_at),
    }


def _print_json(document: Any) -> None:
    print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
