"""M1.2, M2.1: a bug of ours, wherever it strikes, leaves the client a proper answer.

The gateway runs in this process, by the runner of production, so that a bug can be put in.
"""

from __future__ import annotations

import asyncio
import io
import logging
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio
import structlog
from aiohttp import web

from planes import logs
from planes.app import make_app, make_runner
from planes.settings import Settings
from relay import attempts, exchange
from relay.stream import StreamRelay
from tests.support.checks import until
from tests.support.fake_upstream import DONE, FakeUpstream, Send, Sleep, Wait, chunk, sse
from tests.support.gateway import AUTH, MODEL, config_for
from tests.support.stack import MESSAGES, served
from tests.support.wire import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

A: Final = chunk("a", role="assistant")
B: Final = chunk("b")


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the gateway logs."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    out = io.StringIO()
    logs.configure("json", stream=out)
    yield out
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest_asyncio.fixture
async def client(
    up: FakeUpstream, log: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RawClient]:
    """A client of a gateway in this process."""
    monkeypatch.chdir(tmp_path)  # where the database of the defaults lies
    runner = make_runner(make_app(Settings.model_validate(config_for(up))))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with RawClient(host, port) as raw:
        yield raw
    await runner.cleanup()


async def ask(client: RawClient, *headers: tuple[str, str], stream: bool) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream}
    await client.request("POST", "/v1/chat/completions", headers=[AUTH, *headers], json=body)
    await client.read_all()


def fail(*_: object, **__: object) -> Any:
    raise LookupError("a bug")


async def test_a_bug_after_the_first_byte_ends_in_band(
    up: FakeUpstream, client: RawClient, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M2.1: what was sent, the error chunk, `[DONE]`, a proper end; and the log has the bug."""
    feed = StreamRelay.feed

    def feed_once(self: StreamRelay, data: bytes) -> bytes:
        monkeypatch.setattr(StreamRelay, "feed", fail)
        return feed(self, data)

    monkeypatch.setattr(StreamRelay, "feed", feed_once)
    up.script(Send(sse(A)), Sleep(0.1), Send(sse(B)), Wait(asyncio.Event()))
    await ask(client, stream=True)
    assert (client.status, client.complete) == (200, True)
    first, error, done = client.events
    assert first == b"data: " + served(A)
    assert b'"code":"internal_error"' in error
    assert b'"finish_reason":"error"' in error
    assert b"a bug" not in error
    assert done + b"\n\n" == DONE
    await until(lambda: "a bug" in log.getvalue(), what="a line in the log")
    await (await up.request()).wait_closed()
    monkeypatch.undo()
    up.script(Send(sse(A)), Send(DONE))
    await ask(client, stream=True)
    assert client.complete, "the connection serves on"


@pytest.mark.parametrize("headers", [[], [("expect", "100-continue")]], ids=["", "expect"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_before_the_first_byte_is_a_500(
    client: RawClient,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    headers: list[tuple[str, str]],
) -> None:
    """M1.2: in the envelope, with the id under which the log has it."""
    monkeypatch.setattr(attempts.Dialler, "open_first", fail)
    await ask(client, *headers, stream=stream)
    assert client.status == 500
    error = client.json["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert (client.header("x-request-id") or "-") in error["message"]
    assert "a bug" not in error["message"]
    assert "a bug" in log.getvalue()


async def test_a_bug_after_the_answer_adds_nothing_to_it(
    up: FakeUpstream, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M2.1: no second answer on the same wire."""
    monkeypatch.setattr(exchange.Exchange, "_release", fail)
    up.script(Send(sse(A)), Send(DONE))
    await ask(client, stream=True)
    assert client.complete
    await client.read_to_eof()
    assert client.body.endswith(DONE)
