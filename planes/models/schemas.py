"""The request of the models plane: checked once, then frozen (M1.1, M1.2).

Only what this plane itself reads is checked. Everything else is the upstream's to judge and is
passed on as it came.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from planes.errors import InvalidJson
from relay.errors import BadRequest
from relay.request import RelayRequest


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    include_usage: StrictBool | None = None


class ChatRequest(BaseModel):
    """The fields of a chat completion request that the gateway reads."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: StrictStr = Field(min_length=1)
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: StrictInt | None = Field(default=None, ge=1)


def parse(body: bytes, *, request_id: str, created: int) -> RelayRequest:
    """Parse and check the body of a chat completion request.

    Args:
        created: Unix seconds.

    Raises:
        InvalidJson: not a JSON document; with line and column.
        BadRequest: a field is missing or wrong; with `param`.
    """
    document = _load(body)
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
    try:
        chat = ChatRequest.model_validate(document)
    except ValidationError as error:
        _refuse(error)
    options = chat.stream_options
    return RelayRequest(
        request_id=request_id,
        slug=chat.model,
        stream=bool(chat.stream),
        include_usage=bool(options and options.include_usage),
        choices=chat.n or 1,
        created=created,
        body=document,
    )


def _load(body: bytes) -> Any:
    if not body.strip():
        raise InvalidJson("the request body is empty; it must be a JSON object")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        try:  # lone surrogates are legal JSON that orjson does not take
            return json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise InvalidJson(
                f"the request body is not valid JSON: {error.msg} "
                f"(line {error.lineno}, column {error.colno})"
            ) from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _refuse(error: ValidationError) -> NoReturn:
    """Tell the first problem, in words that name the field."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        raise BadRequest(f"`{param}` is missing", param=param)
    message = problem["msg"].replace("Input should be", "must be").replace("valid ", "")
    raise BadRequest(f"`{param}`: {message}", param=param)
