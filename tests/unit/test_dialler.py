"""M3.3: candidates one after the other, with providers and a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.shape import Untranslatable
from encoders.shapes import OPENAI
from relay.attempts import Dialler
from relay.errors import (
    EventTooLarge,
    GatewayShutdown,
    RelayError,
    UpstreamError,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTruncated,
    UpstreamUnavailable,
    UpstreamUnreachable,
)
from relay.record import RequestRecord
from relay.request import RelayRequest
from relay.routing import Candidate, Provider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.attempts import Opened
    from relay.upstreams.base import UpstreamReply, UpstreamRequest

Says = BaseException | int  # a failure, or the status of an answer

RETRY_AFTER: Final = {"content-type": "text/event-stream", "retry-after": "9"}


class Reply:
    def __init__(self, status: int) -> None:
        self.status = status
        self.headers: Mapping[str, str] = RETRY_AFTER
        self.aborted = False

    async def read(self) -> bytes:
        return b""

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    async def release(self) -> None:
        pass


class Upstream:
    """Says one thing after the other, the last one for ever."""

    def __init__(self, name: str, *says: Says) -> None:
        self.name = name
        self.says = list(says)
        self.asked: list[UpstreamRequest] = []
        self.replies: list[Reply] = []

    async def start(self) -> None:
        pass

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        self.asked.append(request)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, BaseException):
            raise said
        self.replies.append(Reply(said))
        return self.replies[-1]

    async def close(self) -> None:
        pass


class World:
    """A dialler, its clock, and one request after the other."""

    def __init__(self, **says: Says | tuple[Says, ...]) -> None:
        self.now = 0.0
        self.dials = 0
        self.dialler = Dialler(clock=lambda: self.now)
        self.up = {
            name: Upstream(name, *(said if isinstance(said, tuple) else (said,)))
            for name, said in says.items()
        }
        self.route = tuple(self.candidate(name) for name in self.up)
        self.record = RequestRecord(request_id="req_0", started=0.0)

    def candidate(self, name: str, **descriptor: Any) -> Candidate:
        provider = Provider(name=name, upstream=self.up[name], **descriptor)
        return Candidate(provider=provider, model="m")

    async def ask(self, **body: Any) -> Opened:
        self.record = RequestRecord(request_id="req_0", started=self.now)
        self.dials = 0

        def dialling() -> None:
            self.dials += 1

        request = RelayRequest(
            request_id="req_0",
            slug="s",
            stream=True,
            include_usage=False,
            choices=1,
            created=0,
            body={"messages": []} | body,
            prompt_tokens=1,
        )
        return await self.dialler.open_first(self.route, request, self.record, dialling=dialling)

    async def fails(self) -> UpstreamError:
        with pytest.raises(UpstreamError) as failed:
            await self.ask()
        return failed.value

    @property
    def tried(self) -> str:
        return "".join(attempt.provider for attempt in self.record.attempts)


def limited(seconds: int | None) -> UpstreamRateLimited:
    return UpstreamRateLimited("x", retry_after_s=seconds)


# --- the verdict ----------------------------------------------------------------------------------


async def test_the_last_error_decides() -> None:
    first, last = UpstreamError("first"), UpstreamError("last")
    assert await World(a=first, b=last).fails() is last


@pytest.mark.parametrize(
    ("errors", "wait"),
    [
        ([limited(30), limited(7), limited(60)], 7),
        ([limited(30), limited(None)], 30),
        ([limited(None), limited(None)], None),
        ([limited(3), UpstreamUnavailable("x", retry_after_s=9)], 3),
        ([limited(3), UpstreamUnavailable("x")], 3),
        ([UpstreamError("x"), limited(30)], 30),
        ([limited(3), UpstreamError("x")], None),
        ([limited(3), UpstreamError("x"), limited(30)], 30),
    ],
)
async def test_where_all_are_limited_the_shortest_wait_is_told(
    errors: list[UpstreamError], wait: int | None
) -> None:
    """B56."""
    world = World(**dict(zip("abc", errors, strict=False)))
    failure = await world.fails()
    assert failure is errors[-1]
    assert failure.retry_after_s == wait


async def test_who_was_never_asked_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """M5: a shape that has no words for the request says nothing about the provider that is down;
    where no shape has them, it is the client's own fault.
    """
    down = UpstreamUnavailable("down", retry_after_s=4)
    world = World(a=down, b=200)

    class Mute(type(OPENAI)):  # type: ignore[misc]
        def request(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise Untranslatable("no words", param="p")

    mute = world.candidate("b", shape=Mute())
    world.route = (world.route[0], mute)
    assert await world.fails() is down
    assert (world.tried, world.record.provider) == ("ab", "a")
    assert not world.up["b"].asked
    assert [attempt.asked for attempt in world.record.attempts] == [True, False]
    assert world.dials == 1
    world.route = (mute,)
    failure = await world.fails()
    assert (failure.status, failure.code, failure.param) == (400, "invalid_request", "p")
    assert [attempt.asked for attempt in world.record.attempts] == [False]
    assert world.dials == 0


# --- the order ------------------------------------------------------------------------------------


async def test_who_failed_is_passed_by_and_the_record_says_so() -> None:
    world = World(a=(UpstreamError("x"), 200), b=200)
    await world.ask()
    assert (world.tried, world.record.cooling) == ("ab", [])
    world.now = 1.0
    await world.ask()
    assert (world.tried, world.record.cooling) == ("b", ["a/m: 29.0 s"])
    assert world.record.fields(1.0)["cooling"] == ["a/m: 29.0 s"]
    world.now = 30.0
    await world.ask()
    assert (world.tried, world.record.cooling) == ("a", [])


async def test_a_provider_that_is_gone_is_passed_by_within_one_request() -> None:
    """Its other models come after everyone else."""
    world = World(a=UpstreamUnreachable("x"), b=200)
    other = Candidate(provider=world.route[0].provider, model="other")
    world.route = (world.route[0], other, world.route[1])
    await world.ask()
    assert world.tried == "ab"


@pytest.mark.parametrize(("status", "order"), [(401, "ab"), (402, "ab"), (403, "aab")])
async def test_a_403_tells_against_one_model(status: int, order: str) -> None:
    world = World(a=(status, status, 200), b=200)
    other = Candidate(provider=world.route[0].provider, model="other")
    world.route = (world.route[0], other, world.route[1])
    await world.ask()
    assert world.tried == order


@pytest.mark.parametrize(
    ("error", "cools"),
    [
        (UpstreamTruncated("x"), True),
        (UpstreamError("x"), True),
        (EventTooLarge("x"), False),
        (GatewayShutdown("x"), False),
        (RelayError("a hang-up, or a bug of ours"), False),
    ],
)
async def test_how_an_answer_ends_counts(error: RelayError, cools: bool) -> None:
    """B47: a death in the middle is a failure; what is not the provider's doing is none."""
    world = World(a=200, b=200)
    world.dialler.ended(await world.ask(), error)
    await world.ask()
    assert world.tried == ("b" if cools else "a")


