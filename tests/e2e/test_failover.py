"""M3.3: candidates in order, cool-down, the last error, one hold. Cases B47, B51, B56, B58."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from bench.ports import free_port
from relay.money import Source
from tests.support.books import Books, books_of
from tests.support.checks import HANG_UP_BOUND_S
from tests.support.fake_upstream import (
    DONE,
    Eof,
    FakeUpstream,
    Fin,
    Head,
    Raw,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import GatewayProcess, config_for
from tests.support.routes import Routes
from tests.support.stack import API_V1, V1, Answer, Stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from relay.money import Settlement
    from tests.support.routes import Route

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAM_OR_NOT: Final = pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
A: Final = chunk("a", role="assistant")
STOP: Final = chunk(None, finish_reason="stop")
WHOLE: Final = {"id": "x", "choices": [{"index": 0, "message": {"content": "Hi"}}]}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "refusing": {"a": {"base_url": f"http://127.0.0.1:{free_port()}/v1"}},
    "nameless": {"a": {"base_url": "http://no-such-host.invalid/v1"}},
    "impatient": {"a": {"header_timeout_s": 0.3}},
    "aggregate": {"aggregate": True},
    "no-options": {"stream_options": False},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routes() -> AsyncIterator[Routes]:
    async with FakeUpstream() as up:
        yield Routes(up, KINDS, count=8, more={"plain": 110})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(routes: Routes) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(config_for(routes.up, **routes.config())) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def books(gateway: GatewayProcess) -> AsyncIterator[Books]:
    async with books_of(gateway.workdir) as books:
        yield books


@pytest.fixture
def stack(routes: Routes, gateway: GatewayProcess) -> Iterator[Stack]:
    stack = Stack(routes.up, gateway)
    yield stack
    stack.check()


@pytest.fixture
def route(routes: Routes) -> Route:
    return routes.take("plain")


def serve(route: Route, letter: str, *, stream: bool = True) -> None:
    """The candidate answers once."""
    steps = openai_stream([letter], usage=False) if stream else json_answer(WHOLE)
    route.script(letter, *steps)


async def row_of(books: Books, answer: Answer) -> Settlement:
    """The one row of a request."""
    rows = await books.settled()
    (row,) = [r for r in rows if r.request_id == answer.header("x-request-id")]
    return row


# --- who is tried next ----------------------------------------------------------------------------


@STREAM_OR_NOT
@pytest.mark.parametrize(
    "status", [401, 402, 403, 404, 405, 408, 409, 425, 429, 500, 501, 502, 503, 504, 520, 529]
)
async def test_a_status_that_fails_over(
    stack: Stack, route: Route, status: int, stream: bool
) -> None:
    """M3.3, B51: the client sees nothing of it; the next request goes straight to the second."""
    route.script("a", *json_answer({"error": {"message": "no"}}, status=status))
    answers = []
    for _ in range(2):
        serve(route, "b", stream=stream)
        answer = await stack.ask(model=route.slug, stream=stream)
        assert answer.status == 200
        served = answer.chunks[0] if stream else answer.json
        assert (served["model"], served["provider"]) == (route.slug, route.name("b"))
        answers.append(answer)
    assert route.order == "abb"
    line = await stack.line(answers[1])
    assert line["provider"] == route.name("b")
    (cooling,) = line["cooling"]
    assert cooling.startswith(f"{route.name('a')}/{route.name('a')}: ")


@STREAM_OR_NOT
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_status_that_returns_at_once(
    stack: Stack, routes: Routes, status: int, stream: bool
) -> None:
    """M3.3: the client's own fault; nobody is cooled for it."""
    route = routes.take("no-options")
    route.script("a", *json_answer({"error": {"message": "no"}}, status=status))
    assert (await stack.ask(model=route.slug, stream=stream)).status == status
    serve(route, "a", stream=stream)
    answer = await stack.ask(model=route.slug, stream=stream)
    assert (answer.status, route.order) == (200, "aa")
    assert "cooling" not in await stack.line(answer)


ODD: Final[dict[str, list[Step]]] = {
    "closed": [Fin()],
    "reset": [Rst()],
    "not HTTP": [Raw(b"SSH-2.0-OpenSSH_9.2\r\n"), Fin()],
    "error with 200": json_answer({"error": {"message": "no"}}),
    "no completion": json_answer({"x": 1}),
    "cut JSON": [Head(200, {"content-type": "application/json"}), Send(b'{"choices":['), Rst()],
}


