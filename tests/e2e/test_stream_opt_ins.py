"""M3.3: `first_byte_timeout_s`, `peek_first_event_s`, `idle_timeout_s`.

Cases B54, B58, B60, B76 of the hazards.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from relay.money import Source
from tests.support.books import books_of
from tests.support.checks import HANG_UP_BOUND_S, until
from tests.support.fake_upstream import (
    DONE,
    PING,
    Eof,
    FakeUpstream,
    Fin,
    Head,
    Pings,
    Rst,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import GatewayProcess, config_for
from tests.support.routes import Routes
from tests.support.stack import API_V1, V1, Answer, Stack, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.routes import Route

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAM_OR_NOT: Final = pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
COMMENT: Final = b": OPENROUTER PROCESSING\n\n"
A: Final = chunk("a", role="assistant")
B: Final = chunk("b")
STOP: Final = chunk(None, finish_reason="stop")
LIMIT_S: Final = 0.4
KINDS: Final[dict[str, dict[str, Any]]] = {
    "byte": {"first_byte_timeout_s": LIMIT_S, "aggregate": True},
    "peek": {"peek_first_event_s": 5, "aggregate": True},
    "hasty": {"peek_first_event_s": LIMIT_S, "aggregate": True},
    "idle": {"idle_timeout_s": LIMIT_S, "aggregate": True},
    "slow": {"first_byte_timeout_s": 6, "peek_first_event_s": 5},
    "off": {},
}


def silence() -> Wait:
    return Wait(asyncio.Event())


def error_event(**error: Any) -> bytes:
    return sse(chunk(None, choices=[], error={"message": "it says so"} | error))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def routes() -> AsyncIterator[Routes]:
    async with FakeUpstream() as up:
        yield Routes(up, KINDS, count=15, more={"peek": 75, "byte": 20})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(routes: Routes) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(config_for(routes.up, **routes.config())) as process:
        yield process


@pytest.fixture
def stack(routes: Routes, gateway: GatewayProcess) -> Iterator[Stack]:
    stack = Stack(routes.up, gateway)
    yield stack
    stack.check()


async def error_code(stack: Stack, answer: Answer) -> tuple[int, str | None, Source, int]:
    """What the one row of a request says: status, code, where its counts are from, its amount."""
    async with books_of(stack.gateway.workdir) as books:
        rows = await books.settled()
    (row,) = [row for row in rows if row.request_id == answer.header("x-request-id")]
    return row.status, row.error_code, row.source, row.completion_tokens


def text_of(answer: Answer, *, stream: bool) -> str:
    if stream:
        return answer.text
    assert answer.status == 200
    content: str = answer.json["choices"][0]["message"]["content"]
    return content


# --- the first byte -------------------------------------------------------------------------------

SILENT: Final[dict[str, list[Step]]] = {
    "no status": [silence()],
    "no body": [Head(), silence()],
    "comments": [Head(), Pings(1000, LIMIT_S / 8)],
    "half a comment": [Head(), Send(b": wai"), silence()],
    "silent JSON": [Head(200, {"content-type": "application/json"}), silence()],
}


@STREAM_OR_NOT
@pytest.mark.parametrize("steps", SILENT.values(), ids=SILENT.keys())
async def test_who_sends_no_first_byte_is_passed_by(
    stack: Stack, routes: Routes, steps: list[Step], stream: bool
) -> None:
    """B60: the second answers soon, the first is closed; comments do not reset the clock."""
    route = routes.take("byte")
    route.script("a", *steps)
    route.script("b", *openai_stream(["b"]))
    started = time.monotonic()
    answer = await stack.ask(model=route.slug, stream=stream)
    took = time.monotonic() - started
    assert text_of(answer, stream=stream) == "b"
    assert LIMIT_S * 0.9 < took < LIMIT_S * 10
    await route.asked("a")[0].wait_closed()
    first, _ = (await stack.line(answer))["attempts"]
    assert "upstream_timeout" in first
    assert (" 200 " in first) is isinstance(steps[0], Head)
    route.script("b", *openai_stream(["b"]))
    await stack.ask(model=route.slug, stream=stream)
    assert route.order == "abb", "it cools"


@STREAM_OR_NOT
async def test_the_last_one_is_not_cut(stack: Stack, routes: Routes, stream: bool) -> None:
    """B60: it has all the time that it needs."""
    route = routes.take("byte")
    route.script("a", silence())
    route.script("b", Head(), silence())
    route.script("c", Sleep(LIMIT_S), Head(), Sleep(2 * LIMIT_S), *openai_stream(["c"]))
    answer = await stack.ask(model=route.slug, stream=stream)
    assert (text_of(answer, stream=stream), route.order) == ("c", "abc")


@pytest.mark.parametrize("first", [b"d", b": x\nd", b"event: message\nd"])
async def test_a_first_byte_stops_the_clock(stack: Stack, routes: Routes, first: bytes) -> None:
    """M3.3: what follows may take its time; nothing of it is lost."""
    route = routes.take("byte")
    rest = b"ata: " + A + b"\n\n" + sse(STOP) + DONE
    route.script("a", Send(first), Sleep(2 * LIMIT_S), Send(rest))
    answer = await stack.ask(model=route.slug)
    assert (answer.text, route.order) == ("a", "a")


async def test_a_refusal_whose_body_is_slow_is_a_refusal(stack: Stack, routes: Routes) -> None:
    """M1.2: its status counts, not the clock of a first byte."""
    route = routes.take("byte")
    head = Head(500, {"content-length": "9"}, "length")
    route.script("a", head, Sleep(2 * LIMIT_S), Send(b"it failed"))
    route.script("b", *openai_stream(["b"]))
    answer = await stack.ask(model=route.slug)
    assert "upstream_error 500" in (await stack.line(answer))["attempts"][0]


# --- the peek -------------------------------------------------------------------------------------

UNBEGUN: Final[dict[str, list[Step]]] = {
    "error": [Send(error_event()), silence()],
    "named error": [Send(b"event: error\n" + sse(b'{"message":"it says so"}'))],
    "error behind a comment": [Send(PING), Sleep(0.05), Send(error_event())],
    "error behind a ping": [Send(sse(b'{"type":"ping"}') + error_event())],
    "error behind an empty chunk": [Send(sse(chunk(None, choices=[]))), Send(error_event())],
    "not JSON": [Send(sse(b"<html>"))],
    "empty": [Head(), Eof()],
    "comments alone": [Pings(3, 0.02)],
    "done alone": [Send(DONE)],
    "reset": [Head(), Send(PING), Rst()],
    "cut": [Head(), Send(b"data: {"), Fin()],
}


@STREAM_OR_NOT
@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize("steps", UNBEGUN.values(), ids=UNBEGUN.keys())
async def test_a_stream_that_fails_before_it_begins_fails_over(
    stack: Stack, routes: Routes, steps: list[Step], base: str, stream: bool
) -> None:
    """M3.3, B54, B58: one role, one id, of who served; who failed cools."""
    route = routes.take("peek")
    route.script("a", *steps)
    for _ in range(2):
        route.script("b", Send(sse(A)), Send(sse(STOP) + DONE))
    answer = await stack.ask(model=route.slug, base=base, stream=stream)
    if stream:
        who = {"model": route.slug, "provider": route.name("b")}
        comment = COMMENT if base == API_V1 else b""
        assert answer.body == comment + sse(served(A, **who)) + sse(served(STOP, **who)) + DONE
    else:
        assert text_of(answer, stream=False) == "a"
    if isinstance(steps[-1], Wait):  # else its body was over, and its connection serves on
        await route.asked("a")[0].wait_closed()
    await stack.ask(model=route.slug, base=base, stream=stream)
    assert route.order == "abb"


@STREAM_OR_NOT
@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({}, 502, "upstream_error"),
        ({"code": 429}, 429, "rate_limit_exceeded"),
        ({"code": 503}, 503, "upstream_unavailable"),
    ],
)
async def test_where_no_stream_begins_the_error_is_a_real_one(
    stack: Stack,
    routes: Routes,
    error: dict[str, Any],
    status: int,
    code: str,
    base: str,
    stream: bool,
) -> None:
    """B54: no 200 was sent, so the last one's status is; and nothing is paid for."""
    route = routes.take("peek")
    for letter in "ab":
        route.script(letter, *json_answer({}, status=500))
    route.script("c", Send(error_event(**error)))
    answer = await stack.ask(model=route.slug, base=base, stream=stream)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert "it says so" in answer.error["message"]
    assert await error_code(stack, answer) == (status, code, Source.NONE, 0)


