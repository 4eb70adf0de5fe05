"""What models cost: the configuration's prices, else the bundled list of `genai-prices` (M4.4)."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from relay.money import Price

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_log: Final = logging.getLogger("sluicegate.prices")
_CACHE_MAX: Final = 10_000  # clients choose the names of `<provider>/<anything>`

FREE: Final = Price()


class PriceBook:
    """Finds the price of a candidate.

    Args:
        configured: slug → price of the configuration; it is the slug's whoever serves it.
        pairs: (provider, model) → price of the slug that lists it: what is named around a slug, as
            `<provider>/<model>`, costs no less.
        urls: provider → its base URL; a provider that is not here costs nothing (the local model,
            recorded transcripts).
        look_up: (base URL, model) → price, None if the list does not have it.
    """

    def __init__(
        self,
        configured: Mapping[str, Price],
        urls: Mapping[str, str],
        look_up: Callable[[str, str], Price | None] | None = None,
        *,
        pairs: Mapping[tuple[str, str], Price] | None = None,
    ) -> None:
        self._configured = configured
        self._pairs = pairs or {}
        self._urls = urls
        self._look_up = look_up or bundled_price
        self._found: dict[tuple[str, str], Price | None] = {}

    def warm_up(self, listed: Iterable[tuple[str, str, str]]) -> None:
        """Find the prices of all that is listed, so that no request waits for the list to be
        loaded, and say which are not known (M4.4).

        Args:
            listed: slug, provider, model of each candidate.
        """
        for url in self._urls.values():
            self._look_up(url, "")
        warning = self.warning(listed)
        if warning is not None:
            _log.warning("%s", warning)

    def warning(self, listed: Iterable[tuple[str, str, str]]) -> str | None:
        """Say which prices are not known; None if all are.

        Args:
            listed: slug, provider, model of each candidate.
        """
        unknown = {
            f"{provider}/{model}"
            for slug, provider, model in listed
            if self._find(slug, provider, model) is None
        }
        if not unknown:
            return None
        names = ", ".join(sorted(unknown))
        return (
            f"no price is known for {names}: counted as free; "
            "set models.<slug>.price to change that"
        )

    def price(self, slug: str, provider: str, model: str) -> Price:
        """Return the price of `model` at `provider` under `slug`; free if nobody knows it."""
        return self._find(slug, provider, model) or FREE

    def _find(self, slug: str, provider: str, model: str) -> Price | None:
        configured = self._configured.get(slug) or self._pairs.get((provider, model))
        if configured is not None:
            return configured
        url = self._urls.get(provider)
        if url is None:
            return FREE
        if (provider, model) not in self._found:
            if len(self._found) >= _CACHE_MAX:
                self._found.clear()  # clients invent names; what is in use comes back at once
            self._found[provider, model] = self._look_up(url, model)
        return self._found[provider, model]


def bundled_price(base_url: str, model: str) -> Price | None:
    """Look a model up in the list that comes with `genai-prices`; never asks the network.

    Where a price depends on the length of the prompt, it is that of short prompts.
    """
    # Imported here: it takes a third of a second, and a gateway of priced models never needs it.
    from genai_prices import Usage, calc_price

    try:
        found = calc_price(Usage(), model_ref=model, provider_api_url=base_url).model_price
    except LookupError:
        return None
    return Price(
        prompt_usd_per_mtok=_flat(found.input_mtok) or Decimal(0),
        completion_usd_per_mtok=_flat(found.output_mtok) or Decimal(0),
        cached_usd_per_mtok=_flat(found.cache_read_mtok),
    )


def _flat(price: Any) -> Decimal | None:
    base = getattr(price, "base", price)
    return base if isinstance(base, Decimal) else None