@STREAM_OR_NOT
@pytest.mark.parametrize("steps", ODD.values(), ids=ODD.keys())
async def test_what_is_no_answer_fails_over(
    stack: Stack, route: Route, steps: list[Step], stream: bool
) -> None:
    """M3.3: also an error body with status 200, of a plain reply too."""
    route.script("a", *steps)
    for _ in range(2):
        serve(route, "b", stream=stream)
        assert (await stack.ask(model=route.slug, stream=stream)).status == 200
    assert route.order == "abb"


@STREAM_OR_NOT
@pytest.mark.parametrize("kind", ["refusing", "nameless", "impatient"])
async def test_who_cannot_be_reached_fails_over(
    stack: Stack, routes: Routes, kind: str, stream: bool
) -> None:
    """M3.3: no connection, no such name, no status in time."""
    route = routes.take(kind)
    if kind == "impatient":
        route.script("a", Wait(asyncio.Event()))
    answers = []
    for _ in range(2):
        serve(route, "b", stream=stream)
        answers.append(await stack.ask(model=route.slug, stream=stream))
    assert [answer.status for answer in answers] == [200, 200]
    assert route.order.removeprefix("a") == "bb"
    (attempt,) = (await stack.line(answers[1]))["attempts"]
    assert attempt.startswith(f"{route.name('b')}/")
    for request in route.asked("a"):
        await request.wait_closed()


async def test_a_refused_attempt_is_closed_while_the_next_one_runs(
    stack: Stack, route: Route
) -> None:
    """M3.3: also where its body never ends."""
    headers = {"content-length": "1000000"}
    route.script("a", Head(500, headers, "length"), Send(b"x" * 70_000), Wait(asyncio.Event()))
    gate = asyncio.Event()
    route.script("b", Send(sse(A)), Wait(gate), Send(sse(STOP) + DONE))
    async with stack.client(model=route.slug) as client:
        await client.read_until(lambda c: c.events)
        await route.asked("a")[0].wait_closed()
        gate.set()
        await client.read_all()


# --- the cool-down --------------------------------------------------------------------------------


async def test_retry_after_is_honoured_and_expires(stack: Stack, route: Route) -> None:
    """M3.3: one second behind the others, and then first again."""
    route.script("a", *json_answer({}, status=429, retry_after="1"))
    serve(route, "b")
    serve(route, "b")
    asked_at = time.monotonic()
    for _ in range(2):
        await stack.ask(model=route.slug)
    assert route.order == "abb"
    while "a" not in route.order[1:]:
        assert time.monotonic() - asked_at < 10
        await asyncio.sleep(0.2)
        for letter in "ab":
            route.script(letter, *openai_stream(["x"]), repeat=True)
        await stack.ask(model=route.slug)
    assert time.monotonic() - asked_at > 0.9
    await stack.ask(model=route.slug)
    assert route.order.endswith("aa"), "success clears it"


async def test_all_are_tried_where_all_are_cooling(stack: Stack, route: Route) -> None:
    """M3.3: never removed; who is ready first is first. One that serves is forgiven."""
    for letter, wait in zip("abc", ("60", "5", "30"), strict=True):
        route.script(letter, *json_answer({}, status=429, retry_after=wait))
    assert (await stack.ask(model=route.slug)).status == 429
    route.script("b", *json_answer({}, status=500))
    serve(route, "c")
    assert (await stack.ask(model=route.slug)).text == "c"
    serve(route, "c")
    assert (await stack.ask(model=route.slug)).text == "c"
    assert route.order == "abc" + "bc" + "c"


@STREAM_OR_NOT
async def test_a_death_in_the_middle_counts(stack: Stack, routes: Routes, stream: bool) -> None:
    """M3.3, B47, B58: no failover after a byte, but the next request goes elsewhere."""
    route = routes.take("aggregate")
    route.script("a", Head(), Send(sse(A)), Rst())
    answer = await stack.ask(model=route.slug, stream=stream)
    if stream:
        assert answer.in_band["metadata"]["provider_name"] == route.name("a")
    else:
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert route.order == "a"
    serve(route, "b")
    assert (await stack.ask(model=route.slug, stream=stream)).status == 200
    assert route.order == "ab"


