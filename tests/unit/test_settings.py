"""The models of `planes.settings`: O3's defaults, what is refused, what is said aloud."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from planes.settings import (
    Decision,
    HttpEngine,
    HttpProvider,
    Key,
    LocalProvider,
    ReplayProvider,
    Server,
    Settings,
    explain,
    notices,
)
from planes.settings.base import Section

OPENAI = {"shape": "openai", "base_url": "https://api.example.com/v1", "api_key": "sk-1"}
UNITS = ("_s", "_mb", "_usd", "_usd_per_mtok", "_days", "_ms")


def settings(**sections: object) -> Settings:
    """Return settings with a key and a provider, so that nothing else is to be said of them."""
    base: dict[str, object] = {
        "keys": [{"key": "ozk_1", "org": "dev"}],
        "providers": {"openai": OPENAI},
    }
    return Settings.model_validate(base | sections)


def provider(**fields: object) -> Any:
    """Return one provider, validated as a part of the whole file."""
    return settings(providers={"p": fields}).providers["p"]


def problems(data: Mapping[str, object]) -> list[str]:
    """Return what is wrong with `data`, as `path: message`."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(data)
    return [f"{'.'.join(map(str, path))}: {message}" for path, message in explain(caught.value)]


def sections() -> Iterator[type[Section]]:
    """Yield every section there is, at any depth of inheritance."""
    pending = list(Section.__subclasses__())
    while pending:
        section = pending.pop()
        pending.extend(section.__subclasses__())
        yield section


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.__name__)
def test_every_field_is_described_and_every_measure_has_its_unit(section: type[Section]) -> None:
    """O3: a setting explains itself; a float's name ends in its unit."""
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
        assert field.description.endswith("."), f"{section.__name__}.{name}: not a sentence"
        if field.annotation in (float, float | None):
            assert name.endswith(UNITS), f"{section.__name__}.{name} names no unit"


def test_defaults_are_those_of_the_contract() -> None:
    """O3: an empty file means these values."""
    empty = Settings()
    assert empty.server.model_dump() == {
        "host": "127.0.0.1",
        "port": 8080,
        "workers": 1,
        "shutdown_grace_s": 25,
        "max_body_mb": 32,
        "write_stall_s": 300,
    }
    assert (empty.store.url, empty.bus.url) == ("sqlite:///sluicegate.db", "memory://")
    assert empty.workflows.engine.kind == "embedded"
    assert (empty.workflows.orphan_after_s, empty.workflows.heartbeat_s) == (300, 15)
    assert empty.agents_plane.keepalive_comment == "OCEAN PROCESSING"
    assert empty.decision.models[0].aliases == ("system-zero",)
    assert empty.decision.media == ("image", "audio", "document", "video")
    assert empty.journal.retention_days == 30
    assert empty.billing.model_dump() == {
        "sweep_interval_s": 300,
        "hold_ttl_s": 900,
        "hold_output_tokens": 4096,
        "webhook": None,
    }
    assert empty.telemetry.model_dump() == {"log": "json", "metrics": True, "otlp_endpoint": None}


def test_settings_are_frozen() -> None:
    """A running process cannot be reconfigured by accident."""
    with pytest.raises(ValidationError):
        settings().server.port = 1


def test_sizes_are_also_given_in_bytes() -> None:
    """MiB in the file, bytes where they are compared."""
    assert Server(max_body_mb=0.5).max_body_bytes == 512 * 1024
    assert provider(**OPENAI).max_event_bytes == 16 * 1024 * 1024


