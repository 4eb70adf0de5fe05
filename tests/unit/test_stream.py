"""StreamRelay: upstream bytes to client bytes, and the one end of a stream (M2.1, M3.1, M3.4)."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkRewriter
from relay.errors import ClientGone, GatewayShutdown, UpstreamTruncated
from relay.lifecycle import Lifecycle, Outcome, StreamInput
from relay.redact import Redactor
from relay.stream import StreamRelay
from relay.upstreams.replay import PACKAGED_TRANSCRIPTS, Transcript

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "sk-upstream-secret"
DONE = b"data: [DONE]\n\n"


def relay(
    *,
    include_usage: bool = False,
    max_event_bytes: int = 1 << 20,
    translator: ChunkRewriter | None = None,
) -> StreamRelay:
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="test/model", provider="fake", id="chatcmpl-ours", created=7)
    return StreamRelay(
        translator=translator or ChunkRewriter(identity, include_usage=include_usage),
        lifecycle=life,
        redactor=Redactor((SECRET,)),
        max_event_bytes=max_event_bytes,
    )


def play(target: StreamRelay, *pieces: bytes, end: str = "eof") -> bytes:
    out = b"".join(target.feed(piece) for piece in pieces)
    if end == "eof":
        out += target.eof()
    elif end == "reset":
        out += target.fail(UpstreamTruncated("the connection to fake broke off"))
    return out


def sse(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"data: " + data + b"\n\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    delta = {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse({"id": "c1", "object": "chat.completion.chunk", "model": "up", "choices": [choice]})


def datas(out: bytes) -> list[Any]:
    """The data of the client's events; strict about the form (M2.1)."""
    assert out == b"" or out.endswith(b"\n\n")
    lines = out.split(b"\n\n")[:-1]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [line[6:] if line == DONE[:-2] else json.loads(line[6:]) for line in lines]


def error_of(out: bytes) -> dict[str, Any]:
    """The error of a stream that ended by M3.4; checks that nothing follows but `[DONE]`."""
    *_, last, done = datas(out)
    assert done == b"[DONE]"
    assert last["choices"] == [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]
    assert (last["model"], last["provider"]) == ("test/model", "fake")
    error: dict[str, Any] = last["error"]
    assert error["type"] == "upstream_error"
    assert error["metadata"]["provider_name"] == "fake"
    return error


# --- ends that are complete -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        pytest.param([chunk("a", "stop"), DONE], "eof", id="done"),
        pytest.param([chunk("a"), DONE], "eof", id="done-without-a-finish"),
        pytest.param([chunk("a", "stop")], "eof", id="B21-finish-without-done"),
        pytest.param([chunk("a", "stop")[:-2]], "eof", id="B08-last-event-without-blank-line"),
        pytest.param([chunk("a", "stop"), b"data: [DONE]"], "eof", id="done-without-blank-line"),
        pytest.param([chunk("a", "stop")], "reset", id="B22-tail-cut-after-the-finish"),
        pytest.param([chunk("a", "stop"), b'data: {"usa'], "eof", id="half-an-event-at-the-end"),
        pytest.param([chunk("a", "stop"), DONE, chunk("b"), DONE], "eof", id="more-after-done"),
    ],
)  # fmt: skip
def test_a_complete_stream_ends_in_one_done(pieces: list[bytes], end: str) -> None:
    target = relay()
    out = play(target, *pieces, end=end)
    assert out.count(DONE) == 1
    assert out.endswith(DONE)
    assert b"error" not in out
    assert b'"b"' not in out
    assert target.closed
    assert target.error is None