@pytest.mark.parametrize(
    ("error", "order"),
    [({"message": "overloaded"}, "ab"), ({"message": "too long", "code": 400}, "aa")],
)
async def test_an_error_event_counts_unless_it_is_the_clients_fault(
    stack: Stack, route: Route, error: dict[str, Any], order: str
) -> None:
    """M3.3, M3.4: it passes as it was sent; without the opt-ins there is no failover on it."""
    route.script("a", Head(), Send(sse(chunk("", error=error))))
    assert error["message"].encode() in (await stack.ask(model=route.slug)).body
    serve(route, order[1])
    await stack.ask(model=route.slug)
    assert route.order == order


@pytest.mark.parametrize("after", ["nothing", "the status", "a chunk"])
async def test_a_hang_up_cools_nobody(stack: Stack, route: Route, after: str) -> None:
    """M3.3, M4.1: the upstream is closed at once, and asked first the next time."""
    head: dict[str, list[Step]] = {
        "nothing": [],
        "the status": [Head()],
        "a chunk": [Head(), Send(sse(A))],
    }
    route.script("a", *head[after], Wait(asyncio.Event()))
    async with stack.client(model=route.slug) as client:
        while not route.asked("a"):
            await asyncio.sleep(0.01)
        if after != "nothing":
            await client.read_head()
        if after == "a chunk":
            await client.read_until(lambda c: c.events)
        client.reset()
    await route.asked("a")[0].wait_closed(HANG_UP_BOUND_S)
    serve(route, "a")
    assert (await stack.ask(model=route.slug)).text == "a"


# --- the last error -------------------------------------------------------------------------------


@STREAM_OR_NOT
@pytest.mark.parametrize("base", [V1, API_V1])
async def test_the_last_error_decides(stack: Stack, route: Route, base: str, stream: bool) -> None:
    """M3.3: and all attempts are in the log, with what each one said."""
    route.script("a", *json_answer({"error": {"message": "m-a"}}, status=500))
    route.script("b", *json_answer({}, status=401))
    route.script("c", *json_answer({"error": {"message": "m-c"}}, status=529))
    answer = await stack.ask(model=route.slug, base=base, stream=stream)
    assert (answer.status, answer.error["code"]) == (503, "upstream_unavailable")
    assert "m-c" in answer.error["message"]
    line = await stack.line(answer)
    told = [attempt.rsplit(" ", 2)[0] for attempt in line["attempts"]]
    codes = zip(
        "abc",
        ("upstream_error 500", "provider_credentials 401", "upstream_unavailable 529"),
        strict=True,
    )
    assert told == [f"{route.name(x)}/{route.name(x)}: {code}" for x, code in codes]
    assert all(attempt.endswith(" ms") for attempt in line["attempts"])


def forms(*seconds: float) -> list[dict[str, str]]:
    """Each of the three spellings of a wait."""
    first, second, third = seconds
    return [
        {"retry_after": f"{first:g}"},
        {"retry_after_ms": f"{1000 * second:g}"},
        {"retry_after": formatdate(time.time() + third, usegmt=True)},
    ]


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("waits", "expected"), [((7, 30, 60), 7), ((90, 12.5, 60), 13), ((90, 60, 20), 20)]
)
async def test_where_all_are_limited_the_shortest_wait_is_told(
    stack: Stack, route: Route, waits: tuple[float, ...], expected: int, stream: bool
) -> None:
    """B56: seconds, milliseconds and dates; the last error's own status."""
    statuses = (429, 503, 429)
    for letter, status, headers in zip("abc", statuses, forms(*waits), strict=True):
        route.script(letter, *json_answer({}, status=status, **headers))
    answer = await stack.ask(model=route.slug, stream=stream)
    assert answer.status == 429
    assert expected - 5 <= int(answer.header("retry-after") or "") <= expected + 1


async def test_where_not_all_are_limited_nobody_waits(stack: Stack, route: Route) -> None:
    """B56: the last error's own Retry-After, and it has none."""
    route.script("a", *json_answer({}, status=429, retry_after="9"))
    route.script("b", *json_answer({}, status=429, retry_after="9"))
    route.script("c", *json_answer({}, status=500))
    answer = await stack.ask(model=route.slug)
    assert (answer.status, answer.header("retry-after")) == (502, None)


