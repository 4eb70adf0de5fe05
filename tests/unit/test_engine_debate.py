"""W3.1: debate: rounds, what speakers read, the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relay.engines.base import Failed
from relay.engines.embedded.kinds import debate as module
from tests.support.engines import play
from tests.support.runs import fails, prompt_of

if TYPE_CHECKING:
    import pytest


def debate(**fields: Any) -> dict[str, Any]:
    return {
        "type": "debate",
        "id": "d",
        "debaters": ["a", "b"],
        "judge": "judge",
        "rounds": 2,
        "prompt": "tea or {{ 'coffee' }}?",
        **fields,
    }


REPLIES: dict[str, Any] = {
    "d.1.1": "TEA1",
    "d.1.2": "COFFEE1",
    "d.2.1": "TEA2",
    "d.2.2": "COFFEE2",
    "d": "neither",
}


def test_a_debate_has_rounds_and_a_judgment() -> None:
    played = play([debate()], REPLIES)
    outlet = played.outlet
    assert outlet.output("d") == "neither"
    assert outlet.names("d") == [
        *("task_dispatched", "debate_start", "debate_round_complete", "debate_round_complete"),
        *("streaming_started", "token", "streaming_completed", "debate_judgment"),
        *("debate_complete", "task_completed", "output_delivered"),
    ]
    assert outlet.data("debate_start") == [{"task_id": "d", "debaters": ["a", "b"], "rounds": 2}]
    assert [data["round"] for data in outlet.data("debate_round_complete")] == [1, 2]
    assert outlet.data("debate_judgment") == [
        {"task_id": "d", "judge": "judge", "output_preview": "neither"}
    ]
    assert outlet.data("debate_complete") == [{"task_id": "d", "rounds": 2}]
    dispatched = [(data["task_id"], data["agent"]) for data in outlet.data("task_dispatched")]
    assert dispatched == [
        *(("d", "judge"), ("d.1.1", "a"), ("d.1.2", "b"), ("d.2.1", "a"), ("d.2.2", "b"))
    ]


def test_every_speaker_reads_what_was_said_before() -> None:
    played = play([debate()], REPLIES)
    said = ["TEA1", "COFFEE1", "TEA2", "COFFEE2"]
    for at, call in enumerate(played.agents.calls):
        prompt = prompt_of(call)
        assert prompt.startswith("tea or coffee?")
        assert [text for text in said if text in prompt] == said[:at]
    assert "judge" in prompt_of(played.agents.calls[-1])


def test_a_contribution_that_fails_ends_the_debate_after_its_own_retries() -> None:
    played = play([debate(retries=1)], {**REPLIES, "d.1.2": [fails()]})
    assert isinstance(played.ending, Failed)
    assert played.ending.task_id == "d.1.2"
    assert [played.agents.called(key) for key in ("d.1.1", "d.1.2", "d.2.1", "d")] == [1, 2, 0, 0]
    assert played.outlet.data("debate_complete") == [{"task_id": "d", "rounds": 0}]


def test_a_judge_is_asked_again_and_the_debate_is_not_held_again() -> None:
    played = play([debate(retries=1)], {**REPLIES, "d/1": ["so", fails()]})
    assert played.outlet.output("d") == "neither"
    assert played.agents.called("d.1.1") == 1
    names = played.outlet.names("d")
    assert names.count("streaming_started") == 2
    assert names.count("debate_judgment") == names.count("debate_complete") == 1
    usage = played.outlet.data("task_completed", "d")[0]["usage"]
    assert usage["completion_tokens"] == len("neither")


def test_a_debate_that_grows_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSCRIPT_CHARS", 200)
    played = play([debate()], {**REPLIES, "d.1.2": "x" * 150})
    (error,) = played.outlet.data("task_error")
    assert (error["task_id"], error["error"]["code"]) == ("d", "debate_too_long")
    assert "200 characters" in error["error"]["message"]
    assert not played.agents.called("d.2.1")
