"""What a client says about reasoning, as Gemini's `thinkingConfig`. [pure]

Rule M5. Gemini 2.5 has a budget in tokens, Gemini 3 and later have a level, and refuse to be told
both. The numbers and levels are those of Google's own OpenAI compatibility layer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_BUDGETS: Final = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576}
_LEVELS: Final = {"minimal": "minimal", "low": "low", "medium": "medium", "high": "high"}
_AS_HIGH: Final = frozenset({"xhigh", "max"})
_AUTOMATIC: Final = -1
_SMALLEST_OF_PRO: Final = 128  # 2.5 Pro cannot be told not to think

_VERSION: Final = re.compile(r"(?:^|/)gemini-(\d+)")


def has_levels(model: str) -> bool:
    """Whether the model is a Gemini 3 or later, by its name; `gemini-…-latest` is one."""
    match = _VERSION.search(model)
    if match is None:
        return "gemini-" in model and model.endswith("-latest")
    return int(match[1]) >= 3


def thinking_config(body: Mapping[str, Any], model: str) -> dict[str, Any] | None:
    """Return the `thinkingConfig` of a request, None if it says nothing about reasoning.

    Args:
        body: a chat completion request, in the words of OpenAI (`reasoning_effort`), OpenRouter
            (`reasoning`, `include_reasoning`), Anthropic (`thinking`) or Qwen (`enable_thinking`).
        model: the provider's own name of it.
    """
    effort, budget, show = _asked(body)
    if effort is None and budget is None and show is None:
        return None
    config: dict[str, Any] = {}
    if budget is not None:
        config["thinkingBudget"] = budget
    elif effort is not None and has_levels(model):
        config["thinkingLevel"] = _level(effort, model)
    elif effort is not None:
        config["thinkingBudget"] = _budget(effort, model)
    thinks = effort != "none" and budget != 0
    config["includeThoughts"] = thinks and show is not False
    return config


def _asked(body: Mapping[str, Any]) -> tuple[str | None, int | None, bool | None]:
    """Return effort, budget in tokens and whether thoughts shall be shown, as far as told."""
    effort, budget, show = _text(body.get("reasoning_effort")), None, None
    reasoning, thinking = body.get("reasoning"), body.get("thinking")
    if isinstance(reasoning, dict):
        effort = _text(reasoning.get("effort")) or effort
        budget = _count(reasoning.get("max_tokens"))
        if reasoning.get("enabled") is False:
            effort = "none"
        elif reasoning.get("enabled") is True:
            show = True
        if reasoning.get("exclude") is True:
            show = False
    if isinstance(thinking, dict):
        budget = _count(thinking.get("budget_tokens")) if budget is None else budget
        if thinking.get("type") == "disabled":
            effort = "none"
        elif thinking.get("type") in ("enabled", "adaptive"):
            show = True
    if body.get("enable_thinking") is False:
        effort = "none"
    elif body.get("enable_thinking") is True:
        show = True
    include = body.get("include_reasoning")
    return effort, budget, include if isinstance(include, bool) else show


def _level(effort: str, model: str) -> str:
    if effort in _AS_HIGH:
        return "high"
    if effort in ("none", "minimal"):  # no Gemini 3 can be told not to think
        return "low" if "-pro" in model else "minimal"
    return _LEVELS.get(effort, effort)


def _budget(effort: str, model: str) -> int:
    if effort in _AS_HIGH:
        return _BUDGETS["high"]
    budget = _BUDGETS.get(effort, _AUTOMATIC)
    return max(budget, _SMALLEST_OF_PRO) if budget == 0 and "-pro" in model else budget


def _text(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
