"""One admitted chat request, and what is asked of a candidate for it. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relay.upstreams.base import UpstreamRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.routing import Candidate


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
    """

    request_id: str
    slug: str
    stream: bool
    include_usage: bool
    choices: int
    created: int
    body: Mapping[str, Any]
    prompt_tokens: int


def asks_usage(request: RelayRequest, candidate: Candidate) -> bool:
    """Whether the usage of a stream is asked for by us alone (M2.4)."""
    return candidate.provider.stream_options and not request.include_usage


def upstream_request(request: RelayRequest, candidate: Candidate) -> UpstreamRequest:
    """Return the request for one candidate: its own model name, and usage asked for (M2.4)."""
    body = dict(request.body)
    body["model"] = candidate.model
    stream = request.stream or candidate.provider.aggregate
    if stream:
        body["stream"] = True
        if candidate.provider.stream_options:
            given = body.get("stream_options")
            options = dict(given) if isinstance(given, dict) else {}
            body["stream_options"] = options | {"include_usage": True}
        else:
            body.pop("stream_options", None)
    return UpstreamRequest(body=body, stream=stream)
