"""A question as a chat request that one token answers, and that token's odds (D6.5). [pure]

Each option has a label of one character, which is one token to every tokenizer that is in use. The
state comes first: the questions about one state share the beginning of their prompt, which
providers keep.
"""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any, Final

from encoders.decision_json import compact
from encoders.decision_reply import UnusableReply, Usage, count, number, outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LABELS: Final = string.ascii_uppercase + string.ascii_lowercase + string.digits

_TASK: Final = (
    "You are given a state and a question about it with labelled options. Choose the option that "
    "fits the state. Reply with its label, one character, and nothing else."
)


def text_of(value: object) -> str:
    """A state or instructions as the model reads them: text as it is, all else as compact JSON."""
    return value if isinstance(value, str) else compact(value).decode()


def make_request(
    state: str,
    question: Mapping[str, Any],
    *,
    images: Sequence[tuple[str, str]] = (),
    top_logprobs: int,
) -> dict[str, Any]:
    """Return the chat request, without a model.

    Args:
        state: its `text_of`, made once for all questions.
        question: with at most `len(LABELS)` outcomes.
        images: names and data URLs.
        top_logprobs: how many tokens are to be listed.
    """
    labelled = list(zip(LABELS, _options(question), strict=False))
    labels = ", ".join(label for label, _ in labelled)
    text = "\n\n".join(
        (
            f"State:\n{state}",
            f"Question:\n{text_of(question['instructions'])}",
            "Options:\n" + "\n".join(f"{label}: {option}" for label, option in labelled),
            f"Reply with one of these labels: {labels}",
        )
    )
    content: Any = text
    if images:
        content = []
        for name, url in images:
            content.append({"type": "text", "text": f"Image {name}:"})
            content.append({"type": "image_url", "image_url": {"url": url}})
        content.append({"type": "text", "text": text})
    return {
        "messages": [
            {"role": "system", "content": _TASK},
            {"role": "user", "content": content},
        ],
        "max_tokens": 1,
        # Not 0: some servers list the odds after it, and nothing would be left of them.
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": top_logprobs,
    }


def _options(question: Mapping[str, Any]) -> list[str]:
    criteria = question.get("criteria") or {}
    match question["type"]:
        case "boolean":
            return [_described(word, criteria.get(key)) for key, word in _WORDS.items()]
        case "choice":
            return [_described(name, said) for name, said in criteria.items()]
        case _:
            return [f"level {level}: {said}" for level, said in enumerate(criteria)]


def _described(name: str, said: str | None) -> str:
    return f"{name} ({said})" if said else name


def read_weights(reply: Mapping[str, Any], question: Mapping[str, Any]) -> dict[str, object]:
    """Return how likely each outcome is; one that is not listed is as likely as the last that is.

    Raises:
        UnusableReply: the reply lists no tokens, or none of the labels.
    """
    listed = _listed(reply)
    keys = outcomes(question)
    found: dict[str, list[float]] = {}
    for token, logprob in listed:
        found.setdefault(token.strip(), []).append(logprob)  # "A" and " A" are one label
    labels = LABELS[: len(keys)]
    if not any(label in found for label in labels):
        raise UnusableReply("none of the options is among the tokens that the model lists")
    least = [min(logprob for _, logprob in listed)]
    peak = max(logprob for label in labels for logprob in found.get(label, least))
    return {
        key: math.fsum(math.exp(logprob - peak) for logprob in found.get(label, least))
        for key, label in zip(keys, labels, strict=True)
    }


def _listed(reply: Mapping[str, Any]) -> list[tuple[str, float]]:
    try:
        tokens = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = [(item["token"], item["logprob"]) for item in tokens]
    except (LookupError, TypeError):
        raise UnusableReply("the model lists no token probabilities (logprobs)") from None
    listed = [
        (token, odds)
        for token, logprob in found
        if isinstance(token, str) and (odds := number(logprob)) is not None
    ]
    if not listed:
        raise UnusableReply("the model lists no token probabilities (logprobs)")
    return listed


def read_usage(reply: Mapping[str, Any]) -> Usage:
    """Return the prompt's tokens."""
    usage = reply.get("usage")
    given = usage if isinstance(usage, dict) else {}
    details = given.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(input_tokens=count(given.get("prompt_tokens")), cached_input_tokens=count(cached))


_WORDS: Final = {"true": "yes", "false": "no"}
