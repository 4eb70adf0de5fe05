"""`GET /v1/workflows/schema`: the JSON Schema of the document (cnl)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planes.json_bodies import json_response
from planes.runs.access import admit_to_runs
from relay.engines.embedded.schema import document_schema

if TYPE_CHECKING:
    from aiohttp import web


async def schema(request: web.Request) -> web.Response:
    """The schema; editors with a YAML language server take it too."""
    admit_to_runs(request)
    return json_response(document_schema())
