"""A backend that answers at once and evenly: every outcome is as likely as any other. D6.5, D6.6.

For tests and benchmarks of what stands in front of a backend. Equal bodies get equal answers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from encoders.decision_reply import Usage, make_answer, make_reply, outcomes
from encoders.json_text import loads
from relay.deciders.base import DecisionReply

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError


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
        reply = make_reply(
            reply_id="szd_" + hashlib.sha256(body).hexdigest()[:32],
            model=request["model"],
            served_by="instant",
            created=self._created,
            answers={
                name: make_answer(question, dict.fromkeys(outcomes(question), 1.0))
                for name, question in questions.items()
            },
            usage=Usage(),
        )
        return DecisionReply(body=reply, answered=len(questions))

    async def close(self) -> None:
        """Nothing is held."""
