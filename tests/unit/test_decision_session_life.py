"""D3 on the machine: clocks and endings, on a fake clock."""

from __future__ import annotations

from typing import Any

import pytest

from encoders.decision_errors import error
from relay.decisions.effects import StartDecide, TakeStart
from tests.support.decision_driver import Driver, start_message


def ended(driver: Driver, code: int, reason: str, retry_after_ms: int) -> None:
    """The last frame is a goodbye without an error frame before it, then the Close."""
    goodbye = driver.frames[-1]
    assert goodbye["type"] == "goodbye"
    assert goodbye["reason"] == reason
    assert goodbye["resume"] == {
        "supported": False,
        "action": "reconnect_and_replay",
        "retry_after_ms": retry_after_ms,
    }
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (code, reason)


def errors(driver: Driver) -> list[dict[str, Any]]:
    return [frame for frame in driver.frames if frame["type"] == "error"]


def test_d3_1_start_within_10_s_of_hello() -> None:
    driver = Driver()
    driver.advance(9.999)
    assert driver.closed is None
    driver.advance(0.001)
    ended(driver, 1008, "policy", 0)


def test_d3_1_a_refused_start_does_not_stop_the_clock() -> None:
    driver = Driver()
    driver.send(start_message(mode="never"))
    driver.advance(10)
    ended(driver, 1008, "policy", 0)


def test_d3_1_an_accepted_start_does() -> None:
    driver = Driver()
    driver.advance(9.999)
    driver.start()
    driver.advance(9)
    assert driver.closed is None


def test_d3_2_a_json_ping_every_30_s_answered_with_its_nonce() -> None:
    driver = Driver()
    driver.start()
    pings = [frame for frame in driver.advance_alive(100) if frame["type"] == "ping"]
    assert [ping["nonce"] for ping in pings] == [1, 2, 3]
    assert driver.closed is None


def test_d3_2_a_missed_pong_is_a_slow_reader() -> None:
    driver = Driver(native_heartbeat_interval_ms=10_000_000)
    driver.start()
    driver.advance(30)
    assert driver.types[-1] == "ping"
    driver.advance(9.999)
    assert driver.closed is None
    driver.advance(0.001)
    ended(driver, 1013, "slow_reader", 1000)
    assert errors(driver) == []


def test_d3_2_the_10_s_begin_when_the_ping_was_written() -> None:
    driver = Driver(native_heartbeat_interval_ms=10_000_000)
    driver.start()
    driver.write = False
    driver.advance(45)
    driver.write = True
    driver.pump()  # taken and written at 45 s
    driver.advance(9.999)
    assert driver.closed is None
    driver.advance(0.001)
    ended(driver, 1013, "slow_reader", 1000)


def test_d3_2_at_most_two_pings_are_out() -> None:
    driver = Driver(
        heartbeat_interval_ms=1000, pong_timeout_ms=60_000, native_heartbeat_interval_ms=10_000_000
    )
    driver.start()
    assert [frame["nonce"] for frame in driver.advance(10)] == [1, 2]
    driver.send({"type": "pong", "nonce": 1})
    assert [frame["nonce"] for frame in driver.advance(5)] == [3]


def test_d3_2_a_wrong_or_repeated_nonce_is_refused() -> None:
    driver = Driver()
    driver.start()
    driver.advance_alive(30)
    for nonce in (1, 2):
        (frame,) = driver.send({"type": "pong", "nonce": nonce})
        assert (frame["phase"], frame["http_status"]) == ("protocol", 400)
        assert frame["envelope"]["error"]["code"] == "stream_invalid_message"


def test_d3_3_a_native_ping_every_10_s_with_the_same_consequence() -> None:
    driver = Driver(heartbeat_interval_ms=10_000_000)
    driver.start()
    driver.advance(10)
    assert len(driver.pings) == 1
    driver.session.receive_control(10, driver.pings[0], driver.now)
    driver.advance(10)
    assert len(set(driver.pings)) == 2
    driver.session.receive_control(10, b"another", driver.now)
    driver.advance(9.999)
    assert driver.closed is None
    driver.advance(0.001)
    ended(driver, 1013, "slow_reader", 1000)


def test_d3_3_a_pong_answers_earlier_pings_too() -> None:
    driver = Driver(native_heartbeat_interval_ms=4000, heartbeat_interval_ms=10_000_000)
    driver.start()
    driver.advance(9)
    assert len(driver.pings) == 2
    driver.session.receive_control(10, driver.pings[1], driver.now)
    driver.advance(10)
    assert driver.closed is None
    assert len(driver.pings) == 4


