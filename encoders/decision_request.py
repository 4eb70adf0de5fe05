"""What is decided: the request of a `start` and the body of the decide API (D4.2 to D4.4, D6.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from encoders import decision_shapes as shapes
from encoders.decision_attachments import Attachment, AttachmentRefused, parse_items
from encoders.decision_errors import error
from encoders.decision_json import compact, compact_text
from encoders.decision_shapes import WrongShape, exact_members, one_of, text

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError

StateKind = Literal["string", "array", "object"]

_PRINTABLE: Final = re.compile(r"[ -~]+")
_NEEDED: Final = frozenset({"model", "state", "questions"})
_OPTIONAL: Final = frozenset({"attachments", "prompt_cache_key", "route", "mode", "policy"})


@dataclass(frozen=True, slots=True)
class StateValue:
    """A state.

    Attributes:
        content: compact JSON; without its quotes or brackets for a string or an array, so that
            what is appended is appended here too.
    """

    kind: StateKind
    content: bytes


def read_request(value: Any, param: str, more: frozenset[str]) -> dict[str, Any]:
    """Read a request as the fields of a `Start` that it has.

    Args:
        param: its path, empty for a body. more: members that are allowed besides.

    Raises:
        WrongShape: it is none.
    """
    if not isinstance(value, dict):
        raise WrongShape(f"{param or 'the body'} must be an object", param or None)
    path = f"{param}." if param else ""
    exact_members(value, _NEEDED, _OPTIONAL | more, path)
    optional: dict[str, str | None] = {}
    for name, words in (("route", ("standard", "committee")), ("mode", ("standard", "deliberate"))):
        optional[name] = one_of(value[name], f"{path}{name}", words) if name in value else None
    for name in ("prompt_cache_key", "session_id"):
        if name in value:
            optional[name] = text(value[name], f"{path}{name}", longest=256)
    if "policy" in value and not isinstance(value["policy"], dict):
        raise WrongShape(f"{path}policy must be an object", f"{path}policy")
    shapes.questions(value["questions"], f"{path}questions")
    attachments, refusal = read_attachments(value.get("attachments"), f"{path}attachments")
    held = held_features(optional["route"], optional["mode"], path)
    return {
        "refusal": held or refusal,
        "model": text(value["model"], f"{path}model", longest=200),
        "state": read_state(value["state"], f"{path}state"),
        "questions": value["questions"],
        "encoded_questions": compact(value["questions"]),
        "attachments": attachments or (),
        "prompt_cache_key": optional.get("prompt_cache_key"),
        "route": optional["route"],
        "mode": optional["mode"],
        "policy": compact(value["policy"]) if "policy" in value else None,
    }


def held_features(route: str | None, mode: str | None, path: str) -> DecisionError | None:
    """The refusal of a route or mode that is not served (D4.4)."""
    if route == "committee":
        return error("committee_not_available", "committee is not served", param=f"{path}route")
    if mode == "deliberate":
        return error("deliberate_not_available", "deliberate is not served", param=f"{path}mode")
    return None


def read_state(value: Any, param: str) -> StateValue:
    """Read a state.

    Raises:
        WrongShape: it is none.
    """
    if isinstance(value, str):
        return StateValue("string", compact_text(value))
    if isinstance(value, list):
        return StateValue("array", compact(value)[1:-1])
    if isinstance(value, dict):
        return StateValue("object", compact(value))
    raise WrongShape(f"{param} must be a string, an object or an array", param)


def read_attachments(
    value: Any, param: str
) -> tuple[tuple[Attachment, ...] | None, DecisionError | None]:
    """The items, None if there are none to speak of, or why they are refused; null is absent.

    Raises:
        WrongShape: it is no array.
    """
    if value is None:
        return None, None
    if not isinstance(value, list):
        raise WrongShape(f"{param} must be an array", param)
    try:
        return parse_items(value, param), None
    except AttachmentRefused as refused:
        return None, refused.error


def idempotency_key(value: str) -> str | None:
    """The key without the ASCII spaces around it; None if it is none (D4.7)."""
    key = value.strip(" ")
    return key if 1 <= len(key) <= 255 and _PRINTABLE.fullmatch(key) else None
