"""Which model serves an agent that names only a provider (A1.2).

`default_model` of `GET {base_url}/health`, else `default`. What was found is kept; a provider that
does not tell is asked again soon, and what it told before stays good until it tells something else.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from encoders.json_text import loads
from relay.errors import UpstreamError
from relay.upstreams.http import HttpUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.routing import Provider

UNTOLD: Final = "default"
ASK_WAIT_S: Final = 2.0
KEEP_S: Final = 300.0
ASK_AGAIN_S: Final = 15.0
_BODY_BYTES_MAX: Final = 64 * 1024
_NAME_CHARACTERS_MAX: Final = 256


@dataclass(slots=True)
class _Known:
    """What is known of one provider.

    Attributes:
        ask_at: when it is to be asked again, on the clock.
    """

    model: str = UNTOLD
    ask_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class DefaultModels:
    """The default models of the providers; asks each at most once at a time.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def known(self, name: str, provider: Provider | None) -> str:
        """Return the provider's own name of its default model as far as it is known; asks nobody.

        Args:
            name: of the configuration; another's may stand in for `provider`.
        """
        if provider is not None and provider.default_model is not None:
            return provider.default_model
        known = self._known.get(name)
        return known.model if known is not None else UNTOLD

    async def find(self, name: str, provider: Provider) -> str:
        """As `known`, and ask if it is time to; takes ASK_WAIT_S at most, never fails."""
        upstream = provider.upstream
        if provider.default_model is not None or not isinstance(upstream, HttpUpstream):
            return self.known(name, provider)
        known = self._known.setdefault(name, _Known())
        async with known.lock:
            if self._clock() >= known.ask_at:
                told = await _asked(upstream)
                known.model = told or known.model
                known.ask_at = self._clock() + (KEEP_S if told else ASK_AGAIN_S)
        return known.model


async def _asked(upstream: HttpUpstream) -> str | None:
    try:
        async with asyncio.timeout(ASK_WAIT_S):
            status, body = await upstream.fetch("/health", max_bytes=_BODY_BYTES_MAX)
        health = loads(body) if 200 <= status < 300 else None
    except (TimeoutError, UpstreamError, ValueError):
        return None
    told = health.get("default_model") if isinstance(health, dict) else None
    if not isinstance(told, str) or not told.isprintable():
        return None
    # It may say it as clients name it.
    told = told.strip().removeprefix(f"{upstream.name}/")
    return told if 0 < len(told) <= _NAME_CHARACTERS_MAX else None
