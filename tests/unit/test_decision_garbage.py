"""D5.6: whatever a backend answers, it is a reply, or it is one kind of error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from system_zero import decisions_for

from encoders import decision_chat, systemone
from encoders.decision_envelope import read_failure
from encoders.decision_reply import UnusableReply, Usage, make_reply, read_reply

QUESTIONS: dict[str, Any] = {
    "b": {"type": "boolean", "instructions": "?"},
    "c": {"type": "choice", "instructions": "?", "criteria": {"x": None, "y": None}},
    "s": {"type": "score", "instructions": "?", "criteria": ["low", "high"]},
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.floats(0, 1),
    st.text(max_size=5),
    st.sampled_from(["boolean", "choice", "score", "noul", "A", " B", "injection_suspected"]),
)
names = st.sampled_from(
    [
        "error", "code", "type", "answers", "b", "c", "s", "x", "y", "0", "1", "probability",
        "probabilities", "noul", "message", "retryable", "details", "param", "choices", "logprobs",
        "content", "top_logprobs", "token", "logprob", "usage", "id", "model", "served_by",
        "created", "context",
    ]
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
    max_leaves=30,
)
# Nearly right: what a server of another version, or a careless one, would send.
odds = st.dictionaries(st.sampled_from(["x", "y", "0", "1"]), scalars, max_size=3)
answer = st.fixed_dictionaries(
    {"type": st.sampled_from(["boolean", "noul", "choice", "score"])},
    optional={"probability": scalars, "noul": scalars, "probabilities": odds | anything,
              "error": anything, "calibration_version": scalars},
)  # fmt: skip
answers = st.fixed_dictionaries({}, optional=dict.fromkeys("bcs", answer))
reply = st.fixed_dictionaries(
    {"answers": answers, "id": st.just("szd_1"), "model": st.just("m"), "served_by": st.just("s")},
    optional={"created": scalars, "context": anything, "usage": anything},
)
token = st.fixed_dictionaries({"token": scalars, "logprob": scalars})
chat = st.lists(token | anything, max_size=5).map(
    lambda tokens: {"choices": [{"logprobs": {"content": [{"top_logprobs": tokens}]}}]}
)


def check(body: bytes, questions: dict[str, Any]) -> None:
    decisions_for(json.loads(body), {"questions": questions})


def made(found: dict[str, Any]) -> bytes:
    return make_reply(
        reply_id="szd_1", model="m", served_by="s", created=1, answers=found, usage=Usage()
    )


@given(reply | anything)
def test_a_services_reply(given_reply: Any) -> None:
    for name in QUESTIONS:
        asked = {name: QUESTIONS[name]}
        cut = given_reply
        if isinstance(cut, dict) and isinstance(cut.get("answers"), dict):
            cut = cut | {"answers": {k: v for k, v in cut["answers"].items() if k == name}}
        with contextlib.suppress(UnusableReply):
            check(read_reply(cut, asked).body, asked)


@given(reply | anything)
def test_a_systemone_reply(given_reply: Any) -> None:
    systemone.read_usage(given_reply)
    for name, question in QUESTIONS.items():
        with contextlib.suppress(UnusableReply):
            asked = {name: question}
            check(made(systemone.read_answers(given_reply, asked)), asked)


@given(chat | st.dictionaries(names, anything))
def test_a_chat_reply(given_reply: Any) -> None:
    decision_chat.read_usage(given_reply)
    for question in QUESTIONS.values():
        with contextlib.suppress(UnusableReply):
            weights = decision_chat.read_weights(given_reply, question)
            assert any(weights.values())


@given(
    st.integers(201, 599),
    anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20),
    st.none() | st.integers(0, 10**6),
    st.booleans(),
)
def test_a_failure(status: int, body: bytes, wait_ms: int | None, own: bool) -> None:
    found = read_failure(status, {}, body, wait_ms=wait_ms, own_credential=own)
    assert 400 <= found.status <= 599
    assert json.loads(found.body("r"))["error"]["code"] == found.code
    if own and found.code != "media_unpriced":
        assert found.status not in (401, 402, 403)
