"""Token usage as providers report it. [pure]

Absent and zero are different things (None and 0), and usage is cumulative: the last report wins
field by field, nothing is ever summed (M2.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Counts of tokens; None where the provider said nothing.

    Attributes:
        prompt_tokens: all input tokens, cached ones included.
        completion_tokens: all output tokens, reasoning included.
        cached_tokens: the part of `prompt_tokens` that was read from a cache.
        reasoning_tokens: the part of `completion_tokens` that was reasoning.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def updated(self, later: TokenUsage) -> TokenUsage:
        """Return this usage with every field that `later` reports."""
        return TokenUsage(
            prompt_tokens=_later(self.prompt_tokens, later.prompt_tokens),
            completion_tokens=_later(self.completion_tokens, later.completion_tokens),
            cached_tokens=_later(self.cached_tokens, later.cached_tokens),
            reasoning_tokens=_later(self.reasoning_tokens, later.reasoning_tokens),
        )


def _later(earlier: int | None, later: int | None) -> int | None:
    return earlier if later is None else later


def openai_usage(value: object) -> TokenUsage | None:
    """Read a `usage` object of the OpenAI wire; None if it reports nothing."""
    if not isinstance(value, dict):
        return None
    prompt = token_count(value, "prompt_tokens")
    completion = token_count(value, "completion_tokens")
    cached = token_count(value.get("prompt_tokens_details"), "cached_tokens")
    reasoning = token_count(value.get("completion_tokens_details"), "reasoning_tokens")
    if prompt is None and completion is None and cached is None and reasoning is None:
        return None
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        reasoning_tokens=reasoning,
    )


def token_count(value: Any, key: str) -> int | None:
    """Return the token count under `key`, None unless `value` is an object with a sane one."""
    if not isinstance(value, dict):
        return None
    count = value.get(key)
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < 2**53:
        return None
    return int(count)
