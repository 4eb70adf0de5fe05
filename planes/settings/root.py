"""The whole file: `Settings`, and the checks that cross its sections (O3)."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, ModelWrapValidatorHandler, SecretStr, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from planes.settings.base import Section
from planes.settings.catalog import Agent, AgentId, Candidate, Key, Model, ProviderName, Slug
from planes.settings.decision import Decision
from planes.settings.providers import Provider
from planes.settings.server import Billing, Bus, Journal, Server, Store, Telemetry
from planes.settings.tools import host_matches
from planes.settings.workflows import AgentsPlane, Workflows

Loc = tuple[int | str, ...]


class Settings(Section):
    """Everything that can be configured.

    Raises:
        pydantic.ValidationError: with every problem at once, those between sections too.
    """

    server: Server = Field(default=Server(), description="The listening process.")
    store: Store = Field(default=Store(), description="The database.")
    bus: Bus = Field(default=Bus(), description="News between processes.")
    keys: tuple[Key, ...] = Field(default=(), description="Static keys of clients.")
    providers: Mapping[ProviderName, Provider] = Field(
        default={}, description="Who serves models, by name."
    )
    models: Mapping[Slug, Model] = Field(
        default={}, description="Slugs that clients name, and who serves them."
    )
    agents: Mapping[AgentId, Agent] = Field(default={}, description="Agents by id (W3.4).")
    workflows: Workflows = Field(default=Workflows(), description="The workflows plane.")
    agents_plane: AgentsPlane = Field(default=AgentsPlane(), description="The agents plane's wire.")
    decision: Decision = Field(default=Decision(), description="The decision plane.")
    journal: Journal = Field(default=Journal(), description="What is kept of finished runs.")
    billing: Billing = Field(default=Billing(), description="Holds and settlements.")
    telemetry: Telemetry = Field(default=Telemetry(), description="Logs, metrics and traces.")

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # An "after" validator would not run while a field is wrong, and the file would have to be
        # mended in two rounds.
        if not isinstance(data, Mapping):
            return handler(data)
        # A section whose lines are all commented out is null, and means its defaults.
        given = {name: value for name, value in data.items() if value is not None}
        found = [_details(loc, "setting", text) for loc, text in _across(given)]
        try:
            settings = handler(given)
        except ValidationError as error:
            kept = [
                _details(e["loc"], e["type"], e["msg"], e.get("ctx"))
                for e in error.errors(include_url=False, include_input=False)
            ]
            raise _together([*kept, *found]) from None
        if found:
            raise _together(found)
        return settings

    def provider_off_reason(self, name: str) -> str | None:
        """Say why the provider `name` is not served, or None if it is.

        Raises:
            KeyError: there is no such provider.
        """
        return self.providers[name].off_reason

    def providers_of(self, agent: Agent) -> tuple[str, ...]:
        """Return who may serve an agent, on or off."""
        if agent.candidates is not None:
            return tuple(candidate.provider for candidate in agent.candidates)
        if agent.model is not None:
            return tuple(candidate.provider for candidate in self.candidates_of(agent.model))
        assert agent.provider is not None, "an agent has a model, candidates or a provider"
        return (agent.provider,)

    def candidates_of(self, slug: str) -> tuple[Candidate, ...]:
        """Return who serves `slug`, on or off; it may be `<provider>/<model>` (M2.2)."""
        if slug in self.models:
            return self.models[slug].candidates
        provider, _, model = slug.partition("/")
        return (Candidate(provider=provider, model=model),)


def _details(
    loc: Loc, kind: str, text: str, context: dict[str, object] | None = None
) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(kind, text, context), loc=loc, input=None)


def _together(details: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("Settings", details, hide_input=True)


def _get(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _entries(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from value.items()


def _items(value: object) -> Iterator[tuple[int, object]]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        yield from enumerate(value)


def _across(data: Mapping[str, object]) -> Iterator[tuple[Loc, str]]:
    """Yield the problems between sections. `data` may hold anything: it is not validated yet."""
    providers = data.get("providers", {})
    if isinstance(providers, Mapping):
        names = [name for name in providers if isinstance(name, str)]
        for loc, name in _named_providers(data):
            if isinstance(name, str) and name not in names:
                yield loc, _unknown_provider(name, names)
        for name, agent in _entries(data.get("agents")):
            slug = _get(agent, "model")
            if isinstance(slug, str) and not _names_a_model(slug, data, providers):
                yield ("agents", name, "model"), _unknown_model(slug, data)
        yield from _unlisted_hosts(data)
        problem = _deciding_model(data, providers)
        if problem is not None:
            yield ("decision", "backend", "model"), problem
    seen: dict[str, int] = {}
    for index, entry in _items(data.get("keys")):
        key = _get(entry, "key")
        text = key.get_secret_value() if isinstance(key, SecretStr) else key
        if isinstance(text, str) and text.strip():
            first = seen.setdefault(text.strip(), index)
            if first != index:
                yield ("keys", index, "key"), f"is the same key as keys[{first}]"


def _named_providers(data: Mapping[str, object]) -> Iterator[tuple[Loc, object]]:
    for section in ("models", "agents"):
        for name, entry in _entries(data.get(section)):
            for index, candidate in _items(_get(entry, "candidates")):
                at = (section, name, "candidates", index, "provider")
                yield at, _get(candidate, "provider")
            if section == "agents":
                yield (section, name, "provider"), _get(entry, "provider")


def _names_a_model(slug: str, data: Mapping[str, object], providers: Mapping[str, object]) -> bool:
    """Whether a slug can be served once its provider is on."""
    if _get(data.get("models"), slug) is not None:
        return True
    provider, slash, model = slug.partition("/")
    return bool(slash and model) and provider in providers


def _unlisted_hosts(data: Mapping[str, object]) -> Iterator[tuple[Loc, str]]:
    """Yield the tools whose host `agents_plane.tool_hosts` does not list (W3.4)."""
    listed = [
        pattern
        for _, pattern in _items(_get(data.get("agents_plane"), "tool_hosts"))
        if isinstance(pattern, str)
    ]
    for name, agent in _entries(data.get("agents")):
        for index, tool in _items(_get(agent, "tools")):
            url = _get(tool, "url")
            if isinstance(url, str) and not _is_listed(url, listed):
                at = ("agents", name, "tools", index, "url")
                yield at, "names a host that is none of `agents_plane.tool_hosts`"


def _is_listed(url: str, listed: list[str]) -> bool:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return True  # no URL at all, which is told already
    return host is None or any(host_matches(pattern, host, port) for pattern in listed)


def _deciding_model(data: Mapping[str, object], providers: Mapping[str, object]) -> str | None:
    """Say why the chat model that shall decide cannot list token probabilities (D6.5)."""
    backend = _get(data.get("decision"), "backend")
    slug = _get(backend, "model")
    if _get(backend, "kind") != "chat-logprobs" or not isinstance(slug, str):
        return None
    entry = _get(data.get("models"), slug)
    names = [_get(candidate, "provider") for _, candidate in _items(_get(entry, "candidates"))]
    if entry is None:
        names = [slug.partition("/")[0]]
        if names[0] not in providers:
            return _unknown_model(slug, data)
    for provider in (providers.get(name) for name in names if isinstance(name, str)):
        if _get(provider, "kind") == "replay":
            return "is served by recorded transcripts, which hold no token probabilities"
        shape = _get(provider, "shape")
        if shape is not None and shape != "openai":
            return "is served by a provider whose shape is not openai: it lists no probabilities"
    return None


# The wrong name itself is not repeated in these: `${…}` may have put anything there.


def _unknown_provider(name: str, names: list[str]) -> str:
    return f"names no configured provider{_near(name, names)}"


def _unknown_model(slug: str, data: Mapping[str, object]) -> str:
    provider, slash, _ = slug.partition("/")
    hint = _near(slug, [name for name, _ in _entries(data.get("models"))])
    if slash and not hint:
        hint = _near(provider, [name for name, _ in _entries(data.get("providers"))], "/…")
    return f"names no configured model{hint}: an entry of `models`, or <provider>/<model>"


def _near(name: str, names: list[str], rest: str = "") -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean `{near[0]}{rest}`?)" if near else ""
