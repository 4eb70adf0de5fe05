"""The types of the parameters of the tools that a request offers. [pure]

A call that a chat template rendered as XML has texts for values; the tool's JSON schema says which
of them are numbers, booleans, objects (M2.7).
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from encoders.json_text import dumps

_NO_TYPES: Final = frozenset[str]()
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class ToolSchema:
    """The tools of one request.

    Args:
        tools: `tools` as the client sent it; whatever is not a function is passed over.
    """

    def __init__(self, tools: object) -> None:
        self._properties: dict[str, Any] = {}
        for tool in tools if isinstance(tools, list) else ():
            function = tool.get("function") if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, dict) else None
                self._properties[function["name"]] = properties

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def is_text(self, name: str, parameter: str) -> bool:
        """Whether the parameter is a string, or nothing is known of it."""
        types = self._types(name, parameter)
        return not types or "string" in types

    def value(self, name: str, parameter: str, text: str) -> str:
        """Return the JSON of a value that is no string: `text` itself if it is of the declared
        type, else a JSON string of it.
        """
        given = text.strip()
        given = _PYTHON_WORDS.get(given, given)
        try:
            value = json.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return dumps(text).decode()
        return given if _kinds(value) & self._types(name, parameter) else dumps(text).decode()

    def _types(self, name: str, parameter: str) -> frozenset[str]:
        properties = self._properties.get(name)
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return _declared(schema)


def _declared(schema: object) -> frozenset[str]:
    """The types that a schema allows; none if it does not say."""
    if not isinstance(schema, dict):
        return _NO_TYPES
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found = {each for each in declared if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            if isinstance(branch, dict) and isinstance(branch.get("type"), str):
                found.add(branch["type"])
    return frozenset(found)


def _kinds(value: object) -> set[str]:
    """The names of the types that a JSON value is of."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case dict():
            return {"object"}
        case list():
            return {"array"}
        case _:
            return {"string"}


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)