def test_a_provider_is_told_by_its_shape_or_kind() -> None:
    """O3: `shape` on the network, `kind` otherwise; each with its own defaults."""
    http = provider(**OPENAI)
    assert isinstance(http, HttpProvider)
    assert (http.connect_timeout_s, http.header_timeout_s, http.max_event_mb) == (5, 120, 16)
    assert (http.stream_options, http.aggregate, http.reasoning) == (True, False, True)
    assert (http.first_byte_timeout_s, http.peek_first_event_s, http.idle_timeout_s) == (
        None,
        None,
        None,
    )
    local = provider(kind="local")
    assert isinstance(local, LocalProvider)
    assert (local.model, local.aggregate) == ("smollm2-135m", True)
    replay = provider(kind="replay")
    assert isinstance(replay, ReplayProvider)
    assert replay.path is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "providers.p: must have `shape: openai|anthropic|gemini`"),
        ({"kind": "lokal"}, "providers.p: must have `shape: openai|anthropic|gemini`"),
        ({"shape": "openai"}, "providers.p.base_url: is missing"),
        (OPENAI | {"shape": "opnai"}, "providers.p.shape: must be 'openai', 'anthropic' or"),
        (OPENAI | {"base_url": "ftp://x"}, "providers.p.base_url: must begin with http:// or"),
        (OPENAI | {"base_url": "https://"}, "providers.p.base_url: must name a host"),
        (OPENAI | {"base_url": "http://h:99999"}, "providers.p.base_url: is not a URL"),
        (OPENAI | {"base_url": "http://[::1"}, "providers.p.base_url: is not a URL"),
        (OPENAI | {"base_url": "http://u:p@h"}, "providers.p.base_url: must not hold a user"),
        (OPENAI | {"base_url": "http://h?a=b"}, "providers.p.base_url: must not have a query"),
        (OPENAI | {"base_url": "http://h\r\n"}, "providers.p.base_url: must not contain spaces"),
        (OPENAI | {"api_key": "a\nb"}, "providers.p.api_key: must be printable ASCII"),
        (OPENAI | {"connect_timeout_s": 0}, "providers.p.connect_timeout_s: must be more than 0"),
        (OPENAI | {"max_event_mb": True}, "providers.p.max_event_mb: must be a number, not true"),
        (OPENAI | {"conect_timeout_s": 1}, "(did you mean `connect_timeout_s`?)"),
        (OPENAI | {"headers": {"x a": "b"}}, "the name must be a header name"),
        (OPENAI | {"headers": {"x\r": "b"}}, "the name must be a header name"),
        (OPENAI | {"headers": {"x": "a\r\nb: c"}}, "must be a header value: no line breaks"),
        ({"kind": "local", "model": "x"}, "providers.p.model: must be 'smollm2-135m'"),
        (OPENAI | {"base_url": "http://h/v1/chat/completions/"}, "cut before /chat/completions"),
        ({"kind": "local", "aggregate": False}, "providers.p.aggregate: must be true"),
        ({"kind": "local", "base_url": "http://h"}, "providers.p.base_url: unknown key"),
        ({"kind": "replay", "path": ""}, "providers.p.path: must not be empty"),
    ],
)
def test_a_wrong_provider_is_refused(fields: dict[str, object], complaint: str) -> None:
    """O3: one problem, at its place, in the file's words."""
    (problem,) = problems({"providers": {"p": fields}})
    assert complaint in problem


def test_a_base_url_loses_its_trailing_slash() -> None:
    """Paths are appended to it."""
    assert provider(**OPENAI | {"base_url": "https://h/v1/"}).base_url == "https://h/v1"
    engine = settings(workflows={"engine": {"kind": "http", "base_url": "http://h/"}})
    assert isinstance(engine.workflows.engine, HttpEngine)
    assert engine.workflows.engine.base_url == "http://h"


