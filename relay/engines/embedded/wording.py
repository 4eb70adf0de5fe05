"""pydantic's errors about a document in its own words and places (W1.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.engines.embedded.document import KINDS, NAME_PATTERN, Part, Workflow, WorkflowDocument
from relay.engines.embedded.problems import Problems, is_task, named
from relay.engines.embedded.syntax import hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import ValidationError

    from relay.engines.embedded.building import Place

_MESSAGES: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "greater_than": lambda c: f"must be more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']:,}",
    "less_than_equal": lambda c: f"must be at most {c['le']:,.0f}",
    "literal_error": lambda c: f"must be {c['expected']}",
    "string_too_short": lambda _: "must not be empty",
    "string_too_long": lambda c: f"must have at most {c['max_length']} characters",
    "too_short": lambda c: f"must have at least {_entries(c['min_length'])}",
    "too_long": lambda c: f"must have at most {_entries(c['max_length'])}",
    "string_pattern_mismatch": lambda c: _pattern(c["pattern"]),
}
# By the beginning of pydantic's error type.
_TYPES: Final = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "string_": "must be text (numbers, true, false and null need quotes to be text)",
    "dict_": "must be a mapping, `name: value`",
    "model_": "must be a mapping, `name: value`",
    "list_": "must be a list",
    "tuple_": "must be a list",
}


def tell(error: ValidationError, value: Any, problems: Problems) -> None:
    """Add what is wrong with the types of a document, place by place."""
    for details in error.errors(include_url=False, include_input=False):
        place = _place(details["loc"])
        kind, context = details["type"], details.get("ctx") or {}
        if "[key]" in details["loc"]:
            problems.add(place, f"the name {_MESSAGES[kind](context)}", key=True)
        elif kind == "extra_forbidden":
            problems.add(place, _unknown_key(place, value), key=True)
        elif kind == "missing":
            problems.add(place[:-1], _missing(place))
        elif kind == "too_short" and len(_at(place, value)) >= context["min_length"]:
            pass  # pydantic counts valid entries only
        elif kind == "union_tag_not_found":
            problems.add(place, f"`type` is missing: it must be one of {named(list(KINDS))}")
        elif kind == "union_tag_invalid":
            tag = str(context.get("tag"))
            problems.add(
                (*place, "type"),
                f"unknown type `{tag[:64]}`{hint(tag, KINDS)}; there are {named(list(KINDS))}",
            )
        elif kind == "template":
            for fault in context["faults"]:
                problems.add(place, fault.message, line=fault.line)
        else:
            problems.add(place, _message(kind, details["msg"], context))


def _place(loc: tuple[int | str, ...]) -> Place:
    """Where an error stands. After each task pydantic names its kind, which is no place."""
    place: list[int | str] = []
    tagged: Place = ()
    for step in loc:
        if tuple(place) != tagged and is_task(tuple(place)):
            tagged = tuple(place)
        elif step != "[key]":
            place.append(step)
    return tuple(place)


def _at(place: Place, value: Any) -> Any:
    for step in place:
        value = value[step]
    return value


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"


def _pattern(pattern: str) -> str:
    if pattern == NAME_PATTERN:
        return "must be 1 to 64 letters, digits or `_`, with a letter first"
    return "must be 1 to 64 letters, digits, `_` or `-`"


def _missing(place: Place) -> str:
    if place == ("workflow",):
        return "`workflow` is missing: the document is `workflow:` with `name` and `tasks` in it"
    return f"`{place[-1]}` is missing"


def _message(kind: str, text: str, context: Mapping[str, Any]) -> str:
    if kind in _MESSAGES:
        return _MESSAGES[kind](context)
    for prefix, message in _TYPES.items():
        if kind.startswith(prefix):
            return message
    return text.replace("Input should be", "must be")


def _unknown_key(place: Place, value: Any) -> str:
    name = str(place[-1])
    known = _known_keys(place[:-1], value)
    return f"unknown key `{name[:64]}`{hint(name, known)}; there are {named(known, 30)}"


def _known_keys(place: Place, value: Any) -> list[str]:
    """The keys that the mapping at a place may have."""
    model: type[Part] = Workflow if place else WorkflowDocument
    if is_task(place):
        model = KINDS[_at(place, value)["type"]]
    return [field.alias or name for name, field in model.model_fields.items()]
