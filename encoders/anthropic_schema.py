"""JSON schemas for structured outputs of the Messages API. [pure]

The API takes a part of JSON Schema and refuses the rest: objects must be closed, and bounds of
numbers, texts and lists are unknown to it. A bound is said in the description instead, where the
model reads it.
"""

from __future__ import annotations

from typing import Any, Final

from encoders.json_text import dumps

_BOUNDS: Final = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "maxItems",
    "uniqueItems",
    "minProperties",
    "maxProperties",
)
_MIN_ITEMS_MAX: Final = 1
_MAPS: Final = frozenset({"properties", "$defs", "definitions"})
_LISTS: Final = frozenset({"anyOf", "allOf", "oneOf"})


def output_schema(schema: Any) -> Any:
    """Return the schema as the API takes it; what is no schema is left as it is."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    bounds: list[str] = []
    for key, value in schema.items():
        if key in _BOUNDS or (key == "minItems" and value not in range(_MIN_ITEMS_MAX + 1)):
            bounds.append(f"{key}: {dumps(value).decode()}")
        elif key in _MAPS and isinstance(value, dict):
            out[key] = {name: output_schema(item) for name, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            out["anyOf" if key == "oneOf" else key] = [output_schema(item) for item in value]
        elif key in ("items", "not"):
            out[key] = output_schema(value)
        else:
            out[key] = value
    if out.get("type") == "object" or "properties" in out:
        out["additionalProperties"] = False
    if bounds:
        said = out.get("description")
        told = [said] if isinstance(said, str) and said else []
        out["description"] = " ".join([*told, f"({', '.join(bounds)})"])
    return out