def test_no_secret_is_in_a_repr_or_an_error() -> None:
    """Keys, provider keys, headers and URLs with passwords stay out of logs."""
    secret = "hunter2hunter2"
    whole = settings(
        keys=[{"key": secret, "org": "dev"}],
        providers={"p": OPENAI | {"api_key": secret, "headers": {"x-auth": secret}}},
        billing={"webhook": {"url": f"https://h/?t={secret}", "secret": secret}},
    )
    assert secret not in repr(whole)
    assert secret not in str(whole)
    assert whole.keys[0].key == SecretStr(secret)
    wrong = {
        "store": {"url": f"postgresql://u:{secret}@h/db"},
        "keys": [{"key": f"{secret} {secret}", "org": "a", "status": secret}, {"key": secret}],
        "providers": {"p": OPENAI | {"api_key": [secret], "base_url": secret, "shape": secret}},
        "models": {"m": {"candidates": [{"provider": secret, "model": "x"}]}},
        "decision": {"backend": {"kind": secret}},
        "billing": {"webhook": {"url": secret, "secret": f"{secret} {secret}"}},
    }
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(wrong)
    assert secret not in str(caught.value)
    assert secret not in "".join(problems(wrong))


def test_a_key_is_trimmed_and_has_the_contracts_defaults() -> None:
    """O3, M1.4: no limit, active, comments on; the line break of `$(cat key)` is not part of it."""
    key = Key.model_validate({"key": " ozk_1\n", "org": "dev"})
    assert key.key.get_secret_value() == "ozk_1"
    assert (key.trial, key.balance_usd, key.max_concurrent) == (False, None, None)
    assert (key.status, key.comments, key.name) == ("active", True, None)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"key": ""}, "keys.0.key: must not be empty"),
        ({"key": "schlüssel"}, "keys.0.key: must be printable ASCII"),
        ({"max_concurrent": 0}, "keys.0.max_concurrent: must be at least 1"),
        ({"max_concurrent": 1.5}, "keys.0.max_concurrent: must be a whole number"),
        ({"balance_usd": -1}, "keys.0.balance_usd: must be at least 0"),
        ({"balance_usd": 1e10}, "keys.0.balance_usd: must be at most 1e+09"),
        ({"balance_usd": float("nan")}, "keys.0.balance_usd: must be a finite number"),
        ({"status": "aktive"}, "keys.0.status: must be 'active', 'suspended' or 'revoked'"),
        ({"org": 12}, "keys.0.org: must be text"),
        ({"org": "a\nb"}, "keys.0.org: must be one line"),
        ({"trial": "perhaps"}, "keys.0.trial: must be true or false"),
    ],
)
def test_a_wrong_key_is_refused(fields: dict[str, object], complaint: str) -> None:
    """O3: the field is named, its value is not."""
    (problem,) = problems({"keys": [{"key": "ozk_1", "org": "dev"} | fields]})
    assert problem.startswith(complaint)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"server": {"port": 65536}}, "server.port: must be at most 65535"),
        ({"server": {"port": True}}, "server.port: must be a number, not true or false"),
        ({"server": []}, "server: must be a mapping"),
        ({"keys": {}}, "keys: must be a list"),
        ({"store": {"url": "mysql://h"}}, "store.url: must be sqlite:///FILE"),
        ({"store": {"url": "sqlite:///"}}, "store.url: must be sqlite:///FILE"),
        ({"bus": {"url": "nats://h"}}, "bus.url: must be memory://"),
        ({"models": {"m": {"candidates": []}}}, "models.m.candidates: must have at least 1 entry"),
        ({"models": {"m": {"candidates": [{"provider": "p", "model": "x"}],
                           "price": {"prompt_usd_per_mtok": 1e7, "completion_usd_per_mtok": 1}}}},
         "models.m.price.prompt_usd_per_mtok: must be at most 1e+06"),
        ({"models": {"a b": {}}}, "models.a b: the name must be printable ASCII"),
        ({"agents": {"a": {}}}, "agents.a: must have `model`, `candidates` or `provider`"),
        ({"agents": {"a/b": {"model": "m"}}}, "agents.a/b: the name must be 1 to 64 letters"),
        ({"workflows": {"engine": {}}}, "workflows.engine: must have a `kind` that"),
        ({"workflows": {"engine": {"kind": "x"}}}, "workflows.engine: must have a `kind` that"),
        ({"agents_plane": {"keepalive_comment": "a\nb"}}, "agents_plane.keepalive_comment: must"),
        ({"decision": {"account_streams": 0}}, "decision.account_streams: must be a whole number"),
        ({"decision": {"media": ["smell"]}}, "decision.media.0: must be 'image', 'audio'"),
        ({"decision": {"models": [{"id": "m", "limits": {"q": 1}}]}},
         "decision.models.0.limits: has no limit of that name; there are questions"),
        ({"decision": {"models": [{"id": "m", "limits": {"questions": 0}}]}},
         "decision.models.0.limits: questions must be a whole number from 1"),
        ({"decision": {"limits": {"idle_ms": 1}}}, "decision.limits: there is no limit 'idle_ms'"),
        ({"decision": {"limits": {"event_burst": 0}}}, "decision.limits: event_burst must be more"),
        ({"decision": {"backend": {"kind": "systemone", "base_url": "http://h", "modl": "m"}}},
         "decision.backend.model: is missing"),
        ({"decision": {"backend": {"kind": "chat-logprobs", "model": "opena/x"}},
          "providers": {"openai": OPENAI}},
         "decision.backend.model: names no configured model"),
        ({"decision": {"backend": {"kind": "chat-logprobs", "model": "a/x"}},
          "providers": {"a": OPENAI | {"shape": "anthropic"}}},
         "decision.backend.model: is served by a provider whose shape is not openai"),
        ({"decision": {"backend": {"kind": "chat-logprobs", "model": "m"}},
          "providers": {"a": OPENAI, "g": OPENAI | {"shape": "gemini"}},
          "models": {"m": {"candidates": [{"provider": "a", "model": "x"},
                                          {"provider": "g", "model": "x"}]}}},
         "decision.backend.model: is served by a provider whose shape is not openai"),
        ({"decision": {"backend": {"kind": "chat-logprobs", "model": "r/x"}},
          "providers": {"r": {"kind": "replay"}}},
         "decision.backend.model: is served by recorded transcripts"),
        ({"decision": {"backend": {"kind": "chat-logprobs", "model": "o/x", "top_logprobs": 1}},
          "providers": {"o": OPENAI}},
         "decision.backend.top_logprobs: must be at least 2"),
        ({"decision": {"backend": {"kind": "system-zero", "base_url": "http://h", "api_key": ""}}},
         "decision.backend.api_key: is empty: set it, or leave it out"),
        ({"telemetry": {"log": "xml"}}, "telemetry.log: must be 'json' or 'console'"),
        (
            {"workflow": {"name": "x"}},
            "workflow: unknown key `workflow`: a workflow is no configuration; `sluicegate run`",
        ),
        ({"telemtry": {}}, "telemtry: unknown key `telemtry` (did you mean `telemetry`?)"),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused(section: dict[str, object], complaint: str) -> None:
    """O3: the first problem is the one that was made."""
    assert problems(section)[0].startswith(complaint)