async def test_an_answer_that_is_complete_clears_its_provider() -> None:
    world = World(a=(UpstreamError("x"), 200), b=UpstreamError("x"))
    await world.fails()
    world.dialler.ended(await world.ask(), None)
    assert world.tried == "a"
    await world.ask()
    assert (world.tried, len(world.record.cooling)) == ("a", 1)


async def test_a_hang_up_cools_nobody() -> None:
    world = World(a=(asyncio.CancelledError(), 200), b=200)
    with pytest.raises(asyncio.CancelledError):
        await world.ask()
    assert str(world.record.attempts[0]) == "a/m: cancelled 0 ms"
    await world.ask()
    assert world.tried == "a"


async def test_what_an_attempt_was_is_noted() -> None:
    """Provider, model, code, status if there was one, duration; a refusal closes its connection."""
    world = World(a=503, b=UpstreamUnavailable("no connection"), c=200)
    await world.ask()
    assert world.record.attempt_lines() == [
        "a/m: upstream_unavailable 503 0 ms",
        "b/m: upstream_unavailable 0 ms",
        "c/m: ok 200 0 ms",
    ]
    assert world.up["a"].replies[0].aborted
    assert not world.up["c"].replies[0].aborted
    assert (world.record.provider, world.record.upstream_model) == ("c", "m")


