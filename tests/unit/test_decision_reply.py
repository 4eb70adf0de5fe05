"""D6.6: any probabilities become a reply that the published client accepts."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_zero import decisions_for

from encoders.decision_reply import (
    UnusableReply,
    Usage,
    count,
    make_answer,
    make_reply,
    only_outcome,
    outcomes,
    read_reply,
)

BOOLEAN: dict[str, Any] = {"type": "boolean", "instructions": "?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "?",
    "criteria": {"z": "last", "é": None, "a": "first"},
}
SCORE: dict[str, Any] = {"type": "score", "instructions": "?", "criteria": ["low", "mid", "high"]}

options = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
questions = st.one_of(
    st.just(BOOLEAN),
    st.dictionaries(options, st.none(), min_size=1, max_size=60).map(
        lambda criteria: {"type": "choice", "instructions": "?", "criteria": criteria}
    ),
    st.lists(st.just("level"), min_size=2, max_size=10).map(
        lambda levels: {"type": "score", "instructions": "?", "criteria": levels}
    ),
)
weights = st.one_of(
    st.floats(0, 1e308),
    st.floats(0, 1),
    st.sampled_from([0, 1, 0.5, 1 / 3, 5e-324, 1e-7, 0.000001, 0.0000005]),
)


def reply_of(answers: dict[str, Any], usage: Usage | None = None) -> dict[str, Any]:
    body = make_reply(
        reply_id="szd_1",
        model="m",
        served_by="s",
        created=1,
        answers=answers,
        usage=usage or Usage(),
    )
    reply: dict[str, Any] = json.loads(body)
    return reply


@given(st.data())
def test_d6_6_any_weights_make_an_answer_that_the_client_accepts(data: st.DataObject) -> None:
    question = data.draw(questions)
    keys = outcomes(question)
    drawn = data.draw(st.lists(weights, min_size=len(keys), max_size=len(keys)))
    if not any(drawn):
        drawn[0] = 1.0
    given_weights: dict[str, object] = dict(zip(keys, drawn, strict=True))
    answer = make_answer(question, given_weights)
    reply = reply_of({"q": answer})
    decision = decisions_for(reply, {"questions": {"q": question}})["q"]
    assert decision.kind == "v1"
    assert len(decision.alternatives) == len(keys) - 1
    # millionths that sum to one exactly, and no outcome is further than one from its share
    found = answer.get("probabilities") or {
        "true": answer["probability"],
        "false": answer["alternatives"][0]["confidence"]
        if answer["decision"]
        else answer["confidence"],
    }
    assert list(found) == keys
    assert sum(round(p * 1_000_000) for p in found.values()) == 1_000_000
    peak = max(drawn)
    total = math.fsum(w / peak for w in drawn)
    for key, weight in zip(keys, drawn, strict=True):
        assert abs(found[key] - weight / peak / total) < 1.1e-6
    # said again, it is the same (a gateway in front of a gateway changes nothing)
    again = read_reply(reply, {"q": question})
    assert json.loads(again.body) == reply
    assert again.answered == 1


def test_d6_6_ties() -> None:
    """Booleans: true. Options: the first by UTF-8. Levels: the lowest, in the order of levels."""
    assert make_answer(BOOLEAN, {"true": 1, "false": 1})["decision"] is True
    choice = make_answer(CHOICE, {"z": 2, "é": 2, "a": 2})
    assert (choice["choice"], choice["decision"]) == ("a", "a")
    assert [item["decision"] for item in choice["alternatives"]] == ["z", "é"]
    assert list(choice["probabilities"]) == ["z", "é", "a"]
    assert choice["probabilities"]["a"] == 0.333334
    score = make_answer(SCORE, {"0": 0.2, "1": 0.4, "2": 0.4})
    assert (score["decision"], score["score"]) == ("1", 1.2)
    assert score["legend"] == {"0": "low", "1": "mid", "2": "high"}
    assert [item["decision"] for item in score["alternatives"]] == ["2", "0"]


def test_d6_6_an_answer_as_the_contract_shows_it() -> None:
    assert make_answer(BOOLEAN, {"true": 0.9, "false": 1 - 0.9}) == {
        "type": "boolean",
        "probability": 0.9,
        "confidence": 0.9,
        "calibration_version": "unpublished",
        "decision": True,
        "alternatives": [{"decision": False, "confidence": 0.1}],
        "calibrated": False,
    }


def test_d6_6_a_single_option_is_certain() -> None:
    only = {"type": "choice", "instructions": "?", "criteria": {"it": None}}
    answer = only_outcome(only)
    assert answer is not None
    assert (answer["choice"], answer["confidence"], answer["alternatives"]) == ("it", 1.0, [])
    assert only_outcome(CHOICE) is None
    assert only_outcome(BOOLEAN) is None
    assert only_outcome(SCORE) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"a": 1, "z": 1},
        {"a": 1, "z": 1, "é": 1, "more": 1},
        {"a": -0.1, "z": 1, "é": 1},
        {"a": math.nan, "z": 1, "é": 1},
        {"a": math.inf, "z": 1, "é": 1},
        {"a": 10**400, "z": 1, "é": 1},
        {"a": True, "z": 1, "é": 1},
        {"a": "1", "z": 1, "é": 1},
        {"a": None, "z": 1, "é": 1},
        {"a": 0, "z": 0, "é": 0},
    ],
)
def test_what_is_no_distribution_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UnusableReply):
        make_answer(CHOICE, bad)


def test_d6_6_usage_is_six_integers() -> None:
    given_usage = {"input_tokens": 7, "cached_input_tokens": 2.0, "media_tokens": -1, "more": 1}
    usage = reply_of({}, Usage.of(given_usage | {"thought_tokens": True}))["usage"]
    assert usage == {
        "input_tokens": 7,
        "cached_input_tokens": 2,
        "media_tokens": 0,
        "long_input_tokens": 0,
        "media_items": 0,
        "thought_tokens": 0,
    }
    assert Usage.of(None) == Usage()
    assert [count(v) for v in (2**53 - 1, 2**53, 1.5, "1", None)] == [2**53 - 1, 0, 0, 0, 0]


class TestAServicesReply:
    """What `system-zero` makes of the reply of a compatible service."""

    QUESTIONS: ClassVar = {"b": BOOLEAN, "c": CHOICE, "s": SCORE}

    def reply(self, **answers: Any) -> dict[str, Any]:
        made = {
            "b": make_answer(BOOLEAN, {"true": 3, "false": 1}),
            "c": make_answer(CHOICE, {"a": 1, "é": 2, "z": 3}),
            "s": make_answer(SCORE, {"0": 1, "1": 2, "2": 3}),
        }
        return reply_of(made | answers, Usage(input_tokens=9))

    def test_rounded_probabilities_are_renormalised(self) -> None:
        rounded = {"type": "score", "score": 9, "probabilities": {"0": 0.33, "1": 0.33, "2": 0.33}}
        read = read_reply(self.reply(s=rounded), self.QUESTIONS)
        reply = json.loads(read.body)
        assert decisions_for(reply, {"questions": self.QUESTIONS})["s"].decision == "0"
        assert reply["answers"]["s"]["score"] == pytest.approx(1, abs=2e-6)

    def test_refusals_stay_and_are_not_answered(self) -> None:
        refusal = {"error": {"code": "injection_suspected", "retryable": False}}
        read = read_reply(self.reply(c=refusal), self.QUESTIONS)
        assert json.loads(read.body)["answers"]["c"] == refusal
        assert read.answered == 2
        with pytest.raises(UnusableReply):
            read_reply(self.reply(c={"error": {"code": "tired"}}), self.QUESTIONS)

    def test_its_calibration_version_stays(self) -> None:
        answer = make_answer(BOOLEAN, {"true": 1, "false": 1}, calibration_version="2026-11")
        read = read_reply(self.reply(b=answer | {"calibrated": True}), self.QUESTIONS)
        told = json.loads(read.body)["answers"]["b"]
        assert (told["calibration_version"], told["calibrated"]) == ("2026-11", False)
        read = read_reply(self.reply(b=answer | {"calibration_version": "x" * 201}), self.QUESTIONS)
        assert json.loads(read.body)["answers"]["b"]["calibration_version"] == "unpublished"

    @pytest.mark.parametrize(
        "broken",
        [
            None,
            [],
            {},
            {"answers": []},
            {"answers": {}},
            {"b": None},
            {"b": {"type": "noul", "noul": 0.5}},
            {"b": {"type": "boolean", "probability": 1.5}},
            {"b": {"type": "boolean", "probability": "0.5"}},
            {"b": {"type": "boolean"}},
            {"c": {"type": "choice", "probabilities": [1, 2]}},
            {"c": {"type": "choice", "probabilities": {"a": 1}}},
            {"extra": {"type": "boolean", "probability": 1}},
        ],
    )
    def test_garbage_is_refused(self, broken: Any) -> None:
        whole = not isinstance(broken, dict) or not broken or "answers" in broken
        reply = broken if whole else self.reply(**broken)
        with pytest.raises(UnusableReply):
            read_reply(reply, self.QUESTIONS)

    @pytest.mark.parametrize("name", ["id", "model", "served_by"])
    def test_its_names_must_be_there(self, name: str) -> None:
        with pytest.raises(UnusableReply, match=name):
            read_reply(self.reply() | {name: None}, self.QUESTIONS)
