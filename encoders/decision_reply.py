"""What backends found, as the decision reply that clients read (D6.6). [pure]

Every backend's reply comes through here: from weights of any size to millionths that sum to one,
and from those everything that follows: decision, confidence, alternatives, score.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNPUBLISHED: Final = "unpublished"
REFUSALS: Final = ("injection_suspected", "question_not_grounded")
MAX_INTEGER: Final = 2**53 - 1

_MILLION: Final = 1_000_000
_LONGEST_VERSION: Final = 200


class UnusableReply(ValueError):
    """A backend's reply is none. The message quotes nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a reply says was used; 0 where it is not known."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    media_tokens: int = 0
    long_input_tokens: int = 0
    media_items: int = 0
    thought_tokens: int = 0

    @classmethod
    def of(cls, value: object) -> Usage:
        """Read the `usage` of a reply, whatever it is."""
        given = value if isinstance(value, dict) else {}
        return cls(**{name: count(given.get(name)) for name in cls.__slots__})


def count(value: object) -> int:
    """A count as a backend reports it; 0 if it reports none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_INTEGER else 0


def outcomes(question: Mapping[str, Any]) -> list[str]:
    """The outcomes of a question in its own order: `true` and `false`, options, or levels."""
    match question["type"]:
        case "boolean":
            return ["true", "false"]
        case "choice":
            return list(question["criteria"])
        case _:
            return [str(level) for level in range(len(question["criteria"]))]


def make_answer(
    question: Mapping[str, Any],
    weights: Mapping[str, object],
    *,
    calibration_version: str = UNPUBLISHED,
) -> dict[str, Any]:
    """Return one answer in the form of D6.6.

    Args:
        question: of a checked decide body.
        weights: how likely each of its `outcomes` is, on any scale.

    Raises:
        UnusableReply: other outcomes, a weight that is negative or no number, none above 0.
    """
    kind = question["type"]
    keys = outcomes(question)
    if weights.keys() != set(keys):
        raise UnusableReply("its outcomes are not those of the question")
    # Of equal outcomes the first by UTF-8 is chosen, of levels the lowest, of booleans true.
    ranked = sorted(keys, key=str.encode) if kind == "choice" else list(keys)
    units = _millionths([(key, weights[key]) for key in ranked])
    ranked.sort(key=lambda key: -units[key])
    answer: dict[str, Any] = {"type": kind}
    if kind == "boolean":
        answer["probability"] = units["true"] / _MILLION
    else:
        if kind == "score":
            answer["score"] = sum(int(key) * part for key, part in units.items()) / _MILLION
            answer["legend"] = dict(zip(keys, question["criteria"], strict=True))
        else:
            answer["choice"] = ranked[0]
        answer["probabilities"] = {key: units[key] / _MILLION for key in keys}
    selected, *others = ranked
    name = _BOOLEANS.__getitem__ if kind == "boolean" else str
    return answer | {
        "confidence": units[selected] / _MILLION,
        "calibration_version": calibration_version,
        "decision": name(selected),
        "alternatives": [
            {"decision": name(other), "confidence": units[other] / _MILLION} for other in others
        ],
        "calibrated": False,
    }


def only_outcome(question: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer of a choice with one option, which nobody has to be asked; None for others."""
    if question["type"] != "choice" or len(question["criteria"]) != 1:
        return None
    return make_answer(question, dict.fromkeys(question["criteria"], 1.0))


