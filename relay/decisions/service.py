"""Runs one decide: what is served, its key, a slot, a hold, the backend, what it costs.

    served? ─▶ key ─▶ slot ─▶ hold ─▶ backend ─▶ answer kept ─▶ settled     each refuses by itself
                └▶ answered before: that answer, and nothing else

D4.4, D5.4, D5.6, D6.2, D6.5, D6.7. The answer and its cost are stored together before anybody is
told: a gateway that is lost leaves a key that is free when its lease ends and a hold that settles
at nothing, or an answer and a hold that settles at its cost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders.decision_errors import DecisionError, error
from encoders.decision_served import check_served
from relay.billing import InsufficientCredits
from relay.deciders.base import DecisionReply
from relay.decisions.effects import Decided, Failed
from relay.decisions.keys import to_its_end
from relay.errors import ConcurrencyExceeded
from relay.money import Hold, Progress, Settlement, Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.decision_served import Served, Subject
    from relay.billing import Billing
    from relay.deciders.base import DecisionBackend
    from relay.decisions.keys import Keys, TakenKey
    from relay.decisions.tariff import Tariff
    from relay.slots import Slots

_log: Final = logging.getLogger("sluicegate.decisions")

# D6.1: the client gives up at 150 s.
DECIDE_S: Final = 140.0
# A backend has the deadline and ends by itself; this is for one that does not.
_OVERTIME_S: Final = 1.0
_SLOT_RETRY_MS: Final = 1000
_HASHED_HERE_MAX: Final = 256 * 1024  # a quarter of a millisecond
PLANE: Final = "decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose decide it is.

    Attributes:
        max_concurrent: the account's limit, None for none. trial: its usage is never debited.
    """

    org: str
    key_id: str
    max_concurrent: int | None = None
    trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be decided.

    Attributes:
        body: the decide body, canonical JSON (D4.10). subject: its parts that are checked.
        idempotency_key: of the client, or None.
        digest: SHA-256 of what the client sent if that is another text than `body`.
    """

    body: bytes
    subject: Subject
    idempotency_key: str | None = None
    digest: bytes | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """One decide while it runs.

    Attributes:
        request_id: names it to the client, in its row and its hold.
        on_start: called when nothing is left that refuses it before the work (D6.1).
        cancelled: status and code of its row if it is cancelled.
        settlement: its row, once it is settled; None if it was never dispatched.
    """

    caller: Caller
    asked: Asked
    request_id: str
    started: float
    on_start: Callable[[], None] | None = None
    cancelled: tuple[int, str] = (499, "client_abort")
    settlement: Settlement | None = None


class DecideService:
    """Decides for accounts.

    Args:
        served: what is refused before the backend is asked.
        slots: where an account's concurrent requests are counted, on every plane.
        billing: holds and settles. tariff: what a decide costs. keys: the idempotency keys.
        provider: names the backend in rows.
    """

    def __init__(
        self,
        backend: DecisionBackend,
        served: Served,
        slots: Slots,
        *,
        billing: Billing,
        tariff: Tariff,
        keys: Keys,
        provider: str,
    ) -> None:
        self._backend = backend
        self._served = served
        self._slots = slots
        self._billing = billing
        self._tariff = tariff
        self._keys = keys
        self._provider = provider

    def start(self) -> None:
        """Begin to erase old answers; the store is open."""
        self._keys.start()

    async def close(self) -> None:
        """Stop. Idempotent."""
        await self._keys.close()

    def begin(
        self,
        caller: Caller,
        asked: Asked,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Run:
        """Return a decide for `decide`.

        Args:
            request_id: without it, one of its own. on_start: see `Run`.
        """
        return Run(
            caller=caller,
            asked=asked,
            request_id=request_id or f"req_{secrets.token_hex(12)}",
            started=asyncio.get_running_loop().time(),
            on_start=on_start,
        )

    async def decide(self, run: Run) -> Decided | Failed:
        """Decide once; a failure is an answer too, nothing is raised."""
        began = time.perf_counter()  # the loop's clock stands still between two rounds of it
        result: DecisionReply | bytes | DecisionError | None
        result = check_served(run.asked.subject, self._served)
        if result is None and run.asked.idempotency_key is None:
            result = await self._dispatch(run, None)
        elif result is None:
            result = await self._keyed(run, run.asked.idempotency_key or "")
        if isinstance(result, DecisionError):
            return Failed(error=result, request_id=run.request_id)
        replayed = isinstance(result, bytes)
        return Decided(
            reply=result if isinstance(result, bytes) else result.body,
            request_id=run.request_id,
            server_timing=None if isinstance(result, bytes) else result.server_timing,
            latency_ms=round((time.perf_counter() - began) * 1000, 3),
            replayed=replayed,
        )

    async def _keyed(self, run: Run, key: str) -> DecisionReply | bytes | DecisionError:
        digest = run.asked.digest or await _digest(run.asked.body)
        taken = await self._keys.take(run.caller.org, key, digest)
        if isinstance(taken, bytes | DecisionError):
            return taken
        try:
            result = await self._dispatch(run, taken)
        except BaseException:
            await to_its_end(taken.leave())
            raise
        if isinstance(result, DecisionError):
            await to_its_end(taken.leave())
        return result

    async def _dispatch(self, run: Run, key: TakenKey | None) -> DecisionReply | DecisionError:
        try:
            with self._slots.hold(run.caller.org, run.request_id, run.caller.max_concurrent):
                return await self._billed(run, key)
        except ConcurrencyExceeded as full:
            return error(
                "concurrency_limit_exceeded",
                full.message,
                retry_after_ms=_SLOT_RETRY_MS,
                details={"cause": "account_concurrency"},
            )

    async def _billed(self, run: Run, key: TakenKey | None) -> DecisionReply | DecisionError:
        """Hold, ask, keep the answer, settle; whatever leaves this has settled once (D6.7)."""
        held, result = True, None
        try:
            try:
                await self._billing.place(self._hold(run))
            except InsufficientCredits as refused:
                held = False
                return error("insufficient_credits", refused.message)
            if run.on_start is not None:
                run.on_start()
            result = await self._ask(run)
            if key is not None and isinstance(result, DecisionReply):
                progress = self._progress(run, result)
                result = await to_its_end(key.keep(result.body, progress)) or result
            return result
        finally:
            if held:
                run.settlement = self._settlement(run, result)
                self._billing.end(run.settlement)

    async def _ask(self, run: Run) -> DecisionReply | DecisionError:
        deadline = run.started + DECIDE_S
        key = run.asked.idempotency_key
        try:
            async with asyncio.timeout_at(deadline + _OVERTIME_S):
                return await self._backend.decide(
                    run.asked.body,
                    idempotency_key=None if key is None else _derived(run.caller.org, key),
                    deadline=deadline,
                )
        except TimeoutError:
            return error("system_zero_timeout", f"no decision within {DECIDE_S:g} s")
        except Exception:  # noqa: BLE001  the last border of a backend
            _log.exception("a decision backend failed")
            return error("internal_error", "the gateway failed")

    # -- money ----------------------------------------------------------------------------------

    def _hold(self, run: Run) -> Hold:
        # Lost with its worker it settles at nothing: no answer was kept, and a failure is free.
        return Hold(
            request_id=run.request_id,
            org=run.caller.org,
            key_id=run.caller.key_id,
            plane=PLANE,
            model=run.asked.subject.model,
            worker=self._billing.worker,
            placed_at=time.time(),
            amount_micro_usd=self._tariff.most_micro_usd(run.asked.subject, len(run.asked.body)),
            prompt_tokens=0,
            prompt_micro_usd=0,
            trial=run.caller.trial,
        )

    def _progress(self, run: Run, reply: DecisionReply) -> Progress:
        return Progress(
            request_id=run.request_id,
            provider=self._provider,
            prompt_tokens=reply.input_tokens,
            completion_tokens=reply.thought_tokens,
            source=Source.REPORTED,
            cost_micro_usd=self._tariff.cost_micro_usd(run.asked.subject, reply),
        )

    def _settlement(self, run: Run, result: DecisionReply | DecisionError | None) -> Settlement:
        reply = result if isinstance(result, DecisionReply) else None
        status, code = (200, None) if reply is not None else run.cancelled
        if isinstance(result, DecisionError):
            status, code = result.status, result.code
        return Settlement(
            request_id=run.request_id,
            at=time.time(),
            org=run.caller.org,
            key_id=run.caller.key_id,
            plane=PLANE,
            model=run.asked.subject.model,
            provider=self._provider,
            status=status,
            error_code=code,
            prompt_tokens=reply.input_tokens if reply else 0,
            completion_tokens=reply.thought_tokens if reply else 0,
            cached_tokens=reply.cached_input_tokens if reply else None,
            source=Source.REPORTED if reply else Source.NONE,
            cost_micro_usd=self._tariff.cost_micro_usd(run.asked.subject, reply) if reply else 0,
            debit=not run.caller.trial,
            duration_ms=round((asyncio.get_running_loop().time() - run.started) * 1000),
        )


async def _digest(body: bytes) -> bytes:
    if len(body) <= _HASHED_HERE_MAX:
        return hashlib.sha256(body).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(body).digest())


def _derived(org: str, key: str) -> str:
    """The key that a backend sees: two accounts never share an answer (D6.2)."""
    return hashlib.sha256(f"{len(org)}:{org}{key}".encode()).hexdigest()
