"""The command line of O2: what it prints, where, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from planes import cli
from planes.settings import Settings
from planes.settings.notices import PUBLISHED_KEYS
from planes.version import version

ROOT = Path(__file__).parents[2]
GOOD = """\
keys: [{key: ozk_1, org: dev}]
providers:
  on: {shape: openai, base_url: "http://127.0.0.1:9000/v1"}
  off: {shape: openai, base_url: "https://api.example.com/v1", api_key: "${SOME_KEY:-}"}
models:
  a/b:
    candidates: [{provider: off, model: x}, {provider: on, model: y}]
    price: {prompt_usd_per_mtok: 0, completion_usd_per_mtok: 0}
"""
BAD = "server: {prot: 1}\nproviders:\n  p: {shape: openai, base_url: example.com}\n"
PRICED = """\
keys: [{key: ozk_0123456789abcdef, org: o}]
providers:
  mine: {shape: openai, base_url: "http://models.internal/v1", api_key: k}
  openai: {shape: openai, base_url: "https://api.openai.com/v1", api_key: k}
  local: {kind: local}
models:
  m/a:
    candidates: [{provider: mine, model: a}]
    price: {prompt_usd_per_mtok: 1, completion_usd_per_mtok: 2}
  m/known: {candidates: [{provider: openai, model: gpt-4o-mini}, {provider: local, model: x}]}
"""
UNPRICED = (
    PRICED
    + """\
  m/b: {candidates: [{provider: mine, model: c}, {provider: mine, model: b}]}
  m/off: {candidates: [{provider: off, model: d}, {provider: mine, model: a}]}
"""
).replace("models:\n", "  off: {shape: openai, base_url: \"http://o/v1\", api_key: ''}\nmodels:\n")
BAD_LINES = [
    ":1: server.prot: unknown key `prot` (did you mean `port`?)",
    ":3: providers.p.base_url: must begin with http:// or https:// (got no scheme)",
]


def run(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own, with nothing but `env` around it."""
    return subprocess.run(
        [sys.executable, "-m", "planes.cli", *arguments],
        cwd=cwd,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Settings, bool]]:
    """Replace the planes by a recorder, and start in an empty folder without environment."""
    calls: list[tuple[Settings, bool]] = []

    def serve(settings: Settings, *, embedded: bool) -> int:
        calls.append((settings, embedded))
        return 0

    app = ModuleType("planes.server")
    app.run = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planes.server", app)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICEGATE_CONFIG", raising=False)
    return calls


def test_check_prints_every_problem_and_exits_with_1(tmp_path: Path) -> None:
    """O2: each with its line, as the file was named, and no traceback."""
    (tmp_path / "gw.yaml").write_text(BAD)
    done = run(tmp_path, "check", "gw.yaml")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [f"gw.yaml{line}" for line in BAD_LINES]


def test_check_says_what_is_off_and_ok(tmp_path: Path) -> None:
    """O2: exit 0; the environment counts."""
    (tmp_path / "gw.yaml").write_text(GOOD)
    done = run(tmp_path, "check", "gw.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "gw.yaml: notice: provider off is off: api_key is empty",
        "gw.yaml: ok",
    ]
    assert run(tmp_path, "check", "gw.yaml", SOME_KEY="k").stdout == "gw.yaml: ok\n"


def test_check_warns_of_models_that_would_be_counted_as_free(tmp_path: Path) -> None:
    """M4.4: as the start does; of what has a price, or is off, nothing is said."""
    (tmp_path / "gw.yaml").write_text(UNPRICED)
    done = run(tmp_path, "check", "gw.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "gw.yaml: warning: no price is known for mine/b, mine/c: counted as free; "
        "set models.<slug>.price to change that",
        "gw.yaml: ok",
    ]
    (tmp_path / "priced.yaml").write_text(PRICED)
    assert run(tmp_path, "check", "priced.yaml").stdout == "priced.yaml: ok\n"


