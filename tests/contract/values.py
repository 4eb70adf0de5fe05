"""Values that the contract suite puts into a store; every field can be said, few need to be."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from relay.money import Hold, Progress, Settlement, Source
from relay.stores.base import Notice, Org, StoredKey
from relay.stores.runs import Batch, JournalEvent, NewRun, RunEnd, TextPiece

if TYPE_CHECKING:
    from relay.stores.base import Store

NOW = 1_800_000_000.0
TTL_S = 900.0
OLD = NOW - TTL_S - 1


def key(tag: str = "a", org: Org | None = None, **fields: Any) -> StoredKey:
    values: dict[str, Any] = {
        "id": f"key_{tag}",
        "digest": hashlib.sha256(tag.encode()).digest(),
        "org": org or Org(id="acme"),
        "name": tag,
        "status": "active",
        "created_at": NOW,
    }
    return StoredKey(**values | fields)


def hold(request_id: str = "req_1", amount: int = 100, **fields: Any) -> Hold:
    values: dict[str, Any] = {
        "request_id": request_id,
        "org": "acme",
        "key_id": "key_a",
        "plane": "models",
        "model": "test/model",
        "worker": "worker_1",
        "placed_at": NOW,
        "amount_micro_usd": amount,
        "prompt_tokens": 7,
        "prompt_micro_usd": 5,
    }
    return Hold(**values | fields)


def row(request_id: str = "req_1", cost: int = 30, **fields: Any) -> Settlement:
    values: dict[str, Any] = {
        "request_id": request_id,
        "at": NOW + 2.5,
        "org": "acme",
        "key_id": "key_a",
        "plane": "models",
        "model": "test/model",
        "provider": "fake",
        "status": 200,
        "error_code": None,
        "prompt_tokens": 7,
        "completion_tokens": 11,
        "source": Source.REPORTED,
        "cost_micro_usd": cost,
        "attempts": ("fake/upstream: ok",),
        "duration_ms": 2500,
    }
    return Settlement(**values | fields)


def progress(request_id: str = "req_1", cost: int = 12, **fields: Any) -> Progress:
    values: dict[str, Any] = {
        "request_id": request_id,
        "provider": "fake",
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "source": Source.COUNTED,
        "cost_micro_usd": cost,
    }
    return Progress(**values | fields)


def notice_of(settlement: Settlement) -> Notice:
    return Notice(
        id=settlement.request_id,
        payload=f"{settlement.status} {settlement.cost_micro_usd}".encode(),
        due_at=settlement.at,
    )


async def balance(store: Store, org: str = "acme") -> int | None:
    found = await store.get_org(org)
    assert found is not None
    return found.balance_micro_usd


async def held(store: Store) -> list[str]:
    """The requests with an open hold, oldest first."""
    return [h.request_id for h in await store.open_holds()]


def new_run(execution_id: str = "e1", **fields: Any) -> NewRun:
    values: dict[str, Any] = {
        "execution_id": execution_id,
        "workflow_id": "wf_1",
        "org": "acme",
        "key_id": "key_a",
        "trial": False,
        "plane": "workflows",
        "name": "triage",
        "source": "inline",
        "document": "workflow:\n  name: triage\n",
        "inputs": {"ticket": "late"},
        "owner": "worker_1",
        "created_at": NOW,
    }
    return NewRun(**values | fields)


def event(event_id: str, name: str = "heartbeat", task_id: str = "") -> JournalEvent:
    frame = f'event: {name}\ndata: {{"of":"{event_id}"}}\n\n'.encode(errors="replace")
    return JournalEvent(event_id=event_id, name=name, frame=frame, task_id=task_id)


def events(*event_ids: str) -> Batch:
    return Batch(events=[event(event_id) for event_id in event_ids])


def piece(event_id: str, offset: int, raw: bytes, task_id: str = "t1") -> TextPiece:
    return TextPiece(
        event_id=event_id, task_id=task_id, offset=offset, raw=raw, chars=len(raw.decode())
    )


def run_end(state: Any = "completed", at: float = NOW + 9, **fields: Any) -> RunEnd:
    return RunEnd(state=state, at=at, **fields)
