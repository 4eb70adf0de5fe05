"""D1.7 and D2 on the machine: frames, refusals, budgets and queues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from encoders.decision_frames import RateLimit
from encoders.decision_messages import decode
from tests.support.decision_driver import REQUEST_ID, STREAM_ID, Driver, encode, start_message

SEED_LIMITS = {
    "max_duration_ms": 3600000,
    "idle_timeout_ms": 120000,
    "start_timeout_ms": 10000,
    "heartbeat_interval_ms": 30000,
    "native_heartbeat_interval_ms": 10000,
    "receipt_timeout_ms": 240000,
    "max_control_queue_frames": 2,
    "pong_timeout_ms": 10000,
    "max_message_bytes": 4194304,
    "max_decide_body_bytes": 3665920,
    "max_pending_events": 4096,
    "max_events": 100000,
    "max_events_per_second": 5,
    "max_send_queue_bytes": 4194304,
    "max_send_queue_frames": 64,
    "min_interval_ms": 0,
    "event_burst": 10,
    "max_messages_per_second": 40,
    "message_burst": 80,
    "max_streams_per_process": 16,
    "max_native_control_frames_per_second": 8,
    "native_control_frame_burst": 16,
    "max_native_control_bytes_per_second": 512,
    "native_control_byte_burst": 1024,
}


def closing(driver: Driver, code: int, reason: str | None) -> dict[str, Any]:
    """The stream ended with this goodbye and this Close; returns the goodbye."""
    assert driver.frames[-1]["type"] == "goodbye"
    assert driver.frames[-1]["reason"] == reason
    assert driver.closed is not None
    assert driver.closed.code == code
    assert driver.closed.reason == (reason or "")
    assert driver.session.closing
    assert driver.session.next_deadline() is None
    return driver.frames[-1]


def test_d1_7_the_first_frame_is_hello_with_all_24_limits() -> None:
    driver = Driver(rate_limit=RateLimit(60, 59, 1_790_000_000))
    assert driver.frames == [
        {
            "type": "hello",
            "stream_id": STREAM_ID,
            "seq": 1,
            "protocol": "system-zero.stream.v1",
            "request_id": REQUEST_ID,
            "limits": SEED_LIMITS,
            "rate_limit": {"limit": 60, "remaining": 59, "reset_epoch_seconds": 1790000000},
        }
    ]
    assert list(driver.frames[0]["limits"]) == list(SEED_LIMITS)
    assert all(type(value) is int for value in driver.frames[0]["limits"].values())


def test_d1_7_a_rate_limit_that_is_not_known_is_null() -> None:
    assert Driver().frames[0]["rate_limit"] is None


def test_d2_1_seq_is_one_more_for_every_json_frame() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    driver.answer()
    driver.append("", event_id="evt_2")
    driver.advance_alive(30)
    driver.session.fail(driver.now)
    driver.pump()
    assert driver.types == ["hello", "ack", "scheduled", "decision", "error", "ping", "goodbye"]
    assert [frame["seq"] for frame in driver.frames] == list(range(1, 8))
    assert {frame["stream_id"] for frame in driver.frames} == {STREAM_ID}


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"", b"{", b'{"a":1,"a":2}', b"[NaN]", b'"\\ud800"', b"\xef\xbb\xbf{}", b"[1e999]"],
)
def test_d2_2_what_is_not_strict_json_closes_1007(data: bytes) -> None:
    driver = Driver()
    driver.send(data)
    assert closing(driver, 1007, None)["resume"]["retry_after_ms"] == 0
    assert driver.types == ["hello", "goodbye"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [(1002, None), (1003, None), (1007, None), (1009, None), (1011, None), (1008, "policy")],
)
def test_d2_2_violations_of_the_wire_say_goodbye_and_close(code: int, reason: str | None) -> None:
    driver = Driver()
    driver.session.violation(code, driver.now)
    driver.pump()
    closing(driver, code, reason)


def test_another_code_is_no_violation() -> None:
    with pytest.raises(ValueError, match="1000"):
        Driver().session.violation(1000, 0.0)


def test_d2_2_nesting_over_256_refuses_the_mutation() -> None:
    driver = Driver()
    driver.start([])
    deep = "[" * 257 + "]" * 257
    (frame,) = driver.send(b'{"type":"append_items","event_id":"evt_2","items":%s}' % deep.encode())
    assert frame["http_status"] == 413
    assert frame["envelope"]["error"]["code"] == "state_too_large"
    assert frame["event_id"] == "evt_2"
    assert driver.session.state_version == 1


def test_d2_3_a_refusal_is_an_error_frame_of_phase_protocol() -> None:
    driver = Driver()
    driver.start()
    (frame,) = driver.append(5)
    assert frame == {
        "type": "error",
        "stream_id": STREAM_ID,
        "seq": 3,
        "phase": "protocol",
        "state_version": 1,
        "event_id": "evt_2",
        "covered_event_ids": [],
        "http_status": 400,
        "envelope": {
            "error": {
                "message": "text must be a string",
                "type": "invalid_request_error",
                "param": "text",
                "code": "stream_invalid_message",
                "retryable": False,
            },
            "request_id": REQUEST_ID,
        },
        "retry": {"should_retry": False, "retry_after_ms": None, "retry_after": None},
        "rate_limit": None,
        "server_timing": None,
        "fatal": False,
    }


@pytest.mark.parametrize(
    ("message", "event_id"),
    [
        ({"type": "decide", "state_version": 7}, None),
        ({"type": "decide", "state_version": "1"}, None),
        ({"type": "pong", "nonce": 3}, None),
        ({"type": "nothing", "event_id": "evt_2"}, None),
        ([], None),
        ({"type": "append_text", "event_id": "evt_9", "text": "x"}, "evt_9"),
        ({"type": "append_items", "event_id": "evt_2", "items": [1]}, "evt_2"),
        ({"type": "replace", "event_id": "evt_2"}, "evt_2"),
        ({"type": "append_text", "event_id": 2, "text": "x"}, None),
        ({"type": "append_text", "event_id": "e" * 5000, "text": ""}, None),
    ],
)
def test_d2_3_only_a_mutation_is_named(message: object, event_id: str | None) -> None:
    driver = Driver()
    driver.start()
    (frame,) = driver.send(message)
    assert (frame["phase"], frame["event_id"]) == ("protocol", event_id)


def test_d2_3_the_third_refusal_within_a_minute_is_fatal() -> None:
    driver = Driver()
    driver.start()
    codes = []
    for version in (5, 6, 7):
        driver.now += 29.9
        frame = driver.decide(version)[0]
        codes.append((frame["envelope"]["error"]["code"], frame["fatal"]))
    assert codes == [
        ("stream_version_mismatch", False),
        ("stream_version_mismatch", False),
        ("stream_version_mismatch", True),
    ]
    closing(driver, 1008, "policy")


def test_d2_3_refusals_of_any_code_count_together() -> None:
    driver = Driver()
    driver.decide(1)
    driver.send({"type": "pong", "nonce": 1})
    (refused, goodbye) = driver.send(start_message(route="committee"))
    assert refused["fatal"] is True
    assert goodbye["type"] == "goodbye"
    closing(driver, 1008, "policy")


def test_d2_3_refusals_that_lie_further_apart_are_not_fatal() -> None:
    driver = Driver()
    driver.start()
    for _ in range(10):
        driver.now += 30.1
        assert driver.decide(5)[0]["fatal"] is False
    assert driver.closed is None


def test_d2_4_messages_40_a_second_burst_80() -> None:
    driver = Driver()
    driver.start()
    for _ in range(79):
        driver.decide()
    driver.now += 0.5
    for _ in range(20):
        driver.decide()
    assert driver.closed is None
    driver.decide()
    closing(driver, 1008, "policy")


def test_d2_4_mutations_5_a_second_burst_10() -> None:
    driver = Driver()
    driver.start()
    for _ in range(9):
        driver.append()
    for _ in range(20):
        driver.now += 0.2
        assert driver.append()[0]["type"] == "ack"
    assert driver.append() == [driver.frames[-1]]
    closing(driver, 1008, "policy")
    assert driver.session.state_version == 30


def test_d2_4_a_refused_mutation_counts_and_a_decide_does_not() -> None:
    driver = Driver(protocol_refusal_limit=1000)
    driver.start()
    for _ in range(9):
        driver.append(event_id="evt_1")
        driver.decide()
    assert driver.closed is None
    driver.append()
    closing(driver, 1008, "policy")


def test_d2_4_control_frames_8_a_second_burst_16() -> None:
    driver = Driver()
    for _ in range(16):
        driver.session.receive_control(9, b"", driver.now)
    driver.now += 0.25
    for _ in range(2):
        driver.session.receive_control(9, b"", driver.now)
    assert not driver.session.closing
    driver.session.receive_control(9, b"", driver.now)
    driver.pump()
    closing(driver, 1008, "policy")


def test_d2_4_control_bytes_are_payload_and_6() -> None:
    driver = Driver()
    for _ in range(7):
        driver.session.receive_control(9, bytes(125), driver.now)
    driver.session.receive_control(9, bytes(101), driver.now)  # 7 * 131 + 107 = 1024
    assert not driver.session.closing
    driver.session.receive_control(9, b"", driver.now)
    driver.pump()
    closing(driver, 1008, "policy")


def test_d2_4_replies_to_our_own_native_pings_count() -> None:
    driver = Driver(native_control_frame_burst=1, max_native_control_frames_per_second=0.01)
    driver.start()
    driver.advance(10)
    driver.session.receive_control(10, driver.pings[0], driver.now)
    assert not driver.session.closing
    driver.session.receive_control(9, b"", driver.now)
    assert driver.session.closing


def test_d2_5_at_most_64_frames_wait() -> None:
    driver = Driver(write=False)
    driver.send(start_message())
    for _ in range(62):
        driver.decide()
    assert driver.closed is None
    driver.decide()
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (1013, "slow_reader")
    assert driver.session.next_frame() is None


def test_d2_5_frames_that_were_taken_count_until_they_are_written() -> None:
    driver = Driver(write=False, max_send_queue_frames=3)
    driver.send(start_message())
    driver.decide()
    driver.session.frames_to_send()
    driver.session.written(driver.now, 2)
    driver.decide()
    driver.decide()
    assert driver.closed is None
    driver.decide()
    assert driver.closed is not None


def test_d2_5_bytes_that_wait_are_bounded() -> None:
    driver = Driver()
    driver.start()
    driver.write = False
    driver.decide()
    driver.answer(b'"%s"' % (b"x" * 3_000_000))
    driver.decide()
    assert driver.closed is None
    driver.answer(b'"%s"' % (b"x" * 1_500_000))
    assert driver.closed is not None
    assert driver.closed.code == 1013


def test_d2_5_a_stalled_peer_gets_no_goodbye() -> None:
    driver = Driver()
    driver.start()
    driver.session.slow_reader(driver.now)
    assert driver.pump() == []
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (1013, "slow_reader")


def test_d2_5_a_reply_that_no_frame_can_hold_is_an_error() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    (frame,) = driver.answer(b'"%s"' % (b"x" * 4_194_304))
    assert (frame["type"], frame["phase"], frame["http_status"]) == ("error", "decide", 413)
    assert frame["envelope"]["error"]["code"] == "questions_too_large"
    assert frame["covered_event_ids"] == ["evt_1"]
    driver.decide()
    (frame,) = driver.answer()
    assert frame["covered_event_ids"] == ["evt_1"]
    assert [frame["seq"] for frame in driver.frames] == list(range(1, len(driver.frames) + 1))


def test_d2_5_the_largest_frame_is_exactly_the_limit() -> None:
    probe = Driver()
    probe.start()
    probe.decide()
    probe.answer(b'""')
    room = 4_194_304 - len(probe.raw[-1])
    for extra, kind in ((0, "decision"), (1, "error")):
        driver = Driver()
        driver.start()
        driver.decide()
        (frame,) = driver.answer(b'"%s"' % (b"x" * (room + extra)))
        assert frame["type"] == kind


def test_decoded_messages_are_taken_like_their_bytes() -> None:
    whole, decoded = Driver(), Driver()
    for message in (start_message("a"), {"type": "decide", "state_version": 1}, {"type": "x"}):
        whole.send(message)
        decoded.session.receive(decode(encode(message)), decoded.now)
        decoded.pump()
    assert whole.raw == decoded.raw


def test_nothing_is_taken_after_the_end() -> None:
    driver = Driver()
    driver.start()
    driver.session.fail(driver.now)
    driver.pump()
    before = len(driver.frames)
    driver.session.receive_control(9, b"", driver.now)
    driver.append()
    driver.session.fail(driver.now)
    driver.session.lease_lost(driver.now)
    driver.drain()
    driver.session.slow_reader(driver.now)
    driver.session.handle_timeout(driver.now + 1e6)
    driver.pump()
    assert len(driver.frames) == before


def test_frames_keep_the_order_of_members_of_the_seed() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    driver.answer()
    driver.decide(9)
    driver.session.fail(driver.now)
    driver.pump()
    members = {frame["type"]: list(frame) for frame in map(json.loads, driver.raw)}
    head = ["type", "stream_id", "seq"]
    assert members["ack"] == [
        *head, "event_id", "state_version", "state_bytes", "synthesized_body_bytes", "scheduled",
    ]  # fmt: skip
    assert members["scheduled"] == [*head, "state_version", "in_flight"]
    assert members["decision"] == [
        *head, "state_version", "covered_event_ids", "reply", "request_id", "http_status",
        "server_timing", "latency_ms", "rate_limit", "queue_ms", "decide_ms",
    ]  # fmt: skip
    assert members["error"] == [
        *head, "phase", "state_version", "event_id", "covered_event_ids", "http_status",
        "envelope", "retry", "rate_limit", "server_timing", "fatal",
    ]  # fmt: skip
    assert members["goodbye"] == [
        *head, "reason", "state_version", "last_decision_state_version", "resume",
    ]  # fmt: skip