@pytest.mark.parametrize(
    ("section", "place", "served"),
    [
        ({"store": {"url": "postgresql://u:p@h/db"}}, "store.url", "sqlite:///FILE is"),
        ({"bus": {"url": "redis://h:6379/0"}}, "bus.url", "memory:// is"),
        ({"server": {"workers": 2}}, "server.workers", "`workers: 1` is"),
    ],
)
def test_what_is_not_served_yet_is_refused(
    section: dict[str, object], place: str, served: str
) -> None:
    """A setting that would silently do nothing is an error that says what is served."""
    (problem,) = problems(section)
    assert problem.startswith(f"{place}: ")
    assert "not served yet" in problem
    assert served in problem


def test_problems_between_sections_come_with_all_the_others() -> None:
    """O3: one round of mending, not two."""
    found = problems(
        {
            "server": {"port": -1},
            "keys": [{"key": "ozk_1", "org": "a"}, {"key": "ozk_1 ", "org": "b"}],
            "providers": {"openai": OPENAI},
            "models": {
                "m": {"candidates": [{"provider": "opnai", "model": "x"}]},
                "fast": {"candidates": [{"provider": "openai", "model": "x"}]},
            },
            "agents": {
                "a": {"provider": "nothing-like-it"},
                "b": {"model": "m/x"},
                "c": {"model": "fsat"},
                "d": {"model": "opnai/gpt"},
            },
        }
    )
    assert found == [
        "server.port: must be at least 0",
        "models.m.candidates.0.provider: names no configured provider (did you mean `openai`?)",
        "agents.a.provider: names no configured provider",
        "agents.b.model: names no configured model: an entry of `models`, or <provider>/<model>",
        "agents.c.model: names no configured model (did you mean `fast`?): "
        "an entry of `models`, or <provider>/<model>",
        "agents.d.model: names no configured model (did you mean `openai/…`?): "
        "an entry of `models`, or <provider>/<model>",
        "keys.1.key: is the same key as keys[0]",
    ]


