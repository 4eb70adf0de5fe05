"""The JSON Schema of workflow documents, made of the models, for editors and other tools.

    # yaml-language-server: $schema=http://127.0.0.1:8080/v1/workflows/schema

It tells structure. What needs the whole document (ids, references, agents) only `loading` tells.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from relay.engines.embedded.document import WorkflowDocument

_TITLE: Final = "Sluicegate workflow"


def document_schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12), a new copy."""
    return deepcopy(_schema())


@cache
def _schema() -> dict[str, Any]:
    made = WorkflowDocument.model_json_schema(by_alias=True, mode="validation")
    made = _without_nulls(made)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": _TITLE}


def _without_nulls(node: Any) -> Any:
    """Without the defaults that only say that a key is left out."""
    if isinstance(node, list):
        return [_without_nulls(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_nulls(entry)
        for key, entry in node.items()
        if not (key == "default" and entry is None)
    }
