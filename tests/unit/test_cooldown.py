"""M3.3: which candidate is tried next, on a clock of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cooldown import ENTRIES_MAX, FIRST_S, LONGEST_S, TRIAL_S, CoolDown
from relay.errors import (
    EventTooLarge,
    ProviderCredentials,
    RequestUntranslatable,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamStalled,
    UpstreamTimeout,
    UpstreamTruncated,
    UpstreamUnavailable,
    UpstreamUnreachable,
)
from relay.routing import Candidate, Provider
from relay.upstreams.unavailable import UnavailableUpstream

if TYPE_CHECKING:
    from collections.abc import Callable


def candidate(name: str, model: str = "m") -> Candidate:
    upstream = UnavailableUpstream(name, "never started")
    return Candidate(provider=Provider(name=name, upstream=upstream), model=model)


A, B, C = candidate("a"), candidate("b"), candidate("c")
ALL: Final = (A, B, C)
FAILED: Final = UpstreamError("x")


def limited(seconds: int | None) -> UpstreamRateLimited:
    return UpstreamRateLimited("x", retry_after_s=seconds)


def fail(cooldown: CoolDown, who: Candidate, now: float, error: UpstreamError = FAILED) -> None:
    """An attempt that fails at once."""
    cooldown.failed(who, error, began=now, now=now)


def order(cooldown: CoolDown, now: float, candidates: tuple[Candidate, ...] = ALL) -> str:
    """The order in which one request would try them."""
    left = list(candidates)
    picked = ""
    while left:
        picked += left.pop(cooldown.pick(left, now)).provider.name
    return picked


def test_who_has_not_failed_is_tried_as_configured() -> None:
    assert order(CoolDown(), 0.0) == "abc"


def test_who_failed_comes_last_until_its_cool_down_is_over() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 100.0)
    assert order(cooldown, 100.0) == "bca"
    assert order(cooldown, 100.0 + FIRST_S - 0.01) == "bca"
    assert order(cooldown, 100.0 + FIRST_S) == "abc"


def test_where_all_are_cooling_who_is_ready_first_is_tried_first() -> None:
    cooldown = CoolDown()
    for who, seconds in ((A, 60), (B, 5), (C, 20)):
        fail(cooldown, who, 0.0, limited(seconds))
    assert order(cooldown, 1.0) == "bca"


def test_of_equals_the_configured_order_decides() -> None:
    cooldown = CoolDown()
    for who in (C, B, A):
        fail(cooldown, who, 0.0)
    assert order(cooldown, 1.0) == "abc"


@pytest.mark.parametrize("seconds", [1, 7, 3600])
def test_retry_after_is_the_cool_down(seconds: int) -> None:
    """Also where it is shorter or longer than ours."""
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, limited(seconds))
    assert cooldown.wait_s(A, 0.0) == seconds
    assert order(cooldown, seconds - 0.01) == "bca"
    assert order(cooldown, float(seconds)) == "abc"


def test_retry_after_nought_is_no_cool_down() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, limited(0))
    assert order(cooldown, 0.0) == "abc"


def test_a_shorter_wait_does_not_end_a_longer_one() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, limited(60))
    fail(cooldown, A, 1.0, limited(5))
    assert cooldown.wait_s(A, 1.0) == 59.0


def test_one_request_tries_it_again_and_the_others_pass_it_by() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0)
    at = FIRST_S
    assert ALL[cooldown.pick(ALL, at)] is A
    assert ALL[cooldown.pick(ALL, at)] is B
    assert ALL[cooldown.pick(ALL, at + TRIAL_S - 0.01)] is B
    assert ALL[cooldown.pick(ALL, at + TRIAL_S)] is A, "a trial that tells nothing does not block"


def test_success_ends_it() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0)
    assert ALL[cooldown.pick(ALL, FIRST_S)] is A
    cooldown.succeeded(A, began=FIRST_S)
    assert len(cooldown) == 0
    assert [ALL[cooldown.pick(ALL, FIRST_S)] for _ in range(3)] == [A, A, A]


def test_success_of_an_attempt_that_began_before_the_failure_proves_nothing() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 10.0, limited(60))
    cooldown.succeeded(A, began=9.0)
    assert cooldown.wait_s(A, 10.0) == 60.0


def test_failures_in_a_row_cool_longer_up_to_a_limit() -> None:
    cooldown = CoolDown()
    now, waits = 0.0, []
    for _ in range(6):
        fail(cooldown, A, now)
        waits.append(cooldown.wait_s(A, now))
        now += waits[-1]
    assert waits == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LONGEST_S, LONGEST_S]


def test_attempts_side_by_side_fail_once() -> None:
    cooldown = CoolDown()
    for _ in range(50):
        cooldown.failed(A, FAILED, began=0.0, now=1.0)
    assert cooldown.wait_s(A, 1.0) == FIRST_S


def test_an_old_failure_is_forgotten() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0)
    fail(cooldown, A, 10_000.0)
    assert cooldown.wait_s(A, 10_000.0) == FIRST_S


UNREACHABLE = UpstreamUnreachable("x")


@pytest.mark.parametrize(
    ("error", "other_model_waits"),
    [
        (UNREACHABLE, True),
        (ProviderCredentials("x"), True),
        (UpstreamError("x"), False),
        (UpstreamRateLimited("x"), False),
        (UpstreamUnavailable("x"), False),
        (UpstreamTimeout("x"), False),
        (UpstreamTruncated("x"), False),
        (UpstreamStalled("x"), False),
        (UpstreamProtocolError("x"), False),
        (UpstreamRefused("x", status=404), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_tells_against_all_of_a_provider(
    error: UpstreamError, other_model_waits: bool
) -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, error)
    assert cooldown.wait_s(A, 0.0) == FIRST_S
    assert cooldown.wait_s(candidate("a", "other"), 0.0) == (FIRST_S if other_model_waits else 0)
    assert cooldown.wait_s(B, 0.0) == 0


@pytest.mark.parametrize(
    "error",
    [
        *(UpstreamRefused("x", status=status) for status in (400, 413, 422)),
        RequestUntranslatable("x"),
        EventTooLarge("x"),
    ],
    ids=str,
)
def test_what_tells_against_nobody(error: UpstreamError) -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, error)
    assert len(cooldown) == 0


def test_success_with_one_model_shows_that_the_provider_is_there() -> None:
    cooldown = CoolDown()
    fail(cooldown, A, 0.0, UNREACHABLE)
    cooldown.succeeded(candidate("a", "other"), began=1.0)
    assert order(cooldown, 1.0) == "abc"


def test_models_that_clients_make_up_take_no_memory() -> None:
    cooldown = CoolDown()
    fail(cooldown, B, 0.0, limited(3600))
    for number in range(3 * ENTRIES_MAX):
        fail(cooldown, candidate("a", f"m{number}"), 0.0)
    assert len(cooldown) == ENTRIES_MAX
    assert cooldown.wait_s(B, 0.0) == 3600.0, "what is to be kept longest goes last"
    fail(cooldown, A, 3650.0)
    assert len(cooldown) == 1 + 1, "what is over makes room first"


# --- whatever happens -----------------------------------------------------------------------------

NAMES: Final = [candidate(name, model) for name in "abc" for model in "xy"]
ERRORS: Final[list[Callable[[], UpstreamError]]] = [
    lambda: UpstreamError("x"),
    lambda: UpstreamUnreachable("x"),
    lambda: limited(0),
    lambda: limited(2),
    lambda: limited(500),
    lambda: UpstreamRefused("x", status=400),
]
EVENTS: Final = st.lists(
    st.tuples(
        st.integers(0, len(NAMES) - 1),
        st.floats(0, 400),  # seconds since the event before
        st.floats(0, 60),  # how long the attempt took
        st.one_of(st.none(), st.sampled_from(ERRORS)),
    ),
    max_size=40,
)


@given(EVENTS, st.lists(st.sampled_from(NAMES), min_size=1, max_size=8), st.floats(0, 400))
def test_nobody_is_ever_left_out_and_who_is_cooling_comes_last(
    events: list[tuple[int, float, float, Callable[[], UpstreamError] | None]],
    route: list[Candidate],
    later: float,
) -> None:
    cooldown, now = CoolDown(), 1000.0
    for number, pause, took, error in events:
        now += pause
        cooldown.pick(NAMES, now)
        if error is None:
            cooldown.succeeded(NAMES[number], began=now - took)
        else:
            cooldown.failed(NAMES[number], error(), began=now - took, now=now)
    now += later
    left, picked, waits = list(route), [], []
    while left:
        before = [cooldown.wait_s(candidate, now) for candidate in left]
        position = cooldown.pick(left, now)
        assert before[position] == min(before)
        assert position == before.index(min(before)), "of equals the configured order decides"
        waits.append(before[position])
        picked.append(left.pop(position))
    assert sorted(picked, key=id) == sorted(route, key=id)
    assert max(waits) <= 500.0 + TRIAL_S
    for candidate_ in NAMES:
        cooldown.succeeded(candidate_, began=now)
    assert len(cooldown) == 0