async def test_a_first_event_that_is_the_clients_fault(stack: Stack, routes: Routes) -> None:
    """M3.3: as a 400; nobody else is asked."""
    route = routes.take("peek")
    route.script("a", Send(error_event(code=422)))
    answer = await stack.ask(model=route.slug)
    assert (answer.status, answer.error["code"], route.order) == (422, "invalid_request", "a")


async def test_no_failover_after_the_first_event(stack: Stack, routes: Routes) -> None:
    """B58: "Hel" and a death are one answer, and it failed."""
    route = routes.take("peek")
    route.script("a", Send(sse(A)), Rst())
    answer = await stack.ask(model=route.slug)
    assert answer.in_band["code"] == "upstream_error"
    assert (len(answer.chunks), route.order) == (2, "a")
    route = routes.take("peek")
    route.script("a", Send(sse(A) + error_event()))
    answer = await stack.ask(model=route.slug)
    assert [b'"error"' in data for data in answer.data] == [False, True, False]
    assert route.order == "a"


async def test_the_headers_leave_with_the_first_event(stack: Stack, routes: Routes) -> None:
    """M1.3: not before it, and not after it."""
    route = routes.take("peek")
    first, second = asyncio.Event(), asyncio.Event()
    steps: list[Step] = [
        Head(),
        Send(PING),
        Wait(first),
        Send(sse(A)),
        Wait(second),
        Send(sse(STOP) + DONE),
    ]
    route.script("a", *steps)
    async with stack.client(model=route.slug) as client:
        with pytest.raises(TimeoutError):
            await client.read_head(timeout=0.5)
        first.set()
        await client.read_until(lambda c: c.events)
        assert client.header("content-type") == "text/event-stream"
        second.set()
        await client.read_all()
    assert (
        client.body
        == sse(served(A, model=route.slug, provider=route.name("a")))
        + sse(served(STOP, model=route.slug, provider=route.name("a")))
        + DONE
    )


