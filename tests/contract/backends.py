"""The stores that the contract suite runs over; a new store is one more class in BACKENDS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from relay.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

    from relay.stores.base import NoticeOf, Store


class Backend(Protocol):
    """One empty database, made with a folder of its own."""

    def __init__(self, folder: Path) -> None: ...

    def store(self, notice_of: NoticeOf | None = None) -> Store:
        """Return a store on it that is not open yet; each is a gateway of its own."""

    def code(self) -> str:
        """Return a Python program that makes `store`, for another process."""


class SqliteBackend:
    """A file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "contract.db"

    def store(self, notice_of: NoticeOf | None = None) -> Store:
        return SqliteStore(self._path, notice_of=notice_of)

    def code(self) -> str:
        return (
            "from relay.stores.sqlite import SqliteStore\n"
            f"store = SqliteStore({str(self._path)!r})\n"
        )


BACKENDS: list[type[Backend]] = [SqliteBackend]
