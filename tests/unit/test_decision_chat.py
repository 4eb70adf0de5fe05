"""D6.5: a question as one token of a chat model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from encoders.decision_chat import LABELS, make_request, read_usage, read_weights, text_of
from encoders.decision_reply import UnusableReply, make_answer

BOOLEAN: dict[str, Any] = {
    "type": "boolean",
    "instructions": {"ask": "Ready?"},
    "criteria": {"true": "all is done"},
}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Who?",
    "criteria": {"ops": "machines", "sales": None, "nobody": ""},
}
SCORE: dict[str, Any] = {"type": "score", "instructions": "How bad?", "criteria": ["fine", "dire"]}


def listing(*tokens: tuple[Any, Any]) -> dict[str, Any]:
    top = [{"token": token, "logprob": logprob, "bytes": None} for token, logprob in tokens]
    content = [{"token": "A", "logprob": -1, "top_logprobs": top}]
    return {"choices": [{"index": 0, "logprobs": {"content": content}}]}


def prompt(question: dict[str, Any], state: Any = "the log") -> str:
    request = make_request(text_of(state), question, top_logprobs=20)
    text: str = request["messages"][1]["content"]
    return text


def test_the_request_asks_for_one_token_and_its_odds() -> None:
    request = make_request("s", BOOLEAN, top_logprobs=7)
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 7)
    assert request["temperature"] == 1
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


def test_the_prompt_has_the_state_first_and_a_label_for_each_option() -> None:
    text = prompt(BOOLEAN, {"k": ["é", 1]})
    assert text.startswith('State:\n{"k":["é",1]}\n\nQuestion:\n{"ask":"Ready?"}\n\nOptions:\n')
    assert "\nA: yes (all is done)\nB: no\n" in text
    assert "\nA: ops (machines)\nB: sales\nC: nobody\n" in prompt(CHOICE)
    assert "\nA: level 0: fine\nB: level 1: dire\n" in prompt(SCORE)
    assert prompt(SCORE).endswith("labels: A, B")


def test_labels_are_one_character_and_none_is_used_twice() -> None:
    assert len(LABELS) == len(set(LABELS)) == 62
    assert all(label.isascii() and label.isalnum() for label in LABELS)


def test_images_are_named_parts_before_the_text() -> None:
    request = make_request(
        "s", BOOLEAN, images=[("shot", "data:image/png;base64,AA")], top_logprobs=2
    )
    parts = request["messages"][1]["content"]
    assert parts[0] == {"type": "text", "text": "Image shot:"}
    assert parts[1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert parts[2]["text"].startswith("State:")


def test_the_odds_are_those_among_the_options() -> None:
    """Softmax over the labels: other tokens do not count."""
    reply = listing(("The", math.log(0.5)), ("A", math.log(0.3)), ("B", math.log(0.1)))
    answer = make_answer(BOOLEAN, read_weights(reply, BOOLEAN))
    assert (answer["decision"], answer["probability"]) == (True, 0.75)


def test_a_label_with_a_space_is_the_same_label() -> None:
    reply = listing((" B", math.log(0.2)), ("B", math.log(0.2)), ("A", math.log(0.1)))
    assert make_answer(BOOLEAN, read_weights(reply, BOOLEAN))["probability"] == 0.2


def test_an_option_that_is_not_listed_is_as_likely_as_the_last_token_that_is() -> None:
    reply = listing(("A", math.log(0.6)), ("x", math.log(0.2)), ("C", math.log(0.3)))
    weights = read_weights(reply, CHOICE)
    assert make_answer(CHOICE, weights)["probabilities"] == {
        "ops": 0.545455,
        "sales": 0.181818,
        "nobody": 0.272727,
    }


def test_odds_of_any_size_do_not_overflow() -> None:
    reply = listing(("A", -9999.0), ("B", -10000), ("C", -1e308))
    answer = make_answer(CHOICE, read_weights(reply, CHOICE))
    assert answer["decision"] == "ops"
    assert answer["confidence"] == pytest.approx(0.731059, abs=1e-6)


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": []}}]},
        {"choices": [{"logprobs": {"content": [{"top_logprobs": None}]}}]},
        listing(),
        listing(
            ("A", None),
            (None, -1.0),
            ("B", math.nan),
            ("B", -math.inf),
            ("B", -(10**400)),
            ("B", True),
        ),
        listing(("<think>", 0.0), ("Yes", -5.0)),
    ],
)
def test_a_reply_without_odds_is_refused(reply: dict[str, Any]) -> None:
    with pytest.raises(UnusableReply):
        read_weights(reply, BOOLEAN)


def test_the_usage() -> None:
    details = {"cached_tokens": 3}
    usage = read_usage({"usage": {"prompt_tokens": 9, "prompt_tokens_details": details}})
    assert (usage.input_tokens, usage.cached_input_tokens) == (9, 3)
    assert read_usage({"usage": None}).input_tokens == 0
    assert read_usage({"usage": {"prompt_tokens_details": 1}}).cached_input_tokens == 0
