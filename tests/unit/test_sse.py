"""M3.1: the decoder follows the WHATWG grammar, however the bytes are cut."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.sse import SseDecoder, SseEvent, SseEventTooLarge, encode_comment, encode_event


def decode(*pieces: bytes, limit: int = 16 << 20) -> list[SseEvent]:
    decoder = SseDecoder(limit)
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


def decode_completed(*pieces: bytes) -> list[SseEvent]:
    """The same by way of the bytes of whole events, wherever that is possible."""
    decoder = SseDecoder()
    events: list[SseEvent] = []
    for piece in pieces:
        whole = decoder.complete(piece)
        events += decoder.feed(piece) if whole is None else decoder.decode(whole)
    return events + decoder.finish()


def data_of(*pieces: bytes) -> list[bytes]:
    return [event.data for event in decode(*pieces)]


def reference(body: bytes) -> list[SseEvent]:
    """The grammar written down a second time, whole and slow: decode lines by §9.2.5/6."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    out: list[SseEvent] = []
    data: list[bytes] = []
    event = last_id = b""
    for line in [*re.split(rb"\r\n|\r|\n", body), b""]:  # the last blank: M3.1's lenient end
        if not line:
            if b"\n".join(data):
                out.append(SseEvent(b"\n".join(data), event, last_id))
            data, event = [], b""
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            event = value
        elif name == b"id" and b"\0" not in value:
            last_id = value
    return out


fragments = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"data", b":", b" ", b"data: ", b"data:", b"event: x", b"id: 7",
         b"id", b"retry: 5", b": c", b"{\"a\":1}",
         b"\xe4\xbd\xa0", b"\xef\xbb\xbf", b"\xe2\x80\xa8",
         b"\xc2\x85", b"\x0b", b"\0", b"[DONE]"]
    ),
    max_size=30,
).map(b"".join)  # fmt: skip


@given(fragments, st.data())
def test_every_chunking_gives_the_same_events_as_the_grammar(
    body: bytes, draw: st.DataObject
) -> None:
    cuts = draw.draw(st.lists(st.integers(0, len(body)), max_size=8).map(sorted))
    edges = [0, *cuts, len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(edges)]
    expected = reference(body)
    assert decode(*pieces) == expected
    assert decode(body) == expected
    assert decode_completed(*pieces) == expected
    assert decode_completed(body) == expected
    assert decode(*(bytes([byte]) for byte in body)) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([b'data: {"a":\r', b"\ndata: 1}\r\n\r\n"], [b'{"a":\n1}'], id="B01-crlf-cut"),
        pytest.param([b"data: a\r\n\r\ndata: b\r\n\r\n"], [b"a", b"b"], id="B02-crlf"),
        pytest.param([b"data: first\r\ndata: second\n\n"], [b"first\nsecond"], id="B04-mixed"),
        pytest.param([b"data: \xe4", b"\xbd\xa0\n\n"], [b"\xe4\xbd\xa0"], id="B05-utf8-cut"),
        pytest.param(
            [b"data: a\xe2\x80\xa8b\xc2\x85c\x0bd\n\n"], [b"a\xe2\x80\xa8b\xc2\x85c\x0bd"], id="B06"
        ),
        pytest.param([b"data: a\n\ndata: b"], [b"a", b"b"], id="B08-no-blank-line"),
        pytest.param([b": c\n\n:\n", b": d\ndata: a\n\n"], [b"a"], id="B09-comments"),
        pytest.param([b"id: 1\ndata: a\n\n: k\n\nid: 2\ndata: b\n\n"], [b"a", b"b"], id="B11"),
        pytest.param([b"retry: 1000\n\nid: 7\n\ndata: a\n\n"], [b"a"], id="B12-control-only"),
        pytest.param([b"\xef\xbb", b"\xbfdata: a\n\n"], [b"a"], id="B17-bom-cut"),
        pytest.param([b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n"], [b"b"], id="B17-one-bom"),
        pytest.param([b"data:a\n\ndata:  b\n\n"], [b"a", b" b"], id="one-space-only"),
        pytest.param([b"data: a\r\rdata: b\r\r"], [b"a", b"b"], id="cr-only"),
        pytest.param([b"data: a\n", b"\n", b"\n", b"data: b\n\n"], [b"a", b"b"], id="blank-cut"),
        pytest.param([b"data\n\ndata:\n\ndata: \n\ndata: a\n\n"], [b"a"], id="empty-data"),
        pytest.param([b"\xef\xbb"], [], id="half-a-bom"),
    ],
)  # fmt: skip
def test_wire_cases(pieces: list[bytes], expected: list[bytes]) -> None:
    assert data_of(*pieces) == expected


