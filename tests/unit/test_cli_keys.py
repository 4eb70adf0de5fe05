"""`sluicegate keys` (O2): what is stored, what is shown, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from planes import cli
from relay.stores.base import Org
from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
KEY = re.compile(r"ozk_[0-9A-Za-z]{40}")


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)
    return tmp_path


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
        return Result(code, *capsys.readouterr())

    return run


def stored(work: Callable[[SqliteStore], Awaitable[T]], path: str = "sluicegate.db") -> T:
    async def look() -> T:
        store = SqliteStore(path)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(look())


def test_a_key_is_shown_once_and_stored_as_its_digest(
    run: Callable[..., Result], workdir: Path
) -> None:
    """O2: alone on standard output, so that a shell can take it; an org is made for it."""
    made = run("keys", "create", "--org", "acme", "--name", "laptop")
    assert made.code == 0
    text = made.out.rstrip("\n")
    assert KEY.fullmatch(text)
    (key,) = stored(lambda store: store.list_keys())
    digest = hashlib.sha256(text.encode()).digest()
    assert (key.digest, key.id) == (digest, f"key_{digest.hex()[:12]}")
    assert (key.org, key.name, key.status) == (Org(id="acme"), "laptop", "active")
    assert f"{key.id} of acme (balance no limit), in {workdir}/sluicegate.db (new)\n" in made.err
    assert "A running gateway takes it within 5 s." in made.err
    assert text not in made.err
    again = run("keys", "create", "--org", "acme", "--json")
    assert f", in {workdir}/sluicegate.db\n" in again.err
    run("keys", "revoke", again.json["id"])
    for shown in (run("keys", "list"), run("keys", "list", "--json"), run("usage")):
        assert text not in shown.out + shown.err
    for file in workdir.iterdir():
        assert text.encode() not in file.read_bytes()


def test_no_two_keys_are_alike(run: Callable[..., Result]) -> None:
    keys = {run("keys", "create", "--org", "acme").out for _ in range(5)}
    assert len(keys) == 5


def test_create_as_json(run: Callable[..., Result]) -> None:
    """O2: for programs."""
    made = run(
        *("keys", "create", "--org", "acme", "--name", "ci", "--trial", "--json"),
        *("--balance-usd", "12.345678", "--max-concurrent", "8"),
    )
    assert made.code == 0
    document = made.json
    text, created_at = document.pop("key"), document.pop("created_at")
    assert KEY.fullmatch(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", created_at)
    assert document == {
        "id": f"key_{hashlib.sha256(text.encode()).hexdigest()[:12]}",
        "org": "acme",
        "name": "ci",
        "status": "active",
        "balance_micro_usd": 12_345_678,
        "trial": True,
        "max_concurrent": 8,
    }


def test_of_an_org_that_is_there_only_what_is_said_changes(run: Callable[..., Result]) -> None:
    """O2, as `keys create --help` says."""

    def acme() -> Org | None:
        return stored(lambda store: store.get_org("acme"))

    run("keys", "create", "--org", "acme", "--balance-usd", "5", "--max-concurrent", "2")
    assert acme() == Org(id="acme", balance_micro_usd=5_000_000, max_concurrent=2)
    run("keys", "create", "--org", "acme")
    assert acme() == Org(id="acme", balance_micro_usd=5_000_000, max_concurrent=2)
    run("keys", "create", "--org", "acme", "--balance-usd", "0", "--trial")
    assert acme() == Org(id="acme", balance_micro_usd=0, max_concurrent=2, trial=True)
    run("keys", "create", "--org", "acme", "--max-concurrent", "3", "--no-trial")
    assert acme() == Org(id="acme", balance_micro_usd=0, max_concurrent=3)
    assert len(stored(lambda store: store.list_keys())) == 4


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--balance-usd", "-1"], "--balance-usd: must be at least 0"),
        (["--balance-usd", "much"], "--balance-usd: must be a number"),
        (["--balance-usd", "nan"], "--balance-usd: must be a finite number"),
        (["--balance-usd", "1e10"], "--balance-usd: must be at most 1e+09"),
        (["--max-concurrent", "0"], "--max-concurrent: must be at least 1"),
        (["--max-concurrent", "1.5"], "--max-concurrent: must be a whole number"),
        (["--name", ""], "--name: must be one line of text"),
        (["--org", "a\nb"], "--org: must be one line of text"),
    ],
)
def test_a_wrong_flag_makes_nothing(
    run: Callable[..., Result], flags: list[str], problem: str, workdir: Path
) -> None:
    """O2: exit 2, in the words of the configuration file."""
    made = run("keys", "create", "--org", "acme", *flags)
    assert (made.code, made.out) == (2, "")
    assert made.err.startswith(f"sluicegate keys create: {problem}")
    assert list(workdir.iterdir()) == []


def test_list(run: Callable[..., Result]) -> None:
    """Oldest first, revoked ones too."""
    made = run("keys", "create", "--org", "acme", "--name", "a", "--balance-usd", "5", "--json")
    run("keys", "create", "--org", "b", "--max-concurrent", "2")
    run("keys", "revoke", made.json["id"])
    listed = run("keys", "list", "--json").json
    assert [(k["org"], k["status"]) for k in listed] == [("acme", "revoked"), ("b", "active")]
    assert listed[0] == {k: v for k, v in made.json.items() if k != "key"} | {"status": "revoked"}
    head, first, second = run("keys", "list").out.splitlines()
    assert head.split() == [
        *("ID", "ORG", "NAME", "STATUS", "BALANCE_USD", "TRIAL", "MAX_CONCURRENT", "CREATED"),
    ]
    assert re.split("  +", first) == [
        *(made.json["id"], "acme", "a", "revoked", "5.000000", "no", "no limit"),
        made.json["created_at"],
    ]
    assert re.split("  +", second)[1:5] == ["b", "active", "no limit", "no"]


def test_revoke(run: Callable[..., Result]) -> None:
    """Idempotent; exit 1 and a clear message for one that is not there."""
    key_id = run("keys", "create", "--org", "acme", "--json").json["id"]
    for _ in range(2):
        done = run("keys", "revoke", key_id)
        assert (done.code, done.err) == (0, "")
        assert f"{key_id} is revoked" in done.out
    assert [k.status for k in stored(lambda store: store.list_keys())] == ["revoked"]
    wrong = run("keys", "revoke", "key_000000000000")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err == (
        "sluicegate: key_000000000000 is no key of this database; `sluicegate keys list` shows "
        "them\n"
    )


def test_revoke_takes_the_key_itself_and_does_not_repeat_it(
    run: Callable[..., Result], workdir: Path
) -> None:
    """O2: who has only the text of a leaked key can revoke it."""
    (workdir / "sluicegate.yaml").write_text("keys: [{key: ozk_static, org: dev}]\n")
    made = run("keys", "create", "--org", "acme", "--json").json
    done = run("keys", "revoke", made["key"])
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{made['id']} is revoked; a running gateway obeys within 5 s\n"
    assert [k.status for k in stored(lambda store: store.list_keys())] == ["revoked"]
    wrong = run("keys", "revoke", "ozk_nobody")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err.startswith("sluicegate: what was given is no key of this database")
    static = run("keys", "revoke", "ozk_static")
    assert static.code == 1
    assert "is a key of the configuration" in static.err
    assert "ozk_" not in wrong.err + static.err


def test_revoking_a_key_of_the_configuration_says_where_to_do_it(
    run: Callable[..., Result], workdir: Path
) -> None:
    """It is no row of the database."""
    (workdir / "sluicegate.yaml").write_text("keys: [{key: ozk_static, org: dev}]\n")
    key_id = f"key_{hashlib.sha256(b'ozk_static').hexdigest()[:12]}"
    done = run("keys", "revoke", key_id)
    assert done.code == 1
    assert "set `status: revoked` there" in done.err
    assert "ozk_static" not in done.err


def test_looking_makes_no_database(run: Callable[..., Result], workdir: Path) -> None:
    """In a wrong directory, say: told, and nothing is left behind."""
    listed = run("keys", "list", "--json")
    assert (listed.code, listed.out) == (0, "[]\n")
    assert listed.err == f"sluicegate: note: there is no database {workdir}/sluicegate.db yet\n"
    assert run("keys", "revoke", "key_1").code == 1
    assert list(workdir.iterdir()) == []


def test_the_database_is_that_of_the_configuration(
    run: Callable[..., Result], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: --config, SLUICEGATE_CONFIG, ./sluicegate.yaml; a relative path from where one stands."""
    for name in ("flag", "variable", "sluicegate"):
        (workdir / f"{name}.yaml").write_text(f'store: {{url: "sqlite:///{name}.db"}}\n')
    run("keys", "create", "--org", "a", "--config", "flag.yaml")
    run("keys", "create", "--org", "b")
    monkeypatch.setenv("SLUICEGATE_CONFIG", str(workdir / "variable.yaml"))
    run("keys", "create", "--org", "c")
    for name, org in (("flag", "a"), ("sluicegate", "b"), ("variable", "c")):
        keys = stored(lambda store: store.list_keys(), f"{name}.db")
        assert [key.org.id for key in keys] == [org]
    (workdir / "variable.yaml").write_text(f'store: {{url: "sqlite:///{workdir}/deep.db"}}\n')
    assert run("keys", "create", "--org", "d").code == 0
    assert (workdir / "deep.db").exists()


