"""D5 on the machine: intents, batches, budgets, failures and retries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from encoders.decision_errors import STATUS, DecisionError, error
from encoders.decision_frames import RateLimit
from tests.support.decision_driver import REPLY, STREAM_ID, Driver, start_message


def state_of(driver: Driver) -> Any:
    return json.loads(driver.decides[-1].body)["state"]


def ended(driver: Driver, code: int, reason: str, retry_after_ms: int) -> None:
    assert driver.frames[-1]["reason"] == reason
    assert driver.frames[-1]["resume"]["retry_after_ms"] == retry_after_ms
    assert driver.closed is not None
    assert (driver.closed.code, driver.closed.reason) == (code, reason)


def unavailable(retry_after_ms: int | None = None, **more: Any) -> DecisionError:
    """A retryable 503."""
    return DecisionError(
        "service_unavailable",
        "full",
        503,
        retryable=more.get("retryable", True),
        retry_after_ms=retry_after_ms,
    )


def test_d5_1_one_decide_in_flight_and_one_intent() -> None:
    driver = Driver()
    driver.start("0", mode="on_change")
    for text in "123":
        driver.append(text)
    assert len(driver.decides) == 1
    assert state_of(driver) == "0"
    driver.answer()
    assert len(driver.decides) == 1
    assert state_of(driver) == "0123"
    driver.answer()
    assert len(driver.decides) == 0
    assert driver.asked == 2


def test_d5_2_on_change_schedules_each_mutation() -> None:
    driver = Driver()
    assert driver.start(mode="on_change")["scheduled"] is True
    assert driver.append()[0]["scheduled"] is True
    driver.answer()
    driver.answer()
    assert driver.append()[0]["scheduled"] is True


def test_d5_2_on_request_schedules_none() -> None:
    driver = Driver()
    assert driver.start()["scheduled"] is False
    driver.decide()
    assert driver.append()[0]["scheduled"] is False  # the running decide does not cover it
    assert driver.asked == 1


def test_d5_2_an_intent_that_waits_covers_a_later_mutation() -> None:
    driver = Driver()
    driver.start("a")
    driver.decide()
    driver.decide()
    assert driver.append("b")[0]["scheduled"] is True
    driver.answer()
    assert state_of(driver) == "ab"
    (decision,) = driver.answer()
    assert (decision["state_version"], decision["covered_event_ids"]) == (2, ["evt_2"])


def test_d5_2_min_interval_runs_from_start_to_start() -> None:
    driver = Driver()
    driver.send(start_message(mode="on_change") | {"min_interval_ms": 10_000})
    driver.now += 3
    driver.append()
    driver.answer()
    assert len(driver.decides) == 0
    driver.advance(6.999)
    assert len(driver.decides) == 0
    driver.advance(0.001)
    assert len(driver.decides) == 1
    (decision,) = driver.answer()
    assert decision["queue_ms"] == 7000


def test_d5_2_min_interval_holds_explicit_decides_too() -> None:
    driver = Driver()
    driver.send(start_message() | {"min_interval_ms": 60_000})
    driver.decide()
    driver.answer()
    driver.now += 1
    (scheduled,) = driver.decide()
    assert (scheduled["type"], scheduled["in_flight"]) == ("scheduled", False)
    driver.advance_alive(58.999)
    assert len(driver.decides) == 0
    driver.advance_alive(0.001)
    assert len(driver.decides) == 1


def test_d5_2_the_servers_own_min_interval_is_a_floor() -> None:
    driver = Driver(min_interval_ms=5000)
    driver.start(mode="on_change")
    driver.answer()
    driver.append()
    driver.advance(4.999)
    assert len(driver.decides) == 0
    driver.advance(0.001)
    assert len(driver.decides) == 1


@pytest.mark.parametrize("mode", ["on_request", "on_change"])
def test_d5_2_a_decide_is_valid_in_both_modes(mode: str) -> None:
    driver = Driver()
    driver.start(mode=mode)
    if mode == "on_change":
        driver.answer()
    assert [frame["type"] for frame in driver.decide()] == ["scheduled"]
    assert len(driver.decides) == 1


@pytest.mark.parametrize("version", [1, 3, 100_000])
def test_d5_2_a_decide_names_the_current_version(version: int) -> None:
    driver = Driver()
    driver.start()
    driver.append()
    (frame,) = driver.decide(version)
    assert frame["http_status"] == 409
    assert frame["envelope"]["error"]["code"] == "stream_version_mismatch"
    assert (frame["event_id"], frame["state_version"]) == (None, 2)
    assert driver.asked == 0


def test_d5_2_one_scheduled_for_each_decide_and_none_unsolicited() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.append()
    driver.answer()
    driver.answer()
    assert "scheduled" not in driver.types
    assert driver.decide()[0] == {
        "type": "scheduled",
        "stream_id": STREAM_ID,
        "seq": 6,
        "state_version": 2,
        "in_flight": False,
    }
    assert driver.decide()[0]["in_flight"] is True
    assert driver.types.count("scheduled") == 2


def test_d5_2_scheduled_comes_before_the_decision_that_it_causes() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    driver.answer()
    assert driver.types == ["hello", "ack", "scheduled", "decision"]


def test_d5_2_the_snapshot_is_taken_when_the_start_is_granted() -> None:
    driver = Driver(grant=False)
    driver.start("a")
    driver.decide()
    driver.append("b")
    assert driver.session.start_granted(driver.now)
    driver.pump()
    assert state_of(driver) == "ab"
    (decision,) = driver.answer()
    assert (decision["state_version"], decision["covered_event_ids"]) == (2, ["evt_1", "evt_2"])


def test_d5_2_a_decided_version_is_decided_again_with_its_key() -> None:
    driver = Driver()
    driver.send(start_message() | {"idempotency_key": "k"})
    bodies = []
    covered = []
    for _ in range(2):
        driver.decide()
        bodies.append((driver.decides[-1].body, driver.decides[-1].idempotency_key))
        covered.append(driver.answer()[0]["covered_event_ids"])
    assert bodies[0] == bodies[1]
    assert bodies[0][1] == "k"
    assert covered == [["evt_1"], []]


def test_d5_3_a_decision_embeds_the_reply_and_its_measures() -> None:
    driver = Driver(grant=False)
    driver.start(mode="on_change")
    driver.now += 0.25
    assert driver.session.start_granted(driver.now)
    driver.pump()
    driver.now += 1.5
    (frame,) = driver.answer(
        server_timing="total;dur=1500",
        latency_ms=1499.5,
        rate_limit=RateLimit(60, 4, 1_790_000_060),
    )
    assert frame == {
        "type": "decision",
        "stream_id": STREAM_ID,
        "seq": 3,
        "state_version": 1,
        "covered_event_ids": ["evt_1"],
        "reply": json.loads(REPLY),
        "request_id": "example-decision",
        "http_status": 200,
        "server_timing": "total;dur=1500",
        "latency_ms": 1499.5,
        "rate_limit": {"limit": 60, "remaining": 4, "reset_epoch_seconds": 1790000060},
        "queue_ms": 250,
        "decide_ms": 1500,
    }
    assert type(frame["queue_ms"]) is type(frame["decide_ms"]) is int


def test_d5_3_a_decision_covers_what_was_frozen_into_it() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.append()
    driver.append()
    (first, second) = (driver.answer()[0], driver.answer()[0])
    assert (first["state_version"], first["covered_event_ids"]) == (1, ["evt_1"])
    assert (second["state_version"], second["covered_event_ids"]) == (3, ["evt_2", "evt_3"])


def test_d5_3_a_failure_carries_its_batch_and_returns_it() -> None:
    driver = Driver()
    driver.start()
    driver.append()
    driver.decide()
    driver.append()
    (frame,) = driver.fail("system_zero_timeout")
    assert (frame["type"], frame["phase"]) == ("error", "decide")
    assert (frame["state_version"], frame["event_id"]) == (2, None)
    assert frame["covered_event_ids"] == ["evt_1", "evt_2"]
    driver.decide()
    (decision,) = driver.answer()
    assert decision["covered_event_ids"] == ["evt_1", "evt_2", "evt_3"]


def test_d5_3_a_protocol_error_carries_the_accepted_version_and_no_batch() -> None:
    driver = Driver()
    (early,) = driver.decide(1)
    assert (early["state_version"], early["covered_event_ids"]) == (0, [])
    driver.start()
    driver.append()
    driver.decide()
    (late,) = driver.append(event_id="evt_9")
    assert (late["state_version"], late["covered_event_ids"]) == (2, [])


def test_d5_4_an_exhausted_budget_makes_the_intent_wait() -> None:
    driver = Driver(grant=False)
    driver.start("a", mode="on_change")
    driver.session.start_refused(1500, driver.now)
    driver.append("b")
    assert driver.asked == 1
    driver.advance(1.499)
    assert driver.asked == 1
    driver.advance(0.001)
    assert driver.asked == 2
    driver.session.start_refused(1000, driver.now)
    driver.advance(1)
    assert driver.asked == 3
    assert driver.session.start_granted(driver.now)
    driver.pump()
    assert state_of(driver) == "ab"
    (decision,) = driver.answer()
    assert decision["queue_ms"] == 2500
    assert "error" not in driver.types


def test_d5_4_a_start_is_asked_for_once() -> None:
    driver = Driver(grant=False)
    driver.start(mode="on_change")
    driver.append()
    driver.decide()
    driver.session.handle_timeout(driver.now)
    driver.pump()
    assert driver.asked == 1


def test_a_start_that_nobody_asked_for_is_not_taken() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    driver.append()
    assert driver.session.start_granted(driver.now) is False
    assert driver.pump() == []
    assert driver.session.in_flight == 1
    assert len(driver.decides) == 1


def test_a_result_of_another_dispatch_is_nothing() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    running = driver.decides[0]
    driver.answer()
    driver.append()
    driver.decides.append(running)
    assert driver.decides.popleft().ticket == 2
    assert driver.answer() == []
    assert driver.session.in_flight == 2


def test_d5_5_a_failure_keeps_status_and_envelope() -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    problem = DecisionError(
        "capacity_exhausted", "busy", 429, retryable=True, retry_after_ms=1500, details={"a": 1}
    )
    (frame,) = driver.fail(problem)
    assert frame["http_status"] == 429
    assert frame["envelope"] == {
        "error": {
            "message": "busy",
            "type": "rate_limit_error",
            "param": None,
            "code": "capacity_exhausted",
            "retryable": True,
            "details": {"a": 1},
        },
        "request_id": "example-decision",
    }
    assert frame["retry"] == {"should_retry": True, "retry_after_ms": 1500, "retry_after": "2"}
    assert frame["fatal"] is False


@pytest.mark.parametrize(
    ("code", "status", "retryable", "retried"),
    [
        ("capacity_exhausted", 429, True, True),
        ("rate_limit_exceeded", 429, True, True),
        ("service_unavailable", 503, True, True),
        ("starting", 503, True, True),
        ("idempotency_conflict", 409, True, True),
        ("service_unavailable", 503, False, False),
        ("capacity_exhausted", 429, False, False),
        ("idempotency_conflict", 409, False, False),
        ("idempotency_replay_unavailable", 409, True, False),
        ("system_zero_timeout", 504, True, False),
        ("internal_error", 500, True, False),
        ("state_too_large", 413, False, False),
    ],
)
def test_d5_5_what_on_change_tries_again(
    code: str, status: int, retryable: bool, retried: bool
) -> None:
    driver = Driver()
    driver.start(mode="on_change")
    (frame,) = driver.fail(DecisionError(code, "no", status, retryable=retryable))
    assert frame["retry"]["should_retry"] is frame["envelope"]["error"]["retryable"] is retryable
    assert frame["fatal"] is False
    driver.advance(0.999)
    assert len(driver.decides) == 0
    driver.advance(0.001)  # without a delay of its own: 1 s
    assert len(driver.decides) == retried


def test_d5_5_on_request_never_tries_again() -> None:
    driver = Driver()
    driver.start()
    for _ in range(5):
        driver.decide()
        (frame,) = driver.fail(unavailable(100))
        assert frame["fatal"] is False
        driver.advance(1)
    assert len(driver.decides) == 0
    assert driver.closed is None


def test_d5_5_the_retry_waits_for_its_delay_and_takes_the_latest_state() -> None:
    driver = Driver()
    driver.start("a", mode="on_change")
    driver.fail(unavailable(5000))
    driver.now += 2
    assert driver.append("b")[0]["scheduled"] is True
    assert driver.decide()[0]["type"] == "scheduled"
    driver.advance(2.999)
    assert len(driver.decides) == 0
    driver.advance(0.001)
    assert state_of(driver) == "ab"
    assert driver.answer()[0]["covered_event_ids"] == ["evt_1", "evt_2"]


def test_d5_5_a_mutation_in_flight_does_not_shorten_the_delay_either() -> None:
    driver = Driver()
    driver.start("a", mode="on_change")
    driver.append("b")
    driver.fail(unavailable(5000))
    assert len(driver.decides) == 0
    driver.advance(5)
    assert state_of(driver) == "ab"


def test_d5_5_the_third_failure_of_one_version_is_fatal() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    fatal = []
    for delay_ms in (100, 200, 300):
        fatal.append(driver.fail(unavailable(delay_ms))[0]["fatal"])
        driver.advance(1)
    assert fatal == [False, False, True]
    assert driver.types[-2:] == ["error", "goodbye"]
    assert driver.frames[-2]["retry"]["retry_after_ms"] == 300
    ended(driver, 1013, "overload", 300)


def test_d5_5_without_a_delay_the_goodbye_says_1_s() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    for _ in range(3):
        driver.fail(unavailable())
        driver.advance(1)
    assert driver.frames[-2]["retry"] == {
        "should_retry": True,
        "retry_after_ms": None,
        "retry_after": None,
    }
    ended(driver, 1013, "overload", 1000)


def test_d5_5_a_mutation_in_flight_does_not_save_the_version_that_fails() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    for _ in range(2):
        driver.fail(unavailable(10))
        driver.advance(0.5)
    driver.append()
    frame, _ = driver.fail(unavailable(10))
    assert (frame["state_version"], frame["fatal"]) == (1, True)


def test_d5_5_a_mutation_during_the_delay_starts_a_new_count() -> None:
    driver = Driver()
    driver.start(mode="on_change")
    for _ in range(6):
        driver.fail(unavailable(1000))
        driver.advance(1)
        driver.fail(unavailable(1000))
        driver.append()
        driver.advance(1)
    assert driver.closed is None


@pytest.mark.parametrize("between", ["success", "other failure"])
def test_d5_5_only_consecutive_failures_count(between: str) -> None:
    driver = Driver()
    driver.start(mode="on_change")
    for _ in range(3):
        for _ in range(2):
            driver.fail(unavailable(10))
            driver.advance(1)
        if between == "success":
            driver.answer()
        else:
            driver.fail("system_zero_timeout")
        driver.decide()
    assert driver.closed is None


def test_d5_5_a_retry_that_would_reach_the_end_of_the_lifetime_is_fatal() -> None:
    for delay_ms, fatal in ((59_999, False), (60_000, True)):
        driver = Driver(max_duration_ms=61_000)
        driver.start(mode="on_change")
        driver.now += 1
        (frame, *rest) = driver.fail(unavailable(delay_ms))
        assert frame["fatal"] is fatal
        assert bool(rest) is fatal
        if fatal:
            ended(driver, 1013, "overload", delay_ms)


@pytest.mark.parametrize(
    "code", ["invalid_api_key", "auth_error", "account_suspended", "unknown_endpoint"]
)
def test_d5_6_fatal_by_code(code: str) -> None:
    driver = Driver()
    driver.start()
    driver.decide()
    (frame, goodbye) = driver.fail(code)
    assert (frame["type"], frame["fatal"]) == ("error", True)
    assert goodbye["type"] == "goodbye"
    ended(driver, 1008, "auth", 0)


@pytest.mark.parametrize("code", ["model_not_found", "media_unpriced", "insufficient_credits"])
def test_d5_6_and_not_by_status(code: str) -> None:
    driver = Driver()
    driver.start(mode="on_change")
    (frame,) = driver.fail(code)
    assert frame["fatal"] is False
    assert driver.closed is None
    driver.append()
    assert len(driver.decides) == 1


def test_every_known_code_has_a_type_that_its_status_says() -> None:
    types = {
        code: error(code, "x").type for code in STATUS if STATUS[code] in (401, 403, 404, 429, 503)
    }
    assert types["media_unpriced"] == "invalid_request_error"
    assert types["invalid_api_key"] == "authentication_error"
    assert types["auth_error"] == types["account_suspended"] == "permission_error"
    assert types["model_not_found"] == types["committee_not_available"] == "not_found_error"
    assert types["stream_limit_exceeded"] == "rate_limit_error"
    assert types["limiter_unavailable"] == types["maintenance"] == "overloaded_error"


def test_equal_inputs_at_equal_times_give_equal_bytes() -> None:
    def story() -> list[bytes]:
        driver = Driver()
        driver.start("é", mode="on_change")
        driver.append("x")
        driver.now += 0.3
        driver.fail(unavailable(700))
        driver.advance(1)
        driver.answer()
        driver.decide(7)
        driver.advance_alive(200)
        return driver.raw

    assert story() == story()
