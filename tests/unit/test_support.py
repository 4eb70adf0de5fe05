"""The test kit's own tests: the scripted provider and the strict client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.support.fake_upstream import (
    DONE,
    PING,
    Eof,
    FakeUpstream,
    Fin,
    Flood,
    Head,
    Pings,
    Raw,
    Rst,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    cut,
    every_cut,
    json_answer,
    openai_stream,
    spaced,
    sse,
)
from tests.support.wire import RawClient, Response, WireError, blocks, chunks, data_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

EVENT = sse(chunk("Hi"))


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def client(up: FakeUpstream) -> AsyncIterator[RawClient]:
    async with RawClient(up.host, up.port) as raw:
        yield raw


async def ask(client: RawClient, model: str = "m") -> None:
    await client.request("POST", "/v1/chat/completions", json={"model": model})


# --- the scripted provider ------------------------------------------------------------------------


async def test_a_script_without_head_and_end_gets_both(up: FakeUpstream, client: RawClient) -> None:
    sends = openai_stream(["a", "é"])
    up.script(*sends)
    await ask(client)
    await client.read_all()
    assert client.complete
    assert client.header("content-type") == "text/event-stream"
    assert client.response.chunk_sizes == [len(send.data) for send in sends]
    assert client.body == b"".join(send.data for send in sends)
    assert data_events(client.body)[-1] == b"[DONE]"
    said = [choice["delta"].get("content") for c in chunks(client.body) for choice in c["choices"]]
    assert said == ["", "a", "é", None]
    assert chunks(client.body)[-1]["usage"]["completion_tokens"] == 2


async def test_requests_are_recorded_and_connections_kept(
    up: FakeUpstream, client: RawClient
) -> None:
    for number in range(2):
        up.script(Head(headers={"X-N": str(number)}), Send(EVENT))
        await ask(client, f"m{number}")
        await client.read_all()
        assert client.header("x-n") == str(number)
    request = await up.request(1)
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["content-type"] == "application/json"
    assert request.json == {"model": "m1"}
    assert json.loads(request.body) == request.json
    assert request.answered.is_set()
    assert request.bytes_written > len(EVENT)
    assert request.bytes_written == up.requests[0].bytes_written
    assert len(up.connections) == 1
    assert not request.closed.is_set()
    client.close()
    assert await request.wait_closed() == up.requests[0].closed_at


async def test_a_chunked_request_body_is_read(up: FakeUpstream, client: RawClient) -> None:
    up.script(*json_answer({"ok": True}, retry_after="3"))
    body = b'6\r\n{"mode\r\n7\r\nl": 1} \r\n0\r\n\r\n'
    await client.request("POST", "/", headers=[("transfer-encoding", "chunked")], body=body)
    await client.read_all()
    assert client.json == {"ok": True}
    assert client.header("retry-after") == "3"
    assert up.requests[0].json == {"model": 1}


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
async def test_each_framing_is_good_http(up: FakeUpstream, framing: str) -> None:
    head = Head(framing=framing)  # type: ignore[arg-type]  # parametrize knows no literals
    up.script(head, Send(EVENT), Pings(2, 0.01), Flood(b"x" * 10, 3))
    async with (
        aiohttp.ClientSession() as session,
        session.post(up.base_url + "/x", json={}) as answer,
    ):
        assert await answer.read() == EVENT + PING * 2 + b"x" * 30


async def test_raw_bytes_go_out_as_they_are(up: FakeUpstream, client: RawClient) -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    up.script(Raw(raw[:20]), Sleep(0.02), Raw(raw[20:]))
    await ask(client)
    assert await client.read_all() == b"{}"
    assert [size for _, size in client.arrivals] == [20, len(raw) - 20]
    assert (await up.request()).bytes_written == len(raw)


@pytest.mark.parametrize(("framing", "complete"), [("chunked", False), ("close", True)])
async def test_fin(up: FakeUpstream, client: RawClient, framing: str, complete: bool) -> None:
    head = Head(framing=framing)  # type: ignore[arg-type]  # parametrize knows no literals
    up.script(head, Send(EVENT), Fin())
    await ask(client)
    assert await client.read_all() == EVENT
    assert (client.complete, client.eof, client.was_reset) == (complete, True, False)
    assert not up.requests[0].closed.is_set()  # the peer's end, not ours, is what counts
    client.close()
    await up.requests[0].wait_closed()


async def test_rst_comes_after_all_that_was_sent(up: FakeUpstream, client: RawClient) -> None:
    block = b"x" * 3_000_000
    up.script(Head(), Send(block), Rst())
    await ask(client)
    assert len(await client.read_all()) == len(block)
    assert (client.complete, client.was_reset) == (False, True)
    assert up.requests[0].closed_at is None


@pytest.mark.parametrize("end", [RawClient.close, RawClient.reset, RawClient.half_close])
@pytest.mark.parametrize("headers_sent", [True, False])
@pytest.mark.parametrize("waiting", ["sleep", "wait"])
async def test_the_peers_close_is_seen_while_the_script_is_silent(
    up: FakeUpstream,
    client: RawClient,
    end: Callable[[RawClient], None],
    headers_sent: bool,
    waiting: str,
) -> None:
    silence = Sleep(60) if waiting == "sleep" else Wait(asyncio.Event())
    before: list[Step] = [Head(), Send(EVENT)] if headers_sent else []
    up.script(*before, silence, Send(EVENT))
    await ask(client)
    request = await up.request()
    if headers_sent:
        await client.read_until(lambda c: c.events)
    await asyncio.sleep(0.03)
    assert not request.closed.is_set()
    end(client)
    left_at = time.monotonic()
    assert await request.wait_closed() - left_at < 1
    assert request.steps_done == len(before)
    assert not request.answered.is_set()


async def test_wait_goes_on_when_the_test_says_so(up: FakeUpstream, client: RawClient) -> None:
    gate = asyncio.Event()
    up.script(Head(), Send(EVENT), Wait(gate), Send(DONE))
    await ask(client)
    await client.read_until(lambda c: c.events)
    with pytest.raises(TimeoutError, match="status 200"):
        await client.read_some(timeout=0.05)
    gate.set()
    assert await client.read_all() == EVENT + DONE


async def test_flood_shows_where_back_pressure_stops_it() -> None:
    block, count = b"x" * 65536, 200
    async with (
        FakeUpstream(sndbuf=65536) as up,
        RawClient(up.host, up.port, rcvbuf=65536) as client,
    ):
        up.script(Flood(block, count))
        await ask(client)
        request = await up.request()
        stuck = -1
        while stuck != request.bytes_written:
            stuck = request.bytes_written
            await asyncio.sleep(0.1)
        assert 0 < stuck < 1_000_000
        await client.read_some()
        assert client.arrivals
        assert len(await client.read_all()) == len(block) * count
        assert request.bytes_written > len(block) * count


async def test_a_reset_is_seen_while_a_flood_is_stuck() -> None:
    async with (
        FakeUpstream(sndbuf=8192) as up,
        RawClient(up.host, up.port, rcvbuf=8192) as client,
    ):
        up.script(Flood(b"x" * 1_000_000, 10))
        await ask(client)
        request = await up.request()
        await asyncio.sleep(0.05)
        client.reset()
        await request.wait_closed()
        assert request.bytes_written < 1_000_000


async def test_scripts_are_found_by_model_then_in_order(
    up: FakeUpstream, client: RawClient
) -> None:
    up.script(Send(b"next"))
    up.script_for("a", Send(b"a once"), repeat=False)
    up.script_for("a", Send(b"a always"))
    assert up.pending == 2
    got = []
    for model in ["a", "b", "a", "a"]:
        await ask(client, model)
        got.append(await client.read_all())
    await client.request("POST", "/v1beta/models/a:streamGenerateContent", body=b"not json")
    got.append(await client.read_all())
    assert got == [b"a once", b"next", b"a always", b"a always", b"a always"]
    assert up.pending == 0
    await ask(client, "b")
    assert b"no script" in await client.read_all()
    assert client.status == 500


async def test_what_is_no_request_fails_the_test() -> None:
    async def case() -> None:
        async with FakeUpstream() as up, RawClient(up.host, up.port) as client:
            await client.send(b"nonsense\r\n\r\n")
            await client.read_to_eof()

    with pytest.raises(ValueError, match="unpack"):
        await case()


def test_bodies() -> None:
    assert sse("a\nb") == b"data: a\ndata: b\n\n"
    assert json.loads(chunk(None, delta={"reasoning": "r"}, usage=None))["usage"] is None
    choice = json.loads(chunk("x", index=1, role="assistant", finish_reason="stop"))["choices"][0]
    assert choice["delta"] == {"role": "assistant", "content": "x"}
    assert (choice["index"], choice["finish_reason"]) == (1, "stop")
    assert openai_stream([], finish=None, usage=False, done=False) == [
        Send(sse(chunk("", role="assistant")))
    ]
    assert cut(b"abcdef", -1, 2) == [b"ab", b"cde", b"f"]
    assert list(every_cut(b"abc")) == [[b"a", b"bc"], [b"ab", b"c"]]
    assert spaced([b"a", b"b"], 1) == [Send(b"a"), Sleep(1), Send(b"b")]
    assert json_answer([], status=429)[-1] == Eof()


# --- the strict client ----------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nA: 1\r\na: 2\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "complete", "body", "rest"),
    [
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", True, b"abc", b""),
        (CHUNKED + b"3\r\nabc\r\n0\r\nt: v\r\n\r\nX", True, b"abc", b"X"),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", False, b"abc", b""),
        (CHUNKED + b"3\r\nabc\r\n", False, b"abc", b""),
        (CHUNKED + b"a\r\nabc", False, b"abc", b""),
        (HEAD + b"content-length: 3\r\n\r\nabcd", True, b"abc", b"d"),
        (HEAD + b"content-length: 0\r\n\r\n", True, b"", b""),
        (HEAD + b"content-length: 3\r\n\r\nab", False, b"ab", b""),
        (HEAD + b"\r\nabc", True, b"abc", b""),
        (b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + CHUNKED + b"0\r\n\r\n", True, b"", b""),
        (b"HTTP/1.1 101 Up\r\nA: 1\r\na: 2\r\n\r\n\x81\x00", True, b"", b"\x81\x00"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_good_responses(raw: bytes, complete: bool, body: bytes, rest: bytes, step: int) -> None:
    response = Response()
    for at in range(0, len(raw), step):
        response.feed(raw[at : at + step])
    response.finish()
    assert (response.complete, bytes(response.body)) == (complete, body)
    assert bytes(response.rest) == rest
    assert response.headers[:2] == [("A", "1"), ("a", "2")]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\n",
        b"HTTP/1.1 200\r\n",
        b"HTTP/1.1 200 OK\n",
        HEAD + b" folded\r\n",
        HEAD + b"bad name: 1\r\n",
        HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        CHUNKED + b"0x3\r\n",
        CHUNKED + b"3;ext\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"3\r\nabcd\r\n",
        CHUNKED + b"3\nabc",
        CHUNKED + b"0\r\nno trailer\r\n",
    ],
)
def test_bad_responses(raw: bytes) -> None:
    with pytest.raises(WireError):
        Response().feed(raw)


@pytest.mark.parametrize(
    "body",
    [b"data: a\r\n\r\n", b"data: a\n\n\n", b"data:a\n\n", b"foo: a\n\n", b"\n\n", b"data: a\n"],
)
def test_bad_sse(body: bytes) -> None:
    with pytest.raises(WireError):
        blocks(body)


def test_good_sse() -> None:
    body = b": hm\n\nevent: e\nid: 1\ndata: {}\n\ndata: x\ndata: y\n\ndata: [DONE]\n\n"
    assert blocks(body)[:2] == [b": hm", b"event: e\nid: 1\ndata: {}"]
    assert data_events(body) == [b"{}", b"x\ny", b"[DONE]"]
    assert blocks(body + b"da", whole=False) == blocks(body)
    assert chunks(EVENT + DONE) == [json.loads(chunk("Hi"))]


async def test_what_follows_a_response_is_not_overlooked(
    up: FakeUpstream, client: RawClient
) -> None:
    up.script(Head(), Send(EVENT), Eof(), Raw(b"0\r\n\r\n"), Fin())
    await ask(client)
    with pytest.raises(WireError, match="after the response"):
        await client.read_to_eof()
    with pytest.raises(WireError, match="after the last response"):
        await ask(client)


async def test_an_early_end_is_an_error_of_read_until(up: FakeUpstream, client: RawClient) -> None:
    up.script(Head(), Send(EVENT), Fin())
    await ask(client)
    await client.read_head()
    with pytest.raises(WireError, match="too early; closed, status 200"):
        await client.read_until(lambda c: len(c.events) == 2)