def test_a_session_that_is_woken_late_sends_one_ping_and_not_many() -> None:
    driver = Driver(native_heartbeat_interval_ms=1000, pong_timeout_ms=600_000)
    driver.start()
    driver.now += 20
    driver.session.handle_timeout(driver.now)
    driver.pump()
    assert len(driver.pings) == 1


def test_d3_4_idle_after_120_s_without_an_application_message() -> None:
    driver = Driver()
    driver.start()
    driver.advance_alive(119)
    driver.append()
    driver.advance_alive(119.999)
    assert driver.closed is None
    driver.advance_alive(0.001)
    ended(driver, 1000, "idle", 0)
    assert errors(driver) == []


def test_d3_4_a_running_decide_holds_the_clock_and_its_end_restarts_it() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    driver.advance_alive(300)
    assert driver.closed is None
    driver.answer()
    driver.advance_alive(119.999)
    assert driver.closed is None
    driver.advance_alive(0.001)
    ended(driver, 1000, "idle", 0)


def test_d3_4_a_pending_intent_holds_the_clock_budget() -> None:
    driver = Driver(grant=False)
    driver.start(mode="on_change")
    driver.session.start_refused(600_000, driver.now)
    driver.advance_alive(500)
    assert driver.closed is None


def test_d3_4_a_pending_intent_holds_the_clock_min_interval() -> None:
    driver = Driver(idle_timeout_ms=10_000)
    driver.send(start_message(mode="on_change") | {"min_interval_ms": 60_000})
    driver.answer()
    driver.append()
    driver.advance_alive(59)
    assert driver.closed is None
    driver.advance_alive(1)
    assert len(driver.decides) == 1


def test_d3_4_a_pending_intent_holds_the_clock_retry() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.fail("service_unavailable", retry_after_ms=500_000)
    driver.advance_alive(499)
    assert driver.closed is None


def test_d3_5_the_lifetime_ends_with_1001() -> None:
    driver = Driver(idle_timeout_ms=10_000_000)
    driver.start()
    driver.advance_alive(3599.9)
    assert driver.closed is None
    driver.advance_alive(0.1)
    ended(driver, 1001, "max_lifetime", 0)


def test_d3_5_a_running_decide_goes_out_first() -> None:
    driver = Driver(max_duration_ms=60_000)
    driver.start(mode="on_change")
    driver.advance_alive(60)
    assert driver.closed is None
    driver.advance_alive(4.9)
    driver.answer()
    assert driver.types[-2:] == ["decision", "goodbye"]
    assert driver.frames[-1]["last_decision_state_version"] == 1
    ended(driver, 1001, "max_lifetime", 0)


def test_d3_5_but_has_the_settlement_time_only() -> None:
    driver = Driver(max_duration_ms=60_000)
    driver.start(mode="on_change")
    driver.advance_alive(65)
    ended(driver, 1001, "max_lifetime", 0)
    driver.answer()
    assert driver.types[-1] == "goodbye"


def test_d3_5_a_drain_while_it_settles_changes_nothing() -> None:
    driver = Driver(max_duration_ms=60_000)
    driver.start(mode="on_change")
    driver.advance_alive(63)
    driver.drain()
    driver.advance_alive(2)
    ended(driver, 1001, "max_lifetime", 0)


def test_d3_6_a_drain_without_a_decide_ends_at_once() -> None:
    driver = Driver()
    driver.start()
    driver.drain()
    ended(driver, 1012, "shutdown", 500)
    assert errors(driver) == []


def test_d3_6_a_drain_before_the_start_ends_at_once() -> None:
    driver = Driver()
    driver.drain()
    ended(driver, 1012, "shutdown", 500)
    assert driver.frames[-1]["state_version"] == 0


def test_d3_6_during_a_drain_mutations_count_and_no_decide_starts() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.append()  # an intent waits behind the running decide
    driver.drain()
    assert driver.closed is None
    (ack,) = driver.append()
    assert (ack["type"], ack["state_version"], ack["scheduled"]) == ("ack", 3, False)
    for _ in range(5):
        (refused,) = driver.decide()
        assert (refused["phase"], refused["http_status"]) == ("protocol", 503)
        assert refused["envelope"]["error"]["code"] == "service_unavailable"
        assert refused["fatal"] is False
        assert refused["retry"]["should_retry"] is refused["envelope"]["error"]["retryable"] is True
    driver.answer()
    assert driver.types[-2:] == ["decision", "goodbye"]
    assert driver.asked == 1
    ended(driver, 1012, "shutdown", 500)
    assert driver.frames[-1]["state_version"] == 3
    assert driver.frames[-1]["last_decision_state_version"] == 1


