"""What was configured and does nothing yet, or should not be so, said aloud (O3)."""

from collections.abc import Iterator
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

from planes.settings.decision import ChatLogprobsBackend
from planes.settings.explain import Complaint
from planes.settings.providers import NO_KEY
from planes.settings.root import Settings
from planes.settings.tools import HttpTool
from planes.settings.workflows import DurableEngine

OPENAI_FLAGS = ("cumulative_deltas", "inline_tool_calls")
# The documentation shows these; whoever reads it has them.
PUBLISHED_KEYS: Final = frozenset({"ozk_dev_0123456789abcdef", "ozk_change_me"})
_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
NO_OTEL: Final = (
    "needs the extra `otel`: pip install 'sluicegate[otel]', or -e '.[otel]' in a checkout"
)


def notices(settings: Settings) -> list[str]:
    """Return one line for each thing that is configured and off, or not served yet.

    Providers that are off for want of a key share one line, however many they are.
    """
    return [
        *_providers_off(settings),
        *_models_off(settings),
        *_agents_off(settings),
        *_tools_refused(settings),
        *_decisions_off(settings),
        *_flags_of_openai(settings),
        *_keys_of_no_workflow(settings),
        *_later(settings),
        *_missing(settings),
    ]


def risks(settings: Settings) -> list[str]:
    """Return one line for each thing that works and should not be left so."""
    host = settings.server.host
    published = any(key.key.get_secret_value() in PUBLISHED_KEYS for key in settings.keys)
    if published and not _is_loopback(host):
        return [
            f"a key that everyone knows is accepted on {host}: whoever reaches it can spend what "
            "your providers cost; write a configuration with a key of your own"
        ]
    return []


def cannot_start(settings: Settings) -> list[Complaint]:
    """Return what is right in the file and keeps the gateway from starting on this machine."""
    if settings.telemetry.otlp_endpoint is not None and not _is_installed(_OTLP):
        return [Complaint(("telemetry", "otlp_endpoint"), NO_OTEL)]
    return []


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it would be in
        return False


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _providers_off(settings: Settings) -> Iterator[str]:
    reasons = {name: settings.provider_off_reason(name) for name in settings.providers}
    keyless = [name for name, reason in reasons.items() if reason == NO_KEY]
    if keyless:
        subject = "provider" if len(keyless) == 1 else "providers"
        yield f"{subject} {_and(keyless)} {_be(keyless)} off: {NO_KEY}"
    for name, reason in reasons.items():
        if reason not in (None, NO_KEY):
            yield f"provider {name} is off: {reason}"


def _models_off(settings: Settings) -> Iterator[str]:
    for slug, model in settings.models.items():
        providers = [candidate.provider for candidate in model.candidates]
        if all(settings.provider_off_reason(name) is not None for name in providers):
            names = list(dict.fromkeys(providers))
            yield f"model {slug} has no live candidate: {_and(names)} {_be(names)} off"


def _agents_off(settings: Settings) -> Iterator[str]:
    """Nobody can serve these; others are served as long as one of their candidates is on."""
    for name, agent in settings.agents.items():
        providers = list(dict.fromkeys(settings.providers_of(agent)))
        if all(settings.provider_off_reason(provider) is not None for provider in providers):
            yield f"agent {name} is off: {_and(providers)} {_be(providers)} off"


def _tools_refused(settings: Settings) -> Iterator[str]:
    """Tools at an address that is written out and not allowed (W3.4). A name may lead anywhere."""
    found = [
        (name, tool)
        for name, agent in settings.agents.items()
        for tool in agent.tools
        if isinstance(tool, HttpTool)
    ]
    if not found:
        return
    # Imported here: a configuration without tools is checked without the relay.
    from relay.agents.addresses import AddressRule

    allowed = AddressRule(map(ip_network, settings.agents_plane.tool_networks))
    for name, tool in found:
        host = urlsplit(tool.url).hostname or ""
        known = ("127.0.0.1", "::1") if host == "localhost" else (host,)
        if all(_is_address(each) and not allowed.allows(each) for each in known):
            yield (
                f"agent {name}: calls of the tool {tool.name} are refused: {host} is not public, "
                "and in none of `agents_plane.tool_networks`"
            )


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _decisions_off(settings: Settings) -> Iterator[str]:
    """The plane is there all the same, and its every answer is 503 with the reason (D5.6)."""
    backend = settings.decision.backend
    if isinstance(backend, ChatLogprobsBackend):
        names = [candidate.provider for candidate in settings.candidates_of(backend.model)]
        if all(settings.provider_off_reason(name) is not None for name in names):
            yield f"the decision plane cannot decide: {backend.model} has no provider that is on"


def _flags_of_openai(settings: Settings) -> Iterator[str]:
    """The other shapes have no such oddities, and nothing that would correct them (M2.7)."""
    for name, provider in settings.providers.items():
        shape = getattr(provider, "shape", "openai")
        flags = [flag for flag in OPENAI_FLAGS if getattr(provider, flag)]
        if flags and shape != "openai":
            yield f"provider {name}: {_and(flags)} {_be(flags)} for the openai shape only"


def _keys_of_no_workflow(settings: Settings) -> Iterator[str]:
    keys = enumerate(settings.keys)
    names = [f"keys[{at}]" for at, k in keys if not k.key.get_secret_value().startswith("ozk_")]
    if names:
        does, them = ("does", "it") if len(names) == 1 else ("do", "them")
        yield f"{_and(names)} {does} not begin with `ozk_`: the workflows plane refuses {them}"


def _later(settings: Settings) -> Iterator[str]:
    if isinstance(settings.workflows.engine, DurableEngine):
        yield "workflows.engine: `durable` is not served yet; `embedded` runs the documents"


def _missing(settings: Settings) -> Iterator[str]:
    if not settings.keys:
        yield "no keys in the configuration: only those of `sluicegate keys create` are accepted"
    if all(settings.provider_off_reason(name) is not None for name in settings.providers):
        yield "no provider is on: no model can be served"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _be(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
