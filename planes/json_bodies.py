"""JSON bodies of requests and answers, the same on every plane (M1.1, M1.2)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from encoders.json_text import dumps
from planes.errors import InvalidJson
from relay.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# It is encoded again for the upstream: deeper documents are no work for an encoder, nor any use.
NESTING_MAX: Final = 200
M = TypeVar("M", bound=BaseModel)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a request's body.

    Raises:
        InvalidJson: not a JSON document; with line and column.
        BadRequest: not an object, or nested too deeply.
    """
    document = _load(body)
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
    if _is_nested_deeper(document, NESTING_MAX):
        raise BadRequest(f"the request body is nested more than {NESTING_MAX} levels deep")
    return document


def checked(kind: type[M], document: Mapping[str, Any]) -> M:
    """Check the fields of a document that a plane reads.

    Raises:
        BadRequest: a field is missing or wrong; with `param`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        _refuse(error)


def json_response(
    document: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Answer with one JSON document."""
    return web.Response(
        status=status, body=dumps(document), headers=headers, content_type="application/json"
    )


def _load(body: bytes) -> Any:
    if not body.strip():
        raise InvalidJson("the request body is empty (line 1, column 1); it must be a JSON object")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:  # lone surrogates are legal JSON that orjson does not take
            return json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
        except UnicodeDecodeError as stray:
            start = body.rfind(b"\n", 0, stray.start) + 1
            line, column = (
                body.count(b"\n", 0, start) + 1,
                len(body[start : stray.start].decode("utf-8", "replace")) + 1,
            )
            message = "a byte that is not UTF-8"
        except (ValueError, RecursionError):
            line, column, message = error.lineno, error.colno, error.msg
        raise InvalidJson(
            f"the request body is not valid JSON: {message} (line {line}, column {column})"
        ) from None


def _is_nested_deeper(document: Any, limit: int) -> bool:
    level = [document]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _refuse(error: ValidationError) -> NoReturn:
    """Tell the first problem, in words that name the field."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        raise BadRequest(f"`{param}` is missing", param=param)
    message = problem["msg"].replace("Input should be", "must be")
    message = message.replace("a valid integer", "a whole number").replace("valid ", "")
    if problem["type"] == "too_short":
        message = "must have at least 1 item"
    raise BadRequest(f"`{param}`: {message}", param=param)
