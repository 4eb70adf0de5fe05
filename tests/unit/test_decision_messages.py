"""Client messages: D2.3's shapes, D4.4's bounds, and a corpus of malformed frames."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.decision_messages import (
    Append,
    AppendAttachments,
    Decide,
    Malformed,
    Pong,
    Refused,
    Replace,
    Start,
    decode,
)
from encoders.decision_request import StateValue
from tests.support.decision_driver import (
    QUESTIONS,
    Driver,
    attachment,
    encode,
    start_message,
)

GOOD: dict[str, dict[str, Any]] = {
    "start": start_message("s") | {"min_interval_ms": 5, "idempotency_key": "k"},
    "append_text": {"type": "append_text", "event_id": "evt_2", "text": "t"},
    "append_items": {"type": "append_items", "event_id": "evt_2", "items": [1]},
    "append_attachments": {
        "type": "append_attachments",
        "event_id": "evt_2",
        "attachments": [attachment("a")],
    },
    "replace": {"type": "replace", "event_id": "evt_2", "state": {}, "attachments": []},
    "decide": {"type": "decide", "state_version": 1},
    "pong": {"type": "pong", "nonce": 1},
}


def refused(message: object) -> tuple[str, str | None]:
    """The code and the param of a message that is refused."""
    incoming = decode(encode(message))
    assert isinstance(incoming, Refused), incoming
    return incoming.error.code, incoming.error.param


def accepted(message: object) -> bool:
    return not isinstance(decode(encode(message)), Refused | Malformed)


def question(kind: str, **members: Any) -> dict[str, Any]:
    return start_message(questions={"q": {"type": kind, "instructions": "?"} | members})


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_is_read(kind: str) -> None:
    classes = {
        "start": Start,
        "append_text": Append,
        "append_items": Append,
        "append_attachments": AppendAttachments,
        "replace": Replace,
        "decide": Decide,
        "pong": Pong,
    }
    incoming = decode(encode(GOOD[kind]))
    assert isinstance(incoming, classes[kind])
    assert incoming.is_mutation is (kind not in ("decide", "pong"))


@pytest.mark.parametrize("kind", GOOD)
def test_d2_3_an_extra_member_is_refused(kind: str) -> None:
    assert refused(GOOD[kind] | {"extra": 1})[0] == "stream_invalid_message"


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        (kind, member)
        for kind, message in GOOD.items()
        for member in message
        if member not in ("type", "min_interval_ms", "idempotency_key", "attachments")
        or kind == "append_attachments"
    ],
)
def test_d2_3_a_missing_member_is_refused(kind: str, member: str) -> None:
    message = {name: value for name, value in GOOD[kind].items() if name != member}
    assert refused(message)[0] == "stream_invalid_message"


WRONG: list[tuple[str, str, list[Any]]] = [
    ("start", "request", [None, [], "x"]),
    ("start", "decision_mode", [None, "", "ON_CHANGE", 1]),
    ("start", "min_interval_ms", [-1, 60_001, 1.0, True, "1", None]),
    ("append_text", "event_id", [None, 2, "", []]),
    ("append_text", "text", [None, "", 1, []]),
    ("append_text", "idempotency_key", [None, "", 1, " ", "é", "x" * 256]),
    ("append_items", "items", [None, [], {}, "x", [1] * 4097]),
    ("append_attachments", "attachments", [None, [], {}, "x"]),
    ("replace", "state", [None, 1, True]),
    ("replace", "attachments", ["x", {}, 1]),
    ("decide", "state_version", [None, 0, -1, 100_001, 1.0, True, "1"]),
    ("pong", "nonce", [None, 0, 9_007_199_254_740_992, 1.5, True, "1"]),
]


@pytest.mark.parametrize(
    ("kind", "member", "value"),
    [(kind, member, value) for kind, member, values in WRONG for value in values],
)
def test_d2_3_a_wrong_value_is_refused(kind: str, member: str, value: Any) -> None:
    assert refused(GOOD[kind] | {member: value}) == ("stream_invalid_message", member)


@pytest.mark.parametrize("kind", ["", "START", "hello", "ping", None, 1, ["start"]])
def test_d2_3_an_unknown_type_is_refused(kind: Any) -> None:
    assert refused(GOOD["start"] | {"type": kind}) == ("stream_invalid_message", "type")


@pytest.mark.parametrize("message", [[], "x", 1, None, True])
def test_d2_3_what_is_not_an_object_is_refused(message: object) -> None:
    assert refused(message)[0] == "stream_invalid_message"


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("model", [None, "", "m" * 201, 1]),
        ("state", [None, 1, False]),
        ("questions", [None, {}, [], "x"]),
        ("attachments", ["x", {}, 1]),
        ("prompt_cache_key", [None, "", "k" * 257, 1]),
        ("route", [None, "", "fast"]),
        ("mode", [None, "", "fast"]),
        ("policy", [None, [], "x"]),
        ("session_id", ["s"]),
        ("extra", [1]),
    ],
)
def test_d4_4_members_of_a_start_request(member: str, values: list[Any]) -> None:
    for value in values:
        message = start_message()
        message["request"][member] = value
        code, param = refused(message)
        assert code == "stream_invalid_message"
        assert param in (f"request.{member}", "request")


def test_d4_4_bounds_of_a_start_request_that_are_just_met() -> None:
    message = start_message(model="m" * 200, prompt_cache_key="é" * 256, route="standard")
    message["request"]["mode"] = "standard"
    assert accepted(message | {"min_interval_ms": 60_000})


@pytest.mark.parametrize("name", ["", "1a", "a-b", "é", "a b", "a" * 65, "a\n"])
def test_d4_4_bad_question_names(name: str) -> None:
    message = start_message(questions={name: QUESTIONS["ready"]})
    assert refused(message) == ("stream_invalid_message", "request.questions")


@pytest.mark.parametrize("name", ["_", "a" * 64, "A_9"])
def test_d4_4_good_question_names(name: str) -> None:
    assert accepted(start_message(questions={name: QUESTIONS["ready"]}))


def test_d4_4_1_to_1024_questions() -> None:
    many = {f"q{n}": QUESTIONS["ready"] for n in range(1025)}
    assert refused(start_message(questions=many)) == ("stream_invalid_message", "request.questions")
    many.popitem()
    assert accepted(start_message(questions=many))


LEVELS = ["low", "high"]


@pytest.mark.parametrize(
    "message",
    [
        question("boolean"),
        question("boolean", criteria={}),
        question("boolean", criteria={"true": "yes", "false": ""}),
        question("boolean", instructions={"a": 1}),
        question("boolean", instructions=["a"]),
        question("choice", criteria={"a": None}),
        question("choice", criteria={"": "x", "k" * 256: None}),
        question("choice", criteria={f"o{n}": None for n in range(255)}),
        question("score", criteria=LEVELS),
        question("score", criteria=LEVELS * 5),
    ],
)
def test_d4_4_questions_within_bounds(message: dict[str, Any]) -> None:
    assert accepted(message)


@pytest.mark.parametrize(
    "message",
    [
        question("noul"),
        question("boolean", extra=1),
        question("boolean", instructions=""),
        question("boolean", instructions=[]),
        question("boolean", instructions={}),
        question("boolean", instructions=None),
        question("boolean", instructions=5),
        question("boolean", criteria=None),
        question("boolean", criteria=[]),
        question("boolean", criteria={"maybe": "x"}),
        question("boolean", criteria={"true": None}),
        question("choice"),
        question("choice", criteria={}),
        question("choice", criteria=["a"]),
        question("choice", criteria={"a": 1}),
        question("choice", criteria={"k" * 257: None}),
        question("choice", criteria={f"o{n}": None for n in range(256)}),
        question("score"),
        question("score", criteria=LEVELS[:1]),
        question("score", criteria=["x"] * 11),
        question("score", criteria=["x", ""]),
        question("score", criteria=["x", " \n"]),
        question("score", criteria=["x", 1]),
        question("score", criteria={"0": "x", "1": "y"}),
        start_message(questions={"q": "x"}),
        start_message(questions={"q": {"instructions": "?"}}),
        start_message(questions={"q": {"type": "boolean"}}),
    ],
)
def test_d4_4_questions_out_of_bounds(message: dict[str, Any]) -> None:
    code, param = refused(message)
    assert code == "stream_invalid_message"
    assert param is not None
    assert param.startswith("request.questions.q")


def test_a_state_becomes_bytes_without_its_quotes_or_brackets() -> None:
    for state, value in [
        ('a"é', StateValue("string", 'a\\"é'.encode())),
        ([1, "é"], StateValue("array", '1,"é"'.encode())),
        ({"a": [1]}, StateValue("object", b'{"a":[1]}')),
    ]:
        incoming = decode(encode({"type": "replace", "event_id": "evt_2", "state": state}))
        assert isinstance(incoming, Replace)
        assert incoming.state == value
        assert incoming.attachments is None


@pytest.mark.parametrize("where", ["front", "back"])
def test_a_message_that_is_too_deep_is_still_named(where: str) -> None:
    deep = b"[" * 300 + b"]" * 300
    named = b'"type" : "replace","event_id":"evt_7"'
    parts = [named, b'"state":' + deep] if where == "front" else [b'"state":' + deep, named]
    incoming = decode(b"{" + b",".join(parts) + b"}")
    assert isinstance(incoming, Refused)
    assert (incoming.error.status, incoming.error.code) == (413, "state_too_large")
    assert (incoming.event_id, incoming.is_mutation) == ("evt_7", True)


def test_a_deep_message_is_not_named_by_what_lies_inside_it() -> None:
    deep = b'{"type":"replace","event_id":"evt_7"}' + b"[" * 300
    incoming = decode(b'{"x":"\\"type\\":\\"replace\\"","state":' + deep)
    assert isinstance(incoming, Refused)
    assert (incoming.event_id, incoming.is_mutation) == (None, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**54) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good message with some member replaced, removed or added, or with a byte changed."""
    message = copy.deepcopy(GOOD[draw(st.sampled_from(sorted(GOOD)))])
    target: Any = message
    if "request" in message and draw(st.booleans()):
        target = message["request"]
        if draw(st.booleans()):
            target = target["questions"]["ready"]
    name = draw(st.sampled_from([*target, "extra"]))
    if draw(st.booleans()):
        target[name] = draw(JSON)
    else:
        target.pop(name, None)
    data = bytearray(json.dumps(message).encode())
    if draw(st.integers(0, 3)) == 0:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@given(st.lists(st.binary(max_size=40) | mutated() | JSON.map(json.dumps), max_size=4))
def test_fuzz_any_message_is_taken_refused_or_ends_the_stream(messages: list[Any]) -> None:
    """Whatever comes, frames stay in order and the state moves only with an ack."""
    driver = Driver()
    for message in messages:
        data = message if isinstance(message, bytes) else message.encode("utf-8", "replace")
        version = driver.session.state_version
        frames = driver.send(data)
        acks = [frame for frame in frames if frame["type"] == "ack"]
        assert driver.session.state_version == version + len(acks)
        assert driver.session.closing or frames or isinstance(decode(data), Pong)
        if driver.session.closing:
            assert driver.closed is not None
            assert driver.closed.code in (1007, 1008)
            break
    assert [frame["seq"] for frame in driver.frames] == list(range(1, len(driver.frames) + 1))
