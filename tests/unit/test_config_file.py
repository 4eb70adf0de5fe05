"""`planes.config_file`: YAML with `${ENV}`, every problem at its line, no secret in any of them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planes.config_file import (
    ConfigError,
    Problem,
    SubstitutionError,
    find_config,
    load,
    load_defaults,
    load_text,
    substitute,
)
from planes.settings import HttpProvider, Settings, notices

CONTRACT = """\
server: {host: 127.0.0.1, port: 8080, workers: 1, shutdown_grace_s: 25, max_body_mb: 32, write_stall_s: 300}
store: {url: "sqlite:///sluicegate.db"}         # or postgresql://user:pw@host/db
bus: {url: "memory://"}                          # or redis://host:6379/0
keys:                                            # static keys; more through `sluicegate keys`
  - {key: "ozk_dev_0123456789abcdef", org: dev, trial: false, balance_usd: 100, max_concurrent: 8, status: active}   # | suspended | revoked
providers:
  openai:    {shape: openai,    base_url: "https://api.openai.com/v1", api_key: "${OPENAI_API_KEY:-}"}   # empty: the provider is off, and the start says so
  anthropic: {shape: anthropic, base_url: "https://api.anthropic.com", api_key: "${ANTHROPIC_API_KEY:-}"}
  gemini:    {shape: gemini,    base_url: "https://generativelanguage.googleapis.com", api_key: "${GEMINI_API_KEY:-}"}
  local:     {kind: local, model: smollm2-135m}          # the child process of O1.1
  replay:    {kind: replay, path: transcripts/}          # recorded transcripts (they are package data of the wheel)
  odd-one:   {shape: openai, base_url: "http://127.0.0.1:9000/v1", cumulative_deltas: true, inline_tool_calls: true,
              connect_timeout_s: 5, header_timeout_s: 120, headers: {x-team: a}}
models:                                          # slug the client names → candidates in failover order
  openai/gpt-4o-mini:
    candidates: [{provider: openai, model: gpt-4o-mini}, {provider: odd-one, model: mini}]
    price: {prompt_usd_per_mtok: 0.15, completion_usd_per_mtok: 0.60}
agents:
  one-agent: {model: openai/gpt-4o-mini, system: "You are brief.", max_tokens: 256}
workflows: {engine: {kind: embedded}, orphan_after_s: 300, heartbeat_s: 15}            # | {kind: http, base_url, api_key, allow_stream_origins} | {kind: durable}
agents_plane: {keepalive_s: 15, keepalive_comment: "OCEAN PROCESSING"}
decision:
  backend: {kind: chat-logprobs, model: openai/gpt-4o-mini}   # | {kind: systemone, base_url, api_key, model} | {kind: system-zero, base_url, api_key}
  models: [{id: rightnow-decision, aliases: [system-zero]}]     # ids that clients may name; limits optional
  media: [image, audio, document, video]
  price: {image_usd: 0.003, question_usd: 0.0001, call_usd: 0.00001}
  account_streams: 1                             # integer | half_concurrency
  limits: {idle_timeout_ms: 120000, heartbeat_interval_ms: 30000}   # any limit, by hello's name or, if it is not there, the seed's (`event_burst` is the mutation burst, `message_burst` the application message burst)
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
    return [str(problem).removeprefix("sluicegate.yaml:") for problem in caught.value.problems]


def system(text: str, env: dict[str, str] | None = None) -> str:
    """Return what `text`, a YAML scalar, becomes where any text is allowed."""
    whole = load_text(f"agents: {{a: {{model: m, system: {text}}}}}", env or {})
    return whole.agents["a"].system


def test_the_contracts_example_loads_without_keys() -> None:
    """O3: `${OPENAI_API_KEY:-}` unset leaves the provider off."""
    settings = load_text(CONTRACT, {})
    assert settings.provider_off_reason("openai") == "api_key is empty"
    assert settings.provider_off_reason("odd-one") is None
    assert notices(settings) == [
        "providers openai, anthropic and gemini are off: api_key is empty",
        "provider odd-one: cumulative_deltas and inline_tool_calls are not served yet",
        "agents, agents_plane, workflows and decision are configured but not served yet",
        "keys: balances are recorded but not enforced yet (balance_usd, trial)",
    ]


