"""Which candidates serve a slug. Rules M2.2 (slugs), M3.3 (order)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from encoders.shapes import OPENAI
from relay.errors import ModelNotFound
from relay.redact import Redactor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from encoders.shape import Shape
    from relay.upstreams.base import Upstream

_SLUG_CHARACTERS_MAX: Final = 512  # a client's own choice; it stands in every chunk and in the log


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One provider that is on, and what its descriptor says about it.

    Attributes:
        default_model: what serves who names no model, None if it has to be asked (A1.2).
        aggregate: plain requests are dialled as streams (M4.1).
        stream_options: it takes `stream_options` (M3.3).
        shape: the wire that it speaks (M5).
        reasoning, cumulative_deltas, inline_tool_calls: see M2.7.
        first_byte_timeout_s, peek_first_event_s, idle_timeout_s: opt-ins of M3.3; None is off.
        max_event_bytes: bound for one event (M3.1).
        redactor: its secrets.
    """

    name: str
    upstream: Upstream
    default_model: str | None = None
    aggregate: bool = False
    stream_options: bool = True
    shape: Shape = OPENAI
    reasoning: bool = True
    cumulative_deltas: bool = False
    inline_tool_calls: bool = False
    first_byte_timeout_s: float | None = None
    peek_first_event_s: float | None = None
    idle_timeout_s: float | None = None
    max_event_bytes: int = 16 * 1024 * 1024
    redactor: Redactor = field(default_factory=Redactor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One provider's model that can serve a slug."""

    provider: Provider
    model: str


class Router:
    """Finds the candidates of a slug.

    Args:
        providers: those that are on, by name.
        routes: slug → candidates in failover order; may be empty where every provider is off.
        off: name of a provider that is not on → why.
    """

    def __init__(
        self,
        providers: Mapping[str, Provider],
        routes: Mapping[str, tuple[Candidate, ...]],
        off: Mapping[str, str] | None = None,
    ) -> None:
        self._providers = providers
        self._routes = routes
        self._off = off or {}

    def resolve(self, slug: str) -> tuple[Candidate, ...]:
        """Return the candidates of `slug` in the order to try them; at least one.

        Raises:
            ModelNotFound: nothing that is on serves it.
        """
        candidates = self._routes.get(slug)
        if candidates:
            return candidates
        too_long = len(slug) > _SLUG_CHARACTERS_MAX
        shown = slug[:_SLUG_CHARACTERS_MAX] + "…" if too_long else slug
        if candidates is not None:
            raise ModelNotFound(
                f"every provider of the model {shown!r} is switched off in this gateway",
                param="model",
            )
        name, slash, model = slug.partition("/")
        provider = self._providers.get(name)
        if provider is not None and slash and model and not too_long:
            return (Candidate(provider=provider, model=model),)
        if slash and name in self._off:
            raise ModelNotFound(f"the provider {name} is off: {self._off[name]}", param="model")
        raise ModelNotFound(
            f"the model {shown!r} is not served here; GET /v1/models lists those that have a name "
            "of their own, and <provider>/<model> names any model of a provider that is on",
            param="model",
        )

    def select(self, named: Iterable[tuple[str, str]]) -> tuple[Candidate, ...]:
        """Return the candidates of a list of one's own, in its order; at least one.

        Args:
            named: names of providers, and their models.

        Raises:
            ModelNotFound: none of the providers is on.
        """
        listed = list(named)
        found = tuple(
            Candidate(provider=self._providers[provider], model=model)
            for provider, model in listed
            if provider in self._providers
        )
        if not found:
            names = ", ".join(dict.fromkeys(provider for provider, _ in listed))
            raise ModelNotFound(f"no provider of these is on: {names}", param="model")
        return found

    def provider(self, name: str) -> Provider | None:
        """Return a provider that is on."""
        return self._providers.get(name)

    def routes(self) -> Iterable[tuple[str, tuple[Candidate, ...]]]:
        """Yield each listed slug with its candidates."""
        return self._routes.items()

    def slugs(self) -> Iterable[tuple[str, str]]:
        """Yield each listed slug that can be served, with the provider that is tried first."""
        for slug, candidates in self._routes.items():
            if candidates:
                yield slug, candidates[0].provider.name
