"""The request of the models plane: checked once, then frozen (M1.1, M1.2).

Only what this plane itself reads is checked. Everything else is the upstream's to judge and is
passed on as it came.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from planes.errors import InvalidJson
from relay.errors import BadRequest
from relay.money import estimate_prompt_tokens
from relay.request import RelayRequest

if TYPE_CHECKING:
    from encoders.translator import ReasoningField

# It is encoded again for the upstream: deeper documents are no work for an encoder, nor any use.
NESTING_MAX: Final = 200


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    include_usage: StrictBool | None = None


class ChatRequest(BaseModel):
    """The fields of a chat completion request that the gateway reads."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: StrictStr = Field(min_length=1)
    # Fails on the first bad one: a million problems are a gigabyte of complaints.
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: StrictInt | None = Field(default=None, ge=1)


def parse(
    body: bytes,
    *,
    request_id: str,
    created: int,
    reasoning_field: ReasoningField = "reasoning_content",
) -> RelayRequest:
    """Parse and check the body of a chat completion request.

    Args:
        created: Unix seconds. reasoning_field: see `RelayRequest`.

    Raises:
        InvalidJson: not a JSON document; with line and column.
        BadRequest: a field is missing or wrong; with `param`.
    """
    document = _load(body)
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
    if _is_nested_deeper(document, NESTING_MAX):
        raise BadRequest(f"the request body is nested more than {NESTING_MAX} levels deep")
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
        prompt_tokens=estimate_prompt_tokens(document),
        reasoning_field=reasoning_field,
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
    message = problem["msg"].replace("Input should be", "must be").replace("valid ", "")
    if problem["type"] == "too_short":
        message = "must have at least 1 item"
    raise BadRequest(f"`{param}`: {message}", param=param)
