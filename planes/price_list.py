"""The prices of a configuration, and which of its models have none (M4.4)."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from planes.settings import HttpProvider
from relay.money import Price
from relay.prices import PriceBook

if TYPE_CHECKING:
    from planes.settings import Settings


def price_book(settings: Settings) -> PriceBook:
    """Return what finds the prices of the models."""
    configured = {
        slug: Price(
            prompt_usd_per_mtok=Decimal(str(model.price.prompt_usd_per_mtok)),
            completion_usd_per_mtok=Decimal(str(model.price.completion_usd_per_mtok)),
        )
        for slug, model in settings.models.items()
        if model.price is not None
    }
    urls = {
        name: provider.base_url
        for name, provider in settings.providers.items()
        if isinstance(provider, HttpProvider) and provider.off_reason is None
    }
    pairs = {
        (candidate.provider, candidate.model): configured[slug]
        for slug, model in settings.models.items()
        if slug in configured
        for candidate in model.candidates
    }
    return PriceBook(configured, urls, pairs=pairs)


def price_warning(settings: Settings) -> str | None:
    """Say which models that are served have no known price, as the start does; None if all have."""
    return price_book(settings).warning(
        (slug, candidate.provider, candidate.model)
        for slug, model in settings.models.items()
        for candidate in model.candidates
        if settings.provider_off_reason(candidate.provider) is None
    )