# --- ends that are not ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "end", "told"),
    [
        pytest.param([chunk("a")], "eof", "before the answer was finished", id="B44-eof"),
        pytest.param([chunk("a")], "reset", "broke off", id="B45-reset"),
        pytest.param([chunk("a"), b'data: {"id":"c","choi'], "reset", "broke off", id="B15-half"),
        pytest.param([chunk("a"), b'data: {"id":"c","choi'], "eof", "before the", id="B15-eof"),
        pytest.param([], "eof", "without an answer", id="empty"),
        pytest.param([b": hb\n\n", b":\n"], "eof", "without an answer", id="only-comments"),
        pytest.param([DONE], "eof", "without an answer", id="only-done"),
        pytest.param([sse({"type": "ping"}), DONE], "eof", "without an answer", id="no-choice"),
        pytest.param([chunk("a"), b"data: oops\n\n"], "eof", "not JSON", id="not-json"),
        pytest.param([b"event: error\n" + sse({"message": "no"})], "eof", "no", id="named-error"),
        pytest.param([sse({"object": "error", "message": "no"})], "", "", id="error-object"),
    ],
)  # fmt: skip
def test_a_failed_stream_ends_in_an_error_and_done(
    pieces: list[bytes], end: str, told: str
) -> None:
    target = relay(include_usage=True)
    out = play(target, *pieces, end=end)
    assert target.closed
    assert target.error is not None
    assert out.count(DONE) == 1
    assert b"usage" not in out  # no usage after an error (M2.4)
    if told:
        error = error_of(out)
        assert told in error["message"]
        assert error["code"] == "upstream_error"


def test_an_event_over_the_bound_ends_the_stream_after_what_came_before() -> None:
    """M3.1, B18."""
    target = relay(max_event_bytes=10_000)
    out = play(target, chunk("a") + b"data: " + b"x" * 20_000)
    assert datas(out)[0]["choices"][0]["delta"]["content"] == "a"
    assert "10000 bytes" in error_of(out)["message"]


@pytest.mark.parametrize("sends_done", [True, False])
def test_the_upstreams_own_error_event_passes_as_sent(sends_done: bool) -> None:
    """M3.4: byte for byte, then one `[DONE]`, and nothing that comes later."""
    event = b'data: {"error": {"message":"Overloaded \\u00fc","code":529 }, "x":1.0}\n\n'
    target = relay()
    out = play(target, chunk("a"), event, DONE if sends_done else b"", chunk("b"))
    assert out.endswith(event + DONE)
    assert out.count(DONE) == 1
    assert target.error is not None
    assert "Overloaded" in target.error.message


def test_our_secrets_are_masked_in_what_the_provider_says() -> None:
    event = sse({"error": {"message": f"bad key {SECRET}", SECRET: [SECRET]}})
    target = relay()
    out = play(target, event)
    assert target.error is not None
    assert SECRET.encode() not in out
    assert SECRET not in target.error.message
    assert SECRET not in str(getattr(target.error, "raw", ""))
    out = play(relay(), chunk("a"), f"data: oops {SECRET}\n\n".encode())
    assert "oops ***" in error_of(out)["metadata"]["raw"]


def test_shutdown_is_told_in_band() -> None:
    """M3.6."""
    target = relay(include_usage=True)
    out = target.feed(chunk("a"))
    out += target.fail(GatewayShutdown("the gateway is shutting down"))
    assert error_of(out)["code"] == "gateway_shutdown"
    assert target.feed(chunk("b")) == target.eof() == b""


def test_a_client_that_is_gone_is_told_nothing() -> None:
    target = relay()
    target.feed(chunk("a"))
    assert target.fail(ClientGone("gone")) == b""
    assert target.closed


# --- every chunking ---------------------------------------------------------------------------


def recorded() -> list[Path]:
    return sorted(p for p in PACKAGED_TRANSCRIPTS.glob("*.jsonl") if ".whole" not in p.name)