def test_the_contracts_example_loads_with_keys() -> None:
    """O3: with its variables set, the values are those of the environment."""
    settings = load_text(CONTRACT, PROVIDER_KEYS)
    openai = settings.providers["openai"]
    assert isinstance(openai, HttpProvider)
    assert openai.api_key is not None
    assert openai.api_key.get_secret_value() == "sk-1"
    assert settings.provider_off_reason("openai") is None
    assert settings.provider_off_reason("gemini") == "its shape is not served yet"
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
        "13: providers.openai.api_key: environment variable MISSING is not set",
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
        "1: server.port: environment variable P is not set",
        "1: server.workers: does not fit its tag",
    ]


def test_an_unset_variable_is_reported_at_its_own_line_of_a_block() -> None:
    """A block of text begins lines before it."""
    text = "agents:\n  a:\n    model: m\n    system: |\n      one\n      ${TWO}\n"
    assert problems(text) == ["6: agents.a.system: environment variable TWO is not set"]


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
    ],
)
def test_only_a_plain_scalar_is_typed_again(text: str, value: object) -> None:
    """O3: `port: ${PORT:-8080}` is a number, in quotes it is text."""
    name = text.partition(":")[0]
    assert getattr(load_text(f"server:\n  {text}\n", {}).server, name) == value


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


@pytest.mark.parametrize("text", ["${", "${}", "${1A}", "${A B}", "${A-x}", "${A:-x", "${A"])
def test_a_reference_that_names_no_variable_is_an_error(text: str) -> None:
    """Better than to pass it on as text: `$${` is there for that."""
    with pytest.raises(SubstitutionError, match="names no variable"):
        substitute(text, {"A": "a"})


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
# YAML's own line breaks and unprintables are none of substitution's business.
CHARACTERS = st.characters(min_codepoint=0x20, max_codepoint=0xD7FF, exclude_categories=["C", "Z"])
PLAIN = st.text(st.one_of(CHARACTERS, st.sampled_from("${}:-\\\"' "))).filter(
    lambda text: "${" not in text and not text.endswith("$")
)
PIECES = st.one_of(
    st.tuples(st.just("text"), PLAIN, st.just("")),
    st.tuples(st.just("escape"), st.just(""), st.just("")),
    st.tuples(st.just("name"), NAMES, st.just("")),
    st.tuples(st.just("default"), NAMES, PLAIN.map(lambda text: text.replace("}", ""))),
)


def written(piece: tuple[str, str, str]) -> str:
    """Return how a piece stands in the file."""
    match piece:
        case ("text", text, _):
            return text
        case ("escape", _, _):
            return "$${"
        case ("name", name, _):
            return f"${{{name}}}"
        case (_, name, default):
            return f"${{{name}:-{default}}}"


def meant(piece: tuple[str, str, str], env: dict[str, str]) -> str | None:
    """Return what a piece means; None if its variable is unset."""
    match piece:
        case ("text", text, _):
            return text
        case ("escape", _, _):
            return "${"
        case ("name", name, _):
            return env.get(name)
        case (_, name, default):
            return env.get(name) or default


@given(pieces=st.lists(PIECES), env=st.dictionaries(NAMES, PLAIN), data=st.data())
def test_substitution_is_piece_by_piece(
    pieces: list[tuple[str, str, str]], env: dict[str, str], data: st.DataObject
) -> None:
    """O3: any mixture of text, escapes and references, in quotes in a file or bare."""
    for piece in pieces:
        if piece[0] in ("name", "default") and data.draw(st.booleans()):
            env[piece[1]] = data.draw(PLAIN)
    text = "".join(map(written, pieces))
    expected = [meant(piece, env) for piece in pieces]
    if None in expected:
        missing = pieces[expected.index(None)][1]
        with pytest.raises(SubstitutionError, match=f"environment variable {missing} is not set"):
            substitute(text, env)
        assert f"1: agents.a.system: environment variable {missing} is not set" in problems(
            f"agents: {{a: {{model: m, system: {json.dumps(text)}}}}}", env
        )
    else:
        whole = "".join(part for part in expected if part is not None)
        assert substitute(text, env) == whole
        assert system(json.dumps(text), env) == whole