@pytest.mark.parametrize("before", [b"", PING, b"data: "], ids=["nothing", "comment", "a piece"])
async def test_a_slow_stream_is_sent_as_it_is(stack: Stack, routes: Routes, before: bytes) -> None:
    """B54: when the time of the peek is over its headers leave, and it is not given up."""
    route = routes.take("hasty")
    gate = asyncio.Event()
    rest = sse(A).removeprefix(before) + sse(STOP) + DONE
    route.script("a", Head(), Send(before), Wait(gate), Send(rest))
    async with stack.client(model=route.slug) as client:
        await client.read_head()
        assert client.status == 200
        assert not client.body
        gate.set()
        await client.read_all()
    assert client.body.endswith(DONE)
    assert route.order == "a"


async def test_a_slow_stream_that_fails_fails_in_band(stack: Stack, routes: Routes) -> None:
    """M3.4: once its headers have left."""
    route = routes.take("hasty")
    route.script("a", Head(), Sleep(2 * LIMIT_S), Rst())
    answer = await stack.ask(model=route.slug)
    assert answer.in_band["code"] == "upstream_error"
    assert route.order == "a"


async def test_a_first_event_of_megabytes(stack: Stack, routes: Routes) -> None:
    """B54: the peek is bounded in bytes; the event is not."""
    route = routes.take("peek")
    large = chunk("x" * 2_000_000, role="assistant")
    route.script("a", Send(sse(large)), Send(sse(STOP) + DONE))
    answer = await stack.ask(model=route.slug)
    assert len(answer.text) == 2_000_000


