"""One admitted chat request, and what is asked of a candidate for it. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.translator import StreamWants
from relay.upstreams.base import UpstreamRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.translator import ReasoningField
    from relay.routing import Candidate

# In the words of OpenAI, OpenRouter, Anthropic, Groq and Qwen.
_REASONING_FIELDS: Final = frozenset(
    {
        "enable_thinking", "include_reasoning", "reasoning", "reasoning_effort",
        "reasoning_format", "thinking", "thinking_budget",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """A chat request after its one validation.

    Attributes:
        request_id: ours, `x-request-id`.
        slug: the model as the client named it (M2.2).
        stream: whether the client asked for a stream.
        include_usage: whether it asked for the usage chunk (M2.4).
        choices: `n`.
        created: Unix seconds of its arrival.
        body: the whole request as sent; unknown fields are passed on (M1.1).
        prompt_tokens: the estimate of its prompt (M4.2).
        reasoning_field: where its client reads the reasoning of a translated shape (M2.6).
    """

    request_id: str
    slug: str
    stream: bool
    include_usage: bool
    choices: int
    created: int
    body: Mapping[str, Any]
    prompt_tokens: int
    reasoning_field: ReasoningField = "reasoning_content"


def upstream_request(
    request: RelayRequest, candidate: Candidate, *, stream_options: bool
) -> UpstreamRequest:
    """Return the request for one candidate, in its shape.

    Args:
        stream_options: whether it may be sent `stream_options` (M3.3).

    Raises:
        Untranslatable: its shape has no words for it.
    """
    provider = candidate.provider
    stream = request.stream or provider.aggregate
    asked = request.body if provider.reasoning else _without_reasoning(request.body)
    body = provider.shape.request(
        asked, model=candidate.model, stream=stream, stream_options=stream_options
    )
    return UpstreamRequest(model=candidate.model, body=body, stream=stream)


def names_stream_options(request: RelayRequest) -> bool:
    """Whether the client sent `stream_options` of its own; else they are only ours (M3.3)."""
    return isinstance(request.body.get("stream_options"), dict)


def stream_wants(
    request: RelayRequest,
    candidate: Candidate,
    *,
    stream_options: bool,
    collect_bytes_max: int | None = None,
) -> StreamWants:
    """Return what the candidate's answer shall bring the client.

    Args:
        stream_options: whether the candidate was sent `stream_options`.
    """
    provider = candidate.provider
    return StreamWants(
        choices=request.choices,
        include_usage=request.include_usage,
        usage_is_ours=stream_options and not request.include_usage,
        reasoning_field=request.reasoning_field,
        cumulative_deltas=provider.cumulative_deltas,
        inline_tool_calls=provider.inline_tool_calls,
        tools=request.body.get("tools"),
        withheld_max=provider.max_event_bytes,
        collect_bytes_max=collect_bytes_max,
    )


def _without_reasoning(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove what a deployment without reasoning would refuse (M2.7)."""
    if body.keys().isdisjoint(_REASONING_FIELDS):
        return body
    return {key: value for key, value in body.items() if key not in _REASONING_FIELDS}
