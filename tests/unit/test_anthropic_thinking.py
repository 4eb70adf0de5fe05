"""M5: reasoning that is asked for, and thinking that goes back for the next turn."""

from __future__ import annotations

from typing import Any

import pytest

from encoders.anthropic_models import generation
from encoders.reasoning_details import ReasoningDetails
from tests.unit.test_anthropic_request import BOTH, HI, NEW, NOW, OLD, asked, call, refused

ANY = "some-server's-model"
SHOWN = {"type": "adaptive", "display": "summarized"}


def budget(tokens: int, **more: Any) -> dict[str, Any]:
    return {"type": "enabled", "budget_tokens": tokens} | more


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("claude-3-haiku-20240307", (3, 0)),
        ("claude-3-7-sonnet-20250219", (3, 7)),
        ("claude-sonnet-4-20250514", (4, 0)),
        ("claude-opus-4-1-20250805", (4, 1)),
        ("us.anthropic.claude-opus-4-7-v1:0", (4, 7)),
        ("anthropic/claude-4.7-opus", (4, 7)),
        ("claude-sonnet-5", (5, 0)),
        ("claude-fable-5-1", (5, 1)),
        ("Claude-Opus-4-6", (4, 6)),
        ("claude-mythos-preview", None),
        ("smollm2-135m", None),
    ],
)
def test_generations(model: str, number: tuple[int, int] | None) -> None:
    """A date is no number of a generation."""
    assert generation(model) == number


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({"reasoning_effort": "high"}, budget(8000)),
        ({"reasoning_effort": "medium"}, budget(5000)),
        ({"reasoning_effort": "low"}, budget(2000)),
        ({"reasoning_effort": "xhigh"}, budget(9500)),
        ({"reasoning_effort": "minimal"}, None),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": None}, None),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "low"}, budget(8000)),
        ({"reasoning": {"enabled": True}}, budget(5000)),
        ({"reasoning": {"enabled": False, "effort": "high"}}, None),
        ({"reasoning": {"max_tokens": 2048}}, budget(2048)),
        ({"reasoning": {"max_tokens": 10}}, budget(1024)),
        ({"reasoning": {"max_tokens": 99999}}, budget(9999)),
        ({"reasoning": {"effort": "low", "exclude": True}}, budget(2000, display="omitted")),
        ({"reasoning_effort": "low", "include_reasoning": False}, budget(2000, display="omitted")),
        ({"reasoning": {}}, None),
        ({"reasoning_effort": "high", "max_tokens": 1024}, None),
        ({"reasoning_effort": "low", "max_tokens": 1025}, budget(1024)),
        ({"reasoning_effort": "high", "thinking": budget(3000)}, budget(3000)),
        ({"reasoning_effort": "high", "thinking": None}, budget(8000)),
    ],
)
@pytest.mark.parametrize("model", [ANY, OLD])
def test_a_budget(model: str, body: dict[str, Any], thinking: object) -> None:
    """At least 1024 and less than max_tokens; without room for that there is none."""
    out = asked(model=model, **{"max_tokens": 10000, **body})
    assert out.get("thinking") == thinking
    assert "output_config" not in out
    assert out.keys().isdisjoint({"reasoning", "reasoning_effort", "include_reasoning"})


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({"reasoning_effort": "high"}, SHOWN, "high"),
        ({"reasoning_effort": "xhigh"}, SHOWN, "xhigh"),
        ({"reasoning_effort": "minimal"}, SHOWN, "low"),
        ({"reasoning_effort": "none"}, {"type": "disabled"}, None),
        ({"reasoning": {"enabled": True, "exclude": True}}, SHOWN | {"display": "omitted"},
         "medium"),
        ({"reasoning": {"max_tokens": 3000}}, SHOWN, None),
        ({"reasoning_effort": "low", "output_config": {"effort": "max"}}, SHOWN, "max"),
        ({"thinking": {"type": "adaptive"}}, {"type": "adaptive"}, None),
    ],
)  # fmt: skip
def test_an_effort(body: dict[str, Any], thinking: object, effort: str | None) -> None:
    """Newer models think as they see fit, and show it only if asked."""
    out = asked(model=NEW, **body)
    assert out["thinking"] == thinking
    assert out.get("output_config", {}).get("effort") == effort


def test_the_generation_that_takes_both() -> None:
    assert asked(model=BOTH, reasoning_effort="xhigh")["output_config"] == {"effort": "high"}
    out = asked(model=BOTH, reasoning={"max_tokens": 2000})
    assert (out["thinking"], out["max_tokens"]) == (budget(2000), 6096)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"reasoning": {"effort": 7}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": "7"}}, "reasoning.max_tokens"),
    ],
)
def test_reasoning_that_nobody_knows(body: dict[str, Any], param: str) -> None:
    assert refused(**body) == param


