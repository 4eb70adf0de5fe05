"""D6.5: the wire of `POST /v1/systemone`."""

from __future__ import annotations

from typing import Any

import pytest

from encoders.decision_reply import UnusableReply
from encoders.systemone import make_request, read_answers, read_usage, url_of

QUESTIONS: dict[str, Any] = {
    "b": {"type": "boolean", "instructions": "Ready?", "criteria": {"true": "it is"}},
    "e": {"type": "boolean", "instructions": ["Well?"], "criteria": {}},
    "c": {"type": "choice", "instructions": "Who?", "criteria": {"x": "one", "y": None}},
    "s": {"type": "score", "instructions": "How?", "criteria": ["low", "high"]},
}
ANSWERS: dict[str, Any] = {
    "b": {"type": "noul", "noul": 0.25},
    "e": {"type": "noul", "noul": 1},
    "c": {"type": "choice", "choice": "y", "probabilities": {"x": 0.33, "y": 0.66}},
    "s": {"type": "score", "score": 0.1, "legend": {}, "probabilities": {"0": 0.9, "1": 0.1}},
}


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1", "http://h:1/v1/systemone"),
        ("http://h:1/v1", "http://h:1/v1/systemone"),
        ("http://h/api", "http://h/api/v1/systemone"),
    ],
)
def test_the_route_is_appended(base: str, url: str) -> None:
    assert url_of(base) == url


def test_the_request() -> None:
    request = make_request("their-name", {"job": 1}, QUESTIONS)
    assert request == {
        "model": "their-name",
        "state": {"job": 1},
        "questions": {
            "b": {"type": "noul", "instructions": "Ready?", "criteria": {"true": "it is"}},
            "e": {"type": "noul", "instructions": ["Well?"]},
            "c": QUESTIONS["c"],
            "s": QUESTIONS["s"],
        },
    }
    assert make_request("m", "s", {}, ["QUJD"])["images"] == ["QUJD"]


def test_the_answers() -> None:
    answers = read_answers({"answers": ANSWERS | {"unasked": 1}}, QUESTIONS)
    assert list(answers) == ["b", "e", "c", "s"]
    assert (answers["b"]["decision"], answers["b"]["probability"]) == (False, 0.25)
    assert answers["e"]["confidence"] == 1
    assert answers["c"]["probabilities"] == {"x": 0.333333, "y": 0.666667}  # what was rounded
    assert (answers["s"]["decision"], answers["s"]["score"]) == ("0", 0.1)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        {"answers": []},
        {"answers": {name: ANSWERS[name] for name in "bes"}},
        {"answers": ANSWERS | {"b": {"type": "boolean", "noul": 0.5}}},
        {"answers": ANSWERS | {"b": {"type": "noul", "noul": -0.5}}},
        {"answers": ANSWERS | {"b": {"type": "noul", "noul": True}}},
        {"answers": ANSWERS | {"c": {"type": "choice", "probabilities": {"x": 0, "y": 0}}}},
        {"answers": ANSWERS | {"s": {"type": "score", "probabilities": {"1": 1, "2": 0}}}},
        {"answers": ANSWERS | {"s": {"type": "score", "score": 1}}},
    ],
)
def test_what_is_no_answer_is_refused(reply: Any) -> None:
    with pytest.raises(UnusableReply):
        read_answers(reply, QUESTIONS)


def test_the_usage() -> None:
    assert read_usage({"usage": {"input_tokens": 12, "output_tokens": 3}}).input_tokens == 12
    assert read_usage({"usage": [1]}).input_tokens == 0
    assert read_usage([]).input_tokens == 0