def test_problems_between_sections_are_found_in_models_too() -> None:
    """Settings made in Python are checked as a file is."""
    key = Key(key=SecretStr("ozk_1"), org="dev")
    with pytest.raises(ValidationError, match=r"is the same key as keys\[0\]"):
        Settings(keys=(key, key))


def test_an_empty_section_means_its_defaults() -> None:
    """`agents:` with all its lines commented out is null in YAML."""
    empty = Settings.model_validate({"agents": None, "server": None, "keys": None})
    assert (empty.agents, empty.server, empty.keys) == ({}, Server(), ())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (OPENAI, None),
        (OPENAI | {"api_key": ""}, "api_key is empty"),
        (OPENAI | {"api_key": None}, "api_key is empty"),
        (OPENAI | {"api_key": "", "base_url": "http://127.0.0.1:9000/v1"}, None),
        (OPENAI | {"api_key": "", "base_url": "http://127.8.9.1"}, None),
        (OPENAI | {"api_key": "", "base_url": "http://[::1]:9000"}, None),
        (OPENAI | {"api_key": "", "base_url": "http://localhost:9000"}, None),
        (OPENAI | {"api_key": "", "base_url": "http://localhost.evil.example"}, "api_key is empty"),
        ({"shape": "openai", "base_url": "https://h"}, None),
        (OPENAI | {"shape": "anthropic"}, None),
        (OPENAI | {"shape": "gemini"}, None),
        (OPENAI | {"shape": "gemini", "api_key": ""}, "api_key is empty"),
        ({"kind": "local"}, None),
        ({"kind": "replay"}, None),
    ],
)
def test_a_provider_says_why_it_is_off(fields: dict[str, object], reason: str | None) -> None:
    """O3: an empty key is off, an absent one or a server on this machine is on."""
    assert settings(providers={"p": fields}).provider_off_reason("p") == reason


def test_a_provider_that_is_not_there_is_a_key_error() -> None:
    """Asking for it is the caller's mistake."""
    with pytest.raises(KeyError):
        settings().provider_off_reason("nobody")


def test_settings_that_do_all_they_say_are_silent() -> None:
    """No notice without a reason; a section written out empty is none."""
    assert notices(settings(agents={})) == []


