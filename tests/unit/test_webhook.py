"""M4.3: the webhook tells of every row, at least once, signed, with the same id each time."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from relay.billing import InsufficientCredits
from relay.money import Hold, Settlement, Source
from relay.stores.sqlite import SqliteStore
from relay.webhook import Webhook, notice_of, signature

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SECRET = "whsec_" + base64.b64encode(b"a secret of the receiver").decode()


def row(request_id: str = "req_1", **fields: Any) -> Settlement:
    values: dict[str, Any] = {
        "at": time.time(),
        "org": "test",
        "key_id": "key_1",
        "plane": "models",
        "model": "fast",
        "provider": "fake",
        "status": 200,
        "error_code": None,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "source": Source.REPORTED,
        "cost_micro_usd": 46,
        "duration_ms": 7,
    }
    return Settlement(request_id=request_id, **(values | fields))


class Receiver:
    """A URL that answers with what it is told to and keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.got.append(({k.lower(): v for k, v in request.headers.items()}, await request.read()))
        return web.Response(status=self.answers.pop(0) if self.answers else 204)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield receiver
    await runner.cleanup()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "x.db", notice_of=notice_of)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def webhook(
    store: SqliteStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Webhook]:
    monkeypatch.setattr("relay.webhook.LOOK_EVERY_S", 3600)  # the tests look themselves
    hook = Webhook(store, url=receiver.url, secret=SECRET, timeout_s=5, authorize=True)
    await hook.start()
    yield hook
    await hook.close()


async def test_every_row_is_told_once_it_is_accepted(
    store: SqliteStore, receiver: Receiver, webhook: Webhook
) -> None:
    await store.settle([row("req_1"), row("req_2", source=Source.NONE, cost_micro_usd=0)])
    await webhook.deliver_due()
    documents = {headers["webhook-id"]: json.loads(body) for headers, body in receiver.got}
    assert documents.keys() == {"req_1", "req_2"}
    assert documents["req_1"]["type"] == "request.settled"
    assert documents["req_2"]["type"] == "request.released"
    data = documents["req_1"]["data"]
    assert (data["cost_micro_usd"], data["prompt_tokens"], data["source"]) == (46, 3, "reported")
    await webhook.deliver_due()
    assert len(receiver.got) == 2


async def test_the_signature_is_that_of_standard_webhooks(
    store: SqliteStore, receiver: Receiver, webhook: Webhook
) -> None:
    await store.settle([row()])
    await webhook.deliver_due()
    ((headers, body),) = receiver.got
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.digest(b"a secret of the receiver", signed, hashlib.sha256)
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    assert headers["idempotency-key"] == "req_1"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60


def test_a_secret_without_the_prefix_is_taken_as_it_is() -> None:
    digest = hmac.digest(b"plain", b"id.1.{}", hashlib.sha256)
    assert signature("plain", "id", 1, b"{}") == "v1," + base64.b64encode(digest).decode()


@pytest.mark.parametrize("failure", [500, 404, 302, "nobody"])
async def test_what_is_not_accepted_is_tried_again_later_with_the_same_bytes(
    store: SqliteStore,
    receiver: Receiver,
    webhook: Webhook,
    failure: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.settle([row()])
    url = receiver.url
    if failure == "nobody":
        monkeypatch.setattr(webhook, "_url", "http://127.0.0.1:1/hook")
    else:
        receiver.answers = [int(failure)]
    await webhook.deliver_due()
    monkeypatch.setattr(webhook, "_url", url)
    before = len(receiver.got)
    await webhook.deliver_due()
    assert len(receiver.got) == before  # not at once
    (notice,) = await store.due_notices(time.time() + 3, 10)
    assert notice.tries == 1
    assert await store.due_notices(time.time(), 10) == []
    await store.postpone_notice(notice.id, 0)
    await webhook.deliver_due()
    assert len(receiver.got) == before + 1
    assert {(h["webhook-id"], body) for h, body in receiver.got} == {("req_1", notice.payload)}
    assert await store.due_notices(time.time() + 10**6, 10) == []


async def test_what_a_crash_left_is_told_after_the_restart(
    tmp_path: Path, receiver: Receiver
) -> None:
    first = SqliteStore(tmp_path / "y.db", notice_of=notice_of)
    await first.open()
    await first.settle([row()])
    await first.close()  # nothing was delivered
    second = SqliteStore(tmp_path / "y.db", notice_of=notice_of)
    await second.open()
    hook = Webhook(second, url=receiver.url, secret=SECRET, timeout_s=5, authorize=False)
    await hook.start()
    await hook.deliver_due()
    await hook.close()
    await second.close()
    assert [headers["webhook-id"] for headers, _ in receiver.got] == ["req_1"]


async def test_a_swept_row_is_told_too(
    store: SqliteStore, receiver: Receiver, webhook: Webhook
) -> None:
    await store.place_hold(hold())
    await store.sweep(time.time(), 1)
    await webhook.deliver_due()
    ((_, body),) = receiver.got
    assert json.loads(body)["data"]["error_code"] == "worker_lost"


def hold() -> Hold:
    return Hold(
        request_id="req_9",
        org="test",
        key_id="key_1",
        plane="models",
        model="fast",
        worker="w",
        placed_at=time.time() - 100,
        amount_micro_usd=100,
        prompt_tokens=3,
        prompt_micro_usd=6,
    )


async def test_it_may_refuse_and_its_silence_allows(receiver: Receiver, webhook: Webhook) -> None:
    receiver.answers = [402, 200, 500]
    with pytest.raises(InsufficientCredits):
        await webhook.authorize(hold())
    await webhook.authorize(hold())
    await webhook.authorize(hold())
    assert all(json.loads(body)["type"] == "request.authorize" for _, body in receiver.got)
