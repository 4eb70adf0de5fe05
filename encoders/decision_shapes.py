"""Member checks that the decision plane's messages and bodies share; they raise `WrongShape`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_QUESTIONS: Final = 1024
MAX_OPTIONS: Final = 255
MAX_OPTION_KEY: Final = 256
LEVELS: Final = range(2, 11)

_QUESTION_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class WrongShape(ValueError):
    """A member is missing, unknown, or of the wrong type or size.

    Attributes:
        param: the path of the member, or None for the message itself.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def exact_members(
    value: Mapping[str, Any], required: frozenset[str], optional: frozenset[str], path: str = ""
) -> None:
    """Every required member is there and no other than the optional ones.

    Raises:
        WrongShape: names the first one.
    """
    for name in sorted(required):
        if name not in value:
            raise WrongShape(f"{path}{name} is missing", f"{path}{name}")
    for name in value:
        if name not in required and name not in optional:
            raise WrongShape(
                "there is a member that does not belong here", path.rstrip(".") or None
            )


def text(value: Any, param: str, *, longest: int | None = None, shortest: int = 1) -> str:
    """A string of `shortest` to `longest` characters.

    Raises:
        WrongShape: it is not.
    """
    if not isinstance(value, str):
        raise WrongShape(f"{param} must be a string", param)
    if len(value) < shortest:
        raise WrongShape(f"{param} must not be empty", param)
    if longest is not None and len(value) > longest:
        raise WrongShape(f"{param} has more than {longest} characters", param)
    return value


def whole(value: Any, param: str, lowest: int, highest: int) -> int:
    """An integer from `lowest` to `highest`; true and 1.0 are none.

    Raises:
        WrongShape: it is not.
    """
    if type(value) is not int or not lowest <= value <= highest:
        raise WrongShape(f"{param} must be a whole number from {lowest} to {highest}", param)
    return value


def one_of(value: Any, param: str, choices: tuple[str, ...]) -> str:
    """One of some words.

    Raises:
        WrongShape: it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise WrongShape(f"{param} must be one of {', '.join(choices)}", param)
    return value


def questions(value: Any, param: str) -> None:
    """Named questions, with the bounds of the schema and not those of a model (D4.4).

    Raises:
        WrongShape: names the question at fault if its name is a good one.
    """
    if not isinstance(value, dict):
        raise WrongShape(f"{param} must be an object", param)
    if not 1 <= len(value) <= MAX_QUESTIONS:
        raise WrongShape(f"{param} must have 1 to {MAX_QUESTIONS} members", param)
    for name, question in value.items():
        if _QUESTION_NAME.fullmatch(name) is None:
            raise WrongShape(
                "a question's name has 1 to 64 ASCII letters, digits and underscores and does not"
                " begin with a digit",
                param,
            )
        _question(question, f"{param}.{name}")


def _question(value: Any, param: str) -> None:
    if not isinstance(value, dict):
        raise WrongShape(f"{param} must be an object", param)
    kind = one_of(value.get("type"), f"{param}.type", ("boolean", "choice", "score"))
    needed = _MEMBERS if kind == "boolean" else _MEMBERS | {"criteria"}
    exact_members(value, needed, frozenset({"criteria"}), f"{param}.")
    instructions = value["instructions"]
    if not isinstance(instructions, str | list | dict) or not instructions:
        raise WrongShape(
            f"{param}.instructions must be a string, an object or an array, and not empty",
            f"{param}.instructions",
        )
    if "criteria" in value:
        _CRITERIA[kind](value["criteria"], f"{param}.criteria")


def _boolean_criteria(value: Any, param: str) -> None:
    if not isinstance(value, dict):
        raise WrongShape(f"{param} must be an object", param)
    exact_members(value, frozenset(), frozenset({"true", "false"}), f"{param}.")
    if not all(isinstance(item, str) for item in value.values()):
        raise WrongShape(f"{param} has strings", param)


def _choice_criteria(value: Any, param: str) -> None:
    if not isinstance(value, dict):
        raise WrongShape(f"{param} must be an object", param)
    if not 1 <= len(value) <= MAX_OPTIONS:
        raise WrongShape(f"{param} must have 1 to {MAX_OPTIONS} options", param)
    for name, item in value.items():
        if len(name) > MAX_OPTION_KEY:
            raise WrongShape(f"an option of {param} has over {MAX_OPTION_KEY} characters", param)
        if item is not None and not isinstance(item, str):
            raise WrongShape(f"{param} has strings and nulls", param)


def _score_criteria(value: Any, param: str) -> None:
    if not isinstance(value, list) or len(value) not in LEVELS:
        raise WrongShape(f"{param} must be an array of {LEVELS[0]} to {LEVELS[-1]} levels", param)
    if not all(isinstance(item, str) and item.strip() for item in value):
        raise WrongShape(f"{param} has strings that are not blank", param)


_MEMBERS: Final = frozenset({"type", "instructions"})
_CRITERIA: Final = {
    "boolean": _boolean_criteria,
    "choice": _choice_criteria,
    "score": _score_criteria,
}
