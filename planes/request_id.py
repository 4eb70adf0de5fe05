"""Ids of requests: `req_` and 96 random bits (M1.2, `x-request-id`)."""

from __future__ import annotations

import os
from typing import Final

_ID_BYTES: Final = 12
_POOL_BYTES: Final = 256 * _ID_BYTES


class _Pool:
    """Random bytes in stock: asking the kernel for each request is a system call each."""

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def take(self) -> bytes:
        if self._at >= len(self._bytes):
            self._bytes, self._at = os.urandom(_POOL_BYTES), 0
        self._at += _ID_BYTES
        return self._bytes[self._at - _ID_BYTES : self._at]


_pool = _Pool()


def new_request_id() -> str:
    """Return an id that no other request has; for the event loop's thread alone."""
    return f"req_{_pool.take().hex()}"
