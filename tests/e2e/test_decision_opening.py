"""D1: what an opening must be, how it is refused, and what `hello` says; by raw sockets."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from planes.decision.http import DECIDE
from tests.support.checks import until
from tests.support.decisions import (
    REVOKED_KEY,
    SUSPENDED_KEY,
    auth,
    config,
    decides,
    fresh_key,
    gateway,
    let_end,
    opened,
)
from tests.support.gateway import KEY, GatewayProcess
from tests.support.websocket import ACCEPT, PROTOCOL, STREAM, TEXT, UPGRADE, RawSocket, close, frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process


async def refused(
    process: GatewayProcess,
    *,
    key: str | None = "",
    headers: Iterable[tuple[str, str]] = (),
    **more: Any,
) -> tuple[int, dict[str, Any], RawSocket]:
    """An opening that is refused: its status and error; the form of both is checked (D1.6)."""
    async with process.client() as client:
        socket = RawSocket(client)
        named = [auth(key or fresh_key())] if key is not None else []
        status = await socket.open(headers=[*named, *headers], **more)
        assert status >= 400
        assert client.header("content-type") == "application/json"
        body = client.json
        assert body.keys() == {"error", "request_id"}
        assert body["request_id"] == client.header("x-request-id")
        error = body["error"]
        assert error.keys() - {"details"} == {"message", "type", "param", "code", "retryable"}
        retry = "true" if error["retryable"] else "false"
        assert client.header("x-should-retry") == retry
        if error["retryable"]:
            milliseconds = int(client.header("retry-after-ms") or "")
            assert int(client.header("retry-after") or "") == -(-milliseconds // 1000)
        else:
            assert client.header("retry-after") is None
        return status, error, socket


def upgrade(**changes: str | None) -> list[tuple[str, str]]:
    """The headers of an upgrade, some of them others or left out."""
    values = dict(UPGRADE) | {name.replace("_", "-"): value for name, value in changes.items()}
    return [(name, value) for name, value in values.items() if value is not None]


async def test_an_opening(shared: GatewayProcess) -> None:
    """D1.1, D1.7: the 101 and the first frame."""
    async with opened(shared) as ws:
        assert ws.client.header("sec-websocket-accept") == ACCEPT
        assert ws.client.header("sec-websocket-protocol") == PROTOCOL
        assert ws.client.header("sec-websocket-extensions") is None
        assert ws.client.header("server") == "sluicegate"
        (hello,) = ws.messages
        assert hello["request_id"] == ws.client.header("x-request-id")
        assert hello["stream_id"].startswith("szws_")
        assert len(hello["stream_id"]) == 37
        assert hello["protocol"] == PROTOCOL
        assert len(hello["limits"]) == 24
        assert hello["limits"]["idle_timeout_ms"] == 120_000
        assert hello["rate_limit"] is None


@pytest.mark.parametrize("expect", ["banana", "100-continue"])
async def test_an_expectation_changes_nothing(shared: GatewayProcess, expect: str) -> None:
    """RFC 9110 §10.1.1: no body is taken here; what is refused is refused in this plane's form."""
    status, error, _ = await refused(shared, key=None, headers=[("expect", expect)])
    assert (status, error["code"]) == (401, "invalid_api_key")
    async with shared.client() as client:
        socket = RawSocket(client)
        assert await socket.open(headers=[auth(fresh_key()), ("expect", expect)]) == 101
        assert (await socket.json())["type"] == "hello"


async def test_two_openings_have_two_ids(shared: GatewayProcess) -> None:
    async with opened(shared) as one, opened(shared) as two:
        for name in ("stream_id", "request_id"):
            assert one.messages[0][name] != two.messages[0][name]


@pytest.mark.parametrize(
    "headers",
    [
        upgrade(upgrade=None, connection=None),
        upgrade(upgrade=None),
        upgrade(upgrade="h2c"),
        upgrade(connection=None),
        upgrade(connection="keep-alive"),
        upgrade(sec_websocket_version="8"),
        upgrade(sec_websocket_version=None),
    ],
)
async def test_no_upgrade_is_426(shared: GatewayProcess, headers: list[tuple[str, str]]) -> None:
    """D1.2; RFC 6455 §4.4 for the version."""
    status, error, ws = await refused(shared, upgrade=headers)
    assert (status, error["code"]) == (426, "stream_upgrade_required")
    assert error["type"] == "invalid_request_error"
    assert ws.client.header("upgrade") == "websocket"
    assert ws.client.header("sec-websocket-version") == "13"


