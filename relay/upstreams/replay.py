"""Recorded transcripts as a provider: real answers, byte for byte, with their chunk borders.

A transcript is a file of JSON lines, made by `relay.upstreams.record` and never by hand:

    {"format": 1, "recorded_from": "software, version, model, date", "shape": "openai",
     "request": {…}, "status": 200, "headers": {"content-type": "text/event-stream"},
     "headers_at_ms": 31.0}
    {"at_ms": 40.2, "data": "data: {…"}          one network read, if it is UTF-8
    {"at_ms": 48.9, "base64": "…"}               one that is not (a split character)
    {"at_ms": 95.0, "end": "eof"}                or "reset"; without this line: eof at once

(the first is one line in the file). Times count from the sending of the request. `<model>.jsonl`
answers streamed requests for `<model>`; `<model>.whole.jsonl`, if it is there, the others.
Serves tests and, when the local model cannot be had, `serve` (O1.1).
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from relay.errors import UpstreamRefused, UpstreamTruncated, UpstreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.upstreams.base import UpstreamReply, UpstreamRequest

FORMAT: Final = 1
PACKAGED_TRANSCRIPTS: Final = Path(__file__).with_name("transcripts")

_SUFFIX: Final = ".jsonl"
_WHOLE_SUFFIX: Final = ".whole.jsonl"

End = Literal["eof", "reset"]


class TranscriptError(ValueError):
    """A file is not a transcript; the message names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One recorded answer. Times are milliseconds since the request was sent.

    Attributes:
        recorded_from: provenance: software, version, model, date.
        shape: wire shape of the answer.
        request: the JSON request that was sent, without credentials.
        status: HTTP status.
        headers: response headers with lower-case names.
        headers_at_ms: when status and headers arrived.
        reads: time and bytes of each network read.
        end: how the body ended.
        end_at_ms: when it did.
    """

    recorded_from: str
    shape: str
    request: Mapping[str, Any]
    status: int
    headers: Mapping[str, str]
    headers_at_ms: float
    reads: tuple[tuple[float, bytes], ...]
    end: End
    end_at_ms: float

    def dump(self) -> bytes:
        """Return the file's bytes; `parse` of them gives an equal transcript."""
        meta = {
            "format": FORMAT,
            "recorded_from": self.recorded_from,
            "shape": self.shape,
            "request": dict(self.request),
            "status": self.status,
            "headers": dict(self.headers),
            "headers_at_ms": self.headers_at_ms,
        }
        lines: list[dict[str, Any]] = [meta]
        for at_ms, data in self.reads:
            try:
                lines.append({"at_ms": at_ms, "data": data.decode("utf-8")})
            except UnicodeDecodeError:
                lines.append({"at_ms": at_ms, "base64": base64.b64encode(data).decode("ascii")})
        lines.append({"at_ms": self.end_at_ms, "end": self.end})
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Transcript:
        """Read a transcript.

        Args:
            data: the file's bytes.
            where: the file's name, for messages.

        Raises:
            TranscriptError: it is not one.
        """
        number = 0
        try:
            # Split as bytes: str.splitlines would also split at U+2028 inside a string.
            meta, *rest = (line for line in data.split(b"\n") if line.strip())
            number = 1
            head = _head(json.loads(meta))
            reads: list[tuple[float, bytes]] = []
            end: End = "eof"
            end_at_ms = head["headers_at_ms"]
            for number, text in enumerate(rest, 2):  # noqa: B007 - the number is for the message
                line = json.loads(text)
                at_ms = end_at_ms = float(line["at_ms"])
                if "end" in line:
                    end = _end(line["end"])
                elif "data" in line:
                    reads.append((at_ms, line["data"].encode()))
                else:
                    reads.append((at_ms, base64.b64decode(line["base64"], validate=True)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TranscriptError(
                f"{where}, line {number}: not a transcript ({error!r}); "
                "make one with `python -m relay.upstreams.record`"
            ) from error
        return cls(**head, reads=tuple(reads), end=end, end_at_ms=end_at_ms)


def _head(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Read the first line."""
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']!r}; this version knows {FORMAT}")
    return {
        "recorded_from": str(meta["recorded_from"]),
        "shape": str(meta["shape"]),
        "request": dict(meta["request"]),
        "status": int(meta["status"]),
        "headers": {str(k).lower(): str(v) for k, v in meta["headers"].items()},
        "headers_at_ms": float(meta.get("headers_at_ms", 0.0)),
    }


def _end(value: object) -> End:
    if value == "eof":
        return "eof"
    if value == "reset":
        return "reset"
    raise ValueError(f"end is eof or reset, not {value!r}")


def load_transcripts(folder: Path) -> dict[str, Transcript]:
    """Read all transcripts of a folder, by file name without `.jsonl`.

    Raises:
        TranscriptError: one of the files is not a transcript, or one of another shape than openai,
            which is what the replay provider is asked in.
        OSError: the folder or a file cannot be read.
    """
    found: dict[str, Transcript] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_SUFFIX):
            transcript = Transcript.parse(path.read_bytes(), str(path))
            if transcript.shape != "openai":
                raise TranscriptError(
                    f"{path} has the shape {transcript.shape}; only openai can be replayed"
                )
            found[path.name.removesuffix(_SUFFIX)] = transcript
    return found


class ReplayUpstream:
    """A provider that answers from recorded transcripts, whatever was asked.

    Args:
        name: canonical id of the provider (M2.2).
        folder: the transcripts; None: those that come with the package.
        speed: 2.0 replays twice as fast, `math.inf` without waiting.
    """

    def __init__(self, name: str, folder: Path | None = None, *, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError(f"speed must be above 0, not {speed}")
        self._name = name
        self._folder = folder or PACKAGED_TRANSCRIPTS
        self._speed = speed
        self._transcripts: dict[str, Transcript] = {}

    @property
    def name(self) -> str:
        """Canonical id of the provider."""
        return self._name

    def models(self) -> list[str]:
        """Return the models that can be streamed, sorted; empty before `start`."""
        return [stem for stem in self._transcripts if not stem.endswith(".whole")]

    async def start(self) -> None:
        """Read the transcripts.

        Raises:
            UpstreamUnavailable: no folder, no transcript in it, or a file that is not one.
        """
        try:
            self._transcripts = load_transcripts(self._folder)
        except (OSError, TranscriptError) as error:
            raise UpstreamUnavailable(f"provider {self._name} cannot replay: {error}") from error
        if not self.models():
            raise UpstreamUnavailable(
                f"provider {self._name} cannot replay: no {_SUFFIX} in {self._folder}; "
                "record one with `python -m relay.upstreams.record`"
            )

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        """Answer from the transcript of the model that the request names.

        Raises:
            UpstreamRefused: 404, no transcript of that name; the message lists those there are.
            UpstreamUnavailable: a `stream: false` request, and only a stream was recorded.
        """
        model = str(request.body.get("model", ""))
        streamed = self._transcripts.get(model) if model in self.models() else None
        if streamed is None:
            raise UpstreamRefused(
                f"no transcript {model!r} is recorded; there are: {', '.join(self.models())}",
                status=404,
            )
        transcript = streamed if request.stream else self._transcripts.get(f"{model}.whole")
        if transcript is None:
            raise UpstreamUnavailable(
                f"{model} was recorded as a stream only: record {model}{_WHOLE_SUFFIX}, or have "
                f"provider {self._name} aggregate"
            )
        reply = _ReplayReply(transcript, self._speed)
        await reply.wait_until(transcript.headers_at_ms)
        return reply

    async def close(self) -> None:
        """Nothing is held open."""


class _ReplayReply:
    """One replay in progress. The clock starts when it is made."""

    def __init__(self, transcript: Transcript, speed: float) -> None:
        self._transcript = transcript
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._position = 0
        self._aborted = False
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._transcript.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers, lower-case names."""
        return self._transcript.headers

    async def read(self) -> bytes:
        """Return the next recorded read when its time has come, b"" at the end.

        Raises:
            UpstreamTruncated: the recording ends with a reset, or the reply was aborted.
        """
        transcript = self._transcript
        at_end = self._position == len(transcript.reads)
        at_ms, data = (transcript.end_at_ms, b"") if at_end else transcript.reads[self._position]
        await self.wait_until(at_ms)
        if self._aborted:
            raise UpstreamTruncated("the reply was aborted")
        if at_end and transcript.end == "reset":
            raise UpstreamTruncated("the connection was reset (as recorded)")
        self._position += not at_end
        return data

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """A transcript keeps its own pace: it is read."""

    def abort(self) -> None:
        """End the replay; a read that waits ends now. Idempotent."""
        self._aborted = True
        _wake(self._sleeper)

    async def release(self) -> None:
        """The answer is complete: there is no connection to give back."""
        self.abort()

    async def wait_until(self, at_ms: float) -> None:
        """Sleep until that moment of the recording, or until `abort`."""
        when = self._began + at_ms / 1000 / self._speed
        if self._aborted or when <= self._loop.time():
            # One turn of the loop all the same: a reader of a fast replay must not starve others.
            await asyncio.sleep(0)
            return
        sleeper = self._sleeper = self._loop.create_future()
        timer = self._loop.call_at(when, _wake, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
