"""Makes the providers and routes of the settings, starts and stops them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from encoders.shapes import OPENAI, SHAPES
from planes.settings import HttpProvider, LocalProvider, ReplayProvider
from planes.version import USER_AGENT
from relay.errors import UpstreamUnavailable
from relay.redact import Redactor
from relay.routing import Candidate, Provider, Router
from relay.upstreams.http import HttpUpstream
from relay.upstreams.local import LlamaProcess, LocalUpstream
from relay.upstreams.replay import PACKAGED_TRANSCRIPTS, ReplayUpstream
from relay.upstreams.unavailable import UnavailableUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.shape import Shape
    from planes.settings import Provider as ProviderSettings
    from planes.settings import Settings
    from relay.upstreams.base import Upstream

log = structlog.get_logger("sluicegate")

REPLAY: Final = "replay"
PACKAGED_MODEL: Final = "smollm2-135m"  # whose transcripts the package has


class Providers:
    """The providers of one gateway that are on.

    Args:
        settings: the whole configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._providers = {
            name: _provider(name, provider)
            for name, provider in settings.providers.items()
            if settings.provider_off_reason(name) is None
        }

    def router(self) -> Router:
        """Return the routes over the providers that are on."""
        routes = {
            slug: tuple(
                Candidate(provider=self._providers[c.provider], model=c.model)
                for c in model.candidates
                if c.provider in self._providers
            )
            for slug, model in self._settings.models.items()
        }
        reasons = {
            name: self._settings.provider_off_reason(name) for name in self._settings.providers
        }
        off = {name: reason for name, reason in reasons.items() if reason is not None}
        return Router(self._providers, routes, off)

    async def start(self, *, replay_if_no_local: bool) -> Router:
        """Start every provider and return the routes over them.

        One that cannot start does not keep the others from serving: it is told in the log, and
        every request to it gets 503 with the reason, so that failover passes it by.

        Args:
            replay_if_no_local: recorded transcripts take the place of a local model that cannot
                start (O1.1).
        """
        for name, provider in list(self._providers.items()):
            try:
                await provider.upstream.start()
            except UpstreamUnavailable as error:
                local = isinstance(self._settings.providers[name], LocalProvider)
                if local and replay_if_no_local and REPLAY in self._providers:
                    log.warning(
                        "the local model cannot be had; recorded transcripts are served instead, "
                        "and every answer says so in `provider`",
                        why=error.message,
                    )
                    self._providers[name] = replace(
                        self._providers[REPLAY], default_model=provider.default_model
                    )
                    continue
                log.error("a provider cannot start", provider=name, why=error.message)
                await provider.upstream.close()
                stand_in = UnavailableUpstream(name, error.message)
                self._providers[name] = replace(provider, upstream=stand_in)
        return self.router()

    async def close(self) -> None:
        """Stop all, also those that did not start."""
        upstreams = {id(p.upstream): p.upstream for p in self._providers.values()}
        results = await asyncio.gather(
            *(upstream.close() for upstream in upstreams.values()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                log.error("a provider did not stop cleanly", exc_info=result)


def _provider(name: str, settings: ProviderSettings) -> Provider:
    upstream: Upstream
    shape: Shape = OPENAI
    secrets: tuple[str, ...] = ()
    default_model: str | None = None
    match settings:
        case HttpProvider():
            key = settings.api_key.get_secret_value() if settings.api_key else ""
            shape = SHAPES[settings.shape]
            secrets = (key, *settings.headers.values())
            upstream = HttpUpstream(
                name,
                settings.base_url,
                shape=shape,
                api_key=key,
                headers=settings.headers,
                connect_timeout_s=settings.connect_timeout_s,
                header_timeout_s=settings.header_timeout_s,
                user_agent=USER_AGENT,
            )
        case LocalProvider():
            default_model = settings.model
            upstream = LocalUpstream(
                name, LlamaProcess(settings.model), _local_http(name, settings.header_timeout_s)
            )
        case ReplayProvider():
            default_model = PACKAGED_MODEL if settings.path is None else None
            upstream = ReplayUpstream(name, _transcripts(settings.path))
    return Provider(
        name=name,
        upstream=upstream,
        default_model=default_model,
        aggregate=settings.aggregate,
        stream_options=settings.stream_options,
        shape=shape,
        reasoning=settings.reasoning,
        cumulative_deltas=settings.cumulative_deltas,
        inline_tool_calls=settings.inline_tool_calls,
        first_byte_timeout_s=settings.first_byte_timeout_s,
        peek_first_event_s=settings.peek_first_event_s,
        idle_timeout_s=settings.idle_timeout_s,
        max_event_bytes=settings.max_event_bytes,
        redactor=Redactor(secrets),
    )


def _transcripts(path: str | None) -> Path | None:
    """The folder as written, or the one of the package that it names (O3 shows `transcripts/`)."""
    if path is None:
        return None
    packaged = PACKAGED_TRANSCRIPTS.parent / path
    return Path(path) if Path(path).is_dir() or not packaged.is_dir() else packaged


def _local_http(name: str, header_timeout_s: float) -> Callable[[Callable[[], str]], Upstream]:
    def make(base_url: Callable[[], str]) -> Upstream:
        return HttpUpstream(
            name, base_url, header_timeout_s=header_timeout_s, user_agent=USER_AGENT
        )

    return make
