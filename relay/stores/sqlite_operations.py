"""What a store does, as functions of an SQLite connection; each runs inside a transaction.

They are called by the threads of `sqlite_threads` only, and may be called again after a failure.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from relay.stores.base import StoreError
from relay.stores.sqlite_rows import (
    HOLD,
    NOTED,
    NOTICE,
    ORG,
    USAGE,
    hold_of,
    key_of,
    notice_of_row,
    org_of,
    row_of_hold,
    row_of_org,
    row_of_settlement,
    settlement_of,
    settlement_of_lost,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relay.money import Hold, Progress, Settlement
    from relay.stores.base import Notice, NoticeOf, Org, OrgChange, StoredKey

# A lease that ran out means no lease; its row is kept for whoever looks for a cause.
LEASE_KEPT_S: Final = 3600.0

# -- orgs and keys --------------------------------------------------------------------------------

_INSERT_ORG: Final = f"INSERT INTO orgs ({ORG.names}) VALUES ({ORG.marks})"


def ensure_org(connection: sqlite3.Connection, org: Org) -> Org:
    connection.execute(f"{_INSERT_ORG} ON CONFLICT DO NOTHING", row_of_org(org))
    return _stored_org(connection, org.id)


def put_org(connection: sqlite3.Connection, org: Org) -> None:
    # Not INSERT OR REPLACE: that deletes the row, which keys refer to.
    connection.execute(
        f"""{_INSERT_ORG} ON CONFLICT DO UPDATE SET
            balance_micro_usd = excluded.balance_micro_usd, trial = excluded.trial,
            max_concurrent = excluded.max_concurrent""",
        row_of_org(org),
    )


def change_org(connection: sqlite3.Connection, org_id: str, change: OrgChange) -> Org:
    connection.execute(
        "INSERT INTO orgs (id, trial) VALUES (?, 0) ON CONFLICT DO NOTHING", (text(org_id),)
    )
    values = dict(change)
    for column in ORG[1:]:
        if column in values:
            connection.execute(
                f"UPDATE orgs SET {column} = ? WHERE id = ?", (values[column], text(org_id))
            )
    return _stored_org(connection, org_id)


def get_org(connection: sqlite3.Connection, org_id: str) -> Org | None:
    row = connection.execute(
        f"SELECT {ORG.names} FROM orgs WHERE id = ?", (text(org_id),)
    ).fetchone()
    return org_of(row) if row else None


def add_balance(connection: sqlite3.Connection, org_id: str, micro_usd: int) -> Org | None:
    connection.execute(
        "UPDATE orgs SET balance_micro_usd = balance_micro_usd + ? WHERE id = ?",
        (micro_usd, text(org_id)),
    )
    return get_org(connection, org_id)


def list_orgs(connection: sqlite3.Connection) -> list[Org]:
    rows = connection.execute(f"SELECT {ORG.names} FROM orgs ORDER BY id")
    return [org_of(row) for row in rows]


def _stored_org(connection: sqlite3.Connection, org_id: str) -> Org:
    org = get_org(connection, org_id)
    assert org is not None
    return org


def create_key(connection: sqlite3.Connection, key: StoredKey) -> None:
    row = (text(key.id), key.digest, text(key.org.id), key.name, key.status, key.created_at)
    try:
        connection.execute(
            "INSERT INTO keys (id, digest, org, name, status, created_at) VALUES (?,?,?,?,?,?)", row
        )
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
            raise StoreError(f"there is no organisation {key.org.id!r}; create it first") from error
        raise StoreError(f"there is a key {key.id!r} already, or one with its digest") from error


def revoke_key(connection: sqlite3.Connection, key_id: str) -> bool:
    changed = connection.execute("UPDATE keys SET status = 'revoked' WHERE id = ?", (text(key_id),))
    return changed.rowcount > 0


def list_keys(connection: sqlite3.Connection) -> list[StoredKey]:
    rows = connection.execute(
        f"""SELECT keys.id, digest, name, status, created_at, {", ".join(f"orgs.{c}" for c in ORG)}
            FROM keys JOIN orgs ON orgs.id = keys.org ORDER BY created_at, seq"""
    )
    return [key_of(row) for row in rows]


def keys_version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("SELECT version FROM keys_version").fetchone()
    return int(version)


# -- holds and rows -------------------------------------------------------------------------------

# The whole decision in one statement: a thread that holds a transaction should come and go between
# SQLite and the interpreter as rarely as it can.
_PLACE: Final = f"""
INSERT INTO holds ({HOLD.names}) SELECT {HOLD.marks}
WHERE NOT EXISTS (SELECT 1 FROM usage WHERE request_id = ?)
AND (? OR coalesce((
    SELECT balance_micro_usd - coalesce((SELECT micro_usd FROM held WHERE org = orgs.id), 0) >= ?
    FROM orgs WHERE id = ? AND balance_micro_usd IS NOT NULL
), 1))
ON CONFLICT (request_id) DO NOTHING"""


def place_hold(connection: sqlite3.Connection, hold: Hold) -> bool:
    row = row_of_hold(hold)
    request_id, org = row[0], row[1]
    placed = connection.execute(_PLACE, (*row, request_id, hold.trial, hold.amount_micro_usd, org))
    if placed.rowcount > 0:
        return True
    if _exists(connection, "SELECT 1 FROM usage WHERE request_id = ?", request_id):
        raise StoreError(f"the request {hold.request_id!r} has been settled already")
    return _exists(connection, "SELECT 1 FROM holds WHERE request_id = ?", request_id)


def _exists(connection: sqlite3.Connection, query: str, value: str) -> bool:
    return connection.execute(query, (value,)).fetchone() is not None


_WRITE_ROW: Final = (
    f"INSERT INTO usage ({USAGE.names}) VALUES ({USAGE.marks}) ON CONFLICT (request_id) DO NOTHING"
)


def settle(
    connection: sqlite3.Connection, settlements: Sequence[Settlement], notice_of: NoticeOf | None
) -> list[Settlement]:
    """Write the rows, drop the holds, debit, tell; return those that had no row yet."""
    written = [
        settlement
        for settlement in settlements
        if connection.execute(_WRITE_ROW, row_of_settlement(settlement)).rowcount > 0
    ]
    connection.executemany(
        "DELETE FROM holds WHERE request_id = ?", [(text(s.request_id),) for s in written]
    )
    debits: dict[str, int] = {}
    for settlement in written:
        if settlement.debit and settlement.cost_micro_usd:
            org = text(settlement.org)
            debits[org] = debits.get(org, 0) + settlement.cost_micro_usd
    connection.executemany(
        "UPDATE orgs SET balance_micro_usd = balance_micro_usd - ? WHERE id = ?",
        [(amount, org) for org, amount in debits.items()],
    )
    if notice_of is not None:
        for settlement in written:
            _store_notice(connection, notice_of(settlement))
    return written


def write_progress(connection: sqlite3.Connection, progress: Sequence[Progress]) -> None:
    connection.executemany(
        f"UPDATE holds SET ({NOTED.names}) = ({NOTED.marks}) WHERE request_id = ?",
        [
            (
                *(text(p.provider), p.prompt_tokens, p.completion_tokens, p.source.value),
                *(p.cost_micro_usd, text(p.request_id)),
            )
            for p in progress
        ],
    )


def open_holds(connection: sqlite3.Connection) -> list[Hold]:
    rows = connection.execute(f"SELECT {HOLD.names} FROM holds ORDER BY placed_at, request_id")
    return [hold_of(row) for row in rows]


# -- leases and the sweep -------------------------------------------------------------------------


def renew_lease(connection: sqlite3.Connection, worker: str, until: float) -> None:
    connection.execute(
        """INSERT INTO leases (worker, until) VALUES (?, ?)
           ON CONFLICT DO UPDATE SET until = excluded.until""",
        (text(worker), until),
    )


def end_lease(connection: sqlite3.Connection, worker: str) -> None:
    connection.execute("DELETE FROM leases WHERE worker = ?", (text(worker),))


def sweep(
    connection: sqlite3.Connection, now: float, ttl_s: float, notice_of: NoticeOf | None
) -> list[Settlement]:
    written = _settle_lost(connection, "placed_at < ?", (now - ttl_s,), now, notice_of)
    connection.execute("DELETE FROM leases WHERE until < ?", (now - LEASE_KEPT_S,))
    return written


def sweep_run(
    connection: sqlite3.Connection, execution_id: str, now: float, notice_of: NoticeOf | None
) -> list[Settlement]:
    # A range of the primary key: all that begins with the id and a slash, which "0" follows.
    of_run = "request_id > ? AND request_id < ?"
    ends = (text(f"{execution_id}/"), text(f"{execution_id}0"))
    _settle_lost(connection, of_run, ends, now, notice_of)
    rows = connection.execute(
        f"SELECT {USAGE.names} FROM usage WHERE {of_run} ORDER BY request_id", ends
    )
    return [settlement_of(row) for row in rows]


def _settle_lost(
    connection: sqlite3.Connection,
    where: str,
    values: Sequence[float | str],
    now: float,
    notice_of: NoticeOf | None,
) -> list[Settlement]:
    lost = connection.execute(
        f"""SELECT {HOLD.names}, {NOTED.names} FROM holds WHERE {where}
            AND worker NOT IN (SELECT worker FROM leases WHERE until > ?)
            ORDER BY placed_at, request_id""",
        (*values, now),
    ).fetchall()
    return settle(connection, [settlement_of_lost(row, now) for row in lost], notice_of)


# -- usage ----------------------------------------------------------------------------------------


def usage(
    connection: sqlite3.Connection, since: float, org: str | None, limit: int | None
) -> list[Settlement]:
    where = "at >= ?"
    values: list[object] = [since]
    if org is not None:
        where, values = "org = ? AND at >= ?", [text(org), since]
    rows = f"SELECT {USAGE.names}, seq FROM usage WHERE {where}"
    if limit is not None:
        rows = f"SELECT * FROM ({rows} ORDER BY at DESC, seq DESC LIMIT ?)"
        values.append(limit)
    found = connection.execute(f"{rows} ORDER BY at, seq", values)
    return [settlement_of(row[:-1]) for row in found]


# -- notices --------------------------------------------------------------------------------------


def _store_notice(connection: sqlite3.Connection, notice: Notice) -> None:
    connection.execute(
        f"INSERT INTO notices ({NOTICE.names}) VALUES ({NOTICE.marks}) ON CONFLICT (id) DO NOTHING",
        (text(notice.id), notice.payload, notice.tries, notice.due_at),
    )


def due_notices(connection: sqlite3.Connection, now: float, limit: int) -> list[Notice]:
    rows = connection.execute(
        f"SELECT {NOTICE.names} FROM notices WHERE due_at <= ? ORDER BY due_at, seq LIMIT ?",
        (now, limit),
    )
    return [notice_of_row(row) for row in rows]


def notice_delivered(connection: sqlite3.Connection, notice_id: str) -> None:
    connection.execute("DELETE FROM notices WHERE id = ?", (text(notice_id),))


def postpone_notice(connection: sqlite3.Connection, notice_id: str, until: float) -> None:
    connection.execute(
        "UPDATE notices SET tries = tries + 1, due_at = ? WHERE id = ?", (until, text(notice_id))
    )
