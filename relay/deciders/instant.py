"""A backend that answers at once and evenly: every outcome is as likely as any other. D6.5, D6.6.

For tests and benchmarks of what stands in front of a backend. Equal bodies get equal answers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps, loads
from relay.deciders.base import DecisionReply

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError

_MILLION: Final = 1_000_000


class InstantBackend:
    """Answers evenly.

    Args:
        created: Unix seconds that replies say they were made at.
    """

    def __init__(self, *, created: int = 1_790_000_000) -> None:
        self._created = created

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """Answer every question of a decide body."""
        del idempotency_key, deadline
        request = loads(body)
        questions: dict[str, Any] = request["questions"]
        reply = {
            "id": "szd_" + hashlib.sha256(body).hexdigest()[:32],
            "model": request["model"],
            "served_by": "instant",
            "created": self._created,
            "context": {"route": "direct", "tokens": 0},
            "answers": {name: _answer(question) for name, question in questions.items()},
            "usage": dict.fromkeys(
                (
                    "input_tokens",
                    "cached_input_tokens",
                    "media_tokens",
                    "long_input_tokens",
                    "media_items",
                    "thought_tokens",
                ),
                0,
            ),
        }
        return DecisionReply(body=dumps(reply), answered=len(questions))


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    kind = question["type"]
    if kind == "boolean":
        answer: dict[str, Any] = {"type": kind, "probability": 0.5}
        outcomes: dict[Any, int] = {True: 500_000, False: 500_000}
    else:
        criteria = question["criteria"]
        score = kind == "score"
        names = (
            [str(level) for level in range(len(criteria))]
            if score
            else sorted(criteria, key=str.encode)
        )
        outcomes = _even(names)
        answer = {"type": kind}
        if score:
            answer["score"] = sum(int(key) * part for key, part in outcomes.items()) / _MILLION
            answer["legend"] = dict(zip(names, criteria, strict=True))
        else:
            answer["choice"] = names[0]
        order = names if score else list(criteria)
        answer["probabilities"] = {key: outcomes[key] / _MILLION for key in order}
    selected, *others = outcomes
    return answer | {
        "confidence": outcomes[selected] / _MILLION,
        "calibration_version": "unpublished",
        "decision": selected,
        "alternatives": [
            {"decision": other, "confidence": outcomes[other] / _MILLION} for other in others
        ],
        "calibrated": False,
    }


def _even(names: list[str]) -> dict[str, int]:
    """Millionths that sum to a million, the first ones getting what is left over."""
    each, left = divmod(_MILLION, len(names))
    return {name: each + (place < left) for place, name in enumerate(names)}
