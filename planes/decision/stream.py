"""One open stream: the session between its wire, its account's leases and its decides.

    wire ──arrived──▶ session ──frames──▶ wire        written at once; one task waits where the
                         │                            kernel does not take it
                      effects ──▶ budget, decide, Close      each a task of the stream's own

The tasks belong to the stream and not to the handler, which is cancelled when the connection is
lost: a decide that runs then is settled (D5.7).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Final

import structlog

from encoders.decision_errors import error
from planes.decision.dispatch import decide, take_start
from planes.decision.frames import (
    ClientClose,
    Message,
    Ping,
    Pong,
    Violation,
    encode_close,
    encode_close_back,
)
from planes.decision.inbox import Inbox
from planes.decision.outbox import Outbox
from planes.decision.wire import Gone
from relay.decisions.effects import Close, Decided, Failed, Opcode, StartDecide, TakeStart
from relay.decisions.lease import LeaseEnd
from relay.errors import GatewayShutdown

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import ExitStack

    from encoders.decision_messages import Incoming
    from planes.decision.dispatch import Account, Services
    from planes.decision.wire import Arrival, Wire
    from relay.decisions.lease import Lease
    from relay.decisions.session import DecisionSession

log = structlog.get_logger("sluicegate")

_PONG: Final = 10  # RFC 6455 §5.2; the session sends none itself
# After the last frame: time for aiohttp to close what it can.
_LINGER_S: Final = 0.25
_FAREWELL_S: Final = 1.5
# Frames of a client that was sent a Close and does not answer it.
_IGNORED_MAX: Final = 256
# These endings have given a running decide its time already (D3.5, D3.6).
_SETTLED_REASONS: Final = frozenset({"shutdown", "max_lifetime"})


class Stream:
    """One stream, from its 101 to its settled end.

    Args:
        lease: taken already; released here.

    Attributes:
        over: the connection has nothing more to say. code, reason: how it was closed, None if it
            was lost.
    """

    def __init__(
        self,
        services: Services,
        account: Account,
        wire: Wire,
        session: DecisionSession,
        lease: Lease,
    ) -> None:
        self._services = services
        self._account = account
        self._wire = wire
        self._session = session
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._decides: dict[int, asyncio.Task[None]] = {}
        limits = services.limits
        self._handshake_s = limits.close_handshake_timeout_ms / 1000
        self._inbox = Inbox(
            wire, max_bytes=limits.max_message_bytes, take=self._take, decoder=services.decoder
        )
        self._outbox = Outbox(wire, session, max_pongs=limits.max_control_queue_frames)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._shook = asyncio.Event()  # the client's Close, or the end of its connection
        self._ended_at: float | None = None
        self._started = self._loop.time()
        self._decided = 0
        self._ignored = 0
        self._close_sent = False
        self.over = asyncio.Event()
        self.code: int | None = None
        self.reason = ""

    # -- life -----------------------------------------------------------------------------------

    def start(self, on_end: Callable[[], None], held: ExitStack) -> None:
        """Say hello, and run until all is settled.

        Args:
            on_end: called when the connection is over. held: closed when all is settled.
        """
        self._on_end = on_end
        self._main = asyncio.create_task(self._run(held), name="decision-stream")
        self._spawn(self._keep_lease())
        self._pump()
        self._wire.listen(self)

    def drain(self) -> None:
        """The process stops (D3.6)."""
        self._give(self._session.drain)

    async def close(self) -> None:
        """End now, whatever runs; for the clean-up of the application."""
        self._main.cancel()
        await asyncio.wait({self._main})
        self._wire.abort()
        await self._lease.release()

    async def _run(self, held: ExitStack) -> None:
        try:
            try:
                async with self._services.inflight.interruptible():
                    await self.over.wait()
                    await self._settle()
            except GatewayShutdown:
                await self._give_up()
        finally:
            self._end()
            await self._cancel()
            held.close()
            self._write_line()

    async def _cancel(self) -> None:
        """End what still runs; a decide leaves its key and settles its hold (D6.2, D6.7)."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_FAREWELL_S)

    async def _settle(self) -> None:
        """Let a decide that runs come to its end; it is billed and stored there (D5.7)."""
        if self._decides and self._ended_at is not None and self.reason not in _SETTLED_REASONS:
            settle_s = self._services.limits.decision_settlement_timeout_ms / 1000
            left_s = self._ended_at + settle_s - self._now()
            await asyncio.wait(self._decides.values(), timeout=max(0.0, left_s))

    async def _give_up(self) -> None:
        """The grace of the process is shorter than a decide's: it is told, then the goodbye."""
        for ticket, task in [*self._decides.items()]:
            task.cancel()
            problem = error("service_unavailable", "the gateway is stopping", retry_after_ms=500)
            failed = Failed(error=problem, request_id=self._account.request_id)
            self._session.resolve(ticket, failed, self._now())
        self._pump()
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self.over.wait()
        except TimeoutError:
            self._wire.abort()

    def _end(self) -> None:
        """Nothing more is read or written. Idempotent."""
        if self.over.is_set():
            return
        self.over.set()
        self._wire.stop_reading()
        if self._timer is not None:
            self._timer.cancel()
        self._on_end()
        # The handler returns now and aiohttp closes; what the client does not take is cut.
        self._loop.call_later(_LINGER_S, self._wire.abort)

    def _write_line(self) -> None:
        log.info(
            "stream",
            request_id=self._account.request_id,
            stream_id=self._account.stream_id,
            org=self._account.org,
            close_code=self.code,
            reason=self.reason or None,
            state_version=self._session.state_version,
            decisions=self._decided,
            duration_ms=round((self._now() - self._started) * 1000, 1),
        )

    def _now(self) -> float:
        return self._loop.time()

    def _spawn(self, work: Coroutine[None, None, None], *, decide: int | None = None) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        if decide is not None:
            self._decides[decide] = task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._fail(bug)

    def _give(self, tell: Callable[[float], None]) -> None:
        """Tell the session something, and do what it asks for then."""
        try:
            tell(self._now())
        except Exception as bug:  # noqa: BLE001  one stream's fault must not be the process's
            self._fail(bug)
        self._pump()

    def _fail(self, bug: BaseException) -> None:
        """A fault of ours (D3.9)."""
        log.error("fault", request_id=self._account.request_id, exc_info=bug)
        if self._session.closing:
            self._end()
            self._wire.abort()
            return
        self._session.fail(self._now())
        self._pump()

    # -- in -------------------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """See `Peer`."""
        if self.over.is_set():
            return
        if self._session.closing:
            self._ignore(arrival)
        elif self._inbox.put(arrival):
            self._spawn(self._inbox.work())

    def _ignore(self, arrival: Arrival) -> None:
        """Only the client's own end matters now, and not for as long as it likes to talk."""
        self._ignored += 1
        if isinstance(arrival, ClientClose | Gone):
            self._shook.set()
        elif self._ignored == _IGNORED_MAX:
            self._wire.stop_reading()
            if self._close_sent:
                self._wire.half_close()

    def _take(self, arrival: Arrival, incoming: Incoming | None) -> None:
        self._give(lambda now: self._tell(arrival, incoming, now))

    def _tell(self, arrival: Arrival, incoming: Incoming | None, now: float) -> None:
        session = self._session
        match arrival:
            case Message(data):
                session.receive(data if incoming is None else incoming, now)
            case Ping(payload):
                session.receive_control(Opcode.PING.value, payload, now)
                if not session.closing and not self._outbox.answer(payload):
                    session.slow_reader(now)
            case Pong(payload):
                session.receive_control(_PONG, payload, now)
            case Violation(code, why):
                log.info("violation", request_id=self._account.request_id, code=code, why=why)
                session.violation(code, now)
            case ClientClose() | Gone():
                self._client_left(arrival, now)

    def _client_left(self, arrival: ClientClose | Gone, now: float) -> None:
        if self._session.closing:  # since it waited in the inbox
            self._shook.set()
        elif isinstance(arrival, ClientClose):
            self._session.client_closed(now)
            self._closing(arrival.code or 1005, "client")
            self._spawn(self._close_back(arrival.payload))
        else:
            self._session.lost(now)
            self._closing(None, "lost")
            self._spawn(self._leave())

    def stalled(self) -> None:
        """See `Peer` (D2.5)."""
        self._give(self._session.slow_reader)

    # -- out ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do what the session asks for; called after every input."""
        while (effect := self._session.next_effect()) is not None:
            match effect:
                case TakeStart():
                    self._spawn(self._take_start())
                case StartDecide():
                    self._spawn(self._decide(effect), decide=effect.ticket)
                case Close():
                    self._closing(effect.code, effect.reason)
                    self._spawn(self._shut(effect))
        if self._outbox.flush():
            self._spawn(self._unblock())
        self._set_timer()

    async def _unblock(self) -> None:
        await self._outbox.unblock()
        self._pump()

    def _set_timer(self) -> None:
        deadline = self._session.next_deadline()
        if deadline is None:
            deadline = math.inf
        if deadline == self._timer_at or self.over.is_set():
            return
        # One that comes too early costs nothing, and most deadlines only move away.
        if self._timer is not None and deadline > self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline < math.inf:
            self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._give(self._session.handle_timeout)

    # -- effects --------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        end = await self._lease.keep()
        if end is LeaseEnd.LOST:
            self._session.lease_lost(self._now())
        else:
            self._session.store_unavailable(self._now())
        self._pump()

    async def _take_start(self) -> None:
        wait_ms = await take_start(self._services, self._account)
        if wait_ms:
            self._session.start_refused(wait_ms, self._now())
        else:
            self._session.start_granted(self._now())
        self._pump()

    async def _decide(self, asked: StartDecide) -> None:
        result = await decide(self._services, self._account, asked)
        self._decides.pop(asked.ticket, None)
        self._decided += isinstance(result, Decided)
        self._session.resolve(asked.ticket, result, self._now())
        self._pump()

    # -- the end --------------------------------------------------------------------------------

    def _closing(self, code: int | None, reason: str) -> None:
        self._ended_at = self._now()
        self.code, self.reason = code, reason

    async def _shut(self, close: Close) -> None:
        """Everything that came before, then the Close; the lease is free before it leaves."""
        self._outbox.flush_all()
        await self._lease.release()
        self._wire.write(encode_close(close.code, close.reason))
        self._close_sent = True
        if self._wire.reading_ended:
            # Its Close cannot be read any more, but its FIN can: closing at once would be a reset,
            # which may take our Close from it.
            self._wire.half_close()
        try:
            async with asyncio.timeout(self._handshake_s):
                await self._shook.wait()
        except TimeoutError:
            self._wire.abort()
        self._end()

    async def _close_back(self, payload: bytes) -> None:
        await self._lease.release()
        self._wire.write(encode_close_back(payload))
        if self._wire.unsent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._handshake_s):
                    await self._wire.flushed()
        self._end()

    async def _leave(self) -> None:
        await self._lease.release()
        self._end()
        self._wire.abort()
