"""What a store must do; the contract suite `tests/contract/` holds every store to it.

All methods are atomic and may be called concurrently, from several processes on one database too.
They raise `StoreError` if the database cannot be reached or refuses; nothing is half done then. A
call that is cancelled may still be done, and is done before what its caller calls next.

A store is given `notice_of` when it is made, or None: for each row that it writes, a settlement's
or a swept one, it stores the row's notice in the same transaction.

Texts come back as they went in, but for lone surrogates, which become U+FFFD.
Times are Unix seconds, amounts micro-USD, keys SHA-256 digests (a key's text never comes here).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.money import Hold, Progress, Settlement
    from relay.stores.runs import RunStore

KeyStatus = Literal["active", "suspended", "revoked"]
NoticeOf: TypeAlias = "Callable[[Settlement], Notice]"


class StoreError(Exception):
    """The database failed; the message says what to do, and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Org:
    """An organisation.

    Attributes:
        balance_micro_usd: what is left, open holds not counted off; None: no limit.
        trial: usage is logged but never debited.
        max_concurrent: requests at once, None for no limit.
    """

    id: str
    balance_micro_usd: int | None = None
    trial: bool = False
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """A key made by `sluicegate keys create`, with its org's properties as they are now."""

    id: str
    digest: bytes
    org: Org
    name: str | None
    status: KeyStatus
    created_at: float


