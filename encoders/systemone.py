"""The wire of `POST /v1/systemone`: typed questions about one state (D6.5). [pure]

    boolean ↔ noul      {"type": "noul", "noul": p}
    choice  ↔ choice    {"type": "choice", "choice", "probabilities": {option: p}, "confidence"}
    score   ↔ score     {"type": "score", "score", "legend", "probabilities": {"0": p}, …}

Of an answer only its probabilities are read; all else follows from them (D6.6), so that what a
server rounded cannot contradict itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.decision_reply import (
    UnusableReply,
    Usage,
    count,
    make_answer,
    of_probabilities,
    of_probability,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROUTE: Final = "/systemone"


def url_of(base_url: str) -> str:
    """Return where to post: a base that does not end in `/v1` gets it."""
    return base_url + ROUTE if base_url.endswith("/v1") else f"{base_url}/v1{ROUTE}"


def make_request(
    model: str, state: object, questions: Mapping[str, Any], images: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the request.

    Args:
        model: the server's name of it.
        questions: of a checked decide body, by name.
        images: base64, no data URLs.
    """
    request: dict[str, Any] = {
        "model": model,
        "state": state,
        "questions": {name: _question(question) for name, question in questions.items()},
    }
    if images:
        request["images"] = list(images)
    return request


def _question(question: Mapping[str, Any]) -> dict[str, Any]:
    kind = "noul" if question["type"] == "boolean" else question["type"]
    asked = {"type": kind, "instructions": question["instructions"]}
    if question.get("criteria"):
        asked["criteria"] = question["criteria"]
    return asked


def read_answers(reply: object, questions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers to these questions in the form of D6.6.

    Raises:
        UnusableReply: one is missing, or is none.
    """
    answers = reply.get("answers") if isinstance(reply, dict) else None
    if not isinstance(answers, dict):
        raise UnusableReply("it has no answers")
    return {name: _answer(question, answers.get(name)) for name, question in questions.items()}


def _answer(question: Mapping[str, Any], answer: object) -> dict[str, Any]:
    kind = "noul" if question["type"] == "boolean" else question["type"]
    if not isinstance(answer, dict) or answer.get("type") != kind:
        raise UnusableReply("an answer is missing or of another type than its question")
    if kind == "noul":
        return make_answer(question, of_probability(answer.get("noul")))
    return make_answer(question, of_probabilities(answer.get("probabilities")))


def read_usage(reply: object) -> Usage:
    """Return what it says was used; the output is not told on."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    given = usage if isinstance(usage, dict) else {}
    return Usage(input_tokens=count(given.get("input_tokens")))
