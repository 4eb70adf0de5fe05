"""An empty database of each kind, and gateways on it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.contract.backends import BACKENDS, Backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from relay.stores.base import NoticeOf, Store


@pytest.fixture(params=BACKENDS, ids=lambda kind: kind.__name__)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    made: Backend = request.param(tmp_path)
    return made


@pytest.fixture
async def gateway(backend: Backend) -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """Opens a further store on the database; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def opened(notice_of: NoticeOf | None = None) -> Store:
            store = backend.store(notice_of)
            stack.push_async_callback(store.close)
            await store.open()
            return store

        yield opened


@pytest.fixture
async def store(gateway: Callable[..., Awaitable[Store]]) -> Store:
    return await gateway()
