"""The request of the models plane: checked once, then frozen (M1.1, M1.2).

Only what this plane itself reads is checked. Everything else is the upstream's to judge and is
passed on as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictInt, StrictStr

from planes.json_bodies import checked, json_object
from relay.money import estimate_prompt_tokens
from relay.request import RelayRequest

if TYPE_CHECKING:
    from encoders.translator import ReasoningField


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
    document = json_object(body)
    chat = checked(ChatRequest, document)
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
