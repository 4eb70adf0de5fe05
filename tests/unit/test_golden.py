"""Golden transcripts: what a client gets for a provider's answer, byte for byte (M2, M3.4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from encoders.openai import ChunkIdentity
from encoders.openai_shape import OpenAIShape
from encoders.translator import StreamWants
from relay.errors import UpstreamTruncated
from relay.lifecycle import Lifecycle, StreamInput
from relay.redact import Redactor
from relay.stream import StreamRelay
from relay.upstreams.replay import PACKAGED_TRANSCRIPTS, Transcript

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TRANSCRIPTS = {
    path.stem: path
    for folder in (FIXTURES / "openai", PACKAGED_TRANSCRIPTS)
    for path in sorted(folder.glob("*.jsonl"))
    if ".whole" not in path.name
}
# The descriptor flags of the provider of a transcript (M2.7).
FLAGS = {
    "flagged-cumulative": {"cumulative_deltas": True},
    "flagged-inline-cut": {"inline_tool_calls": True},
    "flagged-inline-json": {"inline_tool_calls": True},
    "flagged-inline-xml": {"inline_tool_calls": True},
}


def relayed(
    transcript: Transcript, reads: list[bytes], *, include_usage: bool, flags: dict[str, bool]
) -> bytes:
    """What the client gets if the provider's body comes in these reads."""
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="golden/model", provider="fake", id="chatcmpl-ours", created=7)
    wants = StreamWants(
        include_usage=include_usage,
        usage_is_ours=True,
        tools=transcript.request.get("tools"),
        cumulative_deltas=flags.get("cumulative_deltas", False),
        inline_tool_calls=flags.get("inline_tool_calls", False),
    )
    relay = StreamRelay(
        translator=OpenAIShape().translator(identity, wants),
        lifecycle=life,
        redactor=Redactor(),
        max_event_bytes=1 << 24,
    )
    out = b"".join(map(relay.feed, reads))
    if transcript.end == "reset":
        return out + relay.fail(UpstreamTruncated("the connection to fake broke off"))
    return out + relay.eof()


@pytest.mark.parametrize("include_usage", [True, False], ids=["usage", "no-usage"])
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_client_gets_the_golden_bytes(name: str, include_usage: bool) -> None:
    path = TRANSCRIPTS[name]
    transcript = Transcript.parse(path.read_bytes(), str(path))
    reads = [data for _, data in transcript.reads]
    golden = FIXTURES / "golden" / f"{name}{'.usage' if include_usage else ''}.sse"
    flags = FLAGS.get(name, {})
    got = relayed(transcript, reads, include_usage=include_usage, flags=flags)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(got)
    assert got == golden.read_bytes()
    body = b"".join(reads)
    for size in (1, 5, len(body)):  # and in any other cut
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        again = relayed(transcript, pieces, include_usage=include_usage, flags=flags)
        assert again == got


def test_every_golden_has_its_transcript_and_every_transcript_its_origin() -> None:
    names = {
        path.name.removesuffix(".sse").removesuffix(".usage") for path in FIXTURES.glob("golden/*")
    }
    assert names == set(TRANSCRIPTS)
    for path in TRANSCRIPTS.values():
        assert Transcript.parse(path.read_bytes(), str(path)).recorded_from
