"""JSON bodies of requests and answers, the same on every plane (M1.1, M1.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from encoders.json_exact import NestedTooDeeply, NumberTooLarge, loads_exact
from encoders.json_text import dumps
from planes.errors import InvalidJson
from relay.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# It is encoded again for the upstream: deeper documents are no work for an encoder, nor any use.
NESTING_MAX: Final = 200
_PARAM_CHARS: Final = 256
M = TypeVar("M", bound=BaseModel)


def json_object(body: bytes, *, finite: bool = True) -> dict[str, Any]:
    """Parse a request's body; whole numbers are kept exactly, whatever their size.

    Args:
        finite: whether a number that no double holds is refused here. Who says no tells of all
            that is wrong with the document, and finds an infinity in its place.

    Raises:
        InvalidJson: not a JSON document; with line and column.
        BadRequest: not an object, nested too deeply, or with such a number; that has a `param`.
    """
    try:
        document = _load(body, finite=finite)
    except NestedTooDeeply:
        raise BadRequest(
            f"the request body is nested more than {NESTING_MAX} levels deep"
        ) from None
    except NumberTooLarge as error:
        param = ".".join(map(str, error.place))[:_PARAM_CHARS] or None
        raise BadRequest(
            f"`{param or 'the body'}`: the number is larger than a double holds", param=param
        ) from None
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
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


def _load(body: bytes, *, finite: bool) -> Any:
    if not body.strip():
        raise InvalidJson("the request body is empty (line 1, column 1); it must be a JSON object")
    try:
        return loads_exact(body, finite=finite, levels_max=NESTING_MAX)
    except orjson.JSONDecodeError as error:
        line, column, message = error.lineno, error.colno, error.msg
    except UnicodeDecodeError as stray:
        start = body.rfind(b"\n", 0, stray.start) + 1
        line, column = (
            body.count(b"\n", 0, start) + 1,
            len(body[start : stray.start].decode("utf-8", "replace")) + 1,
        )
        message = "a byte that is not UTF-8"
    raise InvalidJson(
        f"the request body is not valid JSON: {message} (line {line}, column {column})"
    )


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
