"""M2.7, M3.3: what a candidate is asked, and what its answer shall bring."""

from __future__ import annotations

from typing import Any, Final

import pytest

from relay.request import RelayRequest, stream_wants, upstream_request
from relay.routing import Candidate, Provider
from relay.upstreams.unavailable import UnavailableUpstream

TOOLS: Final = [{"type": "function", "function": {"name": "f"}}]
REASONING: Final[dict[str, Any]] = {
    "reasoning_effort": "high",
    "reasoning": {"effort": "low"},
    "reasoning_format": "parsed",
    "include_reasoning": True,
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "thinking_budget": 5,
    "enable_thinking": False,
}


def request(**body: Any) -> RelayRequest:
    return RelayRequest(
        request_id="req_1",
        slug="a/b",
        stream=True,
        include_usage=False,
        choices=1,
        created=1,
        body={"model": "a/b", "messages": [], **body},
        prompt_tokens=1,
    )


def candidate(**descriptor: Any) -> Candidate:
    upstream = UnavailableUpstream("p", "never asked")
    return Candidate(provider=Provider(name="p", upstream=upstream, **descriptor), model="m")


@pytest.mark.parametrize("field", REASONING)
def test_reasoning_false_removes_each_parameter(field: str) -> None:
    asked = request(temperature=1, **{field: REASONING[field]})
    sent = upstream_request(asked, candidate(reasoning=False), stream_options=True).body
    assert sent.keys() == {"model", "messages", "temperature", "stream", "stream_options"}
    assert asked.body[field] == REASONING[field]  # the next candidate may take it
    assert upstream_request(asked, candidate(), stream_options=True).body[field] == REASONING[field]


def test_reasoning_false_leaves_all_else() -> None:
    """Also the reasoning of earlier turns: it is no parameter."""
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "y"}]
    asked = request(messages=messages, metadata={"reasoning": 1})
    sent = upstream_request(asked, candidate(reasoning=False), stream_options=True).body
    assert (sent["messages"], sent["metadata"]) == (messages, {"reasoning": 1})


def test_the_flags_of_the_provider_are_wanted_of_its_stream() -> None:
    flags = {"cumulative_deltas": True, "inline_tool_calls": True, "max_event_bytes": 77}
    wants = stream_wants(request(tools=TOOLS), candidate(**flags), stream_options=True)
    assert (wants.cumulative_deltas, wants.inline_tool_calls) == (True, True)
    assert (wants.tools, wants.withheld_max) == (TOOLS, 77)
    plain = stream_wants(request(), candidate(), stream_options=True)
    assert (plain.cumulative_deltas, plain.inline_tool_calls, plain.tools) == (False, False, None)