@pytest.mark.parametrize(
    ("section", "notice"),
    [
        (
            {"providers": {"a": OPENAI, "openai": OPENAI | {"api_key": ""}}},
            "provider openai is off: api_key is empty",
        ),
        (
            {"providers": {"x": OPENAI, **{n: OPENAI | {"api_key": ""} for n in "abc"}}},
            "providers a, b and c are off: api_key is empty",
        ),
        ({"agents_plane": {}, "workflows": {}}, None),
        (
            {"workflows": {"engine": {"kind": "durable"}}},
            "workflows.engine: `durable` is not served yet; `embedded` runs the documents",
        ),
        (
            {
                "providers": {"x": OPENAI, "local": {"kind": "local"}},
                "models": {"m": {"candidates": [{"provider": "local", "model": "x"}]}},
                "agents": {"a": {"model": "m"}, "b": {"provider": "x"}},
            },
            None,
        ),
        (
            {
                "providers": {"x": OPENAI, "a": OPENAI | {"api_key": "sk"}},
                "decision": {"backend": {"kind": "chat-logprobs", "model": "a/m"}},
                "workflows": {},
            },
            None,
        ),
        (
            {"keys": []},
            "no keys in the configuration: only those of `sluicegate keys create` are accepted",
        ),
        ({"providers": {}}, "no provider is on: no model can be served"),
    ],
)
def test_what_does_nothing_yet_is_said(section: dict[str, object], notice: str | None) -> None:
    """Settings that a later release serves are accepted, and said to be so."""
    assert notices(settings(**section)) == ([] if notice is None else [notice])


def test_an_agent_that_nobody_can_serve_is_off() -> None:
    """W3.4: each way to name who serves it; one that is on is enough."""
    off = OPENAI | {"api_key": ""}
    dark, lit = ({"provider": name, "model": "x"} for name in ("dark", "lit"))
    found = notices(
        settings(
            providers={"dark": off, "night": off, "lit": OPENAI},
            models={"m": {"candidates": [dark]}},
            agents={
                "a": {"model": "dark/x"},
                "b": {"candidates": [dark, {"provider": "night", "model": "x"}]},
                "c": {"provider": "dark"},
                "d": {"model": "m"},
                "e": {"candidates": [dark, lit]},
                "f": {"model": "lit/x"},
            },
        )
    )
    assert found == [
        "providers dark and night are off: api_key is empty",
        "model m has no live candidate: dark is off",
        "agent a is off: dark is off",
        "agent b is off: dark and night are off",
        "agent c is off: dark is off",
        "agent d is off: dark is off",
    ]


def test_a_decision_plane_without_a_model_is_said() -> None:
    """D5.6: it answers 503; the reason stands in the log from the start."""
    found = notices(
        settings(
            providers={"x": OPENAI, "off": OPENAI | {"api_key": ""}},
            decision={"backend": {"kind": "chat-logprobs", "model": "off/m"}},
        )
    )
    assert "the decision plane cannot decide: off/m has no provider that is on" in found


def test_flags_of_the_openai_shape_on_another_one_are_said() -> None:
    """M2.7: nothing corrects a stream of another shape; on openai's they are served."""
    flags = {"cumulative_deltas": True, "inline_tool_calls": True, "reasoning": False}
    assert notices(settings(providers={"x": OPENAI | flags})) == []
    found = notices(settings(providers={"x": OPENAI | flags | {"shape": "gemini"}, "y": OPENAI}))
    only = "are for the openai shape only"
    assert f"provider x: cumulative_deltas and inline_tool_calls {only}" in found


def test_a_model_without_a_live_candidate_is_said() -> None:
    """One live candidate is enough to be silent."""
    off, on = {"provider": "off", "model": "m"}, {"provider": "on", "model": "m"}
    found = notices(
        settings(
            providers={"on": OPENAI, "off": OPENAI | {"api_key": ""}},
            models={"a/b": {"candidates": [off, off]}, "c/d": {"candidates": [off, on]}},
        )
    )
    assert found == [
        "provider off is off: api_key is empty",
        "model a/b has no live candidate: off is off",
    ]


def test_limits_keep_whole_numbers_whole() -> None:
    """They travel in `hello` as they are written: 120000, not 120000.0."""
    given = {"idle_timeout_ms": 120000, "max_events_per_second": 0.5}
    limits = Decision.model_validate({"limits": given}).limits
    assert repr(dict(limits)) == "{'idle_timeout_ms': 120000, 'max_events_per_second': 0.5}"
