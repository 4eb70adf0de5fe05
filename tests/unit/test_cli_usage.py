"""`sluicegate usage` (O2): the ledger's rows, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING

import pytest

from planes import cli
from relay.money import Source
from relay.stores.sqlite import SqliteStore
from tests.contract.values import row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from relay.money import Settlement

AT = 1_796_002_400.25  # 2026-11-30T01:33:20.250Z


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)
    return tmp_path


@pytest.fixture
def usage(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `usage` and returns what it prints."""

    def usage(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main(["usage", *arguments]) == 0
        return capsys.readouterr().out

    return usage


def settled(rows: Sequence[Settlement]) -> None:
    async def settle() -> None:
        store = SqliteStore("sluicegate.db")
        await store.open()
        await store.settle(rows)
        await store.close()

    asyncio.run(settle())


def ids(output: str) -> list[str]:
    return [document["request_id"] for document in json.loads(output)]


def test_rows_as_json(usage: Callable[..., str]) -> None:
    """O2: all the fields that the contract names, and no others."""
    settled(
        [
            row("req_1", 1234, at=AT, attempts=("a/b: upstream_error", "fake/up: ok")),
            row("req_2", 0, at=AT + 1, provider=None, status=499, error_code="client_abort",
                source=Source.NONE, attempts=(), prompt_tokens=0, completion_tokens=0),
        ]
    )  # fmt: skip
    first, second = json.loads(usage("--json"))
    assert first == {
        "request_id": "req_1",
        "at": "2026-11-30T01:33:20.250Z",
        "org": "acme",
        "key_id": "key_a",
        "plane": "models",
        "model": "test/model",
        "provider": "fake",
        "status": 200,
        "error_code": None,
        "prompt_tokens": 7,
        "completion_tokens": 11,
        "source": "reported",
        "cost_micro_usd": 1234,
        "attempts": ["a/b: upstream_error", "fake/up: ok"],
        "duration_ms": 2500,
    }
    assert list(second) == list(first)
    assert (second["provider"], second["status"]) == (None, 499)
    assert (second["error_code"], second["source"]) == ("client_abort", "none")
    assert second["attempts"] == []


def test_rows_as_a_table_with_their_sum(usage: Callable[..., str]) -> None:
    """For people: US dollars, one line a row, a total."""
    settled(
        [
            row("req_1", 1_500_000, at=AT),
            row("req_2", 7, at=AT + 1, provider=None, status=502, error_code="upstream_error",
                attempts=("a: x", "b: y")),
        ]
    )  # fmt: skip
    head, first, second, total = usage().splitlines()
    assert head.split() == [
        *("AT", "REQUEST_ID", "ORG", "KEY_ID", "PLANE", "MODEL", "PROVIDER", "STATUS"),
        *("ERROR_CODE", "PROMPT", "COMPLETION", "SOURCE", "COST_USD", "ATTEMPTS", "DURATION_MS"),
    ]
    assert first.split() == [
        *("2026-11-30T01:33:20.250Z", "req_1", "acme", "key_a", "models", "test/model", "fake"),
        *("200", "7", "11", "reported", "1.500000", "1", "2500"),
    ]
    assert second.split()[6:9] == ["502", "upstream_error", "7"]
    assert second.split()[-3:] == ["0.000007", "2", "2500"]
    assert re.split("  +", total) == ["TOTAL", "2 requests", "14", "22", "1.500007"]
    column = head.index("COST_USD") + len("COST_USD")
    assert [line[:column][-8:] for line in (first, second, total)] == [
        "1.500000",
        "0.000007",
        "1.500007",
    ]


def test_what_clients_name_does_not_speak_to_the_terminal(usage: Callable[..., str]) -> None:
    """A model's name may hold anything; a row stays a line."""
    settled([row("req_1", model="local/\x1b[2J\r\n\u202eevil\x9b")])
    lines = usage().splitlines()
    assert len(lines) == 3
    assert "local/?[2J???evil?" in lines[1]
    assert all(line.isprintable() for line in lines)


def test_since_and_org(usage: Callable[..., str]) -> None:
    """ISO-8601 with any offset, UTC without one, or so long ago."""
    now = time.time()
    ages = {"m": 90, "h": 7200, "d": 3 * 86400, "old": 40 * 86400}
    settled([row(f"req_{name}", at=now - age, org=name) for name, age in ages.items()])
    assert ids(usage("--json")) == ["req_old", "req_d", "req_h", "req_m"]
    assert ids(usage("--json", "--since", "30m")) == ["req_m"]
    assert ids(usage("--json", "--since", "5h")) == ["req_h", "req_m"]
    assert ids(usage("--json", "--since", "4d")) == ["req_d", "req_h", "req_m"]
    assert ids(usage("--json", "--since", "2w")) == ["req_d", "req_h", "req_m"]
    assert ids(usage("--json", "--since", "10s")) == []
    assert ids(usage("--json", "--org", "h")) == ["req_h"]
    assert ids(usage("--json", "--org", "h", "--since", "1h")) == []
    assert ids(usage("--json", "--org", "nobody")) == []


@pytest.mark.parametrize(
    ("since", "seen"),
    [
        ("2026-11-30T01:33:20.250Z", True),
        ("2026-11-30T01:33:20.251Z", False),
        ("2026-11-30T01:33:20", True),
        ("2026-11-30T02:33:20+01:00", True),
        ("2026-11-30T02:33:21+01:00", False),
        ("2026-11-30", True),
        ("2026-12-01", False),
        ("20261130T013320Z", True),
        ("0001-01-01", True),
        ("999999999w", True),
    ],
)
def test_iso_8601(usage: Callable[..., str], since: str, seen: bool) -> None:
    settled([row("req_1", at=AT)])
    assert ids(usage("--json", "--since", since)) == (["req_1"] if seen else [])


@pytest.mark.parametrize("since", ["yesterday", "", "1y", "-1h", "1.5h", "2026-13-01", "30"])
def test_a_wrong_since_exits_with_2(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what is right."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["usage", f"--since={since}"])
    assert caught.value.code == 2
    assert "is neither ISO-8601 (2026-11-29" in capsys.readouterr().err


def test_nothing_yet(usage: Callable[..., str], workdir: Path) -> None:
    """With the built-in defaults, before the first start: no rows, and no database is made."""
    assert usage("--json") == "[]\n"
    assert usage().splitlines()[-1].split() == ["TOTAL", "0", "requests", "0", "0", "0.000000"]
    assert list(workdir.iterdir()) == []


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["usage", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:\n  sluicegate usage" in shown
    assert "without it everything is shown" in " ".join(shown.split())
