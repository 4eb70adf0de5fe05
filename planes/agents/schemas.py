"""Requests of the agents plane, read once (A1.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from planes.json_bodies import checked, json_object
from relay.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.routing import Router

_OURS: Final = frozenset(
    {
        "prompt", "messages", "stream", "stream_options", "max_tokens", "model", "provider",
        "on_disconnect", "n",
    }
)  # fmt: skip


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    include_usage: StrictBool | None = None


class _Body(BaseModel):
    """What both routes read; other fields are the model's (temperature, …)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    # Fails on the first bad one: a million problems are a gigabyte of complaints.
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1, fail_fast=True)
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    n: StrictInt | None = Field(default=None, ge=1, le=1)
    model: StrictStr | None = None
    on_disconnect: Literal["continue", "cancel"] | None = None


class _Execute(_Body):
    prompt: StrictStr | None = Field(default=None, min_length=1)
    provider: StrictStr | None = Field(default=None, min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client asks of an agent.

    Attributes:
        document: the run's, see `relay.engines.embedded.agent`.
        cancel: whether a hang-up ends the run (A1.6).
        usage_chunk: `stream_options.include_usage`, of the alias alone (A1.2).
    """

    document: Mapping[str, Any]
    stream: bool
    cancel: bool
    usage_chunk: bool = False


def parse_execute(body: bytes, agent: str, router: Router) -> Asked:
    """Read `POST /v1/agents/{id}/execute`.

    Raises:
        BadRequest, InvalidJson. ModelNotFound: a `model` or `provider` that is not served.
    """
    read = checked(_Execute, json_object(body))
    if (read.prompt is None) == (read.messages is None):
        raise BadRequest("send either `prompt` or `messages`", param="prompt")
    if read.model is not None:
        router.resolve(read.model)
    elif read.provider is not None:
        router.resolve(f"{read.provider}/default")
    messages = read.messages or [{"role": "user", "content": read.prompt}]
    return _asked(read, agent, messages, model=read.model, provider=read.provider)


def parse_chat(body: bytes, agent: str, router: Router) -> Asked:
    """Read `POST /v1/agents/{id}/chat/completions`: an OpenAI body.

    An OpenAI SDK always names a model. It is a pin if it is written `provider/model`; anything
    else (the agent's id, a name that the SDK's user had to put there) changes nothing.

    Raises:
        BadRequest, InvalidJson. ModelNotFound: a pin that nobody serves.
    """
    read = checked(_Body, json_object(body))
    if read.messages is None:
        raise BadRequest("`messages` is missing", param="messages")
    pin = read.model if read.model is not None and "/" in read.model else None
    if pin is not None:
        router.resolve(pin)
    asked = _asked(read, agent, read.messages, model=pin, provider=None)
    options = read.stream_options
    usage_chunk = options is not None and bool(options.include_usage)
    return replace(asked, usage_chunk=usage_chunk)


def _asked(
    read: _Body,
    agent: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str | None,
    provider: str | None,
) -> Asked:
    more = {
        "max_tokens": read.max_tokens,
        "model": model,
        "provider": provider,
        "overrides": {k: v for k, v in (read.model_extra or {}).items() if k not in _OURS},
        # A process that takes the run over has to know: its client is gone by then.
        "on_disconnect": read.on_disconnect if read.on_disconnect == "cancel" else None,
    }
    document: dict[str, Any] = {"agent": agent, "messages": list(messages)}
    document |= {name: value for name, value in more.items() if value}
    return Asked(
        document=document,
        stream=bool(read.stream),
        cancel=read.on_disconnect == "cancel",
    )
