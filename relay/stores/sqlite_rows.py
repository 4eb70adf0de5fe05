"""Rows of the SQLite database as values, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from relay.money import Hold, Settlement, Source
from relay.stores.base import Notice, Org, StoredKey

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[Any, ...]


class Columns(tuple[str, ...]):
    """Names of columns, with what SQL needs of them."""

    __slots__ = ()

    @property
    def names(self) -> str:
        """`a, b, c`."""
        return ", ".join(self)

    @property
    def marks(self) -> str:
        """`?, ?, ?`."""
        return ", ".join("?" * len(self))


ORG: Final = Columns(("id", "balance_micro_usd", "trial", "max_concurrent"))
HOLD: Final = Columns(
    (
        *("request_id", "org", "key_id", "plane", "model", "worker", "placed_at"),
        *("amount_micro_usd", "prompt_tokens", "prompt_micro_usd", "trial"),
    )
)
NOTED: Final = Columns(
    (
        *("noted_provider", "noted_prompt_tokens", "noted_completion_tokens"),
        *("noted_source", "noted_micro_usd"),
    )
)
USAGE: Final = Columns(
    (
        *("request_id", "at", "org", "key_id", "plane", "model", "provider", "status"),
        *("error_code", "prompt_tokens", "completion_tokens", "cached_tokens"),
        *("reasoning_tokens", "source", "cost_micro_usd", "debit", "attempts", "duration_ms"),
    )
)
NOTICE: Final = Columns(("id", "payload", "tries", "due_at"))


def text(value: str) -> str:
    """Return `value` with lone surrogates replaced: clients can name a model with them (B20)."""
    return (
        value
        if value.isascii()
        else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def _text_or_none(value: str | None) -> str | None:
    return None if value is None else text(value)


def row_of_org(org: Org) -> Row:
    return (text(org.id), org.balance_micro_usd, org.trial, org.max_concurrent)


def org_of(row: Sequence[Any]) -> Org:
    org_id, balance, trial, max_concurrent = row
    return Org(
        id=org_id, balance_micro_usd=balance, trial=bool(trial), max_concurrent=max_concurrent
    )


def key_of(row: Sequence[Any]) -> StoredKey:
    key_id, digest, name, status, created_at, *org = row
    return StoredKey(
        id=key_id,
        digest=digest,
        org=org_of(org),
        name=name,
        status=status,
        created_at=created_at,
    )


def row_of_hold(hold: Hold) -> Row:
    return (
        *(text(hold.request_id), text(hold.org), text(hold.key_id), text(hold.plane)),
        *(text(hold.model), text(hold.worker), hold.placed_at, hold.amount_micro_usd),
        *(hold.prompt_tokens, hold.prompt_micro_usd, hold.trial),
    )


def hold_of(row: Sequence[Any]) -> Hold:
    fields = dict(zip(HOLD, row, strict=True))
    return Hold(**fields | {"trial": bool(fields["trial"])})


def row_of_settlement(settlement: Settlement) -> Row:
    s = settlement
    return (
        *(text(s.request_id), s.at, text(s.org), text(s.key_id), text(s.plane), text(s.model)),
        *(_text_or_none(s.provider), s.status, _text_or_none(s.error_code), s.prompt_tokens),
        *(s.completion_tokens, s.cached_tokens, s.reasoning_tokens, s.source.value),
        *(s.cost_micro_usd, s.debit, json.dumps([text(a) for a in s.attempts]), s.duration_ms),
    )


def settlement_of(row: Sequence[Any]) -> Settlement:
    fields = dict(zip(USAGE, row, strict=True))
    return Settlement(
        **fields
        | {
            "source": Source(fields["source"]),
            "debit": bool(fields["debit"]),
            "attempts": tuple(json.loads(fields["attempts"])),
        }
    )


def settlement_of_lost(row: Sequence[Any], now: float) -> Settlement:
    """Return what a swept hold settles at: its progress, else its prompt estimate (M4.2).

    Args:
        row: HOLD and NOTED.
    """
    hold = hold_of(row[: len(HOLD)])
    provider, prompt_tokens, completion_tokens, source, cost = row[len(HOLD) :]
    noted = source is not None
    return Settlement(
        request_id=hold.request_id,
        at=now,
        org=hold.org,
        key_id=hold.key_id,
        plane=hold.plane,
        model=hold.model,
        provider=provider,
        status=500,
        error_code="worker_lost",
        prompt_tokens=prompt_tokens if noted else hold.prompt_tokens,
        completion_tokens=completion_tokens if noted else 0,
        source=Source(source) if noted else Source.COUNTED,
        cost_micro_usd=cost if noted else hold.prompt_micro_usd,
        debit=not hold.trial,
        duration_ms=max(0, round((now - hold.placed_at) * 1000)),
    )


def notice_of_row(row: Sequence[Any]) -> Notice:
    return Notice(**dict(zip(NOTICE, row, strict=True)))
