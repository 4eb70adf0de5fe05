"""`planes.config_file`: YAML with `${ENV}`, every problem at its line, no secret in any of them."""

import re
from pathlib import Path

import pytest

from planes.config_file import (
    ConfigError,
    Problem,
    find_config,
    load,
    load_defaults,
    load_text,
)
from planes.settings import HttpProvider, Settings, notices

CONTRACT = """\
server: {host: 127.0.0.1, port: 8080, workers: 1, shutdown_grace_s: 25, max_body_mb: 32,
         write_stall_s: 300}
store: {url: "sqlite:///sluicegate.db"}         # or postgresql://user:pw@host/db
bus: {url: "memory://"}                          # or redis://host:6379/0
keys:                                            # static keys; more through `sluicegate keys`
  - {key: "ozk_dev_0123456789abcdef", org: dev, trial: false, balance_usd: 100,
     max_concurrent: 8, status: active}          # | suspended | revoked
providers:
  openai:    {shape: openai,    base_url: "https://api.openai.com/v1",
              api_key: "${OPENAI_API_KEY:-}"}    # empty: the provider is off
  anthropic: {shape: anthropic, base_url: "https://api.anthropic.com",
              api_key: "${ANTHROPIC_API_KEY:-}"}
  gemini:    {shape: gemini,    base_url: "https://generativelanguage.googleapis.com",
              api_key: "${GEMINI_API_KEY:-}"}
  local:     {kind: local, model: smollm2-135m}          # the child process of O1.1
  replay:    {kind: replay, path: transcripts/}          # recorded transcripts
  odd-one:   {shape: openai, base_url: "http://127.0.0.1:9000/v1", cumulative_deltas: true,
              inline_tool_calls: true, connect_timeout_s: 5, header_timeout_s: 120,
              headers: {x-team: a}}
models:                         # slug the client names → candidates in failover order
  openai/gpt-4o-mini:
    candidates: [{provider: openai, model: gpt-4o-mini}, {provider: odd-one, model: mini}]
    price: {prompt_usd_per_mtok: 0.15, completion_usd_per_mtok: 0.60}
agents:
  one-agent: {model: openai/gpt-4o-mini, system: "You are brief.", max_tokens: 256}
workflows: {engine: {kind: embedded}, orphan_after_s: 300, heartbeat_s: 15}
agents_plane: {keepalive_s: 15, keepalive_comment: "OCEAN PROCESSING"}
decision:
  backend: {kind: chat-logprobs, model: openai/gpt-4o-mini}
  models: [{id: rightnow-decision, aliases: [system-zero]}]     # limits optional
  media: [image, audio, document, video]
  price: {image_usd: 0.003, question_usd: 0.0001, call_usd: 0.00001}
  account_streams: 1                             # integer | half_concurrency
  limits: {idle_timeout_ms: 120000, heartbeat_interval_ms: 30000}
journal: {retention_days: 30}
billing: {sweep_interval_s: 300, hold_ttl_s: 900, hold_output_tokens: 4096, webhook: null}
telemetry: {log: json, metrics: true, otlp_endpoint: null}
"""
PROVIDER_KEYS = {"OPENAI_API_KEY": "sk-1", "ANTHROPIC_API_KEY": "sk-2", "GEMINI_API_KEY": "sk-3"}


def problems(text: str, env: dict[str, str] | None = None) -> list[str]:
    """Return what is wrong with `text`, a line for each problem."""
    with pytest.raises(ConfigError) as caught:
        load_text(text, env or {})
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return [
        re.sub(r"^sluicegate\.yaml:(?=\d)", "", str(problem)) for problem in caught.value.problems
    ]


def system(text: str, env: dict[str, str] | None = None) -> str:
    """Return what `text`, a YAML scalar, becomes where any text is allowed."""
    agent = f"agents: {{a: {{model: replay/m, system: {text}}}}}"
    whole = load_text(f"{agent}\nproviders: {{replay: {{kind: replay}}}}", env or {})
    return whole.agents["a"].system


def test_the_contracts_example_loads_without_keys() -> None:
    """O3: `${OPENAI_API_KEY:-}` unset leaves the provider off."""
    settings = load_text(CONTRACT, {})
    assert settings.provider_off_reason("openai") == "api_key is empty"
    assert settings.provider_off_reason("odd-one") is None
    assert notices(settings) == [
        "providers openai, anthropic and gemini are off: api_key is empty",
    ]