@pytest.mark.parametrize(
    "opening",
    [
        {"protocol": None},
        {"protocol": "system-zero.stream.v2"},
        {"protocol": f"{PROTOCOL}, other"},
        {"headers": [("sec-websocket-protocol", "other")]},
        {"headers": [("origin", "https://example.com")]},
        {"headers": [("cookie", "a=b")]},
        {"path": f"{STREAM}?model=a"},
        {"path": f"{STREAM}?"},
        {"upgrade": upgrade(sec_websocket_key="c2hvcnQ=")},
        {"upgrade": upgrade(sec_websocket_key="not base64!")},
        {"upgrade": upgrade(sec_websocket_key=None)},
    ],
)
async def test_what_a_stream_does_not_take_is_400(
    shared: GatewayProcess, opening: dict[str, Any]
) -> None:
    """D1.2: before the upgrade, and before the key is looked at."""
    status, error, _ = await refused(shared, key=None, **opening)
    assert (status, error["code"], error["type"]) == (
        400,
        "invalid_request",
        "invalid_request_error",
    )


async def test_http_1_0_has_no_upgrade(shared: GatewayProcess) -> None:
    """RFC 6455 §4.1."""
    async with shared.client() as client:
        headers = [*UPGRADE, auth(KEY), ("sec-websocket-protocol", PROTOCOL)]
        await client.request("GET", STREAM, headers=headers, version="HTTP/1.0")
        await client.read_all()
        assert client.status == 426


async def test_a_trailing_slash_is_404(shared: GatewayProcess) -> None:
    """D1.2."""
    status, error, _ = await refused(shared, path=f"{STREAM}/")
    assert (status, error["code"], error["type"]) == (404, "unknown_endpoint", "not_found_error")


async def test_d6_5_without_a_backend_the_routes_say_that_they_are_off() -> None:
    """So is every configuration of one's own to begin with; a bare 404 would be a riddle."""
    over = config()
    over["decision"]["backend"] = None
    async with GatewayProcess(over) as process:
        for method, path in (("GET", STREAM), ("POST", DECIDE)):
            async with process.client() as client:
                await client.request(method, path, headers=[auth(KEY)])
                error = json.loads(await client.read_all())["error"]
            assert (client.status, error["code"]) == (404, "unknown_endpoint")
            assert "`decision.backend`" in error["message"]
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planes.cli", "decide", "-"),
            *("--server", process.base_url, "--key", KEY),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 1
    assert told.startswith(b"sluicegate: 404 unknown_endpoint: decisions are off here: `decision.b")


async def test_another_method_is_405(shared: GatewayProcess) -> None:
    async with shared.client() as client:
        await client.request("POST", STREAM, headers=[auth(KEY)], json={})
        await client.read_all()
        assert client.status == 405
        assert client.header("allow") == "GET"
        assert client.json["error"]["code"] == "method_not_allowed"


async def test_an_offered_compression_is_not_negotiated(shared: GatewayProcess) -> None:
    """D1.3: and a compressed frame then closes 1002."""
    async with shared.client() as client:
        ws = RawSocket(client)
        offer = ("sec-websocket-extensions", "permessage-deflate; client_max_window_bits")
        assert await ws.open(headers=[auth(fresh_key()), offer]) == 101
        assert client.header("sec-websocket-extensions") is None
        await ws.send(frame(TEXT, b"hi", rsv=4))
        assert (await ws.until_close()).code == 1002


@pytest.mark.parametrize(
    ("key", "status", "code", "type_"),
    [
        (None, 401, "invalid_api_key", "authentication_error"),
        ("ozk_nobody", 401, "invalid_api_key", "authentication_error"),
        (REVOKED_KEY, 403, "auth_error", "permission_error"),
        (SUSPENDED_KEY, 403, "account_suspended", "permission_error"),
    ],
)
async def test_who_may_not(
    shared: GatewayProcess, key: str | None, status: int, code: str, type_: str
) -> None:
    """D1.4."""
    found, error, _ = await refused(shared, key=key)
    assert (found, error["code"], error["type"]) == (status, code, type_)
    assert not error["retryable"]


async def test_a_refused_connection_serves_the_next_request(shared: GatewayProcess) -> None:
    """A refusal is a plain HTTP answer: the connection lives on, and may open a stream then."""
    async with shared.client() as client:
        ws = RawSocket(client)
        assert await ws.open(headers=[auth("ozk_nobody")]) == 401
        assert await ws.open(headers=[auth(fresh_key())]) == 101
        assert (await ws.json())["type"] == "hello"


# --- capacity -------------------------------------------------------------------------------------


async def test_an_account_has_one_stream(shared: GatewayProcess) -> None:
    """D1.5: the wait is no longer than the lease; it is free at once when the first closes."""
    key = fresh_key()
    async with opened(shared, key=key) as ws:
        status, error, other = await refused(shared, key=key)
        assert (status, error["code"]) == (429, "stream_limit_exceeded")
        assert error["type"] == "rate_limit_error"
        assert error["details"] == {"limit": 1}
        assert error["retryable"] is True
        assert 0 < int(other.client.header("retry-after-ms") or "") <= 15_000
        assert 0 < int(other.client.header("retry-after") or "") <= 15
        await ws.send(close())
        assert (await ws.frame()).code == 1000
        async with opened(shared, key=key):
            pass


