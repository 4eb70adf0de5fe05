"""The transcript format, the replay provider (O1.1), and the recorder that feeds it."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from contextlib import asynccontextmanager
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.errors import UpstreamRefused, UpstreamTruncated, UpstreamUnavailable
from relay.upstreams.base import UpstreamRequest
from relay.upstreams.record import record
from relay.upstreams.replay import (
    PACKAGED_TRANSCRIPTS,
    End,
    ReplayUpstream,
    Transcript,
    TranscriptError,
    load_transcripts,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from relay.upstreams.base import UpstreamReply


def transcript(*reads: tuple[float, bytes], end: End = "eof", end_at_ms: float = 0) -> Transcript:
    return Transcript(
        recorded_from="a test",
        shape="openai",
        request={"model": "m"},
        status=200,
        headers={"content-type": "text/event-stream"},
        headers_at_ms=0.0,
        reads=reads,
        end=end,
        end_at_ms=end_at_ms,
    )


def ask(model: str, *, stream: bool = True) -> UpstreamRequest:
    return UpstreamRequest(model=model, body={"model": model, "stream": stream}, stream=stream)


async def replay_of(
    folder: Path, recording: Transcript, *, speed: float = math.inf
) -> UpstreamReply:
    (folder / "m.jsonl").write_bytes(recording.dump())
    upstream = ReplayUpstream("replay", folder, speed=speed)
    await upstream.start()
    return await upstream.open(ask("m"))


async def read_all(reply: UpstreamReply) -> list[bytes]:
    reads = []
    while data := await reply.read():
        reads.append(data)
    return reads


# The format


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.binary(min_size=1))),
    st.sampled_from(["eof", "reset"]),
)
def test_a_dumped_transcript_parses_to_the_same(reads: list[tuple[float, bytes]], end: End) -> None:
    recording = transcript(*reads, end=end, end_at_ms=2e6)
    assert Transcript.parse(recording.dump(), "x") == recording


def test_text_stays_readable_and_a_split_character_is_base64() -> None:
    recording = transcript((1.0, "é\u2028".encode()), (2.0, "é".encode()[:1]), (3.0, b"\xa9"))
    lines = recording.dump().decode().split("\n")
    assert lines[1] == '{"at_ms": 1.0, "data": "é\u2028"}'
    assert lines[2] == '{"at_ms": 2.0, "base64": "ww=="}'
    assert Transcript.parse(recording.dump(), "x") == recording


META = transcript().dump().split(b"\n", maxsplit=1)[0]


def test_without_an_end_line_the_body_ends_with_the_last_read() -> None:
    recording = Transcript.parse(META + b'\n{"at_ms": 5, "data": "x"}\n', "x")
    assert (recording.end, recording.end_at_ms) == ("eof", 5.0)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "line 0"),
        (b"no json", "line 1"),
        (META.replace(b'"format": 1', b'"format": 2'), "line 1.*format 2; this version knows 1"),
        (b'{"format": 1}', "line 1.*recorded_from"),
        (META + b'\n{"data": "x"}', "line 2.*at_ms"),
        (META + b'\n{"at_ms": 1, "base64": "?"}', "line 2"),
        (META + b'\n{"at_ms": 1, "data": "x"}\n{"at_ms": 2, "end": "later"}', "line 3.*'later'"),
        (META + b"\n[]", "line 2"),
    ],
)
def test_what_is_no_transcript_is_named_with_its_line(data: bytes, complaint: str) -> None:
    with pytest.raises(TranscriptError, match="some.jsonl, " + complaint):
        Transcript.parse(data, "some.jsonl")


def test_the_packaged_transcripts_are_whole_answers_with_provenance() -> None:
    packaged = load_transcripts(PACKAGED_TRANSCRIPTS)
    assert set(packaged) >= {
        "smollm2-135m",
        "smollm2-135m.whole",
        "smollm2-135m-tools",
        "smollm2-135m-tools.whole",
    }
    for name, recording in packaged.items():
        body = b"".join(data for _, data in recording.reads)
        assert "llama.cpp" in recording.recorded_from
        assert recording.status == 200
        assert recording.end == "eof"
        if not name.endswith(".whole"):
            assert len(recording.reads) > 10, "the borders of the reads are kept"
            assert body.endswith(b"data: [DONE]\n\n")
            assert b'"usage":{' in body
    calls = json.loads(packaged["smollm2-135m-tools.whole"].reads[0][1])
    assert len(calls["choices"][0]["message"]["tool_calls"]) == 2


# The provider


async def test_it_replays_the_reads_as_they_were_cut(tmp_path: Path) -> None:
    reply = await replay_of(
        tmp_path, transcript((1, b"data: a"), (2, b"\n\nda"), (3, b"ta: b\n\n"))
    )
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream"
    assert await read_all(reply) == [b"data: a", b"\n\nda", b"ta: b\n\n"]
    assert await reply.read() == b""


async def test_it_keeps_the_recorded_times(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    recording = transcript((60, b"a"), (120, b"b"), end_at_ms=180)
    reply = await replay_of(tmp_path, recording, speed=2.0)
    began = loop.time()
    times = []
    for _ in range(3):
        await reply.read()
        times.append(loop.time() - began)
    for measured, due in zip(times, (0.030, 0.060, 0.090), strict=True):
        assert due - 0.005 <= measured < due + 1.0  # never early; late as the machine is busy


async def test_headers_wait_for_their_time(tmp_path: Path) -> None:
    meta = META.replace(b'"headers_at_ms": 0.0', b'"headers_at_ms": 50.0')
    (tmp_path / "m.jsonl").write_bytes(meta)
    upstream = ReplayUpstream("replay", tmp_path)
    await upstream.start()
    began = asyncio.get_running_loop().time()
    reply = await upstream.open(ask("m"))
    assert asyncio.get_running_loop().time() - began >= 0.045
    assert await reply.read() == b""


async def test_a_recorded_reset_is_a_truncation(tmp_path: Path) -> None:
    reply = await replay_of(tmp_path, transcript((1, b"data: a\n\n"), end="reset"))
    assert await reply.read() == b"data: a\n\n"
    with pytest.raises(UpstreamTruncated):
        await reply.read()


async def test_abort_ends_a_waiting_read(tmp_path: Path) -> None:
    reply = await replay_of(tmp_path, transcript((3_600_000, b"in an hour")), speed=1.0)
    reading = asyncio.create_task(reply.read())
    await asyncio.sleep(0.01)
    assert not reading.done()
    reply.abort()
    reply.abort()
    with pytest.raises(UpstreamTruncated):
        await asyncio.wait_for(reading, 1)
    with pytest.raises(UpstreamTruncated):
        await reply.read()


async def test_a_cancelled_read_can_be_read_again(tmp_path: Path) -> None:
    reply = await replay_of(tmp_path, transcript((500, b"once")), speed=1.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reply.read(), 0.005)
    assert await read_all(reply) == [b"once"]


async def test_a_fast_replay_lets_others_run(tmp_path: Path) -> None:
    reply = await replay_of(tmp_path, transcript(*((0, b"x") for _ in range(50))))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await read_all(reply)
    task.cancel()
    assert turns >= 50


async def test_an_unknown_model_is_404_with_the_names_there_are(tmp_path: Path) -> None:
    for name in ("b", "a", "a.whole"):
        (tmp_path / f"{name}.jsonl").write_bytes(transcript().dump())
    (tmp_path / "notes.txt").write_text("not a transcript")
    upstream = ReplayUpstream("replay", tmp_path)
    await upstream.start()
    assert upstream.models() == ["a", "b"]
    for model in ("c", "a.whole", "../a", ""):
        with pytest.raises(UpstreamRefused, match="there are: a, b") as caught:
            await upstream.open(ask(model))
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


async def test_a_whole_answer_comes_from_its_own_recording(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(transcript((0, b"data: x\n\n")).dump())
    (tmp_path / "a.whole.jsonl").write_bytes(transcript((0, b"{}")).dump())
    (tmp_path / "b.jsonl").write_bytes(transcript((0, b"data: x\n\n")).dump())
    upstream = ReplayUpstream("replay", tmp_path, speed=math.inf)
    await upstream.start()
    assert await read_all(await upstream.open(ask("a", stream=False))) == [b"{}"]
    with pytest.raises(UpstreamUnavailable, match="as a stream only"):
        await upstream.open(ask("b", stream=False))
    await upstream.close()


async def test_a_folder_that_cannot_be_replayed_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UpstreamUnavailable, match="No such file"):
        await ReplayUpstream("replay", tmp_path / "missing").start()
    with pytest.raises(UpstreamUnavailable, match=r"relay\.upstreams\.record"):
        await ReplayUpstream("replay", tmp_path).start()
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UpstreamUnavailable, match=r"bad\.jsonl, line 1"):
        await ReplayUpstream("replay", tmp_path).start()
    with pytest.raises(ValueError, match="speed"):
        ReplayUpstream("replay", tmp_path, speed=0)


# The recorder


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nSet-Cookie: secret=1\r\n"
    b"OpenAI-Organization: acme\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@asynccontextmanager
async def provider(*pieces: bytes, end: str, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server on a socket that answers with these pieces, a moment apart."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if seen is not None:
            seen.append(head)
        writer.write(HEAD)
        for piece in pieces:  # chunked, for a cut body without a length looks whole to aiohttp
            await asyncio.sleep(0.03)
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        await asyncio.sleep(0.03)
        if end == "eof":
            writer.write(b"0\r\n\r\n")
        else:  # linger 0: close sends RST
            socket = writer.get_extra_info("socket")
            socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize("end", ["eof", "reset"])
async def test_recording_keeps_borders_times_and_the_ending(end: str) -> None:
    seen: list[bytes] = []
    body = {"model": "m", "stream": True}
    snippet = "data: é\n\n".encode()
    async with provider(snippet[:7], snippet[7:], end=end, seen=seen) as url:
        recording = await record(url, body, recorded_from="a test", api_key="sk-hidden")
    assert [data for _, data in recording.reads] == [snippet[:7], snippet[7:]]
    assert recording.end == end
    times = [at_ms for at_ms, _ in recording.reads]
    assert 0 < recording.headers_at_ms <= times[0] <= times[1] <= recording.end_at_ms
    assert recording.end_at_ms >= 85, "three pauses of 30 ms"
    assert recording.request == body
    assert b"Bearer sk-hidden" in seen[0]
    assert b"accept-encoding: identity" in seen[0].lower()
    assert recording.headers == {"content-type": "text/event-stream"}
    assert b"sk-hidden" not in recording.dump()
    assert Transcript.parse(recording.dump(), "x") == recording


async def test_another_shape_is_recorded_in_its_own_words_and_not_replayed(tmp_path: Path) -> None:
    """The replay provider is asked in OpenAI's words, and would answer in others."""
    seen: list[bytes] = []
    async with provider(b"event: ping\ndata: {}\n\n", end="eof", seen=seen) as url:
        recording = await record(
            url, {"model": "m"}, recorded_from="a test", api_key="sk-hidden", shape="anthropic"
        )
    assert seen[0].startswith(b"POST /v1/messages ")
    assert b"x-api-key: sk-hidden" in seen[0].lower()
    assert recording.shape == "anthropic"
    (tmp_path / "m.jsonl").write_bytes(recording.dump())
    with pytest.raises(TranscriptError, match=r"m\.jsonl has the shape anthropic"):
        load_transcripts(tmp_path)


async def test_an_answer_that_repeats_the_key_is_not_written() -> None:
    async with provider(b"invalid key sk-hid", b"den", end="eof") as url:
        with pytest.raises(ValueError, match="repeats the API key"):
            await record(url, {"model": "m"}, recorded_from="a test", api_key="sk-hidden")


async def test_what_was_recorded_is_what_is_replayed(tmp_path: Path) -> None:
    pieces = (b"data: 1\n\n", b"data: 2\n", b"\n")
    async with provider(*pieces, end="eof") as url:
        recording = await record(url, {"model": "m", "stream": True}, recorded_from="a test")
    assert await read_all(await replay_of(tmp_path, recording)) == list(pieces)
