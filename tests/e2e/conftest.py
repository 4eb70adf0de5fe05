"""The shared gateway of the models plane's tests; see `tests.support.stack`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import GatewayProcess
from tests.support.stack import Stack, config, mute_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_gateway(shared_upstream: FakeUpstream) -> AsyncIterator[GatewayProcess]:
    listener, fillers = mute_socket()
    try:
        async with GatewayProcess(config(shared_upstream, listener)) as process:
            yield process
    finally:
        for sock in (*fillers, listener):
            sock.close()


@pytest.fixture
def stack(shared_upstream: FakeUpstream, shared_gateway: GatewayProcess) -> Iterator[Stack]:
    """The shared gateway as one test sees it; what the test leaves behind fails it."""
    stack = Stack(shared_upstream, shared_gateway)
    yield stack
    stack.check()