def test_check_finds_what_keeps_this_machine_from_starting(tmp_path: Path) -> None:
    """O2, O3.6: a library that is not there is a problem at the line that needs it."""
    (tmp_path / "gw.yaml").write_text(f"{GOOD}telemetry:\n  otlp_endpoint: http://127.0.0.1:4318\n")
    code = (
        "import sys; sys.modules['opentelemetry'] = None; "
        "from planes.cli import main; sys.exit(main(['check', 'gw.yaml']))"
    )
    done = ran(code, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gw.yaml:10: telemetry.otlp_endpoint: needs the extra `otel`: "
        "pip install 'sluicegate[otel]', or -e '.[otel]' in a checkout\n"
    )
    assert run(tmp_path, "check", "gw.yaml", SOME_KEY="k").returncode == 0  # it is here


@pytest.mark.parametrize(
    ("key", "host", "warned"),
    [
        ("ozk_dev_0123456789abcdef", "0.0.0.0", True),
        ("ozk_change_me", "::", True),
        ("ozk_change_me", "gateway.example.com", True),
        ("ozk_change_me", "127.0.0.1", False),
        ("ozk_change_me", "::1", False),
        ("ozk_change_me", "localhost", False),
        ("ozk_mine", "0.0.0.0", False),
    ],
)
def test_a_key_that_everyone_knows_is_for_this_machine_only(
    tmp_path: Path, key: str, host: str, *, warned: bool
) -> None:
    text = GOOD.replace("ozk_1", key) + f'server: {{host: "{host}"}}\n'
    (tmp_path / "gw.yaml").write_text(text)
    done = run(tmp_path, "check", "gw.yaml", SOME_KEY="k")
    assert done.returncode == 0
    warning = f"gw.yaml: warning: a key that everyone knows is accepted on {host}: "
    assert done.stdout.startswith(warning) is warned
    assert key not in done.stdout


def test_check_says_which_keys_run_no_workflow(tmp_path: Path) -> None:
    """W1."""
    keys = "keys: [{key: a, org: o}, {key: ozk_b, org: o}, {key: c, org: o}]"
    (tmp_path / "gw.yaml").write_text(GOOD.replace("keys: [{key: ozk_1, org: dev}]", keys))
    assert run(tmp_path, "check", "gw.yaml", SOME_KEY="k").stdout.splitlines() == [
        "gw.yaml: notice: keys[0] and keys[2] do not begin with `ozk_`: "
        "the workflows plane refuses them",
        "gw.yaml: ok",
    ]


def test_the_keys_that_everyone_knows_are_those_of_the_documentation() -> None:
    pages = [ROOT / "README.md", ROOT / "planes/defaults.yaml", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert set(re.findall(r"ozk_[a-z]\w+", text)) == PUBLISHED_KEYS


def test_check_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A problem like any other, without a line."""
    done = run(tmp_path, "check", "none.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "none.yaml: cannot be read: No such file or directory\n"


def test_check_finds_the_file_as_the_other_commands_do(tmp_path: Path) -> None:
    """O2: FILE is --config; else the variable, ./sluicegate.yaml, the built-in defaults."""
    assert run(tmp_path, "check").stdout.endswith("built-in defaults: ok\n")
    for name in ("sluicegate", "flag", "variable"):
        (tmp_path / f"{name}.yaml").write_text(BAD)
    for arguments, env, name in (
        ([], {}, "sluicegate"),
        (["--config", "flag.yaml"], {}, "flag"),
        ([], {"SLUICEGATE_CONFIG": "variable.yaml"}, "variable"),
        (["flag.yaml"], {"SLUICEGATE_CONFIG": "variable.yaml"}, "flag"),
    ):
        done = run(tmp_path, "check", *arguments, **env)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [f"{name}.yaml{line}" for line in BAD_LINES]


@pytest.mark.parametrize("command", ["serve", "models"])
def test_a_bad_configuration_exits_with_2(tmp_path: Path, command: str) -> None:
    """O2: the same problems, by each of the ways to name the file."""
    (tmp_path / "sluicegate.yaml").write_text(BAD)
    for arguments, env in (
        ([], {}),
        (["--config", "sluicegate.yaml"], {}),
        ([], {"SLUICEGATE_CONFIG": "sluicegate.yaml"}),
    ):
        done = run(tmp_path, command, *arguments, **env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [f"sluicegate.yaml{line}" for line in BAD_LINES]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serv"],
        ["serve", "--port", "x"],
        ["version", "--json"],
        ["check", "a", "--config", "b"],
    ],
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """O2: usage on standard error."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sluicegate")


