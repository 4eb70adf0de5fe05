"""docs/configuration.md, made of the settings themselves (O3).

python -m planes.settings.reference > docs/configuration.md
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from planes.settings import base, tools
from planes.settings.base import Section
from planes.settings.root import Settings

_HEAD: Final = """\
# Configuration

Made of the settings by `python -m planes.settings.reference`; change those, not this page.

## The file

One YAML file: that of `--config FILE`, else that of `$SLUICEGATE_CONFIG`, else `./sluicegate.yaml`
in the working directory, else the [built-in defaults](../planes/defaults.yaml). A file replaces the
built-in defaults as a whole, their development key, their providers and their console log too; what
it leaves out has the default of the tables below. `sluicegate check FILE` tells every problem with
its line.

Values, but not keys or comments, may hold

| form | what it becomes |
|---|---|
| `${NAME}` | the environment variable; an error if it is not set |
| `${NAME:-default}` | the same; `default` if it is not set or empty |
| `$${` | a literal `${` |

Inside `{…}` and `[…]` such a value needs quotes: `{port: "${PORT:-8080}"}`. What a variable holds
is not looked at again for references.

*Italic* settings are accepted and do nothing yet; `check` and the start say so.
"""
_TEXTS: Final = {
    base.http_url: "http(s) URL",
    base.http_link: "http(s) URL",
    base._secret: "secret text",
    base._one_line: "one line of text",
    base._header_name: "header name",
    base._header_value: "header value",
    tools._network: "network",
}
_SCALARS: Final = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    SecretStr: "secret text",
    Any: "anything",
}
_NAMES: Final = {"providers": "NAME", "models": "SLUG", "agents": "ID"}


class Part(NamedTuple):
    """One table of the page: where it stands in the file, and the section it is of."""

    heading: str
    section: type[Section]


def parts() -> list[Part]:
    """Return all tables of the page below that of the file itself; each section once."""
    found: dict[type[Section], Part] = {}
    for name, field in Settings.model_fields.items():
        for part in _below(name, field.annotation, name):
            found.setdefault(part.section, part)
    return list(found.values())


def page() -> str:
    """Return the text of docs/configuration.md."""
    tables = parts()
    links = {part.section: f"[`{_at(part)}`](#{_anchor(part.heading)})" for part in tables}
    blocks = [_HEAD, "## Sections\n", _table(Settings, links)]
    for part in tables:
        summary = (part.section.__doc__ or "").partition("\n")[0]
        blocks += [f"## {part.heading}\n", f"{summary}\n", _table(part.section, links)]
    return "\n".join(blocks)


def _below(path: str, annotation: Any, name: str) -> Iterator[Part]:
    inner = _strip(annotation)
    origin, arguments = get_origin(inner), get_args(inner)
    if isinstance(inner, type) and issubclass(inner, Section):
        yield Part(f"`{path}`{_variant(inner)}", inner)
        for field_name, field in inner.model_fields.items():
            yield from _below(f"{path}.{field_name}", field.annotation, field_name)
    elif origin in (Union, UnionType):
        for member in arguments:
            yield from _below(path, member, name)
    elif origin is tuple:
        yield from _below(f"{path}[]", arguments[0], name)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from _below(f"{path}.{_NAMES.get(name, 'NAME')}", arguments[1], name)


def _variant(section: type[Section]) -> str:
    """Say how a member of a union is told from the others."""
    if "shape" in section.model_fields:
        return " with `shape`"
    kind = section.model_fields.get("kind")
    return f" with `kind: {get_args(kind.annotation)[0]}`" if kind else ""


def _at(part: Part) -> str:
    return part.heading.replace("`", "")


def _anchor(heading: str) -> str:
    # As GitHub makes it of a heading.
    return re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def _table(section: type[Section], links: Mapping[type[Section], str]) -> str:
    rows = ["| key | type | default | what it is |", "|---|---|---|---|"]
    # What is the section's own first, then what it shares with others.
    names = sorted(section.model_fields, key=lambda name: name not in section.__annotations__)
    for name in names:
        field = section.model_fields[name]
        kind = _type(field.annotation, tuple(field.metadata), links)
        cells = (f"`{name}`", kind, _default(field), field.description or "")
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _type(annotation: Any, extras: tuple[Any, ...], links: Mapping[type[Section], str]) -> str:
    """Return a field's type in words.

    Args:
        extras: what stands beside the type in its `Annotated`.
    """
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        extras = (*more, *extras)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "null"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(v) if v is True else v}`" for v in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(member, (), links) for member in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0], (), links)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping, {_type(arguments[0], (), links)}: {_type(arguments[1], (), links)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return links[annotation]
    return _scalar(annotation, extras)


def _scalar(annotation: Any, extras: tuple[Any, ...]) -> str:
    words, bounds = _SCALARS[annotation], []
    flat = [m for e in extras for m in (e.metadata if isinstance(e, FieldInfo) else (e,))]
    for extra in flat:
        match extra:
            case AfterValidator(func=check):
                words = _TEXTS.get(check, words)
            case Ge(ge=bound):
                bounds.append(f"≥ {bound}")
            case Gt(gt=bound):
                bounds.append(f"> {bound}")
            case Le(le=bound):
                bounds.append(f"≤ {bound}")
            case _:
                pass
    return " ".join([words, ", ".join(sorted(bounds, reverse=True))]).strip()


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f"`{{kind: {kind}}}`" if kind else "its defaults"
    if isinstance(value, tuple):
        value = [v.model_dump(mode="json") if isinstance(v, BaseModel) else v for v in value]
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.write(page())
