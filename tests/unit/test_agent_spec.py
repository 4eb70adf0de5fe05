"""What a model is asked in an agent's name (W3.4)."""

from __future__ import annotations

from typing import Any

import pytest

from relay.agents.base import AgentCall
from relay.agents.spec import AgentSpec, opening, relay_request, request_fields
from relay.engines.base import Payer

TOOL = {"type": "function", "function": {"name": "f"}}


def spec(**fields: Any) -> AgentSpec:
    return AgentSpec(id="a", model="m", **fields)


def call(**fields: Any) -> AgentCall:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    payer = Payer(org="o", key_id="k")
    return AgentCall(call_id="c", agent="a", payer=payer, **(given | fields))


@pytest.mark.parametrize(
    ("agent", "asked", "fields"),
    [
        ({}, {}, {}),
        ({"max_tokens": 5}, {}, {"max_tokens": 5}),
        ({"max_tokens": 5}, {"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 5}, {"overrides": {"max_tokens": 4}}, {"max_tokens": 4}),
        (
            {"max_tokens": 5},
            {"overrides": {"max_completion_tokens": 4}},
            {"max_completion_tokens": 4},
        ),
        ({"parameters": {"max_tokens": 9}}, {}, {"max_tokens": 9}),
        (
            {"parameters": {"max_completion_tokens": 9}},
            {"max_tokens": 3},
            {"max_completion_tokens": 3},
        ),
        ({"parameters": {"max_tokens": 9}, "max_tokens": 5}, {}, {"max_tokens": 5}),
        ({"parameters": {"top_p": 1}}, {"overrides": {"top_p": 0}}, {"top_p": 0}),
        (
            {"parameters": {"n": 2, "stream": False, "tool_choice": "required"}},
            {"overrides": {"model": "x", "messages": [], "stream_options": {}, "tools": [TOOL]}},
            {},
        ),
        (
            {"tools": (TOOL,), "parameters": {"tool_choice": "auto"}},
            {},
            {"tools": [TOOL], "tool_choice": "auto"},
        ),
    ],
)
def test_fields(agent: dict[str, Any], asked: dict[str, Any], fields: dict[str, Any]) -> None:
    assert request_fields(spec(**agent), call(**asked)) == fields


def test_the_system_prompt_comes_first() -> None:
    assert opening(spec(), call()) == [{"role": "user", "content": "hi"}]
    system, _ = opening(spec(system="Be brief."), call())
    assert system == {"role": "system", "content": "Be brief."}


def test_a_request() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 40}]
    made = relay_request({"top_p": 0}, messages, request_id="c/2", slug="m", created=7)
    assert made.body == {"top_p": 0, "model": "m", "messages": messages, "stream": True}
    assert (made.request_id, made.slug, made.choices, made.created) == ("c/2", "m", 1, 7)
    assert made.prompt_tokens == 10