@pytest.mark.parametrize("command", ["serve", "check f", "keys list", "usage"])
def test_an_unknown_option_shows_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of `sluicegate`, which says nothing of options."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--what"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: sluicegate {command.removesuffix(' f')} [-h]")
    assert "unrecognized arguments: --what" in err


@pytest.mark.parametrize("command", ["serve", "check", "models", "balance", "version"])
def test_the_help_of_each_command_shows_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does so without the planes."""
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  sluicegate {command}" in capsys.readouterr().out


def ran(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, as if from a checkout."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_check_does_not_import_what_it_does_not_need(tmp_path: Path) -> None:
    """It stays fast in an editor's hook."""
    (tmp_path / "gw.yaml").write_text(GOOD)
    code = (
        "import sys; from planes.cli import main; main(['check', 'gw.yaml']); "
        "print(sorted({'aiohttp', 'structlog', 'relay'} & set(sys.modules)))"
    )
    done = ran(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_serve_without_a_file_uses_the_built_in_defaults(
    served: list[tuple[Settings, bool]],
) -> None:
    """O1.1, O2."""
    assert cli.main(["serve"]) == 0
    ((settings, embedded),) = served
    assert embedded
    assert "local/smollm2-135m" in settings.models


def test_serve_takes_its_flags_over_the_file(
    served: list[tuple[Settings, bool]], tmp_path: Path
) -> None:
    """O2: --host, --port and --workers; the rest stays the file's."""
    (tmp_path / "sluicegate.yaml").write_text(GOOD + "server: {port: 1, write_stall_s: 7}\n")
    assert cli.main(["serve", "--host", "0.0.0.0", "--port", "9000", "--workers", "1"]) == 0
    ((settings, embedded),) = served
    assert not embedded
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 9000)
    assert settings.server.write_stall_s == 7
    assert list(settings.models) == ["a/b"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--port", "65536"], "--port: must be at most 65535"),
        (["--workers", "2"], "--workers: more than one worker is not served yet"),
        (["--host", ""], "--host: must not be empty"),
    ],
)
def test_a_flag_that_the_file_could_not_hold_exits_with_2(
    served: list[tuple[Settings, bool]],
    flags: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """O2: and nothing is served."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"sluicegate serve: {problem}")
    assert served == []


def test_a_failure_at_run_time_exits_with_1(
    served: list[tuple[Settings, bool]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """O2: one line on standard error, no traceback and no secret."""

    def fail(_settings: Settings, *, embedded: bool) -> int:
        raise OSError(98, "address in use, Bearer hunter2")

    monkeypatch.setattr(sys.modules["planes.server"], "run", fail)
    assert cli.main(["serve"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "sluicegate: OSError: [Errno 98] address in use, Bearer ***\n")
    assert served == []


def test_models_lists_candidates_and_why_a_provider_is_off(tmp_path: Path) -> None:
    """O2."""
    (tmp_path / "sluicegate.yaml").write_text(GOOD)
    done = run(tmp_path, "models")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "MODEL     CANDIDATES",
        "a/b       off/x (off: api_key is empty), on/y",
        "",
        "PROVIDER  STATE",
        "on        on",
        "off       off: api_key is empty",
    ]


def test_a_configuration_without_models_is_told_how_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "sluicegate.yaml").write_text("providers: {r: {kind: replay}}\n")
    assert run(tmp_path, "models").stdout.splitlines()[:2] == [
        "MODEL     CANDIDATES",
        "none      <provider>/<model> names any model of a provider that is on",
    ]


def test_models_as_json(tmp_path: Path) -> None:
    """O2: for programs."""
    (tmp_path / "sluicegate.yaml").write_text(GOOD)
    off = {"on": False, "why": "api_key is empty"}
    on = {"on": True, "why": None}
    assert json.loads(run(tmp_path, "models", "--json").stdout) == {
        "models": {
            "a/b": [
                {"provider": "off", "model": "x", **off},
                {"provider": "on", "model": "y", **on},
            ]
        },
        "providers": {"on": on, "off": off},
    }


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """`sluicegate models | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "planes.cli", "models"],
            cwd=tmp_path,
            env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """O2: that of the installed distribution."""
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sluicegate {version()}\n"
