"""M3.1, M3.2: however an upstream frames, cuts and packs its stream, the client gets the same.

Cases A (B01 to B21) of the hazards. Whatever is sent is sent whole, byte by byte and cut in two at
every byte.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

import brotli
import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Flood,
    Head,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    cut,
    every_cut,
    openai_stream,
    spaced,
    sse,
)
from tests.support.stack import EVENT_LIMIT_BYTES, Stack, served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.wire import RawClient

try:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # before Python 3.14
    from backports import zstd

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")
B: Final = chunk("b")
END: Final = chunk(None, finish_reason="stop")
WHOLE: Final = sse(A) + sse(B) + sse(END) + DONE
EXPECTED: Final = [served(A), served(B), served(END), b"[DONE]"]


def lines(ending: bytes) -> bytes:
    return WHOLE.replace(b"\n", ending)


# What an upstream may send around the four events of WHOLE, and still mean them.
FRAMINGS: Final[dict[str, bytes]] = {
    "lf": WHOLE,
    "crlf (B02)": lines(b"\r\n"),
    "cr": lines(b"\r"),
    "mixed (B04)": b"data: " + A + b"\r\n\ndata: " + B + b"\n\r\n" + sse(END) + lines(b"\r")[-16:],
    "bom (B17)": b"\xef\xbb\xbf" + WHOLE,
    "bom and crlf": b"\xef\xbb\xbf" + lines(b"\r\n"),
    "no space": WHOLE.replace(b"data: ", b"data:"),
    "comments (B09)": b": ping\n\n:\n\n:\n" + sse(A) + b": PROCESSING\n" + WHOLE[len(sse(A)) :],
    "a comment that looks like data": b": data: " + B + b"\n\n" + WHOLE,
    "id and event (B11)": WHOLE.replace(b"data: ", b"id: 7\nevent: message\ndata: "),
    "control-only blocks (B12)": b"retry: 1000\n\nid: 7\n\nid\n\nevent: x\n\ndata\n\n" + WHOLE,
    "empty data": b"data:\n\n" + sse(A) + b"data: \n\ndata\n\n" + WHOLE[len(sse(A)) :],
    "unknown fields": WHOLE.replace(b"data: ", b"foo: data\nDATA: x\n data: y\ndata: "),
    "fields behind the data": WHOLE.replace(b"\n\n", b"\nid: 1\nretry: 5\n: hm\n\n"),
    "blank lines": b"\n\n\n" + WHOLE.replace(b"\n\n", b"\n\n\n\n"),
    "no blank line at the end (B08)": WHOLE[:-1],
    "no line end at the end (B08)": WHOLE[:-2],
    "no blank line behind the finish (B08)": WHOLE[: -len(DONE) - 1],
    "no line end behind the finish (B08)": WHOLE[: -len(DONE) - 2],
    "half a line at the end (B15)": WHOLE[: -len(DONE)] + b'data: {"id":"c","choi',
    "half a field at the end": WHOLE[: -len(DONE)] + b"dat",
}


@pytest.mark.parametrize("body", FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_framings(stack: Stack, body: bytes) -> None:
    """M3.1: whole and byte by byte; also where the connection's end is the body's end."""
    one_by_one = [Send(body[at : at + 1]) for at in range(len(body))]
    for steps in ([Send(body)], one_by_one, [Head(framing="close"), *one_by_one, Eof()]):
        assert (await stack.ask(*steps)).data == EXPECTED


@pytest.mark.parametrize("name", ["crlf (B02)", "cr", "bom and crlf", "comments (B09)"])
async def test_a_cut_at_every_byte(stack: Stack, name: str) -> None:
    """M3.1, B01: two reads, with the border at every byte of the body in turn."""
    answers = await stack.ask_all(spaced(parts) for parts in every_cut(FRAMINGS[name]))
    texts = [[chunk["choices"][0] for chunk in answer.chunks] for answer in answers]
    assert len(texts) == len(FRAMINGS[name]) - 1
    assert all(text == texts[0] for text in texts)
    assert [choice["delta"].get("content") for choice in texts[0]] == ["a", "b", None]


async def test_crlf_cut_between_its_bytes_is_one_line_end(stack: Stack) -> None:
    """B01: one event over two data lines, cut inside a CRLF: no event is invented."""
    head, tail = B[: B.index(b'"choices"')], B[B.index(b'"choices"') :]
    parts = [b"data: " + head + b"\r", b"\ndata: " + tail + b"\r", b"\n\r", b"\n"]
    answer = await stack.ask(Send(sse(A)), *spaced(parts), Send(sse(END) + DONE))
    first, second, *_ = answer.chunks
    assert (first["choices"][0]["delta"], second["choices"][0]["delta"]) == (
        {"role": "assistant", "content": "a"},
        {"content": "b"},
    )
    assert len(answer.chunks) == 3
    assert b"\n" not in answer.data[1]


async def test_json_over_several_data_lines_leaves_as_one_line(stack: Stack) -> None:
    """M2.1, M3.1: a chunk broken at any comma; a line break in JSON is white space."""
    breaks = [at + 1 for at, byte in enumerate(B) if byte == ord(",")]
    sent = [B[:at] + b"\n" + B[at:] for at in breaks]
    answer = await stack.ask(*(Send(sse(data)) for data in (A, *sent, B, END)), Send(DONE))
    expected = [served(B) for _ in sent]
    assert [data.replace(b", ", b",") for data in answer.data[1:-3]] == expected
    assert answer.data[-3:] == EXPECTED[1:]


async def test_indented_json_leaves_as_one_line_each(stack: Stack) -> None:
    """M2.1, M3.1: an upstream that pretty-prints sends every chunk over many data lines."""
    chunks = [json.loads(data) for data in (A, B, B, B, END)]
    answer = await stack.ask(*(Send(sse(json.dumps(c, indent=1))) for c in chunks), Send(DONE))
    ours = {"model": "test/model", "provider": "fake"}
    assert answer.chunks == [chunk | ours for chunk in chunks]
    assert len(answer.body.splitlines()) == 2 * len(answer.data)


@pytest.mark.parametrize(
    "kind", ["text/event-stream; charset=utf-8", "TEXT/EVENT-STREAM", "text/plain", "", "x/y"]
)
async def test_what_a_stream_is_called_does_not_matter(stack: Stack, kind: str) -> None:
    """M3.1: many servers name it otherwise, or not at all; ours is named as it must be."""
    answer = await stack.ask(Head(headers={"content-type": kind}), Send(WHOLE))
    assert answer.data == EXPECTED
    assert answer.header("content-type") == "text/event-stream"


@pytest.mark.parametrize("text", ["你", "é", "😀", "a\u2028b\u2029c\x85d", "\u200d\ufeff"])
async def test_characters_arrive_as_sent_wherever_they_are_cut(stack: Stack, text: str) -> None:
    """M3.1, B05, B06: UTF-8 cut inside, and characters that some readers take for line ends."""
    raw = sse(chunk(text))
    start = raw.index(b'"content":"') + 10
    cuts = [cut(raw, start, at) for at in range(start + 1, start + 3 + len(text.encode()))]
    scripts = [[Send(sse(A)), *spaced(parts), Send(sse(END) + DONE)] for parts in cuts]
    for answer in await stack.ask_all(scripts):
        choices = answer.data[1][answer.data[1].index(b'"choices"') :]
        assert raw.endswith(choices + b"\n\n")


async def test_a_surrogate_pair_over_two_deltas(stack: Stack) -> None:
    """B20: escapes pass as sent; on the parsed way (first chunk, finish) as on the spliced one."""
    high, low = (chunk("@").replace(b"@", half) for half in (b"\\ud83d", b"\\ude00"))
    first = chunk("@", role="assistant").replace(b"@", b"\\ud83d")
    last = chunk("@", finish_reason="stop").replace(b"@", b"\\ude00")
    sent = [first, low, high, low, high, last]
    answer = await stack.ask(*(Send(sse(data)) for data in sent), Send(DONE))
    assert answer.data == [*(served(data) for data in sent), b"[DONE]"]


async def test_a_stray_byte_does_not_end_the_stream(stack: Stack) -> None:
    """M3.1: what is no UTF-8 is decoded to U+FFFD by the grammar, and never kills."""
    first = chunk("@", role="assistant").replace(b"@", b"\xff")
    answer = await stack.ask(Send(sse(first)), Send(sse(B)), Send(sse(END)), Send(DONE))
    assert answer.data == [served(first.replace(b"\xff", "\ufffd".encode())), *EXPECTED[1:]]


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbf" + B, B.decode().encode("utf-16-le"), b"{" + B, B + b"\n" + B, b"hello"],
    ids=["second bom (B17)", "utf-16", "open", "two", "text"],
)
async def test_an_event_that_is_no_json_ends_in_band(stack: Stack, data: bytes) -> None:
    """M3.4: at the place where it came, after all that came before it, with what it was."""
    answer = await stack.ask(Send(sse(A) + sse(B)), Send(sse(data)), Send(sse(B) + DONE))
    assert answer.data[:2] == [served(A), served(B)]
    assert answer.in_band["code"] == "upstream_error"
    assert answer.in_band["metadata"]["raw"]
    assert len(answer.data) == 4


@pytest.mark.parametrize("data", [b"5", b"null", b"[]", b'"x"', b"{}", b'{"type":"ping"}', b"true"])
async def test_json_that_is_no_chunk_is_skipped(stack: Stack, data: bytes) -> None:
    """M3.1: pings and the like are not for the client, and not the end."""
    answer = await stack.ask(Send(sse(data)), Send(sse(A) + sse(data) + sse(B)), Send(sse(END)))
    assert answer.data == EXPECTED


@pytest.mark.parametrize("size", [70_000, 200_000, 600_000, 3_000_000, 8 * 1024 * 1024])
async def test_large_events_pass(stack: Stack, size: int) -> None:
    """M3.1, B19: aiohttp's limits on lines do not apply."""
    large = chunk("é" * (size // 2))
    answer = await stack.ask(Send(sse(A)), Send(sse(large)), Send(sse(END) + DONE))
    assert answer.data == [served(A), served(large), served(END), b"[DONE]"]


def sized(size: int) -> bytes:
    """An event whose block is that large."""
    return b"data: " + chunk("x" * (size - len(chunk("")) - len(b"data: ")))


async def test_an_event_of_the_bound_passes(stack: Stack) -> None:
    """M3.1: whole and in many reads."""
    event = sized(EVENT_LIMIT_BYTES) + b"\n\n"
    for parts in ([event], [event[at : at + 999] for at in range(0, len(event), 999)]):
        sends = [Send(part) for part in parts]
        answer = await stack.ask(
            Send(sse(A)), *sends, Send(sse(END) + DONE), model="bounded/upstream-model"
        )
        assert len(answer.chunks) == 3
        assert len(answer.text) == len(event) - len(sse(chunk(""))) + 1


@pytest.mark.parametrize("tail", [b"\n\n", b""], ids=["complete", "endless"])
@pytest.mark.parametrize("piece", [999, 1 << 20], ids=["in pieces", "in one"])
async def test_an_event_over_the_bound_ends_in_band(stack: Stack, tail: bytes, piece: int) -> None:
    """M3.1, M3.4: after the events before it, and the upstream is let go."""
    body = sse(A) + sized(EVENT_LIMIT_BYTES + 1) + tail
    sends = [Send(body[at : at + piece]) for at in range(0, len(body), piece)]
    wait = Wait(asyncio.Event())
    answer = await stack.ask(*sends, Send(sse(B) + DONE), wait, model="bounded/upstream-model")
    assert answer.data[0] == served(A, model="bounded/upstream-model", provider="bounded")
    assert answer.in_band["code"] == "upstream_error"
    assert str(EVENT_LIMIT_BYTES) in answer.in_band["message"]
    assert len(answer.data) == 3
    await (await stack.request()).wait_closed()


async def test_a_line_without_end_takes_no_memory(stack: Stack) -> None:
    """B18: 256 MiB without a line end; the stream fails at 16 MiB and the memory is given back."""
    before = stack.gateway.rss_bytes()
    answer = await stack.ask(Send(sse(A) + b"data: "), Flood(b"x" * 1024 * 1024, 256))
    assert answer.in_band["code"] == "upstream_error"
    assert (await stack.request()).bytes_written < 40 * 1024 * 1024
    assert stack.gateway.rss_bytes() - before < 100 * 1024 * 1024


def has_events(count: int, client: RawClient) -> bool:
    return len(client.events) >= count


async def test_events_leave_as_they_arrive(stack: Stack) -> None:
    """M2.1, B02: with CRLF too, none waits for the next."""
    gates = [asyncio.Event() for _ in range(3)]
    events = lines(b"\r\n").split(b"\r\n\r\n")
    steps: list[Step] = []
    for event, gate in zip(events, gates, strict=False):
        steps += [Send(event + b"\r\n\r\n"), Wait(gate)]
    async with stack.client(*steps, Send(DONE)) as client:
        for count, gate in enumerate(gates, 1):
            await client.read_until(partial(has_events, count))
            assert len(client.events) == count
            gate.set()
        await client.read_all()
        assert client.complete


# --- packing --------------------------------------------------------------------------------------


def deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED: Final[dict[str, tuple[str, Callable[[bytes], bytes]]]] = {
    "gzip": ("gzip", gzip.compress),
    "GZip": ("GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflate_raw),
    "br": ("br", brotli.compress),
    "zstd": ("zstd", zstd.compress),
    "identity": ("identity", bytes),
}


@pytest.mark.parametrize(("coding", "pack"), PACKED.values(), ids=PACKED.keys())
async def test_packed_bodies(stack: Stack, coding: str, pack: Callable[[bytes], bytes]) -> None:
    """M3.2: although `identity` was asked for; streams, plain replies and errors alike."""
    packed = pack(WHOLE)
    head = Head(headers={"content-encoding": coding})
    for parts in ([packed], [packed[at : at + 7] for at in range(0, len(packed), 7)]):
        answer = await stack.ask(head, *(Send(part) for part in parts))
        assert answer.data == EXPECTED
        assert answer.header("content-encoding") is None
    assert (await stack.request()).headers["accept-encoding"] == "identity"
    refused = Head(422, {"content-encoding": coding})
    answer = await stack.ask(refused, Send(pack(b'{"error":{"message":"too warm"}}')))
    assert (answer.status, answer.error["message"]) == (422, "too warm")


def gzip_pieces(parts: Sequence[bytes]) -> list[bytes]:
    packer = zlib.compressobj(wbits=31)
    return [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts]


def brotli_pieces(parts: Sequence[bytes]) -> list[bytes]:
    packer = brotli.Compressor()
    return [packer.process(part) + packer.flush() for part in parts]


def zstd_pieces(parts: Sequence[bytes]) -> list[bytes]:
    packer = zstd.ZstdCompressor()
    return [packer.compress(part, packer.FLUSH_BLOCK) for part in parts]


@pytest.mark.parametrize(
    ("coding", "pack"),
    [("gzip", gzip_pieces), ("br", brotli_pieces), ("zstd", zstd_pieces)],
)
async def test_packed_events_leave_as_they_arrive(
    stack: Stack, coding: str, pack: Callable[[Sequence[bytes]], list[bytes]]
) -> None:
    """M3.2: bodies are decoded as they stream, not when they end."""
    gate = asyncio.Event()
    first, second = pack([sse(A), WHOLE[len(sse(A)) :]])
    head = Head(headers={"content-encoding": coding})
    async with stack.client(head, Send(first), Wait(gate), Send(second), Rst()) as client:
        await client.read_until(lambda c: len(c.events) >= 1)
        gate.set()
        await client.read_all()
        assert client.complete
    assert client.events == [b"data: " + data for data in EXPECTED]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
@pytest.mark.parametrize("good", [0, 1], ids=["at once", "later"])
async def test_a_body_that_cannot_be_unpacked_ends_in_band(
    stack: Stack, coding: str, good: int
) -> None:
    """M3.2, M3.4: garbage where packed bytes should be."""
    packers = {"gzip": gzip_pieces, "br": brotli_pieces, "zstd": zstd_pieces}
    garbage = b"\xff\x00garbage" * 20
    steps: list[Step] = [Head(headers={"content-encoding": coding})]
    if good and coding in packers:
        steps += [Send(packers[coding]([sse(A)])[0]), Wait(gate := asyncio.Event())]
        gate.set()
    answer = await stack.ask(*steps, *spaced([garbage, garbage]))
    assert answer.in_band["code"] == "upstream_error"


async def test_a_packed_event_over_the_bound_ends_in_band(stack: Stack) -> None:
    """M3.1, M3.2: 64 MiB from a few bytes; the bound holds for what was unpacked."""
    before = stack.gateway.rss_bytes()
    bomb = gzip.compress(sse(A) + b"data: " + b"x" * (64 * 1024 * 1024), 6)
    answer = await stack.ask(Head(headers={"content-encoding": "gzip"}), Send(bomb))
    assert answer.in_band["code"] == "upstream_error"
    assert "16777216" in answer.in_band["message"]
    assert stack.gateway.rss_bytes() - before < 100 * 1024 * 1024


async def test_a_finished_answer_survives_any_tail(stack: Stack) -> None:
    """B21, B22: no `[DONE]`, and the rest cut off at every byte of it: still a complete answer."""
    usage = sse(chunk(None, choices=[], usage={"prompt_tokens": 1, "completion_tokens": 2}))
    body = b"".join(send.data for send in openai_stream(["a"], usage=False, done=False))
    tails = [usage[:at] for at in range(0, len(usage), 9)] + [usage + DONE[:5]]
    for answer in await stack.ask_all([Send(body + tail), Eof()] for tail in tails):
        assert answer.text == "a"
        assert answer.chunks[-1]["choices"][0]["finish_reason"] == "stop"
