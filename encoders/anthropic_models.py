"""What the generations of Claude accept, by the number in a model's name. [pure]

The Messages API is one wire, but it refuses words that a generation does not have: a thinking
budget from 4.7 on, adaptive thinking before 4.6, sampling from 4.7 on, structured outputs before
4.5. A name without a number of Claude's (another server's model, an alias) is asked in the words
that every server has known from the first: budgets, sampling, structured outputs.
"""

from __future__ import annotations

import re
from typing import Final

Generation = tuple[int, int]

# claude-opus-4-7, claude-3-7-sonnet-20250219, claude-sonnet-5, us.anthropic.claude-opus-4-1-v1:0
_NAME: Final = re.compile(r"claude-(?:[a-z]+-)?(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)")

_ADAPTIVE_SINCE: Final[Generation] = (4, 6)
_ADAPTIVE_ONLY_SINCE: Final[Generation] = (4, 7)
_STRUCTURED_SINCE: Final[Generation] = (4, 5)


def generation(model: str) -> Generation | None:
    """Return the generation in a model's name, None if it has none."""
    found = _NAME.search(model.lower())
    if found is None:
        return None
    return int(found[1]), int(found[2] or 0)


def takes_adaptive(model: str) -> bool:
    """Whether thinking can be left to the model, steered by an effort."""
    number = generation(model)
    return number is not None and number >= _ADAPTIVE_SINCE


def takes_budget(model: str) -> bool:
    """Whether thinking can have a budget of tokens."""
    number = generation(model)
    return number is None or number < _ADAPTIVE_ONLY_SINCE


def takes_sampling(model: str) -> bool:
    """Whether temperature, top_p and top_k are accepted."""
    return takes_budget(model)


def takes_structured(model: str) -> bool:
    """Whether an output schema and strict tools are accepted."""
    number = generation(model)
    return number is None or number >= _STRUCTURED_SINCE
