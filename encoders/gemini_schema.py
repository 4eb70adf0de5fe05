"""JSON Schema as the Gemini API reads it. [pure]

`parametersJsonSchema` and `responseJsonSchema` take plain JSON Schema and ignore keywords that they
do not know, so a schema passes nearly as it is: unlike the older `parameters` and `responseSchema`,
whose OpenAPI subset refuses `additionalProperties` and a list of types. What is rewritten means the
same: `const` (ignored) is an `enum` of one, `allOf` (ignored) around one schema is that schema,
`definitions` (unknown) is `$defs`, and a `$ref` stands alone (else the request is refused).
Source: the API's reference of `GenerationConfig.responseJsonSchema`.
"""

from __future__ import annotations

from typing import Any, Final

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE: Final = frozenset(
    {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
)
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAPS: Final = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})

_OLD_REF: Final = "#/definitions/"


def gemini_schema(schema: Any) -> Any:
    """Return `schema` as it is sent; it is not changed."""
    if not isinstance(schema, dict):
        return schema
    schema = {("$defs" if key == "definitions" else key): v for key, v in schema.items()}
    alone = schema.get("allOf")
    if isinstance(alone, list) and len(alone) == 1 and isinstance(alone[0], dict):
        del schema["allOf"]
        schema = {**alone[0], **schema}
    if isinstance(schema.get("$ref"), str):
        ref = schema["$ref"]
        if ref.startswith(_OLD_REF):
            ref = "#/$defs/" + ref.removeprefix(_OLD_REF)
        schema = {key: v for key, v in schema.items() if key.startswith("$")} | {"$ref": ref}
    if "const" in schema and "enum" not in schema:
        schema["enum"] = [schema.pop("const")]
    schema.pop("$schema", None)
    return {key: _value(key, value) for key, value in schema.items()}


def _value(key: str, value: Any) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: gemini_schema(item) for name, item in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [gemini_schema(item) for item in value]
    return gemini_schema(value) if key in _ONE else value
