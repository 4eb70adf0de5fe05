"""`reasoning_effort` and `reasoning` as thinking of the Messages API. [pure]

Rule M5. Older generations think with a budget, newer ones as they see fit, steered by an effort
(`encoders.anthropic_models`). `thinking` is the API's own word and passes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders import anthropic_models as models
from encoders.shape import Untranslatable

if TYPE_CHECKING:
    from collections.abc import Mapping

BUDGET_MIN: Final = 1024
_OFF: Final = "none"
# The share of max_tokens that an effort may think, as OpenRouter has it.
_SHARES: Final = {"low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95, "max": 0.95}
_EFFORTS: Final = (_OFF, "minimal", *_SHARES)
_THINKS: Final = ("enabled", "adaptive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a client asked of a model's reasoning.

    Attributes:
        effort: one of OpenAI's words, None if it named none.
        budget: in tokens, None if it named none.
        shown: whether the reasoning shall be in the answer.
    """

    effort: str | None = None
    budget: int | None = None
    shown: bool = True

    @property
    def off(self) -> bool:
        """Whether it asked for an answer without reasoning."""
        return self.effort == _OFF


def wish_of(body: Mapping[str, Any]) -> Wish | None:
    """Read OpenAI's `reasoning_effort` and OpenRouter's `reasoning`; None if neither asks.

    Raises:
        Untranslatable: an effort that nobody knows, or a budget that is no number.
    """
    reasoning = body.get("reasoning")
    asked = reasoning if isinstance(reasoning, dict) else {}
    shown = not asked.get("exclude") and body.get("include_reasoning") is not False
    if asked.get("enabled") is False:
        return Wish(effort=_OFF)
    budget = asked.get("max_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise Untranslatable(
            "`reasoning.max_tokens` must be a whole number", param="reasoning.max_tokens"
        )
    effort, param = asked.get("effort"), "reasoning.effort"
    if effort is None:
        effort, param = body.get("reasoning_effort"), "reasoning_effort"
    if effort is not None and effort not in _EFFORTS:
        raise Untranslatable(f"`{param}` must be one of {', '.join(_EFFORTS)}", param=param)
    if budget is not None and budget > 0:
        return Wish(budget=budget, shown=shown)
    if effort is not None:
        return Wish(effort=effort, shown=shown)
    return Wish(effort="medium", shown=shown) if asked.get("enabled") else None


def budget_beyond(body: Mapping[str, Any], model: str) -> int:
    """Return the tokens that a budget needs on top of the default `max_tokens`: a budget that the
    client names counts towards `max_tokens`, and a limit that it does not name is no reason to
    think less.
    """
    if body.get("thinking") is not None or not models.takes_budget(model):
        return 0
    wish = wish_of(body)
    return max(wish.budget, BUDGET_MIN) if wish is not None and wish.budget else 0


def think(out: dict[str, Any], wish: Wish | None, *, model: str, forced: bool, bare: bool) -> None:
    """Put thinking into a request.

    Args:
        out: the request so far, with `max_tokens` and what the client said of `thinking` itself.
        forced: a tool must be called: the API takes no thinking with that.
        bare: the answer goes on from one without thinking: the API takes no budget with that.
    """
    if out.get("thinking") is None:
        out.pop("thinking", None)
    if wish is not None and "thinking" not in out:
        if wish.off:
            if models.takes_adaptive(model):  # it may think unless told not to
                out["thinking"] = {"type": "disabled"}
        elif _by_budget(wish, model):
            budget = _budget(wish, out["max_tokens"])
            if budget is not None and not forced and not bare:
                out["thinking"] = {"type": "enabled", "budget_tokens": budget} | _display(wish)
        else:
            if wish.effort is not None:
                told = out.get("output_config")
                effort = {"effort": _effort(wish.effort, model)}
                out["output_config"] = effort | (told if isinstance(told, dict) else {})
            if not forced:
                shown = "summarized" if wish.shown else "omitted"
                out["thinking"] = {"type": "adaptive", "display": shown}
    thinking = out.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") in _THINKS:
        _without_sampling(out)
    elif not models.takes_sampling(model):
        for name in ("temperature", "top_p", "top_k"):
            out.pop(name, None)


def _by_budget(wish: Wish, model: str) -> bool:
    if wish.budget is not None:
        return models.takes_budget(model)
    return not models.takes_adaptive(model)


def _budget(wish: Wish, max_tokens: object) -> int | None:
    """Return a budget below `max_tokens`, None where there is no room for one."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens <= BUDGET_MIN:
        return None
    if wish.budget is not None:
        asked = wish.budget
    elif wish.effort in _SHARES:
        asked = int(max_tokens * _SHARES[wish.effort])
    else:  # minimal: less than the smallest budget
        return None
    return min(max(asked, BUDGET_MIN), max_tokens - 1)


def _display(wish: Wish) -> dict[str, Any]:
    return {} if wish.shown else {"display": "omitted"}


def _effort(effort: str, model: str) -> str:
    if effort == "minimal":
        return "low"
    if effort == "xhigh" and models.takes_budget(model):  # 4.6 has no such level
        return "high"
    return effort


def _without_sampling(out: dict[str, Any]) -> None:
    """Thinking takes no temperature but 1, no top_k, and a top_p near 1 only."""
    if out.get("temperature") != 1:
        out.pop("temperature", None)
    out.pop("top_k", None)
    top_p = out.get("top_p")
    if isinstance(top_p, int | float) and top_p < 0.95:
        out.pop("top_p")
