"""D4 on the machine: events, versions, keys and the bytes of the decide body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from encoders.decision_messages import Append, Start, decode
from relay.decisions.state import Change, StateDocument
from tests.support.decision_driver import (
    QUESTIONS,
    STREAM_ID,
    Driver,
    attachment,
    encode,
    start_message,
)

MAX_BODY = 3_665_920


def code(frames: list[dict[str, Any]]) -> tuple[str, str | None]:
    """The code and event id of the one refusal among the frames."""
    (frame,) = frames
    assert (frame["type"], frame["phase"]) == ("error", "protocol")
    return frame["envelope"]["error"]["code"], frame["event_id"]


def snapshot(driver: Driver) -> tuple[bytes, str | None, int]:
    """Body, key and version as a decide sees them."""
    driver.decide()
    decide = driver.decides[-1]
    driver.answer()
    return decide.body, decide.idempotency_key, decide.state_version


def test_d4_1_ids_are_evt_n_with_n_the_next_version() -> None:
    driver = Driver()
    driver.start()
    for number in range(2, 6):
        (ack,) = driver.append(event_id=f"evt_{number}")
        assert (ack["event_id"], ack["state_version"]) == (f"evt_{number}", number)


@pytest.mark.parametrize("wrong", ["evt_1", "evt_3", "evt_02", "evt_2 ", "EVT_2", "evt_two", "x"])
def test_d4_1_any_other_id_is_out_of_order_and_the_id_stays_available(wrong: str) -> None:
    driver = Driver()
    driver.start()
    assert code(driver.append(event_id=wrong)) == ("stream_event_order", wrong)
    assert driver.append(event_id="evt_2")[0]["state_version"] == 2


def test_d4_1_start_is_evt_1() -> None:
    driver = Driver()
    wrong = start_message() | {"event_id": "evt_2"}
    assert code(driver.send(wrong)) == ("stream_event_order", "evt_2")
    driver.start()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "append_text", "event_id": "evt_1", "text": "x"},
        {"type": "append_items", "event_id": "evt_1", "items": [1]},
        {"type": "append_attachments", "event_id": "evt_1", "attachments": [attachment("a")]},
        {"type": "replace", "event_id": "evt_1", "state": ""},
    ],
)
def test_d4_1_a_mutation_before_the_start(message: dict[str, Any]) -> None:
    assert code(Driver().send(message)) == ("stream_not_started", "evt_1")


def test_d4_1_a_decide_before_the_start() -> None:
    assert code(Driver().decide(1)) == ("stream_not_started", None)


def test_d4_1_a_second_start() -> None:
    driver = Driver()
    driver.start()
    second = start_message() | {"event_id": "evt_2"}
    assert code(driver.send(second)) == ("stream_already_started", "evt_2")


def test_d4_1_decision_mode_is_required() -> None:
    message = start_message()
    del message["decision_mode"]
    assert code(Driver().send(message)) == ("stream_invalid_message", "evt_1")


@pytest.mark.parametrize(
    ("state", "message", "refused"),
    [
        ("a", {"type": "append_text", "text": "b"}, False),
        ("a", {"type": "append_items", "items": [1]}, True),
        ([1], {"type": "append_items", "items": [2]}, False),
        ([1], {"type": "append_text", "text": "b"}, True),
        ({"a": 1}, {"type": "append_text", "text": "b"}, True),
        ({"a": 1}, {"type": "append_items", "items": [1]}, True),
        ({"a": 1}, {"type": "replace", "state": [1]}, False),
        ({"a": 1}, {"type": "append_attachments", "attachments": [attachment("a")]}, False),
    ],
)
def test_d4_2_appends_fit_the_kind_of_the_state(
    state: Any, message: dict[str, Any], refused: bool
) -> None:
    driver = Driver()
    driver.start(state)
    frames = driver.send(message | {"event_id": "evt_2"})
    if refused:
        assert code(frames) == ("stream_state_type", "evt_2")
    else:
        assert frames[0]["type"] == "ack"


def test_d4_2_a_replace_changes_the_kind() -> None:
    driver = Driver()
    driver.start("text")
    driver.replace([1, {"a": None}])
    driver.send({"type": "append_items", "event_id": "evt_3", "items": ["é", 2.5]})
    assert json.loads(snapshot(driver)[0])["state"] == [1, {"a": None}, "é", 2.5]


def test_d4_2_appends_to_an_empty_array() -> None:
    driver = Driver()
    driver.start([])
    items: list[Any] = [[], {}, None]
    for number, item in enumerate(items):
        driver.send({"type": "append_items", "event_id": f"evt_{number + 2}", "items": [item]})
    assert driver.frames[-1]["state_bytes"] == len(b"[[],{},null]")
    assert json.loads(snapshot(driver)[0])["state"] == items


def names(driver: Driver) -> list[str]:
    body = json.loads(snapshot(driver)[0])
    return [item["name"] for item in body.get("attachments", [])]


def test_d4_3_attachments_are_kept_cleared_and_added() -> None:
    driver = Driver()
    driver.start("s", attachments=[attachment("a")])
    driver.append()
    assert names(driver) == ["a"]
    driver.replace("t")
    assert names(driver) == ["a"]
    driver.replace("t", attachments=None)
    assert names(driver) == ["a"]
    driver.send(
        {"type": "append_attachments", "event_id": driver.next_id, "attachments": [attachment("b")]}
    )
    assert names(driver) == ["a", "b"]
    driver.now += 10
    driver.replace("t", attachments=[])
    assert names(driver) == []
    driver.replace("t", attachments=[attachment("c")])
    assert names(driver) == ["c"]


def test_d4_3_null_attachments_of_a_start_are_absent() -> None:
    driver = Driver()
    driver.start("s", attachments=None)
    assert names(driver) == []


def test_d4_3_the_list_is_checked_as_a_whole() -> None:
    driver = Driver(protocol_refusal_limit=100)
    driver.start("s", attachments=[attachment("a"), attachment("b"), attachment("c")])

    def add(*items: dict[str, str]) -> tuple[str, str | None]:
        message = {"type": "append_attachments", "event_id": "evt_2", "attachments": list(items)}
        return code(driver.send(message))

    assert add(attachment("a", kind="document")) == ("invalid_request", "evt_2")
    assert add(attachment("d"), attachment("e")) == ("media_unsupported", "evt_2")
    sound = attachment("s", kind="audio"), attachment("t", kind="audio")
    assert add(*sound) == ("media_unsupported", "evt_2")
    documents = [attachment(f"d{n}", kind="document") for n in range(14)]
    assert add(*documents) == ("invalid_request", "evt_2")
    assert names(driver) == ["a", "b", "c"]


def test_d4_4_held_features_are_refused_at_the_start() -> None:
    driver = Driver()
    assert code(driver.send(start_message(route="committee"))) == (
        "committee_not_available",
        "evt_1",
    )
    (frame,) = driver.send(start_message(mode="on_change") | {"event_id": "evt_1"})
    assert frame["type"] == "ack"
    deliberate = start_message()
    deliberate["request"]["mode"] = "deliberate"
    other = Driver()
    assert code(other.send(deliberate)) == ("deliberate_not_available", "evt_1")


def test_d4_4_the_model_is_not_checked_at_the_start() -> None:
    Driver().start(model="no-such-model")


def test_d4_4_a_policy_is_forwarded() -> None:
    driver = Driver()
    driver.start(policy={"b": 1, "a": [True]})
    assert snapshot(driver)[0].endswith(b',"policy":{"b":1,"a":[true]}}')


def test_d4_5_the_example_of_the_seed() -> None:
    driver = Driver()
    first = driver.start("Initial log\n", prompt_cache_key="example-affinity")
    (second,) = driver.append("Job is ready.\n")
    assert (first["state_bytes"], first["synthesized_body_bytes"]) == (15, 158)
    assert (second["state_bytes"], second["synthesized_body_bytes"]) == (30, 173)


@pytest.mark.parametrize(
    "state", ["", 'q"\\/\n\u0001\u007fé\u2028😀', [], [1, -0.5, "é", None], {}, {"é": [True, 1e30]}]
)
def test_d4_5_sizes_are_those_of_compact_json(state: Any) -> None:
    driver = Driver()
    ack = driver.start(state, attachments=[attachment("a"), attachment("b")], route="standard")
    body = snapshot(driver)[0]
    compact = json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()
    assert ack["state_bytes"] == len(compact)
    assert ack["synthesized_body_bytes"] == len(body)
    assert b'"state":%s,"questions":' % compact in body
    assert json.loads(body)["state"] == state


def test_d4_5_the_body_may_have_exactly_its_limit() -> None:
    driver = Driver()
    empty = driver.start()["synthesized_body_bytes"]
    (ack,) = driver.replace("x" * (MAX_BODY - empty))
    assert ack["synthesized_body_bytes"] == MAX_BODY
    assert code(driver.append("x")) == ("payload_too_large", "evt_3")
    assert code(driver.replace("é" * (MAX_BODY // 2))) == ("payload_too_large", "evt_3")
    assert len(snapshot(driver)[0]) == MAX_BODY


def test_d4_5_a_start_over_the_limit_is_refused() -> None:
    driver = Driver()
    assert code(driver.send(start_message("x" * MAX_BODY))) == ("payload_too_large", "evt_1")
    driver.start()


REJECTED: list[dict[str, Any]] = [
    {"type": "append_text", "event_id": "evt_9", "text": "x"},
    {"type": "append_text", "event_id": "evt_2", "text": ""},
    {"type": "append_text", "event_id": "evt_2", "text": "x", "extra": 1},
    {"type": "append_items", "event_id": "evt_2", "items": [1]},
    {"type": "replace", "event_id": "evt_2", "state": 5},
    {"type": "replace", "event_id": "evt_2", "state": "x" * MAX_BODY},
    {"type": "replace", "event_id": "evt_2", "state": "t", "attachments": [{"name": "a"}]},
    {"type": "append_text", "event_id": "evt_2", "text": "x", "idempotency_key": "é"},
    start_message("other"),
]


@pytest.mark.parametrize("message", REJECTED)
def test_d4_6_a_rejected_mutation_changes_nothing(message: dict[str, Any]) -> None:
    driver = Driver()
    driver.send(start_message("s", attachments=[attachment("a")]) | {"idempotency_key": "k1"})
    before = snapshot(driver)
    driver.send({"idempotency_key": "k2"} | message)
    assert driver.types[-1] == "error"
    assert snapshot(driver) == before
    assert before[1:] == ("k1", 1)
    assert driver.append(event_id="evt_2")[0]["type"] == "ack"


def test_d4_7_an_unkeyed_mutation_clears_the_key_and_a_version_keeps_its_own() -> None:
    driver = Driver()
    driver.send(start_message() | {"idempotency_key": "  k 1 "})
    assert [snapshot(driver)[1] for _ in range(2)] == ["k 1", "k 1"]
    driver.append()
    assert snapshot(driver)[1] is None
    driver.append(idempotency_key="~" * 255)
    assert snapshot(driver)[1] == "~" * 255


@pytest.mark.parametrize("key", ["", "   ", "x" * 256, "é", "a\tb", "a\n", "\u00a0", 5, None])
def test_d4_7_other_keys_are_refused(key: Any) -> None:
    driver = Driver()
    driver.start()
    assert code(driver.append(idempotency_key=key)) == ("stream_invalid_message", "evt_2")


def test_d4_8_more_than_the_pending_events_close_1009() -> None:
    driver = Driver(max_events_per_second=1e6, event_burst=10_000, message_burst=10_000)
    driver.start()
    for _ in range(4095):
        driver.append()
    assert driver.closed is None
    driver.append()
    assert driver.closed is not None
    assert (driver.closed.code, driver.frames[-1]["reason"]) == (1009, None)
    assert driver.session.state_version == 4096


def test_d4_8_events_in_flight_are_pending_too() -> None:
    driver = Driver(max_pending_events=3)
    driver.start()
    driver.append()
    driver.decide()
    driver.append()
    driver.append()
    assert driver.closed is not None
    assert driver.closed.code == 1009


def test_d4_8_covered_events_are_not_pending() -> None:
    driver = Driver(max_pending_events=3)
    driver.start()
    for _ in range(8):
        driver.append()
        driver.decide()
        driver.answer()
    assert driver.closed is None


def test_d4_8_more_than_100_000_events_close_1008() -> None:
    driver = Driver(max_events=3)
    driver.start()
    driver.append()
    driver.append()
    assert driver.closed is None
    driver.append()
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (1008, "policy")


def document(state: Any = "") -> StateDocument:
    message = decode(encode(start_message(state)))
    assert isinstance(message, Start)
    return StateDocument(message, STREAM_ID)


def test_d4_9_an_append_touches_only_what_it_appends() -> None:
    """10,000 appends to 3 MB: the old content is the very same object at the end."""
    grown = document("x" * 3_000_000)
    first = grown._chunks[0]
    message = decode(encode({"type": "append_text", "event_id": "evt_2", "text": "y" * 60}))
    assert isinstance(message, Append)
    for _ in range(10_000):
        change = grown.prepare(message, MAX_BODY)
        assert isinstance(change, Change)
        assert sum(map(len, change.chunks)) == 60
        grown.commit(change)
    assert grown._chunks[0] is first
    assert len(grown._chunks) == 10_001
    assert grown.state_bytes == 2 + 3_000_000 + 600_000
    body = grown.body()
    assert len(body) == grown.body_bytes
    assert body.count(b"y" * 60) == 10_000


def test_d4_10_the_members_have_one_order() -> None:
    driver = Driver()
    request = {
        "policy": {},
        "mode": "standard",
        "route": "standard",
        "prompt_cache_key": "key",
        "attachments": [dict(reversed(attachment("a").items()))],
        "questions": QUESTIONS,
        "state": "s",
        "model": "m",
    }
    message = {"decision_mode": "on_request", "request": request, "event_id": "evt_1"}
    driver.send(message | {"type": "start"})
    body = snapshot(driver)[0]
    assert list(json.loads(body)) == [
        "model", "state", "questions", "attachments", "prompt_cache_key", "route", "mode", "policy",
    ]  # fmt: skip
    assert list(json.loads(body)["attachments"][0]) == ["name", "type", "data"]


def test_d4_10_what_is_absent_is_left_out_and_the_key_is_the_stream_id() -> None:
    bodies = set()
    without: list[dict[str, Any]] = [{}, {"attachments": None}, {"attachments": []}]
    for attachments in without:
        driver = Driver()
        driver.start("s", **attachments)
        bodies.add(snapshot(driver)[0])
    (body,) = bodies
    assert list(json.loads(body)) == ["model", "state", "questions", "prompt_cache_key"]
    assert json.loads(body)["prompt_cache_key"] == STREAM_ID


def test_d4_10_equal_content_gives_equal_bytes_whatever_led_to_it() -> None:
    items = ["é", 1.50, {"a": 10**20}]
    key = {"prompt_cache_key": "k", "attachments": [attachment("a")]}
    at_once, grown, replaced = Driver(), Driver(), Driver()
    at_once.start(items, **key)
    grown.start([], prompt_cache_key="k")
    grown.send({"type": "append_items", "event_id": "evt_2", "items": items[:1]})
    grown.send({"type": "append_items", "event_id": "evt_3", "items": items[1:]})
    grown.send(
        {"type": "append_attachments", "event_id": "evt_4", "attachments": [attachment("a")]}
    )
    replaced.start("other", prompt_cache_key="k")
    spaced = json.dumps(
        {"type": "replace", "event_id": "evt_2", "state": items, "attachments": [attachment("a")]},
        indent=1,
    )
    replaced.send(spaced.encode())
    assert snapshot(at_once)[0] == snapshot(grown)[0] == snapshot(replaced)[0]


def test_the_subject_of_a_decide_is_what_the_checks_need() -> None:
    driver = Driver()
    driver.start("s", attachments=[attachment("a")])
    driver.decide()
    subject = driver.decides[-1].subject
    assert (subject.model, subject.questions) == ("MODEL_ID", QUESTIONS)
    assert [item.name for item in subject.attachments] == ["a"]