@pytest.mark.parametrize(("model", "native"), [(OLD, False), (NEW, False), (OLD, True)])
def test_thinking_leaves_no_room_for_sampling(model: str, native: bool) -> None:
    """The API refuses any temperature but 1, any top_k and a low top_p beside it."""
    body: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "top_k": 3}
    body |= {"thinking": budget(2000)} if native else {"reasoning_effort": "high"}
    assert asked(model=model, **body).keys().isdisjoint({"temperature", "top_p", "top_k"})
    out = asked(model=OLD, reasoning_effort="high", temperature=1, top_p=0.97)
    assert (out["temperature"], out["top_p"]) == (1, 0.97)


@pytest.mark.parametrize("model", [OLD, NEW])
def test_a_call_that_must_be_made_leaves_no_room_for_thinking(model: str) -> None:
    """The API refuses both; the call is what the client cannot do without."""
    out = asked(model=model, reasoning_effort="high", tools=[NOW], tool_choice="required")
    assert "thinking" not in out
    assert out.get("output_config") == (None if model == OLD else {"effort": "high"})
    assert "thinking" in asked(model=model, reasoning_effort="high", tools=[NOW])


# --- going back -----------------------------------------------------------------------------------


def detail(index: int, **more: Any) -> dict[str, Any]:
    format_ = {"format": "anthropic-claude-v1"}
    return {"type": "reasoning.text", "index": index} | format_ | more


WHOLE = [
    detail(0, text=" First,\nthen \ud83e. ", signature="c2ln+/=="),
    {"type": "reasoning.encrypted", "data": "b64==", "format": "anthropic-claude-v1", "index": 1},
    detail(2, text="", signature="c2ln2"),
]
PIECES = [
    detail(0, text=" First,\n"),
    detail(0, text="then \ud83e. "),
    detail(0, text="", signature="c2ln+/=="),
    WHOLE[1],
    WHOLE[2],
]
BLOCKS = [
    {"type": "thinking", "thinking": " First,\nthen \ud83e. ", "signature": "c2ln+/=="},
    {"type": "redacted_thinking", "data": "b64=="},
    {"type": "thinking", "thinking": "", "signature": "c2ln2"},
]


@pytest.mark.parametrize(
    "kept",
    [{"reasoning_details": WHOLE}, {"reasoning_details": PIECES}, {"thinking_blocks": BLOCKS}],
    ids=["whole", "in pieces", "LiteLLM"],
)
def test_signed_thinking_goes_back_before_what_it_led_to(kept: dict[str, Any]) -> None:
    """M5: to the byte, or the signature would not hold; in pieces too, as clients collect them."""
    said = {"role": "assistant", "content": "So:", "tool_calls": [call("a", "f", "{}")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    out = asked(
        model=OLD, messages=[*HI, said | kept | {"reasoning_content": "x"}, result],
        reasoning_effort="high",
    )  # fmt: skip
    assert out["messages"][1]["content"][:3] == BLOCKS
    assert [b["type"] for b in out["messages"][1]["content"][3:]] == ["text", "tool_use"]
    assert out["thinking"]["type"] == "enabled"


def test_thinking_in_the_content_is_not_said_twice() -> None:
    said = {"role": "assistant", "content": [BLOCKS[0], {"type": "text", "text": "a"}]}
    out = asked(messages=[*HI, said | {"reasoning_details": WHOLE}, *HI])
    assert [block["type"] for block in out["messages"][1]["content"]] == ["thinking", "text"]


def test_what_another_provider_thought_stays_behind() -> None:
    """Its signature would be refused; so would none."""
    details: list[Any] = [
        {"type": "reasoning.text", "text": "a", "index": 0},
        detail(1, text="b", signature="s", format="google-gemini-v1"),
        {"type": "reasoning.encrypted", "data": "x", "format": "openai-responses-v1"},
        {"type": "reasoning.summary", "summary": "c"},
        7,
    ]
    said = {"role": "assistant", "content": "d", "reasoning_details": details}
    assert asked(messages=[*HI, said, *HI])["messages"][1]["content"] == "d"


@pytest.mark.parametrize(
    ("model", "thinks"), [(OLD, False), (ANY, False), (NEW, True)], ids=["old", "any", "new"]
)
def test_a_client_that_keeps_no_thinking_can_go_on(model: str, thinks: bool) -> None:
    """With a budget the API refuses a turn that called tools without the thinking before it."""
    said = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call("a", "f", "{}")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    assert ("thinking" in asked(model=model, messages=said, reasoning_effort="high")) is thinks
    over = [*said, {"role": "assistant", "content": "1"}, *HI]
    assert "thinking" in asked(model=model, messages=over, reasoning_effort="high")
    prefill = [*HI, {"role": "assistant", "content": "The"}]
    assert ("thinking" in asked(model=model, messages=prefill, reasoning_effort="high")) is thinks


def test_details_are_joined_by_index_and_type() -> None:
    """Entries without an index are whole; what is no entry is ignored."""
    details = ReasoningDetails()
    for piece in PIECES:
        details.add([piece])
    details.add(None)
    details.add([7, {"type": "reasoning.text", "text": "a"}, {"type": "reasoning.text"}])
    assert details.result() == [
        *WHOLE,
        {"type": "reasoning.text", "text": "a"},
        {"type": "reasoning.text"},
    ]
