"""What is checked when a state is decided, for an ack promises none of it (D4.3, D4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.decision_attachments import check_media
from encoders.decision_errors import error
from encoders.decision_shapes import LEVELS, MAX_OPTIONS, MAX_QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from encoders.decision_attachments import Attachment
    from encoders.decision_errors import DecisionError


@dataclass(frozen=True, slots=True)
class Subject:
    """The parts of a decide that the checks look at.

    Attributes:
        questions: by name, of a shape that `decision_shapes.questions` accepts.
    """

    model: str
    questions: Mapping[str, Any]
    attachments: tuple[Attachment, ...]


_NAMED: Final = 20  # models in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The most questions of a decide, options of a choice and levels of a score of a model."""

    questions: int = MAX_QUESTIONS
    choice_options: int = MAX_OPTIONS
    score_levels: int = LEVELS[-1]


@dataclass(frozen=True, slots=True)
class Served:
    """What the gateway serves.

    Attributes:
        models: the limits by every name, aliases too. media: kinds of attachments.
    """

    models: Mapping[str, ModelLimits]
    media: Collection[str]


def check_served(subject: Subject, served: Served) -> DecisionError | None:
    """Return why a decide is refused before a backend is asked, or None."""
    limits = served.models.get(subject.model)
    if limits is None:
        known = ", ".join(sorted(served.models)[:_NAMED])
        return error(
            "model_not_found", f"there is no such decision model; there are: {known}", param="model"
        )
    if len(subject.questions) > limits.questions:
        return error(
            "questions_too_large",
            f"this model takes {limits.questions} questions",
            param="questions",
        )
    for name, question in subject.questions.items():
        kind = question["type"]
        most = {"choice": limits.choice_options, "score": limits.score_levels}.get(kind)
        if most is not None and len(question["criteria"]) > most:
            return error(
                "invalid_criteria",
                f"this model takes {most} {'options' if kind == 'choice' else 'levels'}",
                param=f"questions.{name}.criteria",
            )
    return check_media(subject.attachments, served.media, "attachments")
