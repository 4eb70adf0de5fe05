"""What a decide costs. [pure] D6.7: the text by its model's price, images, questions, the call."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from relay.money import Price, tokens_of, whole_micro_usd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.decision_served import Subject
    from relay.deciders.base import DecisionReply

_FREE: Final = Price()
_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """Prices in US dollars.

    Attributes:
        text: of the text tokens, by every name of a model; one that is not there is free.
    """

    text: Mapping[str, Price] = field(default_factory=dict)
    image_usd: Decimal = Decimal("0.003")
    question_usd: Decimal = Decimal("0.0001")
    call_usd: Decimal = Decimal("0.00001")

    def most_micro_usd(self, subject: Subject, body_bytes: int) -> int:
        """Return what a decide is estimated to cost before it is asked: what is held.

        Args:
            body_bytes: of the whole decide body.
        """
        files = sum(len(item.encoded) for item in subject.attachments)
        text = self._text(subject).cost(tokens_of(max(0, body_bytes - files)), 0)
        return whole_micro_usd(text + self._fees(subject, len(subject.questions)))

    def cost_micro_usd(self, subject: Subject, reply: DecisionReply) -> int:
        """Return what an answered decide costs; one that refuses every question costs nothing.

        Text are the input tokens that are no media, and the tokens of thought.
        """
        if not reply.answered:
            return 0
        text = self._text(subject).cost(
            max(0, reply.input_tokens - reply.media_tokens),
            reply.thought_tokens,
            reply.cached_input_tokens,
        )
        return whole_micro_usd(text + self._fees(subject, reply.answered))

    def _text(self, subject: Subject) -> Price:
        return self.text.get(subject.model, _FREE)

    def _fees(self, subject: Subject, questions: int) -> Decimal:
        images = sum(item.kind == "image" for item in subject.attachments)
        usd = images * self.image_usd + questions * self.question_usd + self.call_usd
        return usd * _MICRO
