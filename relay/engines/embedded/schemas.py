"""JSON Schemas that a document brings along: compiled once, bounded, without any I/O. [pure]

A schema can make its validator work for hours: `$ref` in loops or doubled again and again,
patterns that backtrack. So references stay inside the schema, form no cycle, and count as if they
were written out; patterns run in linear time. Dialects: 2020-12 (default), 2019-09, 7, 6, 4.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

import jsonschema_rs
import orjson

from relay.engines.embedded import limits

_PATTERNS: Final = jsonschema_rs.RegexOptions(size_limit=512 * 1024, dfa_size_limit=512 * 1024)
_MESSAGE_CHARS: Final = 200
_PROBLEMS: Final = 5
_TYPES: Final = "array, boolean, integer, null, number, object, string"
_REFERENCE_DEPTH: Final = 128
_FORBIDDEN: Final = frozenset(
    {"$id", "id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
_DIALECTS: Final = tuple(
    f"http{rest}"
    for rest in (
        "s://json-schema.org/draft/2020-12/schema",
        "s://json-schema.org/draft/2019-09/schema",
        "://json-schema.org/draft-07/schema",
        "://json-schema.org/draft-06/schema",
        "://json-schema.org/draft-04/schema",
    )
)


class SchemaFault(ValueError):
    """It cannot be used as a JSON Schema; the message says where and why."""


class AnswerSchema:
    """A compiled JSON Schema.

    Attributes:
        schema: as it was given.
    """

    __slots__ = ("_validator", "schema")

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        """Compile a schema.

        Raises:
            SchemaFault: it is none, or not within the bounds.
        """
        if schema is not True and not isinstance(schema, dict):
            raise SchemaFault("must be a JSON Schema: a mapping, or true for any JSON value")
        self.schema = schema
        if isinstance(schema, dict):
            _check(schema)
        try:
            self._validator = jsonschema_rs.validator_for(
                schema, pattern_options=_PATTERNS, retriever=_refuse, mask="the value"
            )
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            steps = list(getattr(error, "instance_path", ()))
            path = "".join(f"[{step!r}]" for step in steps)
            message = str(getattr(error, "message", error)).partition("\n")[0]
            if steps[-1:] == ["type"] and "'anyOf'" in message:
                message = f"must be one of {_TYPES}, or a list of them"
            raise SchemaFault(
                f"is no JSON Schema{path and f' at {path}'}: {_cut(message)}"
            ) from None

    def problems(self, value: Any) -> list[str]:
        """What is wrong with a value, at most five things; empty if it fits.

        Each is at most a few hundred characters and holds no part of the value but names.
        """
        found: list[str] = []
        try:
            for error in self._validator.iter_errors(value):
                place = "".join(
                    f"[{step}]" if isinstance(step, int) else f".{step}"
                    for step in error.instance_path
                ).lstrip(".")
                message = _cut(error.message)
                found.append(f"{_cut(place)}: {message}" if place else message)
                if len(found) == _PROBLEMS:
                    break
        except UnicodeError:
            found.append("the value holds half of a surrogate pair, which is no character")
        except ValueError:  # the validator takes 255 levels
            found.append("the value is nested too deeply for its schema")
        return found


def _refuse(uri: str) -> NoReturn:
    raise ValueError("a schema must not refer to other documents")


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"


def _check(schema: dict[str, Any]) -> None:
    """The bounds that the validator itself does not have.

    Raises:
        SchemaFault: one of them is not kept.
    """
    try:
        size = len(orjson.dumps(schema))
    except orjson.JSONEncodeError:
        size = len(json.dumps(schema))
    if size > limits.SCHEMA_BYTES:
        raise SchemaFault(
            f"has {size:,} bytes as JSON; at most {limits.SCHEMA_BYTES:,} are allowed"
        )
    dialect = schema.get("$schema")
    if dialect is not None and (
        not isinstance(dialect, str) or dialect.rstrip("#") not in _DIALECTS
    ):
        raise SchemaFault("`$schema` names an unknown dialect; leave it out for 2020-12")
    _Size(schema).check()


class _Size:
    """Counts the nodes of a schema with every `$ref` written out."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()
        self._patterns = 0
        self._depth = 0

    def check(self) -> None:
        if self._count(self._root) > limits.SCHEMA_NODES:
            raise SchemaFault(
                f"has more than {limits.SCHEMA_NODES:,} nodes with every `$ref` written out"
            )
        if self._patterns > limits.SCHEMA_PATTERNS:
            raise SchemaFault(f"has more than {limits.SCHEMA_PATTERNS} patterns")

    def _count(self, node: Any) -> int:
        if not isinstance(node, dict | list):
            return 1
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            raise SchemaFault("has a `$ref` that leads back to itself; loops are not supported")
        if self._depth == _REFERENCE_DEPTH:
            raise SchemaFault(f"its `$ref` lead more than {_REFERENCE_DEPTH} levels deep")
        self._open.add(id(node))
        self._depth += 1
        size = 1
        if isinstance(node, list):
            size += sum(self._count(entry) for entry in node)
        else:
            size += sum(self._count(entry) for entry in node.values())
            size += self._keywords(node)
        self._depth -= 1
        self._open.discard(id(node))
        self._sizes[id(node)] = size
        return size

    def _keywords(self, node: dict[str, Any]) -> int:
        for name in _FORBIDDEN & node.keys():
            if isinstance(node[name], str | bool):
                raise SchemaFault(f"`{name}` is not supported; use `$defs` and `$ref`")
        self._patterns += isinstance(node.get("pattern"), str)
        properties = node.get("patternProperties")
        self._patterns += len(properties) if isinstance(properties, dict) else 0
        reference = node.get("$ref")
        return self._count(self._target(reference)) if isinstance(reference, str) else 0

    def _target(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaFault(f"`$ref: {_cut(reference)}`: only `#/…` is supported")
        node: Any = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name[:9]) < len(node):
                node = node[int(name[:9])]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise SchemaFault(f"`$ref: {_cut(reference)}` leads nowhere")
        return node
