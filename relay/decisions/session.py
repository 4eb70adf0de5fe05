"""One decision stream as a state machine: D2 to D5 without I/O and without a clock. [pure]

    OPEN ──start──▶ STARTED ──lifetime, drain──▶ SETTLING ──settled, late──▶ CLOSED
      │                │                            │
      └────────────────┴── any other ending ────────┴─────────────────────▶ CLOSED

Messages, frames, results and the time go in; frames, effects and the next deadline come out. Equal
inputs at equal times give equal bytes. A decide that runs when the stream ends is the shell's to
settle (D5.7): its result is taken here and tells nobody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError, error
from encoders.decision_frames import FrameWriter
from encoders.decision_messages import Decide, Malformed, Pong, Refused, Start, decode
from relay.decisions.buckets import RefusalWindow, TokenBucket
from relay.decisions.dispatch import Dispatcher
from relay.decisions.effects import Close, Decided, Failed, Opcode, OutFrame, StartDecide, TakeStart
from relay.decisions.probes import Probes
from relay.decisions.sending import SendQueue
from relay.decisions.state import StateDocument

if TYPE_CHECKING:
    from encoders.decision_frames import RateLimit
    from encoders.decision_messages import Append, AppendAttachments, Incoming, Replace
    from relay.decisions.dispatch import Dispatch
    from relay.decisions.effects import Effect
    from relay.decisions.limits import DecisionLimits

_CONTROL_OVERHEAD: Final = 6  # header and mask of a short control frame, as D2.4 counts it
_FATAL_CODES: Final = frozenset(
    {"invalid_api_key", "auth_error", "account_suspended", "unknown_endpoint"}
)
# What the wire or the process sees: close code → reason of the goodbye.
_VIOLATIONS: Final = {1002: None, 1003: None, 1007: None, 1009: None, 1008: "policy", 1011: None}


@dataclass(frozen=True, slots=True)
class _Ending:
    """An ending that a running decide may still precede."""

    code: int
    reason: str
    retry_after_ms: int
    deadline: float


class DecisionSession:
    """One stream. `now` is seconds on any clock that never goes back.

    Args:
        stream_id: `szws_` and 32 lower-case hexadecimal digits.
        request_id: of the opening; told in `hello` and in refusals.
        rate_limit: the account's budget at the opening, or None.
    """

    def __init__(
        self,
        limits: DecisionLimits,
        *,
        stream_id: str,
        request_id: str,
        now: float,
        rate_limit: RateLimit | None = None,
    ) -> None:
        self._limits = limits
        self._stream_id = stream_id
        self._request_id = request_id
        self._frames = FrameWriter(stream_id)
        self._queue = SendQueue(
            max_frames=limits.max_send_queue_frames, max_bytes=limits.max_send_queue_bytes
        )
        self._effects: deque[Effect] = deque()
        self._messages = TokenBucket(limits.max_messages_per_second, limits.message_burst, now)
        self._mutations = TokenBucket(limits.max_events_per_second, limits.event_burst, now)
        self._control_frames = TokenBucket(
            limits.max_native_control_frames_per_second, limits.native_control_frame_burst, now
        )
        self._control_bytes = TokenBucket(
            limits.max_native_control_bytes_per_second, limits.native_control_byte_burst, now
        )
        self._refusals = RefusalWindow(
            limits.protocol_refusal_limit, limits.protocol_refusal_window_ms / 1000
        )
        self._json_probes = self._probes(limits.heartbeat_interval_ms, now)
        self._native_probes = self._probes(limits.native_heartbeat_interval_ms, now)
        self._dispatcher = self._new_dispatcher(0)
        self._document: StateDocument | None = None
        self._retries = False  # on_change
        self._key: str | None = None
        self._start_by = now + limits.start_timeout_ms / 1000
        self._lifetime_end = now + limits.max_duration_ms / 1000
        self._active_at = now
        self._ending: _Ending | None = None
        self.closing = False
        self.state_version = 0
        self.last_decision_state_version = 0
        self._send(self._frames.hello(request_id, limits.advertised(), rate_limit))

    def _probes(self, interval_ms: int, now: float) -> Probes:
        return Probes(
            now,
            interval_s=interval_ms / 1000,
            timeout_s=self._limits.pong_timeout_ms / 1000,
            most=self._limits.max_pending_probes,
        )

    def _new_dispatcher(self, min_interval_ms: int) -> Dispatcher:
        return Dispatcher(
            min_interval_s=max(min_interval_ms, self._limits.min_interval_ms) / 1000,
            max_failures=self._limits.consecutive_retryable_failures,
        )

    # --- what came from the peer

    def receive(self, message: bytes | Incoming, now: float) -> None:
        """Take one text message: its bytes, or what `decode` made of them (D2.2 – D2.4)."""
        if self.closing:
            return
        incoming = decode(message) if isinstance(message, bytes) else message
        if not self._messages.take(1, now):
            self._close(1008, "policy")
            return
        if incoming.is_mutation and not self._mutations.take(1, now):
            self._close(1008, "policy")
            return
        if not isinstance(incoming, Pong):
            self._active_at = now
        match incoming:
            case Malformed():
                self._close(1007, None)
            case Refused():
                self._refuse(incoming.error, incoming.event_id, now)
            case Pong():
                if not self._json_probes.answered(incoming.nonce):
                    refusal = error("stream_invalid_message", "no such ping is out", param="nonce")
                    self._refuse(refusal, None, now)
            case Decide():
                self._decide(incoming, now)
            case Start():
                self._start(incoming, now)
            case _:
                self._mutate(incoming, now)
        self._dispatch(now)

    def receive_control(self, opcode: int, payload: bytes, now: float) -> None:
        """Take a native ping (9) or pong (10); the shell answers a ping itself (D2.4, D3.3)."""
        if self.closing:
            return
        frames = self._control_frames.take(1, now)
        if not frames or not self._control_bytes.take(len(payload) + _CONTROL_OVERHEAD, now):
            self._close(1008, "policy")
        elif opcode == 10:
            self._native_probes.answered_up_to(int.from_bytes(payload, "big"))

    def client_closed(self, now: float) -> None:
        """The peer sent a Close frame: nothing is sent or asked any more."""
        del now
        self._end_silently()

    def lost(self, now: float) -> None:
        """The transport is gone."""
        del now
        self._end_silently()

    def _end_silently(self) -> None:
        self.closing = True
        self._queue.discard()
        self._effects.clear()
        self._dispatcher.drop()

    # --- what the shell saw

    def violation(self, code: int, now: float) -> None:
        """End for what the wire saw: 1002, 1003, 1007, 1008, 1009, 1011; 1013 as `slow_reader`.

        Raises:
            ValueError: another close code.
        """
        if code == 1013:
            self.slow_reader(now)
        elif code not in _VIOLATIONS:
            raise ValueError(f"close code {code} is no violation")
        else:
            self._close(code, _VIOLATIONS[code])

    def fail(self, now: float) -> None:
        """End for a fault of ours (D3.9)."""
        self.violation(1011, now)

    def slow_reader(self, now: float) -> None:
        """The peer takes nothing (D2.5): no goodbye, it could not leave."""
        del now
        self._overflow()

    def lease_lost(self, now: float) -> None:
        """Another socket has the account's place, or the lease ran out (D3.8)."""
        del now
        self._close(1013, "lease_lost")

    def store_unavailable(self, now: float) -> None:
        """The shared store is gone (D3.8)."""
        del now
        self._close(1013, "store_unavailable")

    def maintenance(self, now: float) -> None:
        """End for maintenance (D3.7)."""
        del now
        self._close(1013, "maintenance", self._limits.maintenance_retry_after_ms)

    def drain(self, now: float) -> None:
        """The process stops (D3.6): a decide in flight may settle, none starts any more."""
        self._settle_then_close(1012, "shutdown", self._limits.shutdown_retry_after_ms, now)

    def written(self, now: float, count: int = 1) -> None:
        """The oldest `count` frames that were taken have left; the pong clocks start (D3.2)."""
        for _ in range(count):
            item = self._queue.written()
            if item is None:
                return
            frame, probe = item
            if probe is not None:
                native = frame.opcode is Opcode.PING
                (self._native_probes if native else self._json_probes).written(probe, now)

    # --- deciding

    def start_granted(self, now: float) -> bool:
        """Answer to `TakeStart`: start. False if it is no longer wanted."""
        dispatch = self._dispatcher.start(self.state_version, now)
        if dispatch is None or self._document is None:
            return False
        self._effects.append(
            StartDecide(dispatch.ticket, self._document.body(), self._key, dispatch.version)
        )
        return True

    def start_refused(self, wait_ms: int, now: float) -> None:
        """Answer to `TakeStart`: the account's budget is exhausted for so long (D5.4)."""
        self._dispatcher.refused(wait_ms / 1000, now)

    def resolve(self, ticket: int, result: Decided | Failed, now: float) -> None:
        """Take the result of a `StartDecide` (D5.3, D5.5)."""
        dispatch = self._dispatcher.settle(ticket)
        if dispatch is None or self.closing:
            return
        self._active_at = now
        if isinstance(result, Decided):
            self._decided(dispatch, result, now)
        else:
            self._failed(dispatch, result, now)
        if self._ending is not None:
            self._finish(self._ending)
        self._dispatch(now)

    def _decided(self, dispatch: Dispatch, result: Decided, now: float) -> None:
        self._dispatcher.succeeded()
        frame = self._frames.decision(
            result.reply,
            version=dispatch.version,
            covered=dispatch.batch,
            request_id=result.request_id,
            server_timing=result.server_timing,
            latency_ms=result.latency_ms,
            rate_limit=result.rate_limit,
            queue_ms=_ms(dispatch.started_at - dispatch.queued_at),
            decide_ms=_ms(now - dispatch.started_at),
            max_bytes=self._limits.max_send_queue_bytes,
        )
        if frame is None:
            refusal = error("questions_too_large", "the reply is too large for a frame")
            failed = Failed(
                error=refusal,
                request_id=result.request_id,
                server_timing=result.server_timing,
                rate_limit=result.rate_limit,
            )
            self._tell_failure(dispatch, failed, fatal=False)
            return
        self.last_decision_state_version = dispatch.version
        self._send(frame)

    def _failed(self, dispatch: Dispatch, result: Failed, now: float) -> None:
        problem = result.error
        if problem.code == "maintenance":
            self._dispatcher.give_back(dispatch.batch)
            self.maintenance(now)
            return
        if problem.code in _FATAL_CODES:
            self._tell_failure(dispatch, result, fatal=True)
            self._close(1008, "auth")
            return
        retry = self._retries and self._ending is None and _retryable(problem)
        if not retry:
            self._dispatcher.succeeded()
            self._tell_failure(dispatch, result, fatal=False)
            return
        delay_ms = problem.retry_after_ms
        if delay_ms is None:
            delay_ms = self._limits.retry_delay_ms
        last = self._dispatcher.failed(dispatch.version)
        fatal = last or now + delay_ms / 1000 >= self._lifetime_end
        self._tell_failure(dispatch, result, fatal=fatal)
        if fatal:
            self._close(1013, "overload", delay_ms)
        else:
            self._dispatcher.retry(delay_ms / 1000, now)

    def _tell_failure(self, dispatch: Dispatch, result: Failed, *, fatal: bool) -> None:
        self._dispatcher.give_back(dispatch.batch)
        frame = self._frames.error(
            result.error,
            phase="decide",
            version=dispatch.version,
            event_id=None,
            covered=dispatch.batch,
            request_id=result.request_id,
            rate_limit=result.rate_limit,
            server_timing=result.server_timing,
            fatal=fatal,
        )
        self._send(frame)

    def _dispatch(self, now: float) -> None:
        if not self.closing and self._ending is None and self._dispatcher.ask(now):
            self._effects.append(TakeStart())

    # --- messages

    def _start(self, message: Start, now: float) -> None:
        if self._document is not None:
            refusal = error("stream_already_started", "the stream has started already")
            self._refuse(refusal, message.event_id, now)
            return
        document = StateDocument(message, self._stream_id)
        refused = self._out_of_order(message.event_id) or message.refusal
        refused = refused or document.check(self._limits.max_decide_body_bytes)
        if refused is not None:
            self._refuse(refused, message.event_id, now)
            return
        self._document = document
        self._retries = message.decision_mode == "on_change"
        self._dispatcher = self._new_dispatcher(message.min_interval_ms)
        self._accept(message.event_id, message.idempotency_key, now)

    def _mutate(self, message: Append | AppendAttachments | Replace, now: float) -> None:
        document = self._document
        if document is None:
            self._refuse(_not_started(), message.event_id, now)
            return
        refused = self._out_of_order(message.event_id)
        if refused is not None:
            self._refuse(refused, message.event_id, now)
            return
        change = document.prepare(message, self._limits.max_decide_body_bytes)
        if isinstance(change, DecisionError):
            self._refuse(change, message.event_id, now)
        elif self.state_version >= self._limits.max_events:
            self._close(1008, "policy")
        elif self._dispatcher.uncovered >= self._limits.max_pending_events:
            self._close(1009, None)
        else:
            document.commit(change)
            self._accept(message.event_id, message.idempotency_key, now)

    def _out_of_order(self, event_id: str) -> DecisionError | None:
        if event_id == f"evt_{self.state_version + 1}":
            return None
        return error(
            "stream_event_order",
            f"the next event is evt_{self.state_version + 1}",
            param="event_id",
        )

    def _accept(self, event_id: str, key: str | None, now: float) -> None:
        document = self._document
        if document is None:
            return
        self.state_version += 1
        self._key = key
        self._dispatcher.accepted(event_id)
        if self._retries and self._ending is None:
            self._dispatcher.want(now)
        self._send(
            self._frames.ack(
                event_id,
                version=self.state_version,
                state_bytes=document.state_bytes,
                body_bytes=document.body_bytes,
                scheduled=self._dispatcher.waiting,
            )
        )

    def _decide(self, message: Decide, now: float) -> None:
        if self._document is None:
            self._refuse(_not_started(), None, now)
        elif message.state_version != self.state_version:
            refusal = error(
                "stream_version_mismatch",
                f"the current version is {self.state_version}",
                param="state_version",
            )
            self._refuse(refusal, None, now)
        elif self._ending is not None:
            refusal = error(
                "service_unavailable",
                "the stream is about to close",
                retry_after_ms=self._ending.retry_after_ms,
            )
            self._refuse(refusal, None, now)
        else:
            running = self._dispatcher.in_flight is not None
            self._dispatcher.want(now)
            self._send(self._frames.scheduled(version=self.state_version, in_flight=running))

    def _refuse(self, refusal: DecisionError, event_id: str | None, now: float) -> None:
        """Refuse a message (D2.3); the third refusal within the window ends the stream."""
        fatal = self._ending is None and self._refusals.add(now)
        self._send(
            self._frames.error(
                refusal,
                phase="protocol",
                version=self.state_version,
                event_id=event_id,
                covered=(),
                request_id=self._request_id,
                rate_limit=None,
                server_timing=None,
                fatal=fatal,
            )
        )
        if fatal:
            self._close(1008, "policy")

    # --- clocks

    def handle_timeout(self, now: float) -> None:
        """Do what is due; early and repeated calls do nothing (D3)."""
        if self.closing:
            return
        if self._ending is not None and now >= self._ending.deadline:
            self._finish(self._ending)
        elif self._ending is None and now >= self._lifetime_end:
            self._settle_then_close(1001, "max_lifetime", 0, now)
        elif self._document is None and now >= self._start_by:
            self._close(1008, "policy")
        elif self._json_probes.missed(now) or self._native_probes.missed(now):
            self._close(1013, "slow_reader", self._limits.slow_reader_retry_after_ms)
        elif (idle_at := self._idle_at()) is not None and now >= idle_at:
            self._close(1000, "idle")
        if not self.closing:
            self._probe(now)
            self._dispatch(now)

    def next_deadline(self) -> float | None:
        """When `handle_timeout` has something to do; None once the stream has ended."""
        if self.closing:
            return None
        deadlines = [self._json_probes.next_deadline(), self._native_probes.next_deadline()]
        if self._ending is not None:
            deadlines.append(self._ending.deadline)
        else:
            deadlines.append(self._lifetime_end)
        if self._document is None:
            deadlines.append(self._start_by)
        idle_at = self._idle_at()
        if idle_at is not None:
            deadlines.append(idle_at)
        start_at = self._dispatcher.next_deadline()
        if start_at is not None:
            deadlines.append(start_at)
        return min(deadlines)

    def _idle_at(self) -> float | None:
        """When the stream is idle (D3.4); None while work runs or waits."""
        if self._dispatcher.in_flight is not None or self._dispatcher.waiting:
            return None
        return self._active_at + self._limits.idle_timeout_ms / 1000

    def _probe(self, now: float) -> None:
        nonce = self._json_probes.due(now)
        if nonce is not None:
            self._send(self._frames.ping(nonce), probe=nonce)
        nonce = self._native_probes.due(now)
        if nonce is not None:
            frame = OutFrame(Opcode.PING, nonce.to_bytes(4, "big"))
            self._queue.push(frame, probe=nonce, counted=False)

    # --- endings

    def _settle_then_close(self, code: int, reason: str, retry_after_ms: int, now: float) -> None:
        if self.closing or self._ending is not None:
            return
        self._dispatcher.drop()
        settlement_s = self._limits.decision_settlement_timeout_ms / 1000
        self._ending = _Ending(code, reason, retry_after_ms, now + settlement_s)
        if self._dispatcher.in_flight is None:
            self._finish(self._ending)

    def _finish(self, ending: _Ending) -> None:
        self._close(ending.code, ending.reason, ending.retry_after_ms)

    def _close(self, code: int, reason: str | None, retry_after_ms: int = 0) -> None:
        """Say goodbye, then close (D3.10)."""
        if self.closing:
            return
        goodbye = self._frames.goodbye(
            reason,
            version=self.state_version,
            last_decision=self.last_decision_state_version,
            retry_after_ms=retry_after_ms,
        )
        self._queue.push(OutFrame(Opcode.TEXT, goodbye))  # no room: the Close frame alone
        self._end(code, reason or "")

    def _overflow(self) -> None:
        if not self.closing:
            self._queue.discard()
            self._end(1013, "slow_reader")

    def _end(self, code: int, reason: str) -> None:
        self.closing = True
        self._dispatcher.drop()
        self._effects.append(Close(code, reason))

    # --- what goes out

    def _send(self, payload: bytes, *, probe: int | None = None) -> None:
        if not self.closing and not self._queue.push(OutFrame(Opcode.TEXT, payload), probe=probe):
            self._overflow()

    @property
    def in_flight(self) -> int | None:
        """The ticket of the running decide, also after the stream has ended."""
        dispatch = self._dispatcher.in_flight
        return None if dispatch is None else dispatch.ticket

    def next_frame(self) -> OutFrame | None:
        """The next frame to write, in order, or None."""
        return self._queue.take()

    def frames_to_send(self) -> list[OutFrame]:
        """All frames that wait, in order."""
        frames: list[OutFrame] = []
        while (frame := self._queue.take()) is not None:
            frames.append(frame)
        return frames

    def next_effect(self) -> Effect | None:
        """The next thing to do, in order, or None; `Close` is the last one ever."""
        return self._effects.popleft() if self._effects else None


def _retryable(problem: DecisionError) -> bool:
    """Whether `on_change` tries again by itself (D5.5)."""
    if not problem.retryable:
        return False
    return problem.status in (429, 503) or (
        problem.status == 409 and problem.code == "idempotency_conflict"
    )


def _not_started() -> DecisionError:
    return error("stream_not_started", "the stream has not started")


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
