"""The money of one request: hold, then exactly one settlement. [pure]

    Hold ──settle──▶ Settlement        final usage, or what was streamed and the prompt
      └───release──▶ Settlement of 0   nothing came out

Amounts are integer micro-USD; a price in USD for a million tokens is micro-USD for one token.
Rules M4.2, M4.4. Nothing here knows a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CHARACTERS_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 1000
# A count that no provider reports: keeps sums inside 64 bits whatever a request claims.
_TOKENS_MAX: Final = 10**9


class Source(StrEnum):
    """Where a settlement's token counts come from."""

    REPORTED = "reported"  # the provider's own usage
    COUNTED = "counted"  # characters / 4
    NONE = "none"  # nothing came out


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs, in USD for a million tokens.

    Attributes:
        cached_usd_per_mtok: for prompt tokens read from a cache; None: as other prompt tokens.
    """

    prompt_usd_per_mtok: Decimal = Decimal(0)
    completion_usd_per_mtok: Decimal = Decimal(0)
    cached_usd_per_mtok: Decimal | None = None

    def cost_micro_usd(self, prompt: int, completion: int, cached: int = 0) -> int:
        """Return the cost of token counts in micro-USD, rounded half up once; see `cost`."""
        return whole_micro_usd(self.cost(prompt, completion, cached))

    def cost(self, prompt: int, completion: int, cached: int = 0) -> Decimal:
        """Return the exact cost of token counts in micro-USD.

        Args:
            prompt: all prompt tokens. completion: all completion tokens.
            cached: the part of `prompt` that was read from a cache.
        """
        prompt, completion = min(prompt, _TOKENS_MAX), min(completion, _TOKENS_MAX)
        cached = min(cached, prompt)
        for_cached = self.cached_usd_per_mtok
        if for_cached is None:
            for_cached = self.prompt_usd_per_mtok
        return (
            (prompt - cached) * self.prompt_usd_per_mtok
            + cached * for_cached
            + completion * self.completion_usd_per_mtok
        )


def whole_micro_usd(cost: Decimal) -> int:
    """Return a cost rounded half up."""
    return int(cost.quantize(Decimal(1), ROUND_HALF_UP))


def dearest(prices: Iterable[Price]) -> Price:
    """Return a price that no candidate exceeds: what a hold is placed at."""
    prices = list(prices)
    if len(prices) == 1 and prices[0].cached_usd_per_mtok is None:
        return prices[0]
    return Price(
        prompt_usd_per_mtok=max((p.prompt_usd_per_mtok for p in prices), default=Decimal(0)),
        completion_usd_per_mtok=max(
            (p.completion_usd_per_mtok for p in prices), default=Decimal(0)
        ),
    )


def tokens_of(characters: int) -> int:
    """Return the estimate for so many characters of text: a quarter, rounded up."""
    return -(-characters // CHARACTERS_PER_TOKEN)


def estimate_prompt_tokens(body: Mapping[str, Any]) -> int:
    """Estimate a request's prompt: characters / 4 of texts and tool schemas, 1000 an image."""
    characters = images = 0
    stack: list[Any] = [body.get("messages")]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value.get("type") in ("image_url", "image", "input_image"):
                images += 1
            else:
                stack += [v for k, v in value.items() if k not in ("type", "role", "id")]
    for key in ("tools", "functions", "response_format"):
        characters += _characters_of_json(body.get(key))
    return tokens_of(characters) + images * IMAGE_TOKENS


def _characters_of_json(value: Any) -> int:
    """Characters of a schema as compact JSON, near enough: text, and one for each mark."""
    characters = 0
    stack = [value] if value is not None else []
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            characters += len(item) + 2
        elif isinstance(item, list):
            characters += len(item) + 1
            stack += item
        elif isinstance(item, dict):
            characters += 2 * len(item) + 1
            stack += item.keys()
            stack += item.values()
        else:
            characters += len(str(item))
    return characters


def max_output_tokens(body: Mapping[str, Any], default: int) -> int:
    """Return the most output that a request may bring: its limit, else `default` and the budget
    that it names for reasoning, for each `n`.

    Of two limits the larger counts, for a provider may know only one of the names; a limit that is
    no positive number is none.
    """
    limits = [_positive(body.get(key)) for key in ("max_completion_tokens", "max_tokens")]
    reasoning = body.get("reasoning")
    thought = _positive(reasoning.get("max_tokens")) if isinstance(reasoning, dict) else 0
    limit = max(limits) or default + thought
    return min(limit * max(_positive(body.get("n")), 1), _TOKENS_MAX)


def _positive(value: object) -> int:
    """A positive whole number, however JSON spells it; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(min(max(value, 0), _TOKENS_MAX)) if value == value else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An amount set aside for one request before it is dialled.

    Attributes:
        request_id: names the hold, the settlement and the row.
        worker: the process that will settle it; its lease tells whether it still lives.
        placed_at: Unix seconds.
        amount_micro_usd: prompt estimate and largest output at the dearest candidate's price.
        prompt_tokens: the prompt estimate.
        prompt_micro_usd: its cost: what a swept hold without progress settles at.
        trial: logged but never debited.
    """

    request_id: str
    org: str
    key_id: str
    plane: str
    model: str
    worker: str
    placed_at: float
    amount_micro_usd: int
    prompt_tokens: int
    prompt_micro_usd: int
    trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an open hold's stream is, for the sweeper (M4.2)."""

    request_id: str
    provider: str
    prompt_tokens: int
    completion_tokens: int
    source: Source
    cost_micro_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The one row of one request.

    Attributes:
        at: Unix seconds of its end.
        status: HTTP status, 499 for a hang-up.
        source: where the counts come from; NONE is a released hold, of amount 0.
        debit: whether the org's balance pays (a trial's does not).
        attempts: candidates that were tried, in order, as `provider/model: code`.
    """

    request_id: str
    at: float
    org: str
    key_id: str
    plane: str
    model: str
    provider: str | None
    status: int
    error_code: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    source: Source
    cost_micro_usd: int
    debit: bool = True
    attempts: tuple[str, ...] = ()
    duration_ms: int