# --- stream_options -------------------------------------------------------------------------------

NAMES_IT: Final = {"error": {"message": "unknown field stream_options"}}


async def test_a_400_to_our_own_stream_options(stack: Stack, route: Route, books: Books) -> None:
    """M3.3, M2.4: tried once without; then it is known, and what is used is counted."""
    route.script("a", *json_answer(NAMES_IT, status=400))
    for _ in range(2):
        serve(route, "a")
    first, second = [await stack.ask(model=route.slug) for _ in range(2)]
    assert (first.text, second.text, route.order) == ("a", "a", "aaa")
    sent = [request.json.get("stream_options") for request in route.asked("a")]
    assert sent == [{"include_usage": True}, None, None]
    row = await row_of(books, second)
    assert (row.status, row.source, row.completion_tokens) == (200, Source.COUNTED, 1)


async def test_a_null_usage_is_the_providers_own_where_it_was_not_asked(
    stack: Stack, route: Route
) -> None:
    """M2.2: only a `"usage":null` that our asking caused is cut out."""
    odd = chunk("a", role="assistant", usage=None)
    route.script("a", *json_answer({}, status=400))
    route.script("a", Send(sse(odd)), Send(sse(STOP) + DONE))
    assert b'"usage":null' in (await stack.ask(model=route.slug)).body


@STREAM_OR_NOT
async def test_a_second_400_returns_at_once(stack: Stack, routes: Routes, stream: bool) -> None:
    """M3.3: a plain request, dialled as a stream, too; its connections are closed."""
    route = routes.take("aggregate")
    for word in ("first", "second"):
        route.script("a", *json_answer({"error": {"message": word}}, status=400))
    answer = await stack.ask(model=route.slug, stream=stream)
    assert (answer.status, answer.error["message"]) == (400, "second")
    assert route.order == "aa"
    assert [a.rsplit(" ", 2)[0] for a in (await stack.line(answer))["attempts"]] == [
        f"{route.name('a')}/{route.name('a')}: invalid_request 400"
    ] * 2


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
async def test_options_of_the_client_are_not_taken_away(
    stack: Stack, route: Route, options: dict[str, Any]
) -> None:
    """M3.3: a refusal of them is told."""
    route.script("a", *json_answer(NAMES_IT, status=400))
    answer = await stack.ask(model=route.slug, stream_options=options)
    assert (answer.status, route.order) == (400, "a")


# --- the money ------------------------------------------------------------------------------------


@STREAM_OR_NOT
async def test_one_hold_and_one_row_for_who_served(
    stack: Stack, route: Route, books: Books, stream: bool
) -> None:
    """M4.2: however many were tried."""
    route.script("a", *json_answer({}, status=500))
    route.script("b", *json_answer({}, status=429))
    serve(route, "c", stream=stream)
    answer = await stack.ask(model=route.slug, stream=stream)
    row = await row_of(books, answer)
    assert (row.status, row.error_code, row.provider) == (200, None, route.name("c"))
    told = [attempt.split(": ")[1].rsplit(" ", 2)[0] for attempt in row.attempts]
    assert told == ["upstream_error 500", "rate_limit_exceeded 429", "ok 200"]


@STREAM_OR_NOT
async def test_where_nobody_served_the_hold_is_released(
    stack: Stack, route: Route, books: Books, stream: bool
) -> None:
    """M4.2: a row of amount 0."""
    for letter in "abc":
        route.script(letter, *json_answer({}, status=500))
    answer = await stack.ask(model=route.slug, stream=stream)
    row = await row_of(books, answer)
    assert (row.status, row.error_code) == (502, "upstream_error")
    assert (row.source, row.cost_micro_usd, len(row.attempts)) == (Source.NONE, 0, 3)


async def test_many_at_once_on_a_route_that_fails(stack: Stack, route: Route) -> None:
    """M3.3: each is served, and none is tried twice."""
    route.script("a", *json_answer({}, status=503), repeat=True)
    route.script("b", Head(), *openai_stream(["b"]), Eof(), repeat=True)
    answers = await asyncio.gather(*(stack.ask(model=route.slug) for _ in range(40)))
    assert {answer.text for answer in answers} == {"b"}
    assert route.order.count("b") == 40
    before = route.order.count("a")
    await stack.ask(model=route.slug)
    assert route.order.count("a") == before <= 40