def test_completed_bytes_are_whole_events_and_the_rest_is_held() -> None:
    decoder = SseDecoder(max_event_bytes=64)
    assert decoder.complete(b"\xef") is None  # a BOM may yet come
    assert decoder.complete(b"data: early\n\n") == b"data: early\n\n"
    assert decoder.complete(b"data: a\n\ndata: b\n\nda") == b"data: a\n\ndata: b\n\n"
    assert decoder.complete(b"ta: c") == b""
    assert decoder.complete(b"\n\n") == b"data: c\n\n"
    assert decoder.complete(b"data: d\n") == b""
    assert decoder.complete(b"\n") is None  # its blank line is cut in two
    assert [event.data for event in decoder.feed(b"\n")] == [b"d"]
    assert decoder.complete(b"data: e\r\n\r\n") is None
    assert decoder.complete(b"data: " + b"x" * 59) is None  # over the bound
    assert decoder.pending_bytes == 0


def test_a_cr_dispatches_without_waiting_for_the_next_read() -> None:
    decoder = SseDecoder()
    assert [e.data for e in decoder.feed(b"data: a\r\n\r")] == [b"a"]
    assert decoder.feed(b"\n") == []
    assert [e.data for e in decoder.feed(b"data: b\n\n")] == [b"b"]


def test_name_and_id_are_told() -> None:
    assert decode(b"event: error\nid: 9\ndata: x\n\ndata: y\n\n") == [
        SseEvent(b"x", b"error", b"9"),
        SseEvent(b"y", b"", b"9"),
    ]


@pytest.mark.parametrize("size", [70_000, 200_000, 600_000, 3_000_000])
@pytest.mark.parametrize("read", [1021, 65_536])
def test_large_events_pass_whole(size: int, read: int) -> None:
    """B19: no line limit but our own bound."""
    body = b"data: " + b"x" * size + b"\n\n"
    pieces = [body[i : i + read] for i in range(0, len(body), read)]
    assert [len(data) for data in data_of(*pieces)] == [size]


def test_an_event_of_exactly_the_bound_passes_and_one_more_byte_does_not() -> None:
    body = b"data: " + b"x" * 94
    assert len(decode(body + b"\n\n", limit=100)) == 1
    with pytest.raises(SseEventTooLarge):
        decode(body + b"x\n\n", limit=100)
    with pytest.raises(SseEventTooLarge):
        decode(*(bytes([byte]) for byte in body + b"x\n\n"), limit=100)


def test_an_endless_line_is_refused_before_it_is_kept() -> None:
    """B18: what is held never passes the bound."""
    decoder = SseDecoder(1 << 20)
    block = b"x" * (1 << 16)
    for _ in range(16):
        assert decoder.feed(block) == []
    with pytest.raises(SseEventTooLarge):
        decoder.feed(block)
    assert decoder.pending_bytes <= 1 << 20


def test_whole_events_before_a_too_large_one_are_not_lost() -> None:
    body = b"data: a\n\ndata: b\n\ndata: " + b"x" * 200
    for end in (b"", b"\n\n"):
        for held in (0, 3, 10):
            decoder = SseDecoder(100)
            seen = decoder.feed(body[:held])
            with pytest.raises(SseEventTooLarge) as error:
                decoder.feed(body[held:] + end)
            assert [e.data for e in seen + error.value.events] == [b"a", b"b"]


def test_encoding_refuses_to_forge() -> None:
    """B16: CR, LF and NUL never reach a field; data is cut at every line end."""
    for bad in ("a\nb", "a\rb", "a\0b"):
        with pytest.raises(ValueError, match="event must not"):
            encode_event(b"x", event=bad)
        with pytest.raises(ValueError, match="id must not"):
            encode_event(b"x", id=bad)
        with pytest.raises(ValueError, match="one line"):
            encode_comment(bad)
    assert encode_event(b"a\rb\nc\r\nd") == b"data: a\ndata: b\ndata: c\ndata: d\n\n"


@given(st.binary().filter(lambda b: b.strip(b"\r\n") != b""), st.sampled_from(["", "token"]))
def test_what_is_encoded_is_decoded(data: bytes, event: str) -> None:
    (got,) = decode(encode_event(data, event=event))
    assert got == SseEvent(re.sub(rb"\r\n|\r", b"\n", data), event.encode())
