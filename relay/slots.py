"""Concurrency slots of an org (M1.2): one for each request, on any plane, freed on every ending."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from relay.errors import ConcurrencyExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator


class Slots:
    """The slots in use in this process, by org and slot id."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def in_use(self, org: str) -> int:
        """How many slots `org` holds."""
        return len(self._held.get(org, ()))

    @contextmanager
    def hold(self, org: str, slot_id: str, limit: int | None) -> Iterator[None]:
        """Hold one slot for the length of the block.

        Args:
            slot_id: the request's id; a slot is freed by it, so freeing twice frees one.
            limit: the org's `max_concurrent`, None for no limit.

        Raises:
            ConcurrencyExceeded: all are in use.
        """
        held = self._held.setdefault(org, set())
        if limit is not None and len(held) >= limit:
            raise ConcurrencyExceeded(
                f"all {limit} concurrent requests of this organisation are in use", retry_after_s=1
            )
        held.add(slot_id)
        try:
            yield
        finally:
            held.discard(slot_id)
            if not held and self._held.get(org) is held:
                del self._held[org]
