"""M2.1, M1.4: comments under `/api/v1`, and none where they are not wanted.

The moments are those of the contract (5 s without a status, then every 10 s): what waits for them
runs side by side, in one fixture.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from tests.support.fake_upstream import (
    DONE,
    PING,
    Eof,
    FakeUpstream,
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
from tests.support.stack import API_V1, QUIET_KEY, V1, Answer, Stack, served

if TYPE_CHECKING:
    from tests.support.gateway import GatewayProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMENT: Final = b": OPENROUTER PROCESSING\n\n"
A: Final = chunk("a", role="assistant")
STOP: Final = chunk(None, finish_reason="stop")
NO_COMMENTS: Final = [("X-No-Comments", "true")]
SWITCHED_OFF: Final[dict[str, dict[str, Any]]] = {
    "/v1": {"base": V1},
    "request": {"base": API_V1, "headers": NO_COMMENTS},
    "request, in other letters": {"base": API_V1, "headers": [("x-no-comments", " TRUE ")]},
    "key": {"base": API_V1, "key": QUIET_KEY},
    "both": {"base": API_V1, "key": QUIET_KEY, "headers": NO_COMMENTS},
}

# --- once the status is known ---------------------------------------------------------------------


async def test_one_comment_once_the_status_is_known(stack: Stack) -> None:
    """M2.1: before any byte of the upstream's body; after the headers."""
    gate = asyncio.Event()
    steps: list[Step] = [Head(), Wait(gate), *openai_stream(["Hi"], usage=False)]
    async with stack.client(*steps, base=API_V1) as client:
        await client.read_until(lambda c: c.events)
        assert client.body == COMMENT
        gate.set()
        await client.read_all()
    assert client.body.count(COMMENT) == 1
    assert client.body.startswith(COMMENT)
    assert client.body.endswith(DONE)


@pytest.mark.parametrize("first", [b"", b": hi\n\n", b"data\n\n", b"retry: 1\n\n"])
async def test_no_upstream_comment_passes(stack: Stack, first: bytes) -> None:
    """M2.1, B10: what the client sees between the one comment and `[DONE]` is chunks alone."""
    parts = [first, PING + sse(A) + PING + PING, PING + sse(STOP) + DONE]
    answer = await stack.ask(*map(Send, parts), base=API_V1)
    assert answer.body == COMMENT + sse(served(A)) + sse(served(STOP)) + DONE


@pytest.mark.parametrize("how", SWITCHED_OFF.values(), ids=SWITCHED_OFF.keys())
async def test_no_comment_where_none_is_wanted(stack: Stack, how: dict[str, Any]) -> None:
    """M2.1, M1.4, B13: every line of the body is a chunk or `[DONE]`."""
    steps: list[Step] = [
        Head(),
        Sleep(0.05),
        Send(PING),
        Send(sse(A)),
        Send(PING + sse(STOP)),
        Eof(),
    ]
    answer = await stack.ask(*steps, **how)
    assert answer.body == sse(served(A)) + sse(served(STOP)) + DONE


@pytest.mark.parametrize("value", ["false", "0", "", "no", "off"])
async def test_the_header_may_say_no(stack: Stack, value: str) -> None:
    """M1.4: only `true` switches comments off."""
    headers = [("X-No-Comments", value)]
    answer = await stack.ask(*openai_stream(["Hi"]), base=API_V1, headers=headers)
    assert answer.body.startswith(COMMENT)


@pytest.mark.parametrize("status", [404, 422, 429, 500, 503])
async def test_a_refusal_is_no_stream(stack: Stack, status: int) -> None:
    """M1.2, M2.1: no comment comes before a status that is an error."""
    answer = await stack.ask(*json_answer({}, status=status), base=API_V1)
    assert answer.status in (status, 502)
    assert answer.error["code"]


async def test_a_plain_reply_has_no_comments(stack: Stack) -> None:
    """M1.1: one `chat.completion`, on this base too."""
    reply = {"choices": [{"index": 0, "message": {"content": "Hi"}}], "model": "up"}
    answer = await stack.ask(*json_answer(reply), base=API_V1, stream=False)
    assert answer.json["model"] == "test/model"


@pytest.mark.parametrize("end", [[Eof()], [Rst()], [Send(DONE)]], ids=["eof", "reset", "done"])
async def test_an_empty_stream_behind_a_comment(stack: Stack, end: list[Step]) -> None:
    """M3.4: the error chunk and `[DONE]`, once."""
    answer = await stack.ask(Head(), *end, base=API_V1)
    assert answer.body.startswith(COMMENT)
    assert answer.in_band["code"] == "upstream_error"


# --- while a client waits -------------------------------------------------------------------------


@dataclass
class Waited:
    """What a client saw, and when, in seconds after it asked."""

    answer: Answer
    arrivals: list[tuple[float, bytes]]

    def times(self, what: bytes) -> list[float]:
        """When each of these came."""
        return [at for at, data in self.arrivals for _ in range(data.count(what))]