STREAM = (
    b"\xef\xbb\xbf: hello\r\n\r\n"
    + chunk("\u4f60\u597d").replace(b"\n", b"\r\n")
    + b"event: ping\nid: 3\ndata: {}\n\n"
    + sse(b'{"choices":[{"index":0,\ndata: "delta":{"content":"\xe4\xbd\xa0"}}],"usage":null}')
    + chunk("b").replace(b"\n", b"\r")
    + sse({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
    + chunk("", "stop")
    + DONE
)


@settings(max_examples=60)
@given(st.data())
def test_every_chunking_gives_the_same_bytes(data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
    edges = [0, *cuts, len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert play(relay(include_usage=True), *pieces) == play(relay(include_usage=True), STREAM)


def test_one_byte_at_a_time_gives_the_same_bytes() -> None:
    pieces = [bytes([byte]) for byte in STREAM]
    whole = play(relay(include_usage=True), STREAM)
    assert play(relay(include_usage=True), *pieces) == whole
    assert whole.count(b'"prompt_tokens"') == 1


@pytest.mark.parametrize("blank", [1, 2, 3, 4, 5, 6])
def test_blank_lines_between_events_are_nothing_wherever_a_read_ends(blank: int) -> None:
    """M3.1: any number of them, the last event of a read with some of the next behind it."""
    events = [chunk("a"), chunk("b"), sse({"choices": [], "usage": {"prompt_tokens": 2}})]
    stream = b"\n" * blank + b"".join(e + b"\n" * blank for e in [*events, chunk("", "stop")])
    want = play(relay(include_usage=True), *events, chunk("", "stop"))
    for start, end in itertools.combinations(range(0, len(stream) + 1, 7), 2):
        pieces = stream[:start], stream[start:end], stream[end:]
        assert play(relay(include_usage=True), *pieces) == want


@pytest.mark.parametrize("path", recorded(), ids=lambda p: p.stem)
@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_recorded_answers_in_any_cut(path: Path, size: int) -> None:
    transcript = Transcript.parse(path.read_bytes(), str(path))
    sent = b"".join(read for _, read in transcript.reads)
    pieces = [sent[i : i + size] for i in range(0, len(sent), size)]
    as_read = play(relay(include_usage=True), *(read for _, read in transcript.reads))
    assert play(relay(include_usage=True), *pieces) == as_read
    assert as_read.endswith(DONE)
    *chunks, _ = datas(as_read)
    assert all(c["model"] == "test/model" for c in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@given(st.integers(0, len(STREAM)))
def test_a_death_at_any_byte_gives_whole_events_and_one_end(at: int) -> None:
    target = relay(include_usage=True)
    out = play(target, STREAM[:at], end="reset")
    assert out.count(DONE) == 1
    assert out.endswith(DONE)
    datas(out)  # whole events only
    assert target.closed


def test_outcomes() -> None:
    for pieces, end, outcome in [
        ([chunk("a"), DONE], "eof", Outcome.COMPLETED),
        ([chunk("a", "stop")], "eof", Outcome.COMPLETED),
        ([chunk("a")], "eof", Outcome.TRUNCATED),
        ([chunk("a")], "reset", Outcome.UPSTREAM_ERROR),
        ([], "eof", Outcome.UPSTREAM_ERROR),
    ]:
        target = relay()
        play(target, *pieces, end=end)
        assert target.outcome is outcome


def test_an_end_that_cannot_be_written_is_a_fault_and_not_a_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream has not ended before its end is there, so that the fault can still be told."""

    def fail(_: ChunkRewriter) -> bytes:
        raise TypeError("nested too deeply")

    monkeypatch.setattr(ChunkRewriter, "closing", fail)
    for end in (DONE, b""):
        target = relay(include_usage=True)
        target.feed(chunk("a", "stop"))
        with pytest.raises(TypeError):
            target.feed(end) if end else target.eof()
        assert not target.closed
        assert error_of(target.fail(GatewayShutdown("x")))


@given(st.data())
def test_what_comes_out_is_counted_once_however_it_is_cut(draw: st.DataObject) -> None:
    """M4.2: also where a read holds content and something else."""

    def content(text: str, **delta: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}
        return sse({"id": "c1", "model": "up", "choices": [choice]})

    words = ["", "ab", "cd", "\u4f60\u597d", 'q"', "\n", "ef", "gh"]
    body = content("", role="assistant") + b"".join(content(word) for word in words)
    body += b": ping\n\n" + content("ij") + chunk("", "stop") + DONE
    cuts = draw.draw(st.lists(st.integers(0, len(body)), max_size=4).map(sorted))
    identity = ChunkIdentity(model="test/model", provider="fake", id="ours", created=7)
    translator = ChunkRewriter(identity)
    target = relay(translator=translator)
    play(target, *(body[a:b] for a, b in itertools.pairwise([0, *cuts, len(body)])))
    assert translator.characters == sum(map(len, words)) + 2
