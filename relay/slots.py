"""Concurrency slots of an org (M1.2): one for each request, on any plane, freed on every ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.errors import ConcurrencyExceeded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Slots:
    """The slots in use in this process, by org and slot id."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def in_use(self, org: str) -> int:
        """How many slots `org` holds."""
        return len(self._held.get(org, ()))

    def hold(self, org: str, slot_id: str, limit: int | None) -> AbstractContextManager[None]:
        """Hold one slot for the length of the block.

        Args:
            slot_id: the request's id; a slot is freed by it, so freeing twice frees one.
            limit: the org's `max_concurrent`, None for no limit.

        Raises:
            ConcurrencyExceeded: on entering: all are in use.
        """
        return _Held(self, org, slot_id, limit)

    def take(self, org: str, slot_id: str, limit: int | None) -> None:
        """See `hold`."""
        held = self._held.setdefault(org, set())
        if limit is not None and len(held) >= limit:
            raise ConcurrencyExceeded(
                f"all {limit} concurrent requests of this organisation are in use", retry_after_s=1
            )
        held.add(slot_id)

    def free(self, org: str, slot_id: str) -> None:
        """See `hold`."""
        held = self._held.get(org, set())
        held.discard(slot_id)
        if not held:
            self._held.pop(org, None)


class _Held:
    """See `Slots.hold`; a class, as each request enters it and generators are dear."""

    __slots__ = ("_limit", "_org", "_slot_id", "_slots")

    def __init__(self, slots: Slots, org: str, slot_id: str, limit: int | None) -> None:
        self._slots = slots
        self._org = org
        self._slot_id = slot_id
        self._limit = limit

    def __enter__(self) -> None:
        self._slots.take(self._org, self._slot_id, self._limit)

    def __exit__(self, *_: object) -> None:
        self._slots.free(self._org, self._slot_id)