def make_reply(
    *,
    reply_id: str,
    model: str,
    served_by: str,
    created: int,
    answers: Mapping[str, Any],
    usage: Usage,
    route: str = "direct",
    tokens: int | None = None,
) -> bytes:
    """Return a decision reply as JSON.

    Args:
        created: Unix seconds. answers: of `make_answer`, or refusals, by question.
        tokens: of the context; None takes the input tokens.
    """
    return dumps(
        {
            "id": reply_id,
            "model": model,
            "served_by": served_by,
            "created": created,
            "context": {"route": route, "tokens": usage.input_tokens if tokens is None else tokens},
            "answers": answers,
            "usage": asdict(usage),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReply:
    """The reply of a compatible service, in the form of D6.6.

    Attributes:
        body: as JSON. answered: questions that it did not refuse.
    """

    body: bytes
    usage: Usage
    answered: int


def read_reply(reply: object, questions: Mapping[str, Any]) -> ServiceReply:
    """Read the reply of a compatible service, and say it again in the form of D6.6.

    Raises:
        UnusableReply: it does not answer these questions.
    """
    if not isinstance(reply, dict) or not isinstance(reply.get("answers"), dict):
        raise UnusableReply("it is no decision reply")
    given = reply["answers"]
    if given.keys() != questions.keys():
        raise UnusableReply("its answers are not those of the questions")
    answers = {name: _read_answer(question, given[name]) for name, question in questions.items()}
    context = reply.get("context")
    context = context if isinstance(context, dict) else {}
    usage = Usage.of(reply.get("usage"))
    body = make_reply(
        reply_id=_text(reply, "id"),
        model=_text(reply, "model"),
        served_by=_text(reply, "served_by"),
        created=count(reply.get("created")),
        answers=answers,
        usage=usage,
        route="long" if context.get("route") == "long" else "direct",
        tokens=count(context.get("tokens")),
    )
    refused = sum("error" in answer for answer in answers.values())
    return ServiceReply(body=body, usage=usage, answered=len(answers) - refused)


def _read_answer(question: Mapping[str, Any], answer: object) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise UnusableReply("an answer is no object")
    if "error" in answer:
        problem = answer["error"]
        code = problem.get("code") if isinstance(problem, dict) else None
        if code not in REFUSALS:
            raise UnusableReply("a question is refused for no known reason")
        return {"error": {"code": code, "retryable": False}}
    if answer.get("type") != question["type"]:
        raise UnusableReply("an answer is of another type than its question")
    version = answer.get("calibration_version")
    known = isinstance(version, str) and 1 <= len(version) <= _LONGEST_VERSION
    weights = (
        of_probability(answer.get("probability"))
        if question["type"] == "boolean"
        else of_probabilities(answer.get("probabilities"))
    )
    return make_answer(
        question, weights, calibration_version=str(version) if known else UNPUBLISHED
    )


def of_probability(value: object) -> dict[str, object]:
    """The weights of a boolean from how likely it is true.

    Raises:
        UnusableReply: not a number from 0 to 1.
    """
    share = number(value)
    if share is None or not 0 <= share <= 1:
        raise UnusableReply("a probability is no number from 0 to 1")
    return {"true": share, "false": 1 - share}


def of_probabilities(value: object) -> Mapping[str, object]:
    """The weights of named outcomes; that they are numbers, `make_answer` checks.

    Raises:
        UnusableReply: not an object.
    """
    if not isinstance(value, dict):
        raise UnusableReply("an answer has no probabilities")
    return value


def _millionths(weights: Sequence[tuple[str, object]]) -> dict[str, int]:
    """Shares that sum to a million: each rounded down, what is left goes to those that lost most.

    So what already is in millionths stays as it is. Of equal losses the first one goes first.
    """
    known: list[tuple[str, float]] = []
    for key, weight in weights:
        share = number(weight)
        if share is None or share < 0:
            raise UnusableReply("a probability is negative or no number")
        known.append((key, share))
    peak = max(weight for _, weight in known)
    if peak == 0:
        raise UnusableReply("no outcome is likely at all")
    scaled = [weight / peak for _, weight in known]  # the sum of what was given may overflow
    total = math.fsum(scaled)
    exact = [part / total * _MILLION for part in scaled]
    units = [int(part) for part in exact]
    lost = sorted(range(len(exact)), key=lambda place: units[place] - exact[place])
    for place in lost[: _MILLION - sum(units)]:
        units[place] += 1
    return {key: part for (key, _), part in zip(known, units, strict=True)}


def number(value: object) -> float | None:
    """A finite number as a backend reports it; None if it is none. True is none."""
    if type(value) is not int and type(value) is not float:
        return None
    try:
        known = float(value)
    except OverflowError:  # an integer that no double holds
        return None
    return known if math.isfinite(known) else None


def _text(reply: Mapping[str, Any], name: str) -> str:
    value = reply.get(name)
    if not isinstance(value, str):
        raise UnusableReply(f"it has no {name}")
    return value


_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "false": False}