async def test_a_lost_stream_gives_its_place_back(shared: GatewayProcess) -> None:
    """D1.5: also without any Close."""
    key = fresh_key()
    for end in ("reset", "close"):
        async with opened(shared, key=key) as ws:
            getattr(ws.client, end)()
        async with asyncio.timeout(5):
            while True:
                async with shared.client() as client:
                    again = RawSocket(client)
                    if await again.open(headers=[auth(key)]) == 101:
                        await again.send(close())
                        await again.until_close()
                        break
                await asyncio.sleep(0.01)


async def test_a_close_is_answered_and_the_place_free_within_moments(
    shared: GatewayProcess,
) -> None:
    """D1.5: the client reopens within 10 ms; twenty times in a row nobody is refused."""
    key = fresh_key()
    for _ in range(20):
        async with opened(shared, key=key) as ws:
            await ws.send(close())
            assert (await ws.frame()).code == 1000


@pytest.mark.parametrize(("policy", "most"), [(3, 3), ("half_concurrency", 2)])
async def test_the_policy_of_account_streams(policy: int | str, most: int) -> None:
    """D1.5: a number, or half of `max_concurrent` (4)."""
    async with gateway(config(account_streams=policy)) as process:
        streams = [opened(process, key=KEY) for _ in range(most)]
        for stream in streams:
            await stream.__aenter__()
        status, error, _ = await refused(process, key=KEY)
        assert (status, error["details"]) == (429, {"limit": most})
        for stream in reversed(streams):
            await stream.__aexit__(None, None, None)


async def test_the_limit_holds_across_processes(tmp_path: Any) -> None:
    """D1.5: the lease is in the store; one that died holds its place for the lease's length."""
    limits = {"lease_ttl_ms": 1500, "lease_renew_interval_ms": 500}
    made = config(limits=limits) | {"store": {"url": f"sqlite:///{tmp_path}/shared.db"}}
    async with gateway(made) as one, gateway(made) as two, opened(one, key=KEY):
        await asyncio.sleep(2.0)  # renewed
        status, error, _ = await refused(two, key=KEY)
        assert (status, error["code"]) == (429, "stream_limit_exceeded")
        one.kill()
        await one.wait()
        with sqlite3.connect(tmp_path / "shared.db") as db:
            ((until_s,),) = db.execute("SELECT until FROM streams").fetchall()
        db.close()
        while True:
            async with two.client() as client:
                ws = RawSocket(client)
                if await ws.open(headers=[auth(KEY)]) == 101:
                    break
            assert time.time() < until_s + 15
            await asyncio.sleep(0.05)
        assert time.time() >= until_s


async def test_a_full_process_is_503() -> None:
    """D1.5."""
    async with gateway(config(limits={"max_streams_per_process": 1})) as process:
        async with opened(process) as ws:
            status, error, _ = await refused(process)
            assert (status, error["code"]) == (503, "service_unavailable")
            assert error["type"] == "overloaded_error"
            assert error["retryable"] is True
            assert ws.messages[0]["limits"]["max_streams_per_process"] == 1
            await ws.send(close())
            await ws.until_close()
        async with opened(process):
            pass


async def test_a_draining_process_is_503() -> None:
    """D1.5, D3.6: while a decide settles, connections that are there already are refused."""
    async with gateway(config()) as process, process.client() as waiting, opened(process) as ws:
        await ws.say(**_deciding())
        assert (await ws.json())["type"] == "ack"
        idle = RawSocket(waiting)
        assert await idle.open(headers=[auth("ozk_nobody")]) == 401
        await until(lambda: decides(process))
        process.terminate()
        await until(lambda: '"event":"draining"' in process.stderr())
        assert await idle.open(headers=[auth(fresh_key())]) == 503
        assert waiting.json["error"]["code"] == "service_unavailable"
        assert waiting.header("retry-after") is not None
        let_end(process, "refused")
        assert (await ws.until_close()).code == 1012


def _deciding() -> dict[str, Any]:
    return {
        "type": "start",
        "event_id": "evt_1",
        "decision_mode": "on_change",
        "request": {
            "model": "rightnow-decision",
            "state": "!until=refused",
            "questions": {"q": {"type": "boolean", "instructions": "?"}},
        },
    }


async def test_a_store_that_does_not_answer_is_503_at_the_opening() -> None:
    """D1.5: the file is locked by another; nothing is left behind when it is free again."""
    async with gateway(
        config(limits={"lease_ttl_ms": 500, "lease_renew_interval_ms": 100})
    ) as process:
        locker = sqlite3.connect(process.workdir / "sluicegate.db", isolation_level=None)
        try:
            locker.execute("BEGIN EXCLUSIVE")
            key = fresh_key()
            status, error, _ = await refused(process, key=key)
            assert (status, error["code"]) == (503, "limiter_unavailable")
            assert error["retryable"] is True
            locker.execute("ROLLBACK")
        finally:
            locker.close()
        async with asyncio.timeout(10):
            while True:
                async with process.client() as client:
                    if await RawSocket(client).open(headers=[auth(key)]) == 101:
                        break
                await asyncio.sleep(0.05)
