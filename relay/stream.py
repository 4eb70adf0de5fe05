"""Everything that happens to the bytes of one stream. [pure]

`StreamRelay` takes the upstream's bytes as they were read and returns the client's bytes: whole
events only, one string for each read. It owns the end of the stream: exactly one terminal, and
nothing after it (M2.1, M3.4). `pump` only awaits and writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from encoders import openai
from encoders.json_text import loads
from encoders.sse import SseDecoder, SseEvent, SseEventTooLarge
from encoders.translator import Kind, ReplyTooLarge
from relay.errors import (
    EventTooLarge,
    RelayError,
    UpstreamProtocolError,
    UpstreamTruncated,
)
from relay.lifecycle import Lifecycle, Outcome, StreamInput, StreamState
from relay.refusals import error_in_stream, excerpt

if TYPE_CHECKING:
    from encoders.translator import Translator
    from encoders.usage import TokenUsage
    from relay.errors import UpstreamError
    from relay.redact import Redactor

_RAW_MAX: Final = 500
# Runs of plain content in one read: beyond it the read is taken event by event.
_RUNS_MAX: Final = 4


class ReadError(Protocol):
    """Makes an error of the data of an error event; see `relay.refusals`."""

    def __call__(self, provider: str, data: bytes, *, redactor: Redactor) -> UpstreamError:
        """Return the error."""


class StreamRelay:
    """Relays one stream from its first body byte to its end.

    Args:
        translator: turns events of the upstream into what the client gets.
        lifecycle: the stream's life, already STREAMING.
        redactor: the provider's secrets.
        max_event_bytes: bound for one event (M3.1).
        read_error: makes an error of an error event.

    Attributes:
        flowing: whether the last `feed` brought nothing but content, so that nothing has ended.
        error: what ended the stream, None while it is open or if it completed.
    """

    def __init__(
        self,
        *,
        translator: Translator,
        lifecycle: Lifecycle,
        redactor: Redactor,
        max_event_bytes: int,
        read_error: ReadError = error_in_stream,
    ) -> None:
        assert lifecycle.state is StreamState.STREAMING
        self._translator = translator
        self._lifecycle = lifecycle
        self._redactor = redactor
        self._splice = translator.splice
        self._read_error = read_error
        self._decoder = SseDecoder(max_event_bytes)
        self._provider = translator.identity.provider
        self.flowing = False
        self.error: RelayError | None = None

    @property
    def closed(self) -> bool:
        """Whether the stream has ended; what comes now is ignored."""
        return self._lifecycle.closed

    @property
    def outcome(self) -> Outcome | None:
        """How the stream ended; None while it is open."""
        return self._lifecycle.outcome

    @property
    def has_choice(self) -> bool:
        """Whether anything of an answer was seen."""
        return self._translator.has_choice

    @property
    def usage(self) -> TokenUsage | None:
        """The last usage that the upstream reported."""
        return self._translator.usage

    @property
    def finishing(self) -> bool:
        """Whether every choice has its finish_reason and only usage and `[DONE]` may follow."""
        return self._translator.all_finished

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the upstream's body; return what goes to the client."""
        if self._lifecycle.closed:
            self.flowing = False
            return b""
        whole = self._decoder.complete(data)
        if whole is not None:
            run = self._splice(whole)
            if run is not None and run[1] == len(whole):
                self.flowing = True
                return run[0]
            self.flowing = False
            return b"".join(self._take_whole(whole, run))
        self.flowing = False
        out: list[bytes] = []
        failure: RelayError | None = None
        try:
            events = self._decoder.feed(data)
        except SseEventTooLarge as error:
            events = error.events
            failure = EventTooLarge(f"{self._provider} sent {error}")
        self._take(events, out)
        if failure is not None and not self._lifecycle.closed:
            out.append(self.fail(failure))
        return b"".join(out)

    def _take_whole(self, whole: bytes, run: tuple[bytes, int] | None) -> list[bytes]:
        """Take whole events: runs of plain content at once, what stands between them singly.

        Args:
            run: what `_splice` made of their beginning. It is asked once for each place, for it
                counts what it takes.
        """
        out: list[bytes] = []
        for _ in range(_RUNS_MAX):
            if run is not None:
                frames, size = run
                out.append(frames)
                whole = whole[size:]
                if not whole:
                    return out
            end = whole.find(b"\n\n") + 2
            self._take(self._decoder.decode(whole[:end]), out)
            whole = whole[end:].lstrip(b"\n")  # a blank line too many is no event's beginning
            if not whole or self._lifecycle.closed:
                return out
            run = self._splice(whole)
        if run is not None:
            out.append(run[0])
            whole = whole[run[1] :]
        self._take(self._decoder.decode(whole), out)
        return out

    def eof(self) -> bytes:
        """The upstream's body ended; return the client's end of the stream."""
        if self._lifecycle.closed:
            return b""
        out: list[bytes] = []
        # An event without its blank line counts only if it is whole; half a line is dropped.
        self._take([e for e in self._decoder.finish() if _is_whole(e.data)], out)
        if not self._lifecycle.closed:
            if not self._translator.has_choice:
                out.append(self.fail(self._empty()))
            else:
                withheld = self._translator.flush()
                end = withheld + self._translator.closing() + openai.DONE
                self._lifecycle.advance(StreamInput.EOF, finished=self._translator.finished)
                if self._lifecycle.outcome is Outcome.COMPLETED:
                    out.append(end)
                else:
                    error = UpstreamTruncated(
                        f"{self._provider} ended the stream before the answer was finished"
                    )
                    out.append(withheld + self._end_in_band(error))
        return b"".join(out)

    def fail(self, error: RelayError) -> bytes:
        """The stream cannot go on; return its end for the client (M3.4, M3.6).

        A connection that dies once every choice has its finish_reason took nothing from the
        answer: that is an end like EOF.
        """
        if self._lifecycle.closed:
            return b""
        if isinstance(error, UpstreamTruncated) and self._translator.finished:
            return self.eof()
        self._lifecycle.advance(error.stream_input)
        return self._translator.flush() + self._end_in_band(error)

    def _end_in_band(self, error: RelayError) -> bytes:
        self.error = error
        return in_band_error(self._translator.identity, error)

    def _take(self, events: list[SseEvent], out: list[bytes]) -> None:
        rewrite = self._translator.rewrite
        for event in events:
            data = event.data
            if b'"error"' in data:  # also of one choice, which passes as it is
                data = event.data = self._redactor.data(data)
            try:
                kind = rewrite(data, out)
            except ValueError as error:  # also JSON that no encoder takes
                out.append(self.fail(self._protocol_error(error, event.data)))
                return
            if kind is Kind.CHUNK and not event.event:
                continue
            if kind is Kind.DONE:
                self._done(out)
                return
            if kind is Kind.ERROR:
                self._upstream_error(out)
                return
            if kind is Kind.FAILED or (event.event == b"error" and kind is Kind.SKIPPED):
                said = self._read_error(self._provider, event.data, redactor=self._redactor)
                out.append(self.fail(said))
                return

    def _done(self, out: list[bytes]) -> None:
        if not self._translator.has_choice:
            out.append(self.fail(self._empty()))
            return
        # Before the stream ends: if this fails, it has not ended.
        end = self._translator.flush() + self._translator.closing() + openai.DONE
        self._lifecycle.advance(StreamInput.TERMINAL)
        out.append(end)

    def _upstream_error(self, out: list[bytes]) -> None:
        """The upstream's own error event passes as sent, but for our secrets (M3.4)."""
        payload = self._redactor.data(self._translator.error_payload)
        self.error = self._read_error(self._provider, payload, redactor=self._redactor)
        self._lifecycle.advance(StreamInput.UPSTREAM_ERROR)
        out.append(self._translator.flush() + openai.event(payload) + openai.DONE)

    def _empty(self) -> UpstreamProtocolError:
        raw = excerpt(self._translator.last_skipped, self._redactor, _RAW_MAX)
        return UpstreamProtocolError(
            f"{self._provider} sent a stream without an answer", raw=raw or None
        )

    def _protocol_error(self, error: ValueError, data: bytes) -> UpstreamProtocolError:
        if isinstance(error, ReplyTooLarge):
            return UpstreamProtocolError(f"{self._provider}: {error}")
        raw = excerpt(data, self._redactor, _RAW_MAX)
        return UpstreamProtocolError(f"{self._provider} sent an event that is not JSON", raw=raw)


def in_band_error(identity: openai.ChunkIdentity, error: RelayError) -> bytes:
    """Return the end of a stream that failed after its headers were sent: one error chunk and
    `[DONE]` (M3.4); a client that is gone gets nothing.
    """
    if error.stream_input is StreamInput.CLIENT_GONE:
        return b""
    raw = getattr(error, "raw", None)
    chunk = openai.error_chunk(identity, message=error.message, code=error.code, raw=raw)
    return chunk + openai.DONE


def _is_whole(data: bytes) -> bool:
    if data.strip() == b"[DONE]":
        return True
    try:
        loads(data)
    except ValueError:
        return False
    return True