@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize("steps", [[], [Head()], [Head(), Send(PING)]], ids=["", "head", "ping"])
async def test_a_hang_up_in_the_peek(
    stack: Stack, routes: Routes, steps: list[Step], base: str
) -> None:
    """M4.1, M3.3: the upstream is closed at once, nobody else is asked, nobody is cooled."""
    route = routes.take("peek")
    route.script("a", *steps, silence())
    async with stack.client(model=route.slug, base=base) as client:
        while not route.asked("a"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        client.reset()
    left_at = time.monotonic()
    assert await route.asked("a")[0].wait_closed(HANG_UP_BOUND_S) - left_at < HANG_UP_BOUND_S
    route.script("a", *openai_stream(["a"]))
    answer = await stack.ask(model=route.slug, base=base)
    assert (answer.text, route.order) == ("a", "aa")
    await until(lambda: '"error_code":"client_abort"' in stack.log, what="the log line")


# --- comments meanwhile ---------------------------------------------------------------------------


async def test_candidates_are_tried_on_behind_comments(stack: Stack, routes: Routes) -> None:
    """M1.3, M2.1: the headers leave with the first comment, five seconds on; failover is possible
    until a byte of a stream was sent, and a failure of all is then told in-band. On `/v1` all that
    is silent.
    """
    asked: dict[str, Route] = {}
    for name in ("served", "failed", "quiet"):
        asked[name] = route = routes.take("slow")
        route.script("a", Head(), Pings(1000, 0.5))
    route = asked["served"]
    route.script("b", Head(), Sleep(0.5), *openai_stream(["b"], usage=False))
    asked["quiet"].script("b", Head(), *openai_stream(["b"], usage=False))
    asked["failed"].script("b", Send(error_event(code=429)))
    asked["failed"].script("c", *json_answer({"error": {"message": "last"}}, status=503))
    started = time.monotonic()

    async def first_byte(route: Route, base: str) -> tuple[float, Answer]:
        async with stack.client(model=route.slug, base=base) as client:
            await client.read_head(timeout=20)
            at = time.monotonic() - started
            await client.read_all(timeout=20)
        return at, Answer(client.status, client.headers, client.body)

    (at, good), (bad_at, bad), (quiet_at, quiet) = await asyncio.gather(
        first_byte(route, API_V1),
        first_byte(asked["failed"], API_V1),
        first_byte(asked["quiet"], V1),
    )
    assert 4.8 < at < quiet_at
    assert 4.8 < bad_at < quiet_at
    assert quiet_at > 5.8
    assert good.body.startswith(COMMENT)
    assert good.text == quiet.text == "b"
    assert bad.in_band["code"] == "upstream_unavailable"
    assert "last" in bad.in_band["message"]
    assert COMMENT not in quiet.body
    assert asked["failed"].order == "abc"
    assert await error_code(stack, bad) == (502, "upstream_error", Source.NONE, 0)


# --- silence in the middle ------------------------------------------------------------------------


@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize("sent", [[A, B], []], ids=["two chunks", "nothing"])
async def test_a_stalled_stream_ends_in_band(
    stack: Stack, routes: Routes, sent: list[bytes], base: str
) -> None:
    """B76: the error and `[DONE]`, the upstream closed, what was streamed settled; it cools."""
    route = routes.take("idle")
    route.script("a", Head(), *(Send(sse(data)) for data in sent), silence())
    started = time.monotonic()
    answer = await stack.ask(model=route.slug, base=base)
    assert LIMIT_S * 0.9 < time.monotonic() - started < 10 * LIMIT_S
    assert answer.in_band["code"] == "upstream_error"
    assert "sent nothing for 0.4 s" in answer.in_band["message"]
    assert len(answer.chunks) == len(sent) + 1
    await route.asked("a")[0].wait_closed()
    source, tokens = (Source.COUNTED, 1) if sent else (Source.NONE, 0)
    assert await error_code(stack, answer) == (502, "upstream_error", source, tokens)
    route.script("b", *openai_stream(["b"]))
    await stack.ask(model=route.slug, base=base)
    assert route.order == "ab"


async def test_a_plain_request_whose_stream_stalls(stack: Stack, routes: Routes) -> None:
    """M3.3, M4.1: no failover once bytes flow, but a real error."""
    route = routes.take("idle")
    route.script("a", Send(sse(A)), silence())
    answer = await stack.ask(model=route.slug, stream=False)
    assert (answer.status, answer.error["code"], route.order) == (502, "upstream_error", "a")
    await route.asked("a")[0].wait_closed()
    assert await error_code(stack, answer) == (502, "upstream_error", Source.NONE, 0)


async def test_comments_are_no_silence(stack: Stack, routes: Routes) -> None:
    """B76: the upstream is at work; nor are chunks that come slowly, however many (B75)."""
    route = routes.take("idle")
    gap = LIMIT_S / 8
    slow = [step for data in (B,) * 16 for step in (Send(sse(data)), Sleep(gap))]
    end = [Send(sse(STOP)), Send(DONE)]
    route.script("a", Send(sse(A)), Pings(20, gap), Sleep(gap), *slow, *end)
    answer = await stack.ask(model=route.slug)
    assert answer.text == "a" + 16 * "b"


async def test_a_stall_behind_the_end_is_none(stack: Stack, routes: Routes) -> None:
    """M3.4: nothing of the answer is missing."""
    route = routes.take("idle")
    route.script("a", Send(sse(A)), Send(sse(STOP)), silence())
    answer = await stack.ask(model=route.slug)
    assert answer.text == "a"
    assert not any("error" in chunk for chunk in answer.chunks)


async def test_a_client_that_reads_slowly_is_no_silence(stack: Stack, routes: Routes) -> None:
    """M3.5: the clock runs while the gateway waits for the upstream, not for the client."""
    route = routes.take("idle")
    block = chunk("y" * 30_000)
    many = [Send(sse(block))] * 200
    route.script("a", Send(sse(A)), *many, Send(sse(STOP) + DONE))
    async with stack.gateway.client(rcvbuf=8192) as client:
        body = {"model": route.slug, "stream": True, "messages": []}
        body["messages"] = [{"role": "user", "content": "Hello"}]
        headers = [("authorization", "Bearer ozk_test_0123456789abcdef")]
        await client.request("POST", "/v1/chat/completions", headers=headers, json=body)
        await client.read_head()
        await asyncio.sleep(4 * LIMIT_S)
        await client.read_all(timeout=20)
    assert client.body.endswith(DONE)
    assert b'"error"' not in client.body


async def test_without_the_opt_ins_silence_is_nothing(stack: Stack, routes: Routes) -> None:
    """M3.3: off by default; an error event passes as it was sent."""
    route = routes.take("off")
    route.script("a", Head(), Sleep(3 * LIMIT_S), Send(sse(A)), Sleep(3 * LIMIT_S), Send(DONE))
    assert (await stack.ask(model=route.slug)).text == "a"
    route.script("a", Head(), Send(error_event()))
    answer = await stack.ask(model=route.slug)
    assert b"it says so" in answer.body
    assert route.order == "aa"


# --- the drain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[], [Head(), Send(PING)]], ids=["no status", "peek"])
async def test_a_shutdown_in_the_peek(steps: list[Step]) -> None:
    """M3.6: a real 503, and the upstream is closed."""
    async with FakeUpstream() as up:
        routes = Routes(up, {"slow": KINDS["slow"]}, count=1)
        config = config_for(up, **routes.config(), server={"shutdown_grace_s": 0.2})
        async with GatewayProcess(config) as gateway:
            route = routes.take("slow")
            route.script("a", *steps, silence())
            stack = Stack(up, gateway)
            async with stack.client(model=route.slug) as client:
                asked = await up.request()
                await asyncio.sleep(0.1)
                gateway.terminate()
                await client.read_all()
            assert client.status == 503
            assert client.json["error"]["code"] == "gateway_shutdown"
            await asked.wait_closed()
            assert await gateway.wait() == 0
            assert route.order == "a"