def test_the_contracts_example_loads_with_keys() -> None:
    """O3: with its variables set, the values are those of the environment."""
    settings = load_text(CONTRACT, PROVIDER_KEYS)
    openai = settings.providers["openai"]
    assert isinstance(openai, HttpProvider)
    assert openai.api_key is not None
    assert openai.api_key.get_secret_value() == "sk-1"
    assert settings.provider_off_reason("openai") is None
    assert settings.provider_off_reason("gemini") is None
    assert settings.models["openai/gpt-4o-mini"].candidates[1].provider == "odd-one"
    assert settings.decision.limits == {"idle_timeout_ms": 120000, "heartbeat_interval_ms": 30000}


def test_no_scalar_of_a_file_is_ever_shown() -> None:
    """O3: whatever stands in the wrong place may be a secret."""
    secret = "hunter2hunter2"
    wrong = re.sub(r'("[^"]*"|(?<=: )[\w./-]+)(?=[,}\]\s])', f'"{secret} x"', CONTRACT)
    assert wrong.count(secret) > 60
    found = "\n".join(problems(wrong))
    assert len(found.splitlines()) > 30
    assert secret not in found


def test_no_variables_value_is_ever_shown() -> None:
    """O3: nor one of the environment."""
    text = """\
server: {host: "", port: "${SECRET}"}
providers:
  p: {shape: "${SECRET}", base_url: "${SECRET}", api_key: "${SECRET} x", headers: {a: "${SECRET}"}}
models:
  m: {candidates: [{provider: "${SECRET}", model: "${SECRET}"}], "${SECRET}": 1}
workflows: {engine: {kind: "${SECRET}"}}
telemetry: {log: "${SECRET}", metrics: "${SECRET}"}
"""
    found = problems(text, {"SECRET": "hunter2\nhunter2"})
    assert len(found) == 11
    assert "hunter2" not in "".join(found)


def test_all_problems_come_at_once_in_the_files_order() -> None:
    """O3: of YAML, of the environment, of single fields and between sections."""
    text = """\
server:
  port: 99999
  prot: 1
keys:
  - key: ozk_1
    org: dev
  - {key: "ozk_1", org: dev}
providers:
  openai:
    shape: openai
    conect_timeout_s: 5
    base_url: api.example.com
    api_key: "${MISSING}"
  openai: {}
models:
  a/b:
    candidates:
      - {provider: opnai, model: x}
"""
    assert problems(text) == [
        "2: server.port: must be at most 65535",
        "3: server.prot: unknown key `prot` (did you mean `port`?)",
        "7: keys[1].key: is the same key as keys[0]",
        "11: providers.openai.conect_timeout_s: unknown key `conect_timeout_s` (did you mean "
        "`connect_timeout_s`?)",
        "12: providers.openai.base_url: must begin with http:// or https:// (got no scheme)",
        "13: providers.openai.api_key: environment variable MISSING is not set; "
        "${MISSING:-…} has a default",
        "14: providers.openai: is set twice in one mapping",
        "18: models.a/b.candidates[0].provider: names no configured provider (did you mean "
        "`openai`?)",
    ]


def test_a_problem_has_a_column_too() -> None:
    """For editors; of the key, as the value may be lines below."""
    with pytest.raises(ConfigError) as caught:
        load_text("server: {host: h, port: x}", {})
    assert caught.value.problems == [
        Problem(1, 19, "server.port", "must be a whole number", "sluicegate.yaml")
    ]


def test_a_missing_key_is_reported_where_it_should_stand() -> None:
    """There is no line of its own: that of its mapping."""
    text = "providers:\n  p:\n    shape: openai\nkeys:\n  - key: ozk_1\n"
    assert problems(text) == [
        "2: providers.p.base_url: is missing",
        "5: keys[0].org: is missing",
    ]


def test_a_value_that_cannot_be_made_is_one_problem() -> None:
    """Not a second one for its wrong type."""
    assert problems('server: {port: "${P}", workers: !!int x}') == [
        "1: server.port: environment variable P is not set; ${P:-…} has a default",
        "1: server.workers: does not fit its tag",
    ]


