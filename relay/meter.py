"""What a stream has used, and where we know it from. [pure] Rules M2.4, M4.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.money import Source, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.usage import TokenUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Token counts at one moment of a stream.

    Attributes:
        source: REPORTED if the provider told the output, COUNTED if it is characters / 4, NONE if
            nothing is known to have come out.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None
    source: Source


def read(usage: TokenUsage | None, characters: Callable[[], int], prompt_estimate: int) -> Reading:
    """Return what was used so far.

    Args:
        usage: the last usage that the provider reported. What it reports is believed, zero too;
            what it leaves out is estimated.
        characters: counts the output so far; asked only if the provider has not told its tokens.
        prompt_estimate: tokens of the prompt.
    """
    prompt = usage.prompt_tokens if usage else None
    completion = usage.completion_tokens if usage else None
    if completion is not None:
        source = Source.REPORTED
    else:
        completion = tokens_of(characters())
        source = Source.COUNTED if completion or usage else Source.NONE
    return Reading(
        prompt_tokens=prompt_estimate if prompt is None else prompt,
        completion_tokens=completion,
        cached_tokens=usage.cached_tokens if usage else None,
        reasoning_tokens=usage.reasoning_tokens if usage else None,
        source=source,
    )
