"""The instant backend answers in the form of D6.6."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relay.deciders.base import DecisionReply
from relay.deciders.instant import InstantBackend
from tests.support.decision_driver import encode

QUESTIONS: dict[str, Any] = {
    "boolean": {"type": "boolean", "instructions": "?"},
    "one": {"type": "choice", "instructions": "?", "criteria": {"only": None}},
    "three": {"type": "choice", "instructions": "?", "criteria": {"z": "", "é": None, "a": "x"}},
    "many": {
        "type": "choice",
        "instructions": "?",
        "criteria": {f"o{n}": None for n in range(255)},
    },
    "score": {"type": "score", "instructions": "?", "criteria": [f"level {n}" for n in range(7)]},
}


async def reply_to(questions: dict[str, Any]) -> tuple[DecisionReply, dict[str, Any]]:
    body = encode({"model": "m", "state": "s", "questions": questions})
    reply = await InstantBackend().decide(body, idempotency_key=None, deadline=0.0)
    assert isinstance(reply, DecisionReply)
    return reply, json.loads(reply.body)


async def test_d6_6_the_reply_around_the_answers() -> None:
    reply, body = await reply_to(QUESTIONS)
    assert list(body) == ["id", "model", "served_by", "created", "context", "answers", "usage"]
    assert body["model"] == "m"
    assert list(body["answers"]) == list(QUESTIONS)
    assert len(body["usage"]) == 6
    assert set(body["usage"].values()) == {0}
    assert reply.answered == len(QUESTIONS)


@pytest.mark.parametrize("name", QUESTIONS)
async def test_d6_6_answers(name: str) -> None:
    _, body = await reply_to(QUESTIONS)
    answer = body["answers"][name]
    assert (answer["calibration_version"], answer["calibrated"]) == ("unpublished", False)
    outcomes = {answer["decision"]: answer["confidence"]}
    outcomes |= {item["decision"]: item["confidence"] for item in answer["alternatives"]}
    units = {key: round(value * 1_000_000) for key, value in outcomes.items()}
    assert all(units[key] / 1_000_000 == value for key, value in outcomes.items())
    assert sum(units.values()) == 1_000_000
    assert answer["confidence"] == max(outcomes.values())
    if name == "boolean":
        assert (answer["probability"], answer["decision"]) == (0.5, True)
        return
    criteria = QUESTIONS[name]["criteria"]
    keys = list(criteria) if isinstance(criteria, dict) else list(map(str, range(len(criteria))))
    assert list(answer["probabilities"]) == keys
    assert answer["probabilities"] == outcomes
    order = keys if name == "score" else sorted(keys, key=str.encode)
    ranked = sorted(order, key=lambda key: -units[key])
    assert [answer["decision"], *(item["decision"] for item in answer["alternatives"])] == ranked
    if name == "score":
        assert answer["legend"] == dict(zip(keys, criteria, strict=True))
        mean = sum(int(key) * value for key, value in outcomes.items())
        assert abs(answer["score"] - mean) < 1e-6
    else:
        assert answer["choice"] == answer["decision"]


async def test_equal_bodies_get_equal_replies() -> None:
    first, second = await reply_to(QUESTIONS), await reply_to(QUESTIONS)
    assert first[0] == second[0]
    other, _ = await reply_to({"boolean": QUESTIONS["boolean"]})
    assert other.body != first[0].body
