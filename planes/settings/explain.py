"""pydantic's errors in the words of the configuration file (O3).

No text made here holds a value of the file: any of them may be a secret.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from planes.settings.root import Settings

Path = tuple[int | str, ...]


class Complaint(NamedTuple):
    """What is wrong, and where in the file."""

    path: Path
    message: str


def explain(error: ValidationError, root: type[BaseModel] = Settings) -> list[Complaint]:
    """Return what is wrong with a `Settings`, or another `root`, place by place."""
    found = []
    for details in error.errors(include_url=False, include_input=False):
        path, model = _locate(details["loc"], root)
        context = details.get("ctx") or {}
        message = _message(details["type"], details["msg"], context, path, model)
        if "[key]" in details["loc"]:
            message = f"the name {message}"
        found.append(Complaint(path, message))
    return found


_MESSAGES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda _: "is missing",
    "greater_than": lambda c: f"must be more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']:g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:g}",
    "literal_error": lambda c: f"must be {'true' if c['expected'] == 'True' else c['expected']}",
    "string_too_short": lambda _: "must not be empty",
    "too_short": lambda c: f"must have at least {c['min_length']} entry",
    "finite_number": lambda _: "must be a finite number",
}
# By the beginning of pydantic's error type.
_TYPES = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "bool_": "must be true or false",
    "string_": "must be text (numbers, true, false and null need quotes to be text)",
    "dict_": "must be a mapping, `name: value`",
    "mapping_": "must be a mapping, `name: value`",
    "model_": "must be a mapping, `name: value`",
    "list_": "must be a list",
    "tuple_": "must be a list",
}


def _message(
    kind: str, text: str, context: Mapping[str, Any], path: Path, model: type[BaseModel] | None
) -> str:
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), list(model.model_fields) if model else [])
    if kind in _MESSAGES:
        return _MESSAGES[kind](context)
    for prefix, message in _TYPES.items():
        if kind.startswith(prefix):
            return message
    return text.replace("Input should be", "must be")


def _unknown_key(name: str, fields: list[str]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f" (did you mean `{near[0]}`?)" if near else ""
    if name == "workflow" and "workflows" in fields:
        hint = ": a workflow is no configuration; `sluicegate run` runs it"
    return f"unknown key `{name}`{hint}"


def _locate(loc: Path, root: type[BaseModel]) -> tuple[Path, type[BaseModel] | None]:
    """Return the place in the file behind pydantic's `loc`, and the model it is a field of.

    pydantic's own steps (the tag of a union's member, `[key]`) have no place in a file.
    """
    annotation: Any = root
    path: list[int | str] = []
    model: type[BaseModel] | None = None
    for step in loc:
        members = list(_members(annotation))
        tagged = [m for m in members if _has_tag(m, step)]
        if step == "[key]":
            continue
        if tagged:
            annotation = tagged[0]
            continue
        path.append(step)
        inner = _strip(members[0]) if members else None
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
        annotation = _child(inner, step)
    return tuple(path), model


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, flat and without None; anything else yields itself."""
    inner = _strip(annotation)
    if get_origin(inner) in (Union, UnionType):
        for member in get_args(inner):
            if member is not type(None):
                # A member's Annotated may hold its Tag: keep it.
                nested = get_origin(_strip(member)) in (Union, UnionType)
                yield from _members(member) if nested else (member,)
    elif inner is not None:
        yield annotation


def _strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _has_tag(member: Any, step: int | str) -> bool:
    extras = get_args(member)[1:] if get_origin(member) is Annotated else ()
    return any(isinstance(extra, Tag) and extra.tag == step for extra in extras)


def _child(inner: Any, step: int | str) -> Any:
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        field = inner.model_fields.get(str(step))
        return field.annotation if field else None
    arguments = get_args(inner)
    match get_origin(inner):
        case origin if origin is tuple:
            return arguments[0]
        case origin if isinstance(origin, type) and issubclass(origin, Mapping):
            return arguments[1]
        case _:
            return None
