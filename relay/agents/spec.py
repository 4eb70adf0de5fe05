"""What an agent is, and what a model is asked in its name. [pure] Rule W3.4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from relay.money import estimate_prompt_tokens
from relay.request import RelayRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.agents.base import AgentCall

# The caller's own: neither an agent's parameters nor a request's fields say these.
_OWN: Final = frozenset({"messages", "model", "n", "stream", "stream_options", "tools"})
_LIMITS: Final = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent of the configuration.

    Attributes:
        model: a slug. candidates: (provider, model) in order, instead of it. provider: one whose
            default model serves, instead of both (A1.2).
        system: the system prompt; empty for none.
        parameters: request fields.
        tools: as models are told of them, in the OpenAI form. tool_rounds: how often a call may run
            tools, one after the other.
    """

    id: str
    model: str | None = None
    candidates: tuple[tuple[str, str], ...] = ()
    provider: str | None = None
    system: str = ""
    max_tokens: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_rounds: int = 8


def opening(spec: AgentSpec, call: AgentCall) -> list[Mapping[str, Any]]:
    """Return the messages that a call begins with."""
    system: list[Mapping[str, Any]] = []
    if spec.system:
        system = [{"role": "system", "content": spec.system}]
    return [*system, *call.messages]


def request_fields(spec: AgentSpec, call: AgentCall) -> dict[str, Any]:
    """Return the fields of every request of a call, but for its messages.

    A limit keeps the name that the agent or the request gives it: some models know only one.
    """
    named = {**spec.parameters, **call.overrides}
    fields = {key: value for key, value in named.items() if key not in _OWN}
    limit = call.max_tokens or _given_limit(call.overrides) or spec.max_tokens
    if limit is not None:
        name = next((key for key in _LIMITS if key in fields), "max_tokens")
        fields = {key: value for key, value in fields.items() if key not in _LIMITS}
        fields[name] = limit
    if spec.tools:
        fields["tools"] = list(spec.tools)
    else:
        for key in ("tool_choice", "parallel_tool_calls"):  # alone they are refused
            fields.pop(key, None)
    return fields


def _given_limit(overrides: Mapping[str, Any]) -> int | None:
    return next((overrides[key] for key in _LIMITS if overrides.get(key)), None)


def relay_request(
    fields: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    *,
    request_id: str,
    slug: str,
    created: int,
) -> RelayRequest:
    """Return one request to a model.

    Args:
        fields: of `request_fields`. created: Unix seconds.
    """
    body = {**fields, "model": slug, "messages": list(messages), "stream": True}
    return RelayRequest(
        request_id=request_id,
        slug=slug,
        stream=True,
        include_usage=False,  # the settlement tells it
        choices=1,
        created=created,
        body=body,
        prompt_tokens=estimate_prompt_tokens(body),
    )
