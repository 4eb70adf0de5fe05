"""D6.1, D6.3, D6.7: the body of the decide API, its model's entry, its price."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.decision_attachments import Attachment
from encoders.decision_errors import DecisionError
from encoders.decision_messages import Start, decode, decode_body
from encoders.decision_models import model_document
from encoders.decision_served import ModelLimits, Served, Subject
from relay.deciders.base import DecisionReply
from relay.decisions.state import StateDocument
from relay.decisions.tariff import Tariff
from relay.money import Price

QUESTIONS: dict[str, Any] = {"q": {"type": "boolean", "instructions": "?"}}
BODY: dict[str, Any] = {"model": "m", "state": "s", "questions": QUESTIONS}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
members = st.fixed_dictionaries(
    {},
    optional={
        name: json_values | st.just(good)
        for name, good in (BODY | {"session_id": "s", "policy": {}, "attachments": None}).items()
    },
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@given(st.binary(max_size=60) | members.map(encoded) | json_values.map(encoded))
def test_any_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    found = decode_body(data)
    if isinstance(found, DecisionError):
        assert 400 <= found.status < 500
        assert not found.retryable
    else:
        assert BODY.keys() <= json.loads(data).keys()


@given(
    state=st.text(max_size=9) | st.lists(json_values, max_size=3),
    policy=st.none() | st.dictionaries(st.text(max_size=3), json_values, max_size=3),
)
def test_the_body_of_a_request_is_that_of_a_stream(state: Any, policy: Any) -> None:
    """D4.10: equal content gives equal bytes, whatever led to it."""
    request = BODY | {"state": state, "prompt_cache_key": "c"}
    if policy is not None:
        request["policy"] = policy
    start = {"type": "start", "event_id": "evt_1", "request": request, "decision_mode": "on_change"}
    streamed, asked = decode(encoded(start)), decode_body(encoded(request | {"session_id": "x"}))
    assert isinstance(streamed, Start)
    assert isinstance(asked, Start)
    body = StateDocument(asked, None).body()
    assert body == StateDocument(streamed, "szws_1").body()
    assert json.loads(body) == request


def test_a_body_without_a_cache_key_stays_without() -> None:
    asked = decode_body(encoded(BODY))
    assert isinstance(asked, Start)
    document = StateDocument(asked, None)
    assert document.body() == json.dumps(BODY, separators=(",", ":")).encode()
    assert document.body_bytes == len(document.body())


def test_the_list_of_attachments_is_named_as_it_was_sent() -> None:
    image = {"name": "a", "type": "image", "data": "data:image/png;base64,iVBORw0KGgo="}
    asked = decode_body(encoded(BODY | {"attachments": [image, image]}))
    assert isinstance(asked, Start)
    refused = StateDocument(asked, None).check(10_000)
    assert refused is not None
    assert refused.param == "attachments"


def test_an_entry_of_the_model_list() -> None:
    limits = ModelLimits(questions=8, choice_options=20, score_levels=5)
    served = Served(models={"m": limits, "n": limits}, media=("image",))
    found = model_document("n", served, alias_for="m", body_bytes=1000, created=7)
    assert (found["id"], found["alias_for"], found["created"]) == ("n", "m", 7)
    assert found["limits"]["questions"] == 8
    assert found["limits"]["choice_options"]["text"] == {"min": 1, "max": 20}
    assert found["limits"]["score_levels"]["media"] == {"min": 2, "max": 5}
    assert (found["limits"]["images"], found["limits"]["audio"]) == (4, 0)
    assert found["limits"]["body_bytes"] == 1000
    none = model_document(
        "m", Served(models={"m": limits}, media=()), alias_for=None, body_bytes=1, created=7
    )
    assert (none["limits"]["images"], none["limits"]["attachments"]) == (0, 0)


PRICE = Price(
    prompt_usd_per_mtok=Decimal("1.5"),
    completion_usd_per_mtok=Decimal(4),
    cached_usd_per_mtok=Decimal("0.5"),
)


def image(name: str) -> Attachment:
    return Attachment(name, "image", "image/png", 1, b"", b"x" * 100)


@pytest.mark.parametrize(
    ("reply", "cost"),
    [
        ({"answered": 0, "input_tokens": 1000}, 0),
        ({"answered": 1}, 100 + 10),
        ({"answered": 3, "input_tokens": 1000}, 300 + 10 + 1500),
        ({"answered": 1, "input_tokens": 1000, "media_tokens": 1000}, 100 + 10),
        ({"answered": 1, "input_tokens": 5, "media_tokens": 9}, 100 + 10),
        ({"answered": 1, "input_tokens": 1000, "cached_input_tokens": 400}, 110 + 900 + 200),
        ({"answered": 1, "thought_tokens": 10}, 110 + 40),
        ({"answered": 1, "input_tokens": 1}, 112),  # 111.5: rounded half up, once
    ],
)
def test_what_a_reply_costs(reply: dict[str, Any], cost: int) -> None:
    """D6.7."""
    tariff = Tariff(text={"m": PRICE})
    subject = Subject("m", QUESTIONS, ())
    assert tariff.cost_micro_usd(subject, DecisionReply(body=b"", **reply)) == cost


def test_images_count_each_and_other_files_do_not() -> None:
    files = (image("a"), image("b"), Attachment("c", "audio", "audio/wav", 1, b"", b""))
    subject = Subject("m", QUESTIONS, files)
    tariff = Tariff(image_usd=Decimal("0.003"))
    assert tariff.cost_micro_usd(subject, DecisionReply(body=b"", answered=1)) == 6110
    assert tariff.cost_micro_usd(subject, DecisionReply(body=b"", answered=0)) == 0


@given(bytes_=st.integers(0, 10**7), images=st.integers(0, 4), questions=st.integers(1, 50))
def test_what_is_held_covers_what_is_estimated(bytes_: int, images: int, questions: int) -> None:
    """Text at a token for four bytes, without the files that are in the body."""
    tariff = Tariff(text={"m": PRICE})
    asked = {f"q{i}": QUESTIONS["q"] for i in range(questions)}
    subject = Subject("m", asked, tuple(image(str(i)) for i in range(images)))
    held = tariff.most_micro_usd(subject, bytes_ + 100 * images)
    tokens = -(-bytes_ // 4)
    reply = DecisionReply(body=b"", answered=questions, input_tokens=tokens)
    assert held == tariff.cost_micro_usd(subject, reply)
