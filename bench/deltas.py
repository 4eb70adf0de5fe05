"""What it costs to read text back from our own stream: `python -m bench.deltas`.

CPU seconds for a million content chunks, in bursts of so many chunks a read: the relay alone, and
with `encoders.deltas` behind it, as a call of an agent has it.
"""

from __future__ import annotations

import json
import time
from typing import Final

from encoders.deltas import DeltaReader
from encoders.openai import ChunkIdentity
from encoders.shapes import OPENAI
from encoders.translator import StreamWants
from relay.lifecycle import Lifecycle, StreamInput
from relay.redact import Redactor
from relay.stream import StreamRelay

_CHUNKS: Final = 200_000
_ROUNDS: Final = 3
_READS: Final = 5  # different ones
_WORDS: Final = {
    "ascii": [" the", " gateway", " is", ",", " stream"],
    "escapes": [" the\n", "a", '"'],
    "utf-8": [" café", "a", "𝄞"],
}


def _event(text: str, padding: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "gpt-4o-mini-2024-07-18",
        "system_fingerprint": "fp_1",
        "choices": [choice],
    }
    if padding is not None:
        chunk["obfuscation"] = padding
    return (
        b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def _relay() -> StreamRelay:
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="bench/model", provider="bench", id="chatcmpl-1", created=7)
    return StreamRelay(
        translator=OPENAI.translator(identity, StreamWants()),
        lifecycle=life,
        redactor=Redactor(),
        max_event_bytes=1 << 24,
    )


def _seconds(reads: list[bytes], per_read: int, *, read_back: bool) -> float:
    """CPU seconds for a million chunks, the best of some rounds."""
    relay, reader = _relay(), DeltaReader()
    for _ in range(3):  # what stands around the text is learned
        reader.feed(relay.feed(reads[0]))
    count = _CHUNKS // per_read
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.process_time()
        if read_back:
            for n in range(count):
                reader.feed(relay.feed(reads[n % _READS]))
        else:
            for n in range(count):
                relay.feed(reads[n % _READS])
        best = min(best, time.process_time() - began)
    return best / (count * per_read) * 1e6


def main() -> None:
    """Print a table."""
    print(f"{'text':<12}{'a read':>8}{'relay':>9}{'+ deltas':>10}{'ratio':>8}")
    for name, words in [*_WORDS.items(), ("obfuscation", _WORDS["ascii"])]:
        for per_read in (1, 8, 32, 128):
            reads = [
                b"".join(
                    _event(
                        words[(start + n) % len(words)],
                        "x" * (n % 7) if name == "obfuscation" else None,
                    )
                    for n in range(per_read)
                )
                for start in range(_READS)
            ]
            alone = _seconds(reads, per_read, read_back=False)
            both = _seconds(reads, per_read, read_back=True)
            print(f"{name:<12}{per_read:>8}{alone:>7.2f} s{both:>8.2f} s{both / alone:>8.2f}")


if __name__ == "__main__":
    main()