class OrgChange(TypedDict, total=False):
    """Properties of an org that change; what is left out stays."""

    balance_micro_usd: int | None
    trial: bool
    max_concurrent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a webhook is told of one row; kept until it has accepted it (at least once).

    Attributes:
        id: its idempotency key; the same in every try.
        payload: the JSON body, the same bytes in every try.
        due_at: when it is to be tried. tries: how often it was tried.
    """

    id: str
    payload: bytes
    due_at: float
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """One try of a decide under an idempotency key (D6.2).

    Attributes:
        org, key: the key is the account's own; another account's is another key.
        digest: SHA-256 of the body. owner: names this try and no other.
    """

    org: str
    key: str
    digest: bytes
    owner: str


class KeyState(Enum):
    """What an idempotency key is to who wants to use it."""

    CLAIMED = "claimed"  # it was free and is this try's now
    RUNNING = "running"  # another try has it, with the same body
    ANSWERED = "answered"  # with the same body; the answer is there
    EXPIRED = "expired"  # likewise, and the answer was erased
    REUSED = "reused"  # it belongs to another body


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """What `claim_key` found.

    Attributes:
        until: when the other try's lease runs out, for RUNNING. answer: for ANSWERED.
    """

    state: KeyState
    until: float = 0.0
    answer: bytes = b""


class Store(Protocol):
    """A database."""

    async def open(self) -> None:
        """Connect, bring the schema up to date (never down). Called once."""

    async def close(self) -> None:
        """Finish what was accepted, then free everything. Idempotent."""

    @property
    def runs(self) -> RunStore:
        """The runs of this database; usable while the store is open."""

    # -- orgs and keys ------------------------------------------------------------------------

    async def ensure_org(self, org: Org) -> Org:
        """Create the org if it is not there; return it as stored. Its balance is an opening
        balance: an org that exists keeps its own.
        """

    async def put_org(self, org: Org) -> None:
        """Create the org or overwrite all its properties, its balance too: for a live org that
        would undo debits; see `change_org`.
        """

    async def change_org(self, org_id: str, change: OrgChange) -> Org:
        """Overwrite what `change` names and nothing else, creating the org if it is not there (no
        balance, no trial, no limit); return it as stored.
        """

    async def get_org(self, org_id: str) -> Org | None:
        """Return an org as stored."""

    async def add_balance(self, org_id: str, micro_usd: int) -> Org | None:
        """Add to what the org has left, whatever is settled meanwhile; return it as stored. An
        org without a limit stays without. None: there is no such org.
        """

    async def list_orgs(self) -> list[Org]:
        """All organisations, by name."""

    async def create_key(self, key: StoredKey) -> None:
        """Add a key; its org exists. Raises StoreError if id or digest is taken."""

    async def revoke_key(self, key_id: str) -> bool:
        """Revoke a key for good; whether there was such a key. Idempotent."""

    async def list_keys(self) -> list[StoredKey]:
        """All keys, revoked ones too, oldest first."""

    async def keys_version(self) -> int:
        """A number that changes whenever a key or an org's properties (not its balance) do."""

    # -- holds and rows -----------------------------------------------------------------------

    async def place_hold(self, hold: Hold) -> bool:
        """Set the amount aside. False if the org's balance less its open holds is below it; an
        org without a row or without a balance, and a trial hold, always pass. Trial holds count
        for nothing. A request that has a hold keeps it: True, and nothing changes; for one that
        has a row, StoreError.
        """

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """For each settlement whose request has no row yet: write the row, drop its hold, debit
        the org, store the row's notice. One that has a row already changes nothing.
        """

    async def write_progress(self, progress: Sequence[Progress]) -> None:
        """Note how far open holds are; holds that are gone are passed over."""

    async def open_holds(self) -> list[Hold]:
        """All open holds, oldest first."""

    # -- leases and the sweep -----------------------------------------------------------------

    async def renew_lease(self, worker: str, until: float) -> None:
        """Say that `worker` lives until then."""

    async def end_lease(self, worker: str) -> None:
        """Say that `worker` has stopped; its open holds are swept without waiting for the lease."""

    async def sweep(self, now: float, ttl_s: float) -> list[Settlement]:
        """Settle every hold that is older than `ttl_s` and whose worker has no lease at `now`, at
        its progress, else at its prompt estimate (source COUNTED), status 500, error_code
        `worker_lost`, as `settle` does (a trial hold is not debited); return the rows that this
        call wrote. Two sweeps never write one row twice. Long expired leases are removed.
        """

    async def sweep_run(self, execution_id: str, now: float) -> list[Settlement]:
        """As `sweep`, but the holds of one run's calls only (their request ids begin with the
        run's and a slash), of any age; return all rows of its calls, in order of their ids.
        """

    # -- decision streams ---------------------------------------------------------------------

    async def lease_stream(
        self, org: str, stream_id: str, *, limit: int, now: float, until: float
    ) -> float | None:
        """Lease one of the org's `limit` sockets until then (D1.5). None: it is leased. Else all
        are, and this is when the first of their leases runs out if nobody renews it. A lease that
        ran out at `now` counts for nothing.
        """

    async def renew_stream(self, stream_id: str, *, now: float, until: float) -> bool:
        """Keep the lease until then; False if it has run out, or was never given."""

    async def release_stream(self, stream_id: str) -> None:
        """Give the lease up. Idempotent."""

    async def start_decision(self, org: str, *, now: float, per_minute: float, burst: int) -> float:
        """Take one of the org's decision starts (D5.4). 0: it is taken. Else none is left, and
        this is in how many seconds the next one is there.
        """

    # -- idempotency keys of decides ----------------------------------------------------------

    async def claim_key(self, use: KeyUse, *, now: float, until: float) -> KeyClaim:
        """Take a free key until then (D6.2). Free is one that nobody has used, that a try has left
        or lost with its lease, or whose time (`keep_answer`) is over at `now`.
        """

    async def renew_key(self, use: KeyUse, *, until: float) -> bool:
        """Keep it until then; False if it is not this try's any more."""

    async def keep_answer(
        self,
        use: KeyUse,
        answer: bytes,
        *,
        until: float,
        forget_at: float,
        progress: Progress | None,
    ) -> bool:
        """End a try with an answer, and note the cost of its hold, so that both are there or none.

        Args:
            until: when the answer is erased. forget_at: when the key is free again.
            progress: what the hold settles at if this process is lost before it does.

        Returns:
            False if the key is not this try's any more; nothing is stored then.
        """

    async def leave_key(self, use: KeyUse) -> None:
        """End a try without an answer: the key is free. Idempotent; nothing if it is another's."""

    async def erase_answers(self, now: float) -> None:
        """Erase the answers whose time is over, and forget the keys that are free by time."""

    # -- usage --------------------------------------------------------------------------------

    async def usage(
        self, *, since: float = 0.0, org: str | None = None, limit: int | None = None
    ) -> list[Settlement]:
        """Rows since then, oldest first; with `limit`, the newest so many of them."""

    # -- notices to the webhook ---------------------------------------------------------------

    async def due_notices(self, now: float, limit: int) -> list[Notice]:
        """Notices to try now, those due longest first."""

    async def notice_delivered(self, notice_id: str) -> None:
        """The webhook has it; it is never due again."""

    async def postpone_notice(self, notice_id: str, until: float) -> None:
        """It was tried in vain: count the try, try again then."""
