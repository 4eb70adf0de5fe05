"""Golden transcripts: what a client gets for a provider's answer, byte for byte (M2, M3.4)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from encoders.openai import ChunkIdentity
from encoders.shapes import SHAPES
from encoders.translator import StreamWants
from relay.errors import UpstreamTruncated
from relay.lifecycle import Lifecycle, StreamInput
from relay.redact import Redactor
from relay.stream import StreamRelay
from relay.upstreams.replay import PACKAGED_TRANSCRIPTS, Transcript

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TRANSCRIPTS = {
    path.stem: path
    for folder in (*(FIXTURES / shape for shape in SHAPES), PACKAGED_TRANSCRIPTS)
    for path in sorted(folder.glob("*.jsonl"))
    if ".whole" not in path.name
}
# The descriptor flags of the provider of a transcript (M2.7).
FLAGS: dict[str, dict[str, Any]] = {
    "flagged-cumulative": {"cumulative_deltas": True},
    "flagged-inline-cut": {"inline_tool_calls": True},
    "flagged-inline-json": {"inline_tool_calls": True},
    "flagged-inline-xml": {"inline_tool_calls": True},
}
# What a client asks for, by the ending of its golden file. The planes differ only in where the
# reasoning of a translated shape stands.
VARIANTS: dict[str, StreamWants] = {
    ".usage": StreamWants(include_usage=True),
    "": StreamWants(),
    ".openrouter": StreamWants(reasoning_field="reasoning"),
}
CASES = [
    (name, variant)
    for name, path in TRANSCRIPTS.items()
    for variant in VARIANTS
    if variant != ".openrouter" or path.parent.name in SHAPES.keys() - {"openai"}
]


def relayed(transcript: Transcript, reads: list[bytes], wants: StreamWants) -> bytes:
    """What the client gets if the provider's body comes in these reads."""
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="golden/model", provider="fake", id="chatcmpl-ours", created=7)
    relay = StreamRelay(
        translator=SHAPES[transcript.shape].translator(identity, wants),
        lifecycle=life,
        redactor=Redactor(),
        max_event_bytes=1 << 24,
    )
    out = b"".join(map(relay.feed, reads))
    if transcript.end == "reset":
        return out + relay.fail(UpstreamTruncated("the connection to fake broke off"))
    return out + relay.eof()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_the_client_gets_the_golden_bytes(name: str, variant: str) -> None:
    path = TRANSCRIPTS[name]
    transcript = Transcript.parse(path.read_bytes(), str(path))
    reads = [data for _, data in transcript.reads]
    golden = FIXTURES / "golden" / f"{name}{variant}.sse"
    tools = transcript.request.get("tools")
    wants = replace(VARIANTS[variant], tools=tools, **FLAGS.get(name, {}))
    got = relayed(transcript, reads, wants)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(got)
    assert got == golden.read_bytes()
    body = b"".join(reads)
    for size in (1, 5, len(body)):  # and in any other cut
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        assert relayed(transcript, pieces, wants) == got


def test_every_golden_has_its_transcript_and_every_transcript_its_origin() -> None:
    names = {path.name for path in FIXTURES.glob("golden/*.sse")}
    assert names == {f"{name}{variant}.sse" for name, variant in CASES}
    for path in TRANSCRIPTS.values():
        assert Transcript.parse(path.read_bytes(), str(path)).recorded_from
