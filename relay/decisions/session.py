"""One decision stream as a state machine: D2 to D5 without I/O and without a clock. [pure]

    OPEN ──start──▶ STARTED ──lifetime, drain──▶ SETTLING ──settled, late──▶ CLOSED
      │                │                            │
      └────────────────┴── any other ending ────────┴─────────────────────▶ CLOSED

Messages, frames, results and the time go in; frames, effects and the next deadline come out. Equal
inputs at equal times give equal bytes. A decide that runs when the stream ends is the shell's to
settle (D5.7): its result is taken here and tells nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from encoders.decision_messages import decode
from relay.decisions import results
from relay.decisions.budgets import Budgets
from relay.decisions.clocks import Clocks
from relay.decisions.dispatch import Dispatcher
from relay.decisions.effects import Decided, Failed, Opcode, StartDecide, TakeStart
from relay.decisions.intake import Intake
from relay.decisions.outlet import Ending, Outlet

if TYPE_CHECKING:
    from encoders.decision_frames import RateLimit
    from encoders.decision_messages import Incoming
    from relay.decisions.effects import Effect, OutFrame
    from relay.decisions.limits import DecisionLimits

_NATIVE_PONG: Final = 10
# What the wire or the process sees: close code → reason of the goodbye.
_VIOLATIONS: Final = {1002: None, 1003: None, 1007: None, 1008: "policy", 1009: None, 1011: None}


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
        self._outlet = Outlet(limits, stream_id)
        self._clocks = Clocks(limits, now)
        self._budgets = Budgets(limits, now)
        self._dispatcher = Dispatcher(max_failures=limits.consecutive_retryable_failures)
        self._intake = Intake(
            limits,
            stream_id=stream_id,
            request_id=request_id,
            outlet=self._outlet,
            budgets=self._budgets,
            clocks=self._clocks,
            dispatcher=self._dispatcher,
        )
        self._settling: Ending | None = None
        self._settled_by = 0.0
        self.last_decision_state_version = 0
        hello = self._outlet.frames.hello(request_id, limits.advertised(), rate_limit)
        self._outlet.send(hello)

    # --- what came from the peer

    def receive(self, message: bytes | Incoming, now: float) -> None:
        """Take one text message: its bytes, or what `decode` made of them (D2.2 to D2.4)."""
        if self.closing:
            return
        incoming = decode(message) if isinstance(message, bytes) else message
        ending = self._intake.take(incoming, now)
        if ending is not None:
            self._close(ending)
        self._dispatch(now)

    def receive_control(self, opcode: int, payload: bytes, now: float) -> None:
        """Take a native ping (9) or pong (10); the shell answers a ping itself (D2.4, D3.3)."""
        if self.closing:
            return
        if not self._budgets.control(len(payload), now):
            self._close(Ending(1008, "policy"))
        elif opcode == _NATIVE_PONG:
            self._clocks.native_probes.answered_up_to(int.from_bytes(payload, "big"))

    def client_closed(self, now: float) -> None:
        """The peer sent a Close frame, or is gone: nothing is sent or asked any more."""
        del now
        for effect in self._outlet.silence():
            if isinstance(effect, StartDecide):  # nobody will ever run it
                self._dispatcher.settle(effect.ticket)
        self._dispatcher.drop()

    def lost(self, now: float) -> None:
        """The transport is gone."""
        self.client_closed(now)

    # --- what the shell saw

    def violation(self, code: int, now: float) -> None:
        """End for what the wire saw: 1002, 1003, 1007, 1008, 1009, 1011; 1013 as `slow_reader`.

        Raises:
            ValueError: another close code.
        """
        if code == 1013:
            self.slow_reader(now)
        elif code in _VIOLATIONS:
            self._close(Ending(code, _VIOLATIONS[code]))
        else:
            raise ValueError(f"close code {code} is no violation")

    def fail(self, now: float) -> None:
        """End for a fault of ours (D3.9)."""
        self.violation(1011, now)

    def slow_reader(self, now: float) -> None:
        """The peer takes nothing (D2.5): no goodbye, it could not leave."""
        del now
        self._dispatcher.drop()
        self._outlet.overflow()

    def lease_lost(self, now: float) -> None:
        """Another socket has the account's place, or the lease ran out (D3.8)."""
        del now
        self._close(Ending(1013, "lease_lost"))

    def store_unavailable(self, now: float) -> None:
        """The shared store is gone (D3.8)."""
        del now
        self._close(Ending(1013, "store_unavailable"))

    def maintenance(self, now: float) -> None:
        """End for maintenance (D3.7)."""
        del now
        self._close(Ending(1013, "maintenance", self._limits.maintenance_retry_after_ms))

    def drain(self, now: float) -> None:
        """The process stops (D3.6): a decide in flight may settle, none starts any more."""
        self._settle(Ending(1012, "shutdown", self._limits.shutdown_retry_after_ms), now)

    def written(self, now: float, count: int = 1) -> None:
        """The oldest `count` frames that were taken have left; the pong clocks start (D3.2)."""
        for _ in range(count):
            item = self._outlet.written()
            if item is not None and item.probe is not None:
                native = item.frame.opcode is Opcode.PING
                probes = self._clocks.native_probes if native else self._clocks.json_probes
                probes.written(item.probe, now)

    # --- deciding

    def start_granted(self, now: float) -> bool:
        """Answer to `TakeStart`: start. False if it is no longer wanted."""
        dispatch = self._dispatcher.start(self.state_version, now)
        document = self._intake.document
        if dispatch is None or document is None:
            return False
        self._outlet.ask(
            StartDecide(
                ticket=dispatch.ticket,
                body=document.body(),
                idempotency_key=self._intake.key,
                state_version=dispatch.version,
                subject=document.subject(),
            )
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
        self._clocks.active(now)
        teller = results.Teller(self._limits, self._outlet, self._dispatcher)
        if isinstance(result, Failed):
            ending = teller.failed(
                dispatch,
                result,
                now,
                may_retry=self._intake.on_change and self._settling is None,
                lifetime_end=self._clocks.lifetime_end,
            )
            if ending is not None:
                self._close(ending)
        elif teller.decided(dispatch, result, now):
            self.last_decision_state_version = dispatch.version
        if self._settling is not None:
            self._close(self._settling)
        self._dispatch(now)

    def _dispatch(self, now: float) -> None:
        if not self.closing and self._dispatcher.ask(now):
            self._outlet.ask(TakeStart())

    # --- clocks

    def handle_timeout(self, now: float) -> None:
        """Do what is due; early and repeated calls do nothing (D3)."""
        if self.closing:
            return
        clocks = self._clocks
        if self._settling is not None:
            if now >= self._settled_by:
                self._close(self._settling)
        elif now >= clocks.lifetime_end:
            self._settle(Ending(1001, "max_lifetime"), now)
        elif self._intake.document is None and now >= clocks.start_by:
            self._close(Ending(1008, "policy"))
        elif self._is_idle and now >= clocks.idle_at:
            self._close(Ending(1000, "idle"))
        if clocks.missed(now):
            hint = self._limits.slow_reader_retry_after_ms
            self._close(Ending(1013, "slow_reader", hint))
        if not self.closing:
            self._probe(now)
            self._dispatch(now)

    def next_deadline(self) -> float | None:
        """When `handle_timeout` has something to do; None once the stream has ended."""
        if self.closing:
            return None
        clocks = self._clocks
        deadlines = [
            clocks.json_probes.next_deadline(),
            clocks.native_probes.next_deadline(),
            clocks.lifetime_end if self._settling is None else self._settled_by,
        ]
        if self._intake.document is None:
            deadlines.append(clocks.start_by)
        if self._is_idle:
            deadlines.append(clocks.idle_at)
        start_at = self._dispatcher.next_deadline()
        if start_at is not None:
            deadlines.append(start_at)
        return min(deadlines)

    @property
    def _is_idle(self) -> bool:
        """Whether the idle clock runs: no decide runs or waits (D3.4)."""
        return self._dispatcher.in_flight is None and not self._dispatcher.waiting

    def _probe(self, now: float) -> None:
        nonce = self._clocks.json_probes.due(now)
        if nonce is not None:
            self._outlet.send(self._outlet.frames.ping(nonce), probe=nonce)
        nonce = self._clocks.native_probes.due(now)
        if nonce is not None and not self.closing:
            self._outlet.send_native_ping(nonce)

    # --- endings

    def _settle(self, ending: Ending, now: float) -> None:
        """End when the decide in flight has settled, or has not in time (D3.5, D3.6)."""
        if self.closing or self._settling is not None:
            return
        self._settling = ending
        self._settled_by = now + self._limits.decision_settlement_timeout_ms / 1000
        self._intake.settle(ending)
        if self._dispatcher.in_flight is None:
            self._close(ending)

    def _close(self, ending: Ending) -> None:
        self._dispatcher.drop()
        self._outlet.close(
            ending, version=self.state_version, last_decision=self.last_decision_state_version
        )

    # --- what goes out

    @property
    def closing(self) -> bool:
        """The stream has ended, for whatever reason: feed nothing any more."""
        return self._outlet.closed

    @property
    def state_version(self) -> int:
        """The accepted version; 0 before the start."""
        return self._intake.version

    @property
    def in_flight(self) -> int | None:
        """The ticket of the running decide, also after the stream has ended."""
        dispatch = self._dispatcher.in_flight
        return None if dispatch is None else dispatch.ticket

    def next_frame(self) -> OutFrame | None:
        """The next frame to write, in order, or None."""
        return self._outlet.next_frame()

    def frames_to_send(self) -> list[OutFrame]:
        """All frames that wait, in order."""
        frames: list[OutFrame] = []
        while (frame := self.next_frame()) is not None:
            frames.append(frame)
        return frames

    def next_effect(self) -> Effect | None:
        """The next thing to do, in order, or None; `Close` is the last one ever."""
        return self._outlet.next_effect()
