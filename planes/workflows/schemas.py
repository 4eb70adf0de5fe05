"""Bodies of the workflows plane: read once, then plain values (W1.1, W1.2)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from planes.errors import InvalidJson
from planes.json_bodies import json_object
from planes.middleware import read_body
from relay.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp import web

YAML_TYPES: Final = frozenset(
    {"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/vnd.yaml"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client asks to run. `document`: YAML text or an object, as received."""

    document: str | Mapping[str, Any]
    inputs: Mapping[str, Any]


async def read_asked(request: web.Request) -> Asked:
    """Read `{"workflow", "inputs"?}`, or the YAML itself.

    Raises:
        BadRequest, InvalidJson, PayloadTooLarge, RequestTimeout.
    """
    body = await read_body(request)
    if request.content_type in YAML_TYPES:
        return Asked(document=_text(body), inputs={})
    try:
        given = _object(body, known=("workflow", "inputs"), finite=False)
    except InvalidJson as error:
        if body.lstrip().startswith((b"{", b"[")):
            raise
        raise InvalidJson(f"{error.message}; YAML needs `Content-Type: application/yaml`") from None
    document = given.get("workflow")
    if isinstance(document, Mapping):
        # The document's own top level is `workflow:` too; who sends an object often leaves it out.
        if "workflow" not in document:
            document = {"workflow": document}
    elif not isinstance(document, str):
        raise BadRequest(
            "`workflow` must be the document: YAML text or an object", param="workflow"
        )
    return Asked(document=document, inputs=_inputs(given))


async def read_inputs(request: web.Request) -> Mapping[str, Any]:
    """Read `{"inputs"?}`; an empty body is `{}`."""
    body = await read_body(request)
    return _inputs(_object(body, known=("inputs",), finite=False)) if body.strip() else {}


async def read_answer(request: web.Request) -> Any:
    """Read `{"answer"}` (W2.3)."""
    body = await read_body(request)
    given = _object(body, known=("answer",))
    if "answer" not in given:
        raise BadRequest("`answer` is missing", param="answer")
    return given["answer"]


def _object(body: bytes, *, known: Collection[str], finite: bool = True) -> dict[str, Any]:
    """Args: finite: false where the engine's check tells of numbers too large (W1.4)."""
    given = json_object(body, finite=finite)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            takes = ", ".join(f"`{each}`" for each in known)
            raise BadRequest(
                f"there is no field {name[:64]!r} here{hint} ({takes})", param=name[:64]
            )
    return given


def _inputs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs = given.get("inputs")
    if inputs is None:
        return {}
    if not isinstance(inputs, dict):
        raise BadRequest("`inputs` must be an object", param="inputs")
    return inputs


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise BadRequest(f"line {line}: the document is not UTF-8", param="workflow") from None
