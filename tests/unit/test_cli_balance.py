"""`sluicegate balance` (O2): what is shown, what is changed, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from planes import cli
from relay.money import Hold
from relay.stores.base import Org
from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose database has two organisations, one with a running request."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)

    async def fill() -> None:
        store = SqliteStore("sluicegate.db")
        await store.open()
        try:
            await store.put_org(Org(id="acme", balance_micro_usd=5_000_000, max_concurrent=3))
            await store.put_org(Org(id="free"))
            await store.place_hold(hold("req_1", "acme", 250_000))
            await store.place_hold(hold("req_2", "acme", 1))
            await store.place_hold(hold("req_3", "acme", 9_000_000, trial=True))
        finally:
            await store.close()

    asyncio.run(fill())
    return tmp_path


def hold(request_id: str, org: str, micro_usd: int, *, trial: bool = False) -> Hold:
    return Hold(
        request_id=request_id,
        org=org,
        key_id="key_1",
        plane="models",
        model="m",
        worker="worker_1",
        placed_at=0.0,
        amount_micro_usd=micro_usd,
        prompt_tokens=1,
        prompt_micro_usd=1,
        trial=trial,
    )


def run(*arguments: str) -> int:
    try:
        return cli.main(["balance", *arguments])
    except SystemExit as left:
        return int(left.code or 0)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What `--json` shows after the arguments were obeyed."""
    capsys.readouterr()
    assert run(*arguments, "--json") == 0
    return {org["org"]: org["balance_micro_usd"] for org in json.loads(capsys.readouterr().out)}


def test_all_are_shown_with_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    """A trial's hold is set aside from nothing."""
    assert run() == 0
    assert capsys.readouterr().out.splitlines() == [
        "ORG   BALANCE_USD  HELD_USD",
        "acme     5.000000  0.250001",
        "free     no limit  0.000000",
    ]
    assert run("acme", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"org": "acme", "balance_micro_usd": 5_000_000, "held_micro_usd": 250_001}
    ]


def test_it_is_set_added_to_and_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else of the organisation, or of another one, changes."""
    assert shown(capsys, "acme", "--add-usd", "0.5") == {"acme": 5_500_000}
    assert shown(capsys, "acme", "--set-usd", "0") == {"acme": 0}
    assert shown(capsys, "acme", "--no-limit") == {"acme": None}
    assert shown(capsys, "free", "--set-usd", "2") == {"free": 2_000_000}
    assert shown(capsys) == {"acme": None, "free": 2_000_000}

    async def stored() -> Org | None:
        store = SqliteStore("sluicegate.db")
        await store.open()
        try:
            return await store.get_org("acme")
        finally:
            await store.close()

    assert asyncio.run(stored()) == Org(id="acme", max_concurrent=3)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--add-usd", "1"], 2, "say whose balance"),
        (["--no-limit"], 2, "say whose balance"),
        (["acme", "--add-usd", "-1"], 2, "sluicegate balance: --add-usd: must be at least 0"),
        (["acme", "--set-usd", "x"], 2, "sluicegate balance: --set-usd: must be a number"),
        (["acme", "--set-usd", ""], 2, "sluicegate balance: --set-usd: must be a number"),
        (["acme", "--set-usd", "1", "--add-usd", "1"], 2, "not allowed with argument"),
        (["amce", "--add-usd", "1"], 1, "there is no such organisation"),
        (["amce"], 1, "there is no such organisation"),
        (["free", "--add-usd", "1"], 1, "it has no limit, so there is nothing to add to"),
    ],
)
def test_what_cannot_be_done_changes_nothing(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """O2: a wrong name makes no organisation."""
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert shown(capsys) == {"acme": 5_000_000, "free": None}


def test_looking_makes_no_database(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "elsewhere.yaml").write_text("store: {url: 'sqlite:///none.db'}\n")
    assert run("--config", "elsewhere.yaml") == 0
    out, err = capsys.readouterr()
    assert out == "ORG  BALANCE_USD  HELD_USD\n"
    assert "there is no database" in err
    assert not (workdir / "none.db").exists()