def test_a_database_that_cannot_be_used_is_one_line(
    run: Callable[..., Result], workdir: Path
) -> None:
    """O2: exit 1, no traceback."""
    (workdir / "sluicegate.db").write_text("not a database at all\n" * 50)
    for command in (["keys", "create", "--org", "a"], ["keys", "list"], ["keys", "revoke", "k"]):
        done = run(*command)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"sluicegate: the database {workdir}/sluicegate.db: it is not")
        assert done.err.count("\n") == 1


def test_a_bad_configuration_exits_with_2(run: Callable[..., Result], workdir: Path) -> None:
    """O2: as of every command."""
    (workdir / "sluicegate.yaml").write_text("sore: {}\n")
    done = run("keys", "list")
    assert (done.code, done.out) == (2, "")
    assert done.err == "sluicegate.yaml:1: sore: unknown key `sore` (did you mean `store`?)\n"


@pytest.mark.parametrize("command", ["create", "list", "revoke"])
def test_help_shows_examples(run: Callable[..., Result], command: str) -> None:
    shown = run("keys", command, "--help")
    assert shown.code == 0
    assert f"examples:\n  sluicegate keys {command}" in shown.out
    assert "--config" in shown.out


@pytest.mark.parametrize("arguments", [["keys"], ["keys", "creat"], ["keys", "create"]])
def test_a_wrong_command_line_exits_with_2(
    run: Callable[..., Result], arguments: list[str]
) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.err.startswith("usage: sluicegate keys")


def test_as_a_process_beside_another(workdir: Path) -> None:
    """Several at once on one new database: all keys are there."""
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "planes.cli", "keys", "create", "--org", "acme", "--json"],
            env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    ends = [command.communicate(timeout=60) for command in commands]
    assert [command.returncode for command in commands] == [0] * 4, ends
    made = {json.loads(out)["id"] for out, _ in ends}
    assert {key.id for key in stored(lambda store: store.list_keys())} == made
