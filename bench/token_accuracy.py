"""How far characters / 4 is from the provider's own token counts (M4.2).

    python -m bench.token_accuracy              recorded transcripts, and the local model
    python -m bench.token_accuracy --recorded   recorded transcripts only

For each completed stream: tokens REPORTED by the provider, tokens COUNTED from the same bytes, and
the error of the count. A hang-up on a provider that reports usage only at the end is billed by the
count, so this is how wrong such a bill can be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from encoders.openai import ChunkIdentity
from encoders.openai_chunks import ChunkRewriter
from relay import meter
from relay.errors import UpstreamUnavailable
from relay.lifecycle import Lifecycle, Outcome, StreamInput
from relay.money import estimate_prompt_tokens
from relay.redact import Redactor
from relay.stream import StreamRelay
from relay.upstreams.base import UpstreamRequest
from relay.upstreams.http import HttpUpstream
from relay.upstreams.local import LlamaProcess, LocalUpstream
from relay.upstreams.replay import PACKAGED_TRANSCRIPTS, load_transcripts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from relay.upstreams.base import Upstream

PROMPTS = {
    "prose": "Write two sentences about rivers.",
    "list": "List ten fruits, one a line.",
    "code": "Write a Python function that adds two numbers, with a docstring.",
    "numbers": "Count from 1 to 40, separated by commas.",
    "german": "Schreibe zwei S\u00e4tze \u00fcber Br\u00fccken.",
    "chinese": "\u7528\u4e2d\u6587\u5199\u4e24\u53e5\u8bdd\u3002",
    "json": 'Answer with JSON only: {"name": a name, "age": a number}.',
}


@dataclass(frozen=True, slots=True)
class Line:
    """One stream: tokens by the provider and by us, of the prompt and of the output."""

    name: str
    prompt_reported: int
    prompt_counted: int
    output_reported: int
    output_counted: int


def measure(name: str, body: dict[str, Any], reads: Iterable[bytes]) -> Line | None:
    """Relay the bytes of a stream; return both counts, None if it did not complete with usage."""
    life = Lifecycle()
    life.advance(StreamInput.DIAL)
    life.advance(StreamInput.HEADERS)
    identity = ChunkIdentity(model="bench", provider="bench", id="x", created=1)
    rewriter = ChunkRewriter(identity)
    relay = StreamRelay(
        translator=rewriter, lifecycle=life, redactor=Redactor(), max_event_bytes=1 << 24
    )
    for data in reads:
        relay.feed(data)
    relay.eof()
    usage = relay.usage
    if relay.outcome is not Outcome.COMPLETED or usage is None:
        return None
    estimate = estimate_prompt_tokens(body)
    counted = meter.read(None, lambda: rewriter.characters, estimate)
    return Line(
        name,
        usage.prompt_tokens or 0,
        counted.prompt_tokens,
        usage.completion_tokens or 0,
        counted.completion_tokens,
    )


def recorded() -> list[Line]:
    """Measure the transcripts that come with the package."""
    lines = []
    for name, transcript in load_transcripts(PACKAGED_TRANSCRIPTS).items():
        if not name.endswith(".whole"):
            reads = [data for _, data in transcript.reads]
            lines.append(measure(f"recorded {name}", dict(transcript.request), reads))
    return [line for line in lines if line is not None]


async def live(tokens: int) -> list[Line]:
    """Measure streams of the local model; an empty list if it cannot be had."""

    def make(base_url: Callable[[], str]) -> Upstream:
        return HttpUpstream("local", base_url)

    upstream = LocalUpstream("local", LlamaProcess(), make)
    try:
        await upstream.start()
    except UpstreamUnavailable as error:
        print(f"the local model is left out: {error.message}", file=sys.stderr)
        await upstream.close()
        return []
    lines = []
    try:
        for name, prompt in PROMPTS.items():
            body = {
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            reply = await upstream.open(
                UpstreamRequest(model=str(body["model"]), body=body, stream=True)
            )
            reads = []
            while data := await reply.read():
                reads.append(data)
            lines.append(measure(f"local {name}", body, reads))
    finally:
        await upstream.close()
    return [line for line in lines if line is not None]


def show(lines: list[Line]) -> None:
    """Print the table and the errors of the sums."""
    print(f"{'stream':32} {'prompt':>20} {'output':>20}")
    print(f"{'':32} {'reported  counted':>20} {'reported  counted':>20}   error of the output")
    for line in lines:
        error = line.output_counted / line.output_reported - 1 if line.output_reported else 0.0
        print(
            f"{line.name:32} {line.prompt_reported:>11} {line.prompt_counted:>8} "
            f"{line.output_reported:>11} {line.output_counted:>8}   {error:+.0%}"
        )
    reported = sum(line.output_reported for line in lines)
    counted = sum(line.output_counted for line in lines)
    off = sum(abs(line.output_counted - line.output_reported) for line in lines)
    if reported:
        print(f"{'all':32} {'':>20} {reported:>11} {counted:>8}   {counted / reported - 1:+.0%}")
        print(f"mean absolute error of a stream's output: {off / reported:.0%}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recorded", action="store_true", help="recorded transcripts only")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a live stream")
    parser.add_argument("--json", action="store_true", help="as JSON lines")
    options = parser.parse_args()
    lines = recorded()
    if not options.recorded:
        lines += asyncio.run(live(options.tokens))
    if options.json:
        for line in lines:
            print(json.dumps({field: getattr(line, field) for field in Line.__slots__}))
    else:
        show(lines)


if __name__ == "__main__":
    main()