def test_an_unset_variable_is_reported_at_its_own_line_of_a_block() -> None:
    """A block of text begins lines before it."""
    text = "agents:\n  a:\n    provider: p\n    system: |\n      one\n      ${TWO}\n"
    text += "providers: {p: {kind: replay}}\n"
    assert problems(text) == [
        "6: agents.a.system: environment variable TWO is not set; ${TWO:-…} has a default"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("port: ${PORT:-8080}", 8080),
        ("port: ${PORT:-0x10}", 16),
        ("port: 80${PORT:-80}", 8080),
        ("max_body_mb: ${PORT:-0.5}", 0.5),
        ("host: ${PORT:-localhost}", "localhost"),
        ('host: "${PORT:-8080}"', "8080"),
        ("host: '${PORT:-8080}'", "8080"),
        ("host: >-\n    ${PORT:-8080}", "8080"),
        ("host: 2026-01-01", "2026-01-01"),
        ("host: no", "no"),
    ],
)
def test_only_a_plain_scalar_is_typed_again(text: str, value: object) -> None:
    """O3: `port: ${PORT:-8080}` is a number, in quotes it is text."""
    name = text.partition(":")[0]
    assert getattr(load_text(f"server:\n  {text}\n", {}).server, name) == value


def test_a_boolean_may_be_any_of_yamls_words() -> None:
    """Of 1.1 and 1.2; elsewhere those words are text."""
    for word, value in (("off", False), ("no", False), ("false", False), ("Yes", True)):
        assert load_text(f"telemetry: {{metrics: {word}}}", {}).telemetry.metrics is value


def test_an_empty_plain_value_is_null() -> None:
    """Which is `no limit` for a limit, but an empty key and never `needs no key` for a key."""
    text = """\
keys:
  - {key: ozk_1, org: dev}
  - key: ozk_2
    org: dev
    max_concurrent: ${LIMIT:-}
providers:
  p:
    shape: openai
    base_url: https://api.example.com
    api_key: ${KEY:-}
"""
    settings = load_text(text, {})
    assert settings.keys[1].max_concurrent is None
    assert settings.provider_off_reason("p") == "api_key is empty"


def test_substitution_leaves_keys_and_comments_alone() -> None:
    """O3: scalar values only."""
    assert problems("# ${UNSET}\nserver:\n  ${UNSET}: 1 # ${UNSET}\n") == [
        "3: server.${UNSET}: unknown key `${UNSET}`"
    ]


def test_what_is_put_in_is_not_looked_at_again() -> None:
    """A value of the environment is neither a reference nor YAML."""
    assert system('"${A}"', {"A": "${B} $${C} # {x: 1}"}) == "${B} $${C} # {x: 1}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server:\n  port: 1\n host: x\n", "3:2: is not YAML: "),
        ("a: [1, 2\nb: 3\n", "2:2: is not YAML: while parsing a flow sequence "),
        ("a: b: c", "1:5: is not YAML: mapping values are not allowed here"),
        ("a: *hunter2", "1:4: is not YAML: found undefined alias"),
        ("server: {port: ${P}}", "1:17: is not YAML: "),
        ("server: {}\n---\nserver: {}", "2:1: is not YAML: expected a single document"),
        ("server:\n  host: a\x00b", "2: is not YAML: a control character"),
        ("[" * 5000, "sluicegate.yaml: is nested too deeply"),
        ("- 1", "1:1: must be a mapping"),
        ("? [a]\n: 1", "1:3: a key must be text"),
        ("server: !!python/object:os.system {}", "1: server: has a tag (`!…`) that is not allow"),
        ("server: {port: !env P}", "1: server.port: has a tag (`!…`) that is not allowed"),
        ("agents: &a {x: *a}", "1: agents.x: is an alias of what it stands in"),
        ("agents: &a {<<: *a}", "1: agents: `<<` must name a mapping, or a list of them"),
        ("agents: {<<: [1]}", "1: agents: `<<` must name a mapping, or a list of them"),
    ],
)
def test_what_is_no_configuration_is_said_at_its_line(text: str, problem: str) -> None:
    """O3: the first error of the syntax with line and column, and nothing of the text itself."""
    (found,) = problems(text)
    assert found.startswith(problem)
    assert "hunter2" not in found