SCENARIOS: Final[dict[str, tuple[list[Step], dict[str, Any]]]] = {
    "status after 8 s": (
        [Sleep(8), Head(), Sleep(1), *openai_stream(["Hi"], usage=False)],
        {"base": API_V1},
    ),
    "refused after 8 s": ([Sleep(8), *json_answer({"error": "no"}, status=429)], {"base": API_V1}),
    "died after 8 s": ([Sleep(8), Rst()], {"base": API_V1}),
    "body after 13 s": ([Head(), Sleep(13), *openai_stream(["Hi"])], {"base": API_V1}),
    "comment, then silence": (
        [Head(), Send(PING), Sleep(13), *openai_stream(["Hi"])],
        {"base": API_V1},
    ),
    "silence after the first chunk": (
        [Send(sse(A)), Sleep(13), Send(sse(STOP) + DONE)],
        {"base": API_V1},
    ),
    "off, refused after 8 s": (
        [Sleep(8), *json_answer({"error": "no"}, status=429, retry_after="3")],
        {"base": API_V1, "headers": NO_COMMENTS},
    ),
    "off, status after 8 s": (
        [Sleep(8), Head(), Sleep(1), *openai_stream(["Hi"])],
        {"base": API_V1, "key": QUIET_KEY},
    ),
    "/v1, refused after 8 s": ([Sleep(8), *json_answer({}, status=422)], {"base": V1}),
    "/v1, body after 13 s": ([Head(), Sleep(13), *openai_stream(["Hi"])], {"base": V1}),
    "endless after the finish": ([Send(sse(A) + sse(STOP)), Pings(60, 0.5)], {"base": V1}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def waited(
    shared_upstream: FakeUpstream, shared_gateway: GatewayProcess
) -> dict[str, Waited]:
    """All scenarios, side by side."""
    stack = Stack(shared_upstream, shared_gateway)

    async def run(number: int, steps: list[Step], how: dict[str, Any]) -> Waited:
        model = f"wait-{number}"
        shared_upstream.script_for(model, *steps, repeat=False)
        started = time.monotonic()
        arrivals = []
        async with stack.client(model=f"fake/{model}", **how) as client:
            while not client.complete:
                seen = len(client.body)
                assert await client.read_some(timeout=20), "cut off"
                arrivals.append((time.monotonic() - started, client.body[seen:]))
        return Waited(Answer(client.status, client.headers, client.body), arrivals)

    found = await asyncio.gather(
        *(run(number, *scenario) for number, scenario in enumerate(SCENARIOS.values()))
    )
    return dict(zip(SCENARIOS, found, strict=True))


def about(times: list[float], *expected: float) -> bool:
    """Whether these are the times; what else happens is three seconds from each."""
    return len(times) == len(expected) and all(
        wanted - 0.2 <= time_ <= wanted + 2.5 for time_, wanted in zip(times, expected, strict=True)
    )


async def test_comments_begin_after_five_seconds_without_a_status(
    waited: dict[str, Waited],
) -> None:
    """M2.1, M1.3: the headers are committed then; the status, when known, adds no second one."""
    seen = waited["status after 8 s"]
    assert about(seen.times(COMMENT), 5)
    assert about([seen.arrivals[0][0]], 5)
    assert seen.answer.text == "Hi"
    assert seen.answer.header("content-type") == "text/event-stream"


@pytest.mark.parametrize("name", ["refused after 8 s", "died after 8 s"])
async def test_a_failure_behind_comments_travels_in_band(
    waited: dict[str, Waited], name: str
) -> None:
    """M2.1, M3.4: with the served slug and provider, and `[DONE]`."""
    seen = waited[name]
    assert seen.answer.status == 200
    assert about(seen.times(COMMENT), 5)
    assert about(seen.times(b'"error":{'), 8)
    assert seen.answer.in_band["metadata"]["provider_name"] == "fake"
    assert seen.answer.chunks[-1]["provider"] == "fake"


async def test_comments_come_every_ten_seconds_until_the_first_byte(
    waited: dict[str, Waited],
) -> None:
    """M2.1: at the status, and then each ten seconds."""
    assert about(waited["body after 13 s"].times(COMMENT), 0, 10)
    assert waited["body after 13 s"].answer.text == "Hi"


@pytest.mark.parametrize("name", ["comment, then silence", "silence after the first chunk"])
async def test_comments_end_with_the_first_byte(waited: dict[str, Waited], name: str) -> None:
    """M2.1: the upstream's own comment is such a byte."""
    assert about(waited[name].times(COMMENT), 0)


@pytest.mark.parametrize(
    ("name", "status"), [("off, refused after 8 s", 429), ("/v1, refused after 8 s", 422)]
)
async def test_without_comments_nothing_is_committed_before_the_status(
    waited: dict[str, Waited], name: str, status: int
) -> None:
    """M1.4, M2.1: so that a late refusal keeps its own status and Retry-After."""
    seen = waited[name]
    assert seen.answer.status == status
    assert about([seen.arrivals[0][0]], 8)
    assert seen.answer.header("retry-after") == ("3" if status == 429 else None)


@pytest.mark.parametrize("name", ["off, status after 8 s", "/v1, body after 13 s"])
async def test_without_comments_a_slow_stream_is_silent(
    waited: dict[str, Waited], name: str
) -> None:
    """M1.4, M2.1: not a byte but chunks."""
    seen = waited[name]
    assert b":" not in [block[:1] for block in seen.answer.body.split(b"\n\n")]
    assert seen.answer.text == "Hi"


async def test_an_upstream_that_never_ends_after_the_finish(waited: dict[str, Waited]) -> None:
    """M3.4, B22: it gets ten seconds, comments or not; then the answer is complete."""
    seen = waited["endless after the finish"]
    assert about(seen.times(DONE), 10)
    assert [data[:6] for data in seen.answer.data[:2]] == [b'{"id":'] * 2
