"""Record a provider's real answer as a transcript that `relay.upstreams.replay` can serve.

    python -m relay.upstreams.record https://api.openai.com/v1 --model gpt-4o-mini \
        --api-key-env OPENAI_API_KEY --out transcripts/gpt-4o-mini.jsonl
    python -m relay.upstreams.record local --prompt "Hello!" --out transcripts/hello.jsonl

`local` starts the local model for it. `--shape` says which wire is spoken; a request in other words
than OpenAI's comes by `--body`. `--body FILE` sends a JSON request (or, to record one again, the
request of an existing transcript), `--whole` asks for an unstreamed answer. The borders and times
of the network reads are kept. Credentials are not: request headers are never written, of the
response only the headers that a client can depend on, and an answer that repeats the key is
refused.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from encoders.shapes import SHAPES
from relay.errors import RelayError
from relay.upstreams.local import DEFAULT_MODEL, LlamaProcess
from relay.upstreams.replay import End, Transcript
from relay.upstreams.weights import SMOLLM2_135M

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEPT_HEADERS: Final = frozenset({"cache-control", "content-type", "retry-after"})
_CONNECT_TIMEOUT_S: Final = 10.0
_READ_TIMEOUT_S: Final = 120.0
_READ_BUFFER_BYTES: Final = 64 * 1024


async def record(
    base_url: str,
    body: Mapping[str, Any],
    *,
    recorded_from: str,
    api_key: str = "",
    shape: str = "openai",
) -> Transcript:
    """Send one request to a provider and return everything that came back.

    Args:
        base_url: as in the configuration; the route of the shape is added.
        body: the request; `body["stream"]` decides what is asked for.
        recorded_from: provenance: software, version, model, date.
        api_key: sent as the shape has it, never written.
        shape: the wire that is spoken.

    Raises:
        aiohttp.ClientError: no answer, or none for two minutes.
        ValueError: the answer repeats the key.
    """
    wire = SHAPES[shape]
    headers = {"accept-encoding": "identity", **wire.auth(api_key)}
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S
    )
    model = str(body.get("model") or "")
    url = wire.url(base_url.rstrip("/"), model, stream=bool(body.get("stream")))
    in_url = ("model", "stream") if shape == "gemini" else ()
    sent = {key: value for key, value in body.items() if key not in in_url}
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=_READ_BUFFER_BYTES) as session:
        clock = _Clock()
        async with session.post(url, json=sent, headers=headers) as response:
            headers_at_ms = clock.now_ms()
            reads, end = await _read_all(response, clock)
            transcript = Transcript(
                recorded_from=recorded_from,
                shape=shape,
                request=dict(body),
                status=response.status,
                headers=_kept(response.headers),
                headers_at_ms=headers_at_ms,
                reads=tuple(reads),
                end=end,
                end_at_ms=clock.now_ms(),
            )
    if api_key and api_key.encode() in b"".join(data for _, data in reads):
        raise ValueError("the answer repeats the API key; it was not written")
    return transcript


class _Clock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now_ms(self) -> float:
        return round((time.monotonic() - self._began) * 1000, 1)


async def _read_all(
    response: aiohttp.ClientResponse, clock: _Clock
) -> tuple[list[tuple[float, bytes]], End]:
    """Read the body to its end; a body without a length or chunks that is cut looks whole."""
    reads: list[tuple[float, bytes]] = []
    try:
        while data := await response.content.readany():
            reads.append((clock.now_ms(), data))
    except aiohttp.ServerTimeoutError:
        raise  # we gave up: that is not how the provider ended
    except (aiohttp.ClientError, ConnectionError):
        return reads, "reset"
    return reads, "eof"


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that a client can depend on: no cookies, no account names."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in lower.items() if name in _KEPT_HEADERS}


async def record_local(
    body: Mapping[str, Any], *, weights_path: Path | None = None, shape: str = "openai"
) -> Transcript:
    """Start the local model, record one answer of it, end it; raises as `LlamaProcess.start`."""
    process = LlamaProcess(str(body["model"]), weights_path=weights_path)
    await process.start()
    try:
        weights = weights_path.name if weights_path else SMOLLM2_135M.file_name
        software = f"llama.cpp (xllamacpp {metadata.version('xllamacpp')}), {weights}"
        return await record(
            process.base_url, body, recorded_from=_provenance(software, body), shape=shape
        )
    finally:
        await process.close()


def _provenance(software: str, body: Mapping[str, Any]) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{software}, model {body['model']}, {today}"


def _request(options: argparse.Namespace) -> dict[str, Any]:
    """Make the request body of the command line."""
    if options.body:
        text = options.body.read_text("utf-8")
        try:
            body = json.loads(text)
        except ValueError:  # more lines than one: a transcript
            body = json.loads(text.split("\n", 1)[0])["request"]
    else:
        body = {
            "messages": [{"role": "user", "content": options.prompt}],
            "temperature": 0,
            "max_tokens": options.max_tokens,
        }
    model = options.model or body.get("model") or DEFAULT_MODEL
    body = {**body, "model": model, "stream": not options.whole}
    body.pop("stream_options", None)
    if body["stream"] and options.shape == "openai":
        body["stream_options"] = {"include_usage": True}
    return dict(body)


def _api_key(variable: str | None) -> str:
    """Return the key; from the environment, for a command line is seen by every user."""
    if variable is None:
        return ""
    if not (key := os.environ.get(variable)):
        raise ValueError(f"{variable} is not set")
    return key


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m relay.upstreams.record",
        description="Record a provider's answer as a transcript for the replay provider.",
    )
    parser.add_argument("url", metavar="URL", help="base URL of the provider, or `local`")
    parser.add_argument("--out", type=Path, required=True, help="the transcript, *.jsonl")
    parser.add_argument("--model", help=f"default: that of --body, else {DEFAULT_MODEL}")
    parser.add_argument("--prompt", default="Say hello in one sentence.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--body", type=Path, help="a JSON request, or a transcript to repeat")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="openai")
    parser.add_argument("--whole", action="store_true", help="ask for an unstreamed answer")
    parser.add_argument("--api-key-env", metavar="NAME", help="variable that holds the key")
    parser.add_argument("--software", help="who answers, for `recorded_from`; default: the URL")
    return parser.parse_args(arguments)


def main() -> int:
    """Record one answer; 1 and a message on standard error if there is none."""
    options = _options()
    try:
        body = _request(options)
        if options.url == "local":
            recording = record_local(body, shape=options.shape)
        else:
            recording = record(
                options.url,
                body,
                recorded_from=_provenance(options.software or options.url, body),
                api_key=_api_key(options.api_key_env),
                shape=options.shape,
            )
        transcript = asyncio.run(recording)
        options.out.write_bytes(transcript.dump())
    except (RelayError, aiohttp.ClientError, OSError, ValueError) as error:
        sys.stderr.write(f"nothing was recorded: {error!r}\n")
        return 1
    octets = sum(len(data) for _, data in transcript.reads)
    sys.stdout.write(
        f"{options.out}: status {transcript.status}, {len(transcript.reads)} reads, "
        f"{octets} bytes, {transcript.end} after {transcript.end_at_ms:g} ms\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
