"""JSON Schemas that a document brings along: compiled once, bounded, without any I/O. [pure]

A schema can make its validator work for hours: `$ref` in loops or doubled again and again,
patterns that backtrack. So references stay inside the schema, form no cycle, and count as if they
were written out; patterns run in linear time. Dialects: 2020-12 (default), 2019-09, 7, 6, 4.
"""

from __future__ import annotations

import itertools
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

    __slots__ = ("_nodes", "_validator", "schema")

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        """Compile a schema.

        Raises:
            SchemaFault: it is none, or not within the bounds.
        """
        if schema is not True and not isinstance(schema, dict):
            raise SchemaFault("must be a JSON Schema: a mapping, or true for any JSON value")
        self.schema = schema
        self._nodes = _check(schema) if isinstance(schema, dict) else 1
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
        """What is wrong with a value, at most five things; empty if it fits. Takes below 0.5 s.

        Each is at most a few hundred characters and holds no part of the value but names.
        """
        most = min(limits.SCHEMA_VALUES, limits.SCHEMA_STEPS // self._nodes)
        values = _values(value, most)
        if values > most:
            return [f"the value is too large for its schema: it has more than {most:,} parts"]
        try:
            if self._validator.is_valid(value):
                return []
            # The validator makes all its errors at once, each of ten microseconds and kilobytes.
            if values * self._nodes > limits.SCHEMA_TOLD:
                return ["the value does not fit the schema, and is too large to say where"]
            errors = self._validator.iter_errors(value)
            return [_problem(error) for error in itertools.islice(errors, _PROBLEMS)]
        except UnicodeError:
            return ["the value holds half of a surrogate pair, which is no character"]
        except ValueError:  # the validator takes 255 levels
            return ["the value is nested too deeply for its schema"]


def _problem(error: jsonschema_rs.ValidationError) -> str:
    place = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path
    ).lstrip(".")
    message = _cut(error.message)
    return f"{_cut(place)}: {message}" if place else message


def _values(value: Any, most: int) -> int:
    """How many values there are in one, keys and each 256 characters of a text too; counted no
    further than `most`.
    """
    count, waiting = 1, [value]
    while waiting and count <= most:
        item = waiting.pop()
        if isinstance(item, str):
            count += len(item) // limits.CHARS_PER_STEP
        elif isinstance(item, dict | list):
            count += len(item)
            if count <= most:
                waiting.extend(item)
                waiting.extend(item.values() if isinstance(item, dict) else ())
    return count


def _refuse(uri: str) -> NoReturn:
    raise ValueError("a schema must not refer to other documents")


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"


def _check(schema: dict[str, Any]) -> int:
    """The bounds that the validator itself does not have; return the nodes of the schema.

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
    return _Size(schema).check()


class _Size:
    """Counts the nodes of a schema with every `$ref` written out."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()
        self._patterns = 0
        self._depth = 0

    def check(self) -> int:
        nodes = self._count(self._root)
        if nodes > limits.SCHEMA_NODES:
            raise SchemaFault(
                f"has more than {limits.SCHEMA_NODES:,} nodes with every `$ref` written out"
            )
        if self._patterns > limits.SCHEMA_PATTERNS:
            raise SchemaFault(f"has more than {limits.SCHEMA_PATTERNS} patterns")
        return nodes

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
