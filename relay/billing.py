"""Billing: hooks around every request (M4.2, M4.3).

    authorize ─▶ (the request runs) ─▶ settle   once, with what was used
                                   └▶ release   once, if nothing came out

`authorize` may refuse; it comes before a candidate is dialled. `settle` and `release` are plain
calls that must not block: they run while a hang-up's cancellation passes through. A hook that
raises or hangs is logged and changes nothing for the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from relay import meter
from relay.errors import RelayError
from relay.lifecycle import Outcome
from relay.money import (
    Hold,
    Price,
    Progress,
    Settlement,
    Source,
    dearest,
    max_output_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from relay.prices import PriceBook
    from relay.record import RequestRecord
    from relay.request import RelayRequest
    from relay.routing import Candidate

_log: Final = logging.getLogger("sluicegate.billing")

AUTHORIZE_WAIT_S: Final = 2.0
_GONE, _MID_STREAM = 499, 502
_NOTHING: Final = meter.Reading(
    prompt_tokens=0,
    completion_tokens=0,
    cached_tokens=None,
    reasoning_tokens=None,
    source=Source.NONE,
)


class InsufficientCredits(RelayError):
    """The balance, less what open requests hold, is below what this one may cost."""

    status = 402
    code = "insufficient_credits"
    type = "insufficient_quota"


class BillingHook(Protocol):
    """One who is asked before a request and told after it."""

    @property
    def name(self) -> str:
        """For the log."""

    async def authorize(self, hold: Hold) -> None:
        """Allow the request, or refuse it.

        Raises:
            InsufficientCredits: refused. Any other exception allows it.
        """

    def settle(self, settlement: Settlement) -> None:
        """The request ended and used this. Must not block."""

    def release(self, settlement: Settlement) -> None:
        """The request ended and nothing came out; the amount is 0. Must not block."""


@dataclass(slots=True)
class OpenHold:
    """A hold whose request runs.

    Attributes:
        prices: of each candidate, by provider and model.
        read: what was used so far; None before the first byte.
    """

    hold: Hold
    prices: dict[tuple[str, str], Price]
    record: RequestRecord
    read: Callable[[], meter.Reading] | None = None
    noted: meter.Reading | None = None

    def cost(self, reading: meter.Reading) -> int:
        """Return the cost of a reading at the price of who serves, in micro-USD."""
        price = self.price()
        cached = reading.cached_tokens or 0
        return price.cost_micro_usd(reading.prompt_tokens, reading.completion_tokens, cached)

    def price(self) -> Price:
        """Return the price of the candidate that was tried last."""
        served = (self.record.provider or "", self.record.upstream_model or "")
        return self.prices.get(served) or dearest(self.prices.values())


class Billing:
    """Runs the hooks and keeps the open holds of this process.

    Args:
        hooks: asked in this order; the ledger comes last, so that a refusal leaves no hold.
        prices: what candidates cost.
        worker: names this process in its holds.
        hold_output_tokens: output held for a request that names no limit.
    """

    def __init__(
        self,
        hooks: Sequence[BillingHook],
        prices: PriceBook,
        *,
        worker: str,
        hold_output_tokens: int,
    ) -> None:
        self._hooks = hooks
        self._prices = prices
        self._worker = worker
        self._hold_output_tokens = hold_output_tokens
        self._open: dict[str, OpenHold] = {}
        self._placed: set[str] = set()

    @property
    def open_holds(self) -> int:
        """How many holds of this process are open."""
        return len(self._open) + len(self._placed)

    @property
    def worker(self) -> str:
        """Names this process in its holds."""
        return self._worker

    def price(self, slug: str, candidates: Iterable[tuple[str, str]]) -> Price:
        """Return a price of `slug` that no candidate (provider, model) exceeds."""
        return dearest(self._prices.price(slug, *candidate) for candidate in candidates)

    def prepare(
        self,
        request: RelayRequest,
        candidates: tuple[Candidate, ...],
        record: RequestRecord,
        *,
        trial: bool,
    ) -> OpenHold:
        """Compute the hold of a request; from here on `close` must be called exactly once, or
        `authorize` has refused.
        """
        prices = {
            (c.provider.name, c.model): self._prices.price(request.slug, c.provider.name, c.model)
            for c in candidates
        }
        prompt = request.prompt_tokens
        output = max_output_tokens(request.body, self._hold_output_tokens)
        price = dearest(prices.values())
        hold = Hold(
            request_id=request.request_id,
            org=record.org or "",
            key_id=record.key_id or "",
            plane=record.plane,
            model=request.slug,
            worker=self._worker,
            placed_at=time.time(),
            amount_micro_usd=price.cost_micro_usd(prompt, output),
            prompt_tokens=prompt,
            prompt_micro_usd=price.cost_micro_usd(prompt, 0),
            trial=trial,
        )
        opened = OpenHold(hold, prices, record)
        self._open[hold.request_id] = opened
        return opened

    async def authorize(self, opened: OpenHold) -> None:
        """Place the hold. If this is cancelled, it may have been placed: `close` releases it.

        Raises:
            InsufficientCredits: refused; there is no hold and nothing to close.
        """
        try:
            await self._ask(opened.hold)
        except InsufficientCredits:
            del self._open[opened.hold.request_id]
            raise

    async def place(self, hold: Hold) -> None:
        """Place a hold that is computed elsewhere; `end` must be called exactly once, if this is
        cancelled too.

        Raises:
            InsufficientCredits: refused; there is no hold and nothing to end.
        """
        self._placed.add(hold.request_id)
        try:
            await self._ask(hold)
        except InsufficientCredits:
            self._placed.remove(hold.request_id)
            raise

    def end(self, settlement: Settlement) -> None:
        """Settle or release the hold of `place`; synchronous, exactly once."""
        self._placed.remove(settlement.request_id)  # a second end is a bug of ours: KeyError
        self._tell(settlement)

    async def _ask(self, hold: Hold) -> None:
        for hook in self._hooks:
            await self._authorize(hook, hold)

    async def _authorize(self, hook: BillingHook, hold: Hold) -> None:
        try:
            async with asyncio.timeout(AUTHORIZE_WAIT_S):
                await hook.authorize(hold)
        except InsufficientCredits:
            raise
        except Exception:  # noqa: BLE001  a broken hook breaks no stream (M4.3)
            _log.exception("billing hook %s failed to authorize; the request goes on", hook.name)

    def close(self, opened: OpenHold, outcome: Outcome, *, dialled: bool = True) -> Settlement:
        """Settle or release the hold of a request that ended; synchronous, exactly once.

        Args:
            dialled: whether a candidate may have seen the request.
        """
        del self._open[opened.hold.request_id]  # a second close is a bug of ours: KeyError
        settlement = _settlement(opened, outcome, dialled=dialled)
        self._tell(settlement)
        return settlement

    def _tell(self, settlement: Settlement) -> None:
        for hook in self._hooks:
            tell = hook.release if settlement.source is Source.NONE else hook.settle
            try:
                tell(settlement)
            except Exception:  # noqa: BLE001  the next hook is told all the same
                _log.exception("billing hook %s failed to settle", hook.name)

    def progress(self) -> list[Progress]:
        """Return how far each open stream is that moved since the last call."""
        moved: list[Progress] = []
        for opened in self._open.values():
            reading = opened.read() if opened.read is not None else None
            if reading is None or reading == opened.noted:
                continue
            opened.noted = reading
            moved.append(
                Progress(
                    request_id=opened.hold.request_id,
                    provider=opened.record.provider or "",
                    prompt_tokens=reading.prompt_tokens,
                    completion_tokens=reading.completion_tokens,
                    source=reading.source,
                    cost_micro_usd=opened.cost(reading),
                )
            )
        return moved


def _settlement(opened: OpenHold, outcome: Outcome, *, dialled: bool) -> Settlement:
    """Decide what a request that ended so costs (M4.2)."""
    hold, record = opened.hold, opened.record
    reading = opened.read() if opened.read is not None else None
    if reading is None:
        reading = meter.read(None, lambda: 0, hold.prompt_tokens)
    came_out = reading.source is not Source.NONE
    status, code = _told(record, outcome)
    match outcome:
        case Outcome.COMPLETED:
            pays = True
        case Outcome.CLIENT_ABORT:
            # The provider has the prompt and works on it, whatever has come back so far.
            pays = dialled
        case _:
            # A client that got nothing pays nothing.
            pays = came_out and record.streamed
    if pays and not came_out:
        reading = replace(reading, source=Source.COUNTED)
    elif not pays:
        reading = _NOTHING
    return Settlement(
        request_id=hold.request_id,
        at=time.time(),
        org=hold.org,
        key_id=hold.key_id,
        plane=hold.plane,
        model=hold.model,
        provider=record.provider,
        status=status,
        error_code=code,
        prompt_tokens=reading.prompt_tokens,
        completion_tokens=reading.completion_tokens,
        cached_tokens=reading.cached_tokens,
        reasoning_tokens=reading.reasoning_tokens,
        source=reading.source,
        cost_micro_usd=opened.cost(reading) if pays else 0,
        debit=not hold.trial,
        attempts=tuple(record.attempt_lines()),
        duration_ms=round((time.monotonic() - record.started) * 1000),
    )


def _told(record: RequestRecord, outcome: Outcome) -> tuple[int, str | None]:
    """Return the status and error code of a row."""
    match outcome:
        case Outcome.COMPLETED:
            return 200, None
        case Outcome.CLIENT_ABORT:
            return _GONE, "client_abort"
        case Outcome.UPSTREAM_ERROR | Outcome.TRUNCATED if record.streamed:
            return _MID_STREAM, "upstream_error"
        case _:
            error = record.error
            return (error.status, error.code) if error else (500, "internal_error")