def test_a_reference_without_quotes_in_a_flow_mapping_is_explained() -> None:
    """YAML's own words do not lead there."""
    (found,) = problems("server: {port: ${PORT:-8080}}")
    assert found.endswith("put a value with ${…} in quotes inside {…} or […]")


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("server:\n\tport: 1", "2:1", "indent with spaces, not tabs"),
        ("keys:\n  - key: k\n   org: o", "3:4", "is this line indented as those beside it?"),
        ("server:\n  host: a: b", "2:10", "a value that holds `: ` needs quotes"),
    ],
)
def test_yamls_own_words_are_explained(text: str, place: str, hint: str) -> None:
    (found,) = problems(text)
    assert found.startswith(f"{place}: is not YAML: ")
    assert found.endswith(f"; {hint}")


def test_aliases_of_aliases_are_bounded() -> None:
    """Nine lines of YAML could otherwise ask for a thousand million values."""
    lines = ["a0: &a0 [x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)
    ]
    assert "is too large: aliases repeat too much" in problems("\n".join(lines))[-1]


def test_anchors_and_merges_work() -> None:
    """Own keys win over merged ones, the first merge over the next; lines are the origin's."""
    text = """\
providers:
  a: &a {shape: openai, base_url: "http://a", header_timeout_s: 1}
  b: &b {<<: *a, base_url: "http://b"}
  c: {<<: [*b, *a], connect_timeout_s: 9}
  d: *a
"""
    providers = load_text(text, {}).providers
    fields = [(p.base_url, p.header_timeout_s) for p in providers.values()]  # type: ignore[union-attr]
    assert fields == [("http://a", 1), ("http://b", 1), ("http://b", 1), ("http://a", 1)]
    assert problems(text.replace("timeout_s: 1", "timeout_s: 0"))[-1].startswith("2: providers.d")


def test_a_file_that_cannot_be_read_is_a_problem_without_a_line(tmp_path: Path) -> None:
    """O2: missing, a folder, or not UTF-8; the name is as it was given."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read: ") as caught:
            load(path, {})
        assert str(caught.value).startswith(f"{path}: ")
    (tmp_path / "latin1.yaml").write_bytes(b"server:\n  host: \xfc\n")
    with pytest.raises(ConfigError, match=r"latin1\.yaml:2: is not UTF-8"):
        load(tmp_path / "latin1.yaml", {})


def test_a_file_may_begin_with_a_byte_order_mark_or_be_empty(tmp_path: Path) -> None:
    """Editors write the one; the other means all defaults."""
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfserver: {port: 1}\n")
    assert load(tmp_path / "a.yaml", {}).server.port == 1
    assert load_text("# nothing\n", {}) == Settings()


def test_the_file_is_found_in_the_contracts_order(tmp_path: Path) -> None:
    """O2: --config, SLUICEGATE_CONFIG, ./sluicegate.yaml; a named one need not exist."""
    env = {"SLUICEGATE_CONFIG": "env.yaml"}
    assert find_config(None, {}, tmp_path) is None
    here = tmp_path / "sluicegate.yaml"
    here.write_text("")
    assert find_config(None, {"SLUICEGATE_CONFIG": ""}, tmp_path) == here
    assert find_config(None, env, tmp_path) == tmp_path / "env.yaml"
    assert find_config("flag.yaml", env, tmp_path) == tmp_path / "flag.yaml"
    assert find_config("/etc/flag.yaml", env, tmp_path) == Path("/etc/flag.yaml")


def test_the_built_in_defaults_serve_the_local_model() -> None:
    """O1.1: one development key, this machine only, and one line about all missing keys."""
    settings = load_defaults({})
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    assert [key.key.get_secret_value() for key in settings.keys] == ["ozk_dev_0123456789abcdef"]
    assert settings.keys[0].max_concurrent is None
    assert settings.telemetry.log == "console"
    assert list(settings.models) == ["local/smollm2-135m"]
    on = [name for name in settings.providers if settings.provider_off_reason(name) is None]
    assert on == ["local", "replay"]
    assert len(notices(settings)) == 1


@pytest.mark.parametrize(
    "name",
    ["openai", "groq", "openrouter", "mistral", "deepseek", "together", "fireworks", "xai"],
)
def test_a_key_in_the_environment_switches_its_provider_on(name: str) -> None:
    """O1.1: `<NAME>_API_KEY` and nothing else."""
    settings = load_defaults({f"{name.upper()}_API_KEY": "k"})
    assert settings.provider_off_reason(name) is None