STATUSES: Final = [200, 400, 401, 404, 408, 413, 422, 429, 500, 503]


@given(
    st.lists(st.lists(st.sampled_from(STATUSES), min_size=8, max_size=8), min_size=1, max_size=5),
    st.lists(st.floats(0, 100), min_size=1, max_size=8),
)
def test_each_candidate_is_tried_at_most_once_until_one_serves(
    says: list[list[int]], pauses: list[float]
) -> None:
    names = "abcde"[: len(says)]
    world = World(**{name: tuple(said) for name, said in zip(names, says, strict=True)})
    world.route = tuple(world.candidate(name, stream_options=False) for name in names)

    async def run() -> None:
        for pause in pauses:
            world.now += pause
            try:
                opened = await world.ask()
            except UpstreamError as failure:
                at_once = failure.status in (400, 413, 422)
                assert at_once or sorted(world.tried) == sorted(names), "none was left out"
            else:
                assert opened.candidate.provider.name == world.tried[-1]
                world.dialler.ended(opened, None)
            assert len(set(world.tried)) == len(world.tried)
            told = [attempt.error_code for attempt in world.record.attempts]
            assert None not in told[:-1]

    asyncio.run(run())


# --- stream_options -------------------------------------------------------------------------------

ABOUT_IT: Final = UpstreamRefused("Unrecognized argument: stream_options", status=400)
SOME_400: Final = UpstreamRefused("something is wrong", status=400)


def options(upstream: Upstream) -> list[object]:
    return [asked.body.get("stream_options") for asked in upstream.asked]


OURS: Final = {"include_usage": True}


@pytest.mark.parametrize("refusal", [ABOUT_IT, SOME_400])
async def test_a_400_to_options_that_only_we_added_is_tried_once_without(
    refusal: UpstreamRefused,
) -> None:
    world = World(a=(refusal, 200), b=200)
    opened = await world.ask()
    assert options(world.up["a"]) == [OURS, None]
    assert not opened.stream_options
    assert world.record.attempt_lines() == ["a/m: invalid_request 0 ms", "a/m: ok 200 0 ms"]


async def test_it_is_remembered_where_the_refusal_names_it() -> None:
    world = World(a=(ABOUT_IT, 200))
    for _ in range(3):
        await world.ask()
    assert options(world.up["a"]) == [OURS, None, None, None]
    world = World(a=(SOME_400, 200))
    for _ in range(2):
        await world.ask()
    assert options(world.up["a"]) == [OURS, None, OURS], "an answer by luck proves nothing"


async def test_options_of_the_client_are_the_clients() -> None:
    """Also where ours are known to be refused."""
    world = World(a=(ABOUT_IT, 200, ABOUT_IT))
    await world.ask()
    with pytest.raises(UpstreamRefused):
        await world.ask(stream_options={"x": 1})
    assert options(world.up["a"]) == [OURS, None, {"x": 1} | OURS]


async def test_a_second_400_returns_at_once() -> None:
    second = UpstreamRefused("second", status=400)
    world = World(a=(ABOUT_IT, second), b=200)
    assert await world.fails() is second
    assert world.tried == "aa"


async def test_another_failure_of_the_second_try_fails_over() -> None:
    world = World(a=(ABOUT_IT, 500, 200), b=200)
    await world.ask()
    assert world.tried == "aab"
    await world.ask()
    assert world.tried == "b"


@pytest.mark.parametrize("status", [413, 422])
async def test_other_refusals_are_not_about_it(status: int) -> None:
    world = World(a=UpstreamRefused("something is wrong", status=status), b=200)
    await world.fails()
    assert world.tried == "a"


async def test_a_422_that_names_it_is() -> None:
    """What validating servers say to a field that they do not know."""
    world = World(a=(UpstreamRefused("x", status=422, param="body.stream_options"), 200))
    await world.ask()
    assert options(world.up["a"]) == [OURS, None]


async def test_a_provider_that_is_sent_none_is_not_asked_twice() -> None:
    world = World(a=SOME_400)
    world.route = (world.candidate("a", stream_options=False),)
    await world.fails()
    assert options(world.up["a"]) == [None]
