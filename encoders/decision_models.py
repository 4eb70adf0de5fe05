"""A decision model as `GET /v1/models` tells it (D6.3): OpenAI's members and the real client's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.decision_attachments import MAX_DECODED_BYTES, MAX_ITEMS, MAX_OF_KIND

if TYPE_CHECKING:
    from encoders.decision_served import Served

_HELD: Final = ("committee", "deliberate")


def model_document(
    name: str, served: Served, *, alias_for: str | None, body_bytes: int, created: int
) -> dict[str, Any]:
    """Return the entry of a model.

    Args:
        name: one that `served` has. body_bytes: of the largest decide body. Tokens have no limit
            of their own here, and none is shorter than a byte.
        created: Unix seconds.
    """
    limits = served.models[name]

    def ranges(lowest: int, most: int) -> dict[str, dict[str, int]]:
        return {kind: {"min": lowest, "max": most} for kind in ("text", "media")}

    most_of = {kind: MAX_OF_KIND[kind] if kind in served.media else 0 for kind in MAX_OF_KIND}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sluicegate",
        "name": name,
        "alias_for": alias_for,
        "released_at": None,
        "calibration_versions": None,
        "limits": {
            "state_tokens": body_bytes,
            "rendered_tokens": body_bytes,
            "questions": limits.questions,
            "question_tokens": body_bytes,
            "question_bytes": body_bytes,
            "choice_options": ranges(1, limits.choice_options),
            "score_levels": ranges(2, limits.score_levels),
            "attachments": MAX_ITEMS if served.media else 0,
            "body_bytes": body_bytes,
            "inline_attachment_bytes": MAX_DECODED_BYTES,
            "images": most_of["image"],
            "audio": most_of["audio"],
        },
        "held_routes": [*_HELD],
    }