def test_d3_6_a_failure_during_a_drain_is_told_and_not_retried() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.drain()
    driver.fail("service_unavailable", retry_after_ms=10)
    assert driver.types[-2:] == ["error", "goodbye"]
    assert errors(driver)[-1]["fatal"] is False
    ended(driver, 1012, "shutdown", 500)


def test_d3_6_the_settlement_has_5_s() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.drain()
    driver.advance(4.999)
    assert driver.closed is None
    driver.advance(0.001)
    ended(driver, 1012, "shutdown", 500)


def test_d3_6_a_start_that_was_only_asked_for_is_not_wanted_any_more() -> None:
    driver = Driver(grant=False)
    driver.start(mode="on_change")
    driver.drain()
    ended(driver, 1012, "shutdown", 500)
    assert driver.session.start_granted(driver.now) is False
    assert driver.session.next_effect() is None


def test_d3_7_maintenance_is_a_goodbye_alone() -> None:
    driver = Driver()
    driver.start()
    driver.session.maintenance(driver.now)
    driver.pump()
    ended(driver, 1013, "maintenance", 300_000)
    assert errors(driver) == []


def test_d3_7_maintenance_from_a_decide_is_no_error_frame() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.fail("maintenance", retry_after_ms=1000)
    ended(driver, 1013, "maintenance", 300_000)
    assert errors(driver) == []


def test_d3_8_a_lost_lease_and_a_lost_store_end_with_1013() -> None:
    lost, gone = Driver(), Driver()
    lost.session.lease_lost(lost.now)
    gone.session.store_unavailable(gone.now)
    lost.pump()
    gone.pump()
    ended(lost, 1013, "lease_lost", 0)
    ended(gone, 1013, "store_unavailable", 0)


def test_d3_9_a_fault_of_ours_is_1011() -> None:
    driver = Driver()
    driver.session.fail(driver.now)
    driver.pump()
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (1011, "")
    assert driver.frames[-1]["reason"] is None


def test_d3_10_goodbye_names_the_versions() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.answer()
    driver.append()
    driver.session.fail(driver.now)
    driver.pump()
    assert driver.frames[-1]["state_version"] == 2
    assert driver.frames[-1]["last_decision_state_version"] == 1


def test_d3_10_goodbye_is_left_out_where_it_has_no_room() -> None:
    driver = Driver(write=False, max_send_queue_frames=1)
    driver.session.fail(driver.now)
    assert len(driver.session.frames_to_send()) == 1  # hello
    driver.pump()
    assert driver.closed is not None
    assert driver.closed.code == 1011


def test_a_client_close_silences_everything() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.session.client_closed(driver.now)
    assert driver.session.closing
    driver.answer()
    assert driver.pump() == []
    assert driver.closed is None
    assert driver.session.in_flight is None


def test_a_decide_that_nobody_took_before_the_end_does_not_run_on() -> None:
    driver = Driver(grant=False)
    driver.start(mode="on_change")
    assert driver.session.start_granted(driver.now)
    driver.session.lost(driver.now)
    assert driver.session.next_effect() is None
    assert driver.session.in_flight is None


def test_d5_7_a_result_after_the_end_tells_nobody() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.session.lease_lost(driver.now)
    driver.pump()
    assert driver.session.in_flight == 1
    driver.fail("invalid_api_key")
    assert driver.types[-1] == "goodbye"
    assert driver.session.in_flight is None


def test_d5_7_an_answer_after_the_end_is_no_decision_of_the_stream() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.session.lease_lost(driver.now)
    driver.pump()
    driver.answer()
    assert driver.session.last_decision_state_version == 0


def test_calls_of_handle_timeout_that_nobody_needed_do_nothing() -> None:
    driver = Driver()
    driver.start()
    before = driver.session.next_deadline()
    for _ in range(3):
        driver.session.handle_timeout(driver.now)
    assert driver.pump() == []
    assert driver.session.next_deadline() == before


@pytest.mark.parametrize("kind", [TakeStart, StartDecide])
def test_effects_come_after_the_frames_that_announce_them(kind: type[object]) -> None:
    driver = Driver(grant=False, write=False)
    driver.session.receive(b'{"type":"x"}', driver.now)
    driver.send(start_message(mode="on_change"))
    if kind is StartDecide:
        assert driver.session.start_granted(driver.now)
        driver.pump()
        assert len(driver.decides) == 1
    types = [frame.payload for frame in driver.session.frames_to_send()]
    assert b'"ack"' in types[-1]
    assert driver.asked == 1


def test_a_problem_with_a_wait_that_is_not_retryable_agrees_with_itself() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    (frame,) = driver.fail(error("system_zero_timeout", "too late"))
    assert frame["retry"]["should_retry"] is frame["envelope"]["error"]["retryable"] is False
