"""D6.1, D6.2, D6.7: `POST /v1/system-zero/decide`, byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from system_zero import decisions_for

from tests.support.books import books_of
from tests.support.checks import until
from tests.support.decisions import (
    MODEL,
    QUESTIONS,
    REVOKED_KEY,
    SECOND_KEY,
    SUSPENDED_KEY,
    auth,
    config,
    decides,
    fresh_key,
    gateway,
    let_end,
    opened,
    start,
)
from tests.support.gateway import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.gateway import GatewayProcess
    from tests.support.wire import RawClient

DECIDE = "/v1/system-zero/decide"
MAX_BYTES = 3_665_920
ALL_QUESTIONS: dict[str, Any] = {
    "ready": {"type": "boolean", "instructions": "Is it ready?"},
    "lane": {"type": "choice", "instructions": ["Which?"], "criteria": {"b": None, "a": "A"}},
    "mood": {"type": "score", "instructions": {"how": "?"}, "criteria": ["low", "mid", "high"]},
}
BILLED = 110  # micro-USD of a call with one question and no text price


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayProcess]:
    async with gateway(config()) as process:
        yield process
        assert "Traceback" not in process.stderr()
        assert '"event":"fault"' not in process.stderr()


def body(state: Any = "Order received.", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "state": state, "questions": QUESTIONS} | more


async def ask(
    client: RawClient,
    what: Any = None,
    *,
    key: str = KEY,
    headers: dict[str, str] | None = None,
    events: bool = False,
    idempotency_key: str | None = None,
) -> None:
    """Sends a decide; nothing is read yet."""
    pairs = [auth(key), *(headers or {}).items()]
    if events:
        pairs.append(("accept", "text/event-stream"))
    if idempotency_key is not None:
        pairs.append(("idempotency-key", idempotency_key))
    raw = what if isinstance(what, bytes) else json.dumps(what or body()).encode()
    await client.request("POST", DECIDE, headers=pairs, body=raw)


async def answer(process: GatewayProcess, what: Any = None, **more: Any) -> RawClient:
    """The whole answer to a decide on a connection of its own."""
    async with process.client() as client:
        await ask(client, what, **more)
        await client.read_all(timeout=20)
        return client


def check_refusal(client: RawClient, status: int, code: str) -> dict[str, Any]:
    """D1.6: the envelope, its headers, and that they agree."""
    assert client.status == status, client.body
    found: dict[str, Any] = client.json
    assert set(found) == {"error", "request_id"}
    error = found["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code", "retryable"}
    assert error["code"] == code
    assert client.header("x-request-id") == found["request_id"]
    assert client.header("x-should-retry") == ("true" if error["retryable"] else "false")
    wait = client.header("retry-after-ms")
    assert (wait is not None) is error["retryable"]
    if wait is not None:
        assert client.header("retry-after") == str(-(-int(wait) // 1000))
    return error  # type: ignore[no-any-return]


# --- an answer ------------------------------------------------------------------------------------


async def test_an_answer(shared: GatewayProcess) -> None:
    what = body(questions=ALL_QUESTIONS)
    client = await answer(shared, what, headers={"X-Client-Request-Id": "trace-1"})
    assert client.status == 200
    assert decisions_for(client.json, what).keys() == ALL_QUESTIONS.keys()
    assert client.header("content-type") == "application/json"
    assert re.fullmatch(r"req_[0-9a-f]+", client.header("x-request-id") or "")
    assert client.header("x-client-request-id") == "trace-1"
    assert float(client.header("x-latency-ms") or "-1") >= 0
    assert re.fullmatch(r"decide;dur=[0-9.]+", client.header("server-timing") or "")
    assert (client.header("x-ratelimit-limit"), client.header("x-ratelimit-remaining")) == (
        ("4", "4")
    )
    assert abs(int(client.header("x-ratelimit-reset") or "0") - time.time()) < 60
    assert client.header("x-rightnow-idempotent-replay") is None


async def test_the_backend_gets_the_canonical_body(shared: GatewayProcess) -> None:
    """D4.10: fixed order, compact; the session is for nobody, and there is no cache key of ours."""
    sent = (
        b'{ "policy": {"z": 1, "a": 2.50},\n"session_id":"s", "questions": '
        + json.dumps(QUESTIONS).encode()
        + b', "state": ["canonical \\u00e9", 1E2], "attachments": null, "model": "system-zero"}'
    )
    client = await answer(shared, sent)
    assert client.status == 200, client.body
    (call,) = [call for call in decides(shared) if "canonical" in call["body"]]
    assert call["body"] == (
        '{"model":"system-zero","state":["canonical é",100.0],"questions":'
        + json.dumps(QUESTIONS, separators=(",", ":"))
        + ',"policy":{"z":1,"a":2.5}}'
    )
    assert call["key"] is None


async def test_a_body_of_the_limit_and_one_byte_more(shared: GatewayProcess) -> None:
    empty = len(json.dumps(body("")).encode())
    most = json.dumps(body("x" * (MAX_BYTES - empty))).encode()
    assert len(most) == MAX_BYTES
    assert (await answer(shared, most)).status == 200
    async with shared.client() as client:  # refused by its head
        head = f"POST {DECIDE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        await client.send(f"{head}Content-Length: {MAX_BYTES + 1}\r\n\r\n".encode())
        await client.read_all()
        check_refusal(client, 413, "payload_too_large")
    async with shared.client() as client:  # refused as it comes
        await client.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            for _ in range(56):
                await client.send(chunk)
        except ConnectionError:
            pass
        await client.read_all()
        check_refusal(client, 413, "payload_too_large")


# --- refusals -------------------------------------------------------------------------------------

HEADERS = {
    "no key": ({}, 401, "invalid_api_key"),
    "an unknown key": ({"authorization": "Bearer no"}, 401, "invalid_api_key"),
    "a revoked key": ({"authorization": f"Bearer {REVOKED_KEY}"}, 403, "auth_error"),
    "suspended": ({"authorization": f"Bearer {SUSPENDED_KEY}"}, 403, "account_suspended"),
    "an empty key": ({"idempotency-key": "  "}, 400, "invalid_idempotency_key"),
    "a long key": ({"idempotency-key": "k" * 256}, 400, "invalid_idempotency_key"),
    "a key that is not ASCII": ({"idempotency-key": "k\xe9"}, 400, "invalid_idempotency_key"),
    "a key with a tab": ({"idempotency-key": "k\tk"}, 400, "invalid_idempotency_key"),
    "an empty trace": ({"x-client-request-id": ""}, 400, "invalid_trace_header"),
    "a long trace": ({"x-client-request-id": "t" * 256}, 400, "invalid_trace_header"),
    "a trace with a space": ({"x-client-request-id": "a b"}, 400, "invalid_trace_header"),
    "compressed": ({"content-encoding": "gzip"}, 400, "invalid_request"),
}


@pytest.mark.parametrize("case", HEADERS)
async def test_a_refusal_by_the_head_does_not_wait_for_the_body(
    shared: GatewayProcess, case: str
) -> None:
    """The key comes first; `Expect: 100-continue` is not answered with 100."""
    given, status, code = HEADERS[case]
    if status == 400:
        given = {"authorization": f"Bearer {KEY}"} | given
    for expect in ({}, {"expect": "100-continue"}):
        async with shared.client() as client:
            headers = [*given.items(), *expect.items(), ("content-length", "1000")]
            await client.request("POST", DECIDE, headers=headers)
            await client.read_head()
            await client.read_all()
            error = check_refusal(client, status, code)
            assert not error["retryable"]
            assert (
                error["type"]
                == {
                    400: "invalid_request_error",
                    401: "authentication_error",
                    403: "permission_error",
                }[status]
            )


async def test_expect_100_continue(shared: GatewayProcess) -> None:
    async with shared.client() as client:
        raw = json.dumps(body()).encode()
        headers = [auth(KEY), ("expect", "100-continue"), ("content-length", str(len(raw)))]
        await client.request("POST", DECIDE, headers=headers)
        head = await asyncio.get_running_loop().sock_recv(client.sock, 100)
        assert head == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(raw)
        await client.read_all()
        assert client.status == 200


GIF = "data:image/gif;base64,R0lGODlhAQABAAAAACw="
PNG = "data:image/png;base64,iVBORw0KGgo="
BODIES: dict[str, tuple[Any, int, str, str | None]] = {
    "nothing": (b" ", 400, "invalid_request", None),
    "no JSON": (b"{", 400, "invalid_request", None),
    "a member twice": (b'{"model":"m","model":"m"}', 400, "invalid_request", None),
    "NaN": (b'{"model":NaN}', 400, "invalid_request", None),
    "not UTF-8": (b'{"model":"\xff"}', 400, "invalid_request", None),
    "an array": (b"[]", 400, "invalid_request", None),
    "deep": (b"[" * 257 + b"]" * 257, 413, "state_too_large", None),
    "no model": (b'{"state":"x","questions":{}}', 400, "invalid_request", "model"),
    "an unknown member": (body(stream=True), 400, "invalid_request", None),
    "a state of null": (body(state=None), 400, "invalid_request", "state"),
    "no question": (body(questions={}), 400, "invalid_request", "questions"),
    "a question without a type": (
        body(questions={"q": {"instructions": "?"}}),
        400,
        "invalid_request",
        "questions.q.type",
    ),
    "a session without a name": (body(session_id=""), 400, "invalid_request", "session_id"),
    "a long session": (body(session_id="s" * 257), 400, "invalid_request", "session_id"),
    "a policy": (body(policy=[]), 400, "invalid_request", "policy"),
    "committee": (body(route="committee"), 404, "committee_not_available", "route"),
    "deliberate": (body(mode="deliberate"), 404, "deliberate_not_available", "mode"),
    "an unknown model": (body(model="gpt"), 404, "model_not_found", "model"),
    "an upload": (
        body(attachments=[{"name": "a", "type": "image", "upload": "u"}]),
        400,
        "invalid_request",
        "attachments.0",
    ),
    "a name twice": (
        body(attachments=[{"name": "a", "type": "image", "data": PNG}] * 2),
        400,
        "invalid_request",
        "attachments",
    ),
    "a gif": (
        body(attachments=[{"name": "a", "type": "image", "data": GIF}]),
        403,
        "media_unpriced",
        "attachments.0.data",
    ),
}


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("case", BODIES)
async def test_a_refusal_by_the_body(shared: GatewayProcess, case: str, events: bool) -> None:
    """A plain HTTP error for a client that wants events too: the work has not begun."""
    what, status, code, param = BODIES[case]
    before = len(decides(shared))
    client = await answer(
        shared, what, events=events, headers={"x-client-request-id": "t"}, idempotency_key=case
    )
    error = check_refusal(client, status, code)
    assert error["param"] == param
    assert client.header("x-client-request-id") == "t"
    assert len(decides(shared)) == before
    after = await answer(shared, idempotency_key=case)  # a refusal takes no key
    assert after.status == 200


async def test_other_methods_and_paths(shared: GatewayProcess) -> None:
    async with shared.client() as client:
        await client.request("GET", DECIDE, headers=[auth(KEY)])
        await client.read_all()
        check_refusal(client, 405, "method_not_allowed")
        assert client.header("allow") == "POST"
        await client.request("POST", f"{DECIDE}/", headers=[auth(KEY)], json=body())
        await client.read_all()
        check_refusal(client, 404, "unknown_endpoint")


async def test_failures_of_the_backend_keep_status_and_envelope(shared: GatewayProcess) -> None:
    for code, status, wait in (
        ("capacity_exhausted", 429, 1500),
        ("system_zero_unavailable", 503, 20),
        ("system_zero_timeout", 504, None),
    ):
        word = f"!error={code}" + (f":{wait}" if wait else "")
        client = await answer(shared, body(word))
        error = check_refusal(client, status, code)
        assert error["retryable"] is (wait is not None)
        if wait:
            assert client.header("retry-after-ms") == str(wait)


async def test_a_slot_is_taken_for_a_decide(shared: GatewayProcess) -> None:
    """D5.4, D1.6: the account has four, on whatever plane."""
    async with asyncio.TaskGroup() as group:
        words = [f"!until=full {i}" for i in range(4)]
        running = [group.create_task(answer(shared, body(state))) for state in words]
        await until(lambda: len([c for c in decides(shared) if "!until=full" in c["state"]]) == 4)
        full = await answer(shared, idempotency_key="full")
        error = check_refusal(full, 429, "concurrency_limit_exceeded")
        assert error["details"] == {"cause": "account_concurrency"}
        assert (await answer(shared, key=SECOND_KEY)).status == 200
        let_end(shared, "full")
    assert [task.result().status for task in running] == [200] * 4
    assert (await answer(shared, idempotency_key="full")).status == 200


# --- events ---------------------------------------------------------------------------------------


async def test_events(shared: GatewayProcess) -> None:
    """D6.1: the head comes when the work begins, before its end."""
    async with shared.client() as client:
        what = body("!until=head events")
        await ask(client, what, events=True, idempotency_key="events")
        await client.read_head()
        let_end(shared, "head")
        await client.read_all()
    assert client.header("content-type") == "text/event-stream"
    assert client.header("cache-control") == "no-cache, no-transform"
    assert client.header("x-request-id")
    decision, done = client.events
    kind, data = decision.split(b"\n")
    assert kind == b"event: decision"
    assert decisions_for(json.loads(data.removeprefix(b"data: ")))["ready"].kind == "v1"
    assert done == b"event: done\ndata: {}"
    replay = await answer(shared, what, events=True, idempotency_key="events")
    assert replay.header("x-rightnow-idempotent-replay") == "true"
    assert replay.body == client.body


def decides_ended(process: GatewayProcess, state: str) -> bool:
    return any(state in call["state"] for call in decides(process, "ended"))


async def test_a_failure_after_the_head_is_an_event(shared: GatewayProcess) -> None:
    client = await answer(shared, body("!delay=0.2 !error=capacity_exhausted:7"), events=True)
    assert client.status == 200
    failed, done = client.events
    kind, data = failed.split(b"\n")
    assert kind == b"event: error"
    envelope = json.loads(data.removeprefix(b"data: "))
    assert envelope["error"]["code"] == "capacity_exhausted"
    assert envelope["request_id"] == client.header("x-request-id")
    assert done == b"event: done\ndata: {}"


@pytest.mark.slow
async def test_keepalives_while_it_runs(shared: GatewayProcess) -> None:
    """One each ten seconds, for proxies in between."""
    async with shared.client() as client:
        await ask(client, body("!delay=11"), events=True)
        await client.read_all(timeout=60)
    assert client.events[0] == b": keepalive"
    assert [block.partition(b"\n")[0] for block in client.events[1:]] == [
        b"event: decision",
        b"event: done",
    ]


# --- keys and money -------------------------------------------------------------------------------


async def test_a_replay_is_the_same_bytes_and_bills_nothing() -> None:
    """D6.2, D6.7: over HTTP and the socket, under one key of one account."""
    async with gateway(config()) as process, books_of(process.workdir) as books:
        compact = json.dumps(body("same", prompt_cache_key="c"), separators=(",", ":")).encode()
        first = await answer(process, compact, key=SECOND_KEY, idempotency_key="k")
        again = await answer(process, compact, key=SECOND_KEY, idempotency_key=" k ")
        assert again.header("x-rightnow-idempotent-replay") == "true"
        assert again.body == first.body
        spaced = await answer(
            process, body("same", prompt_cache_key="c"), key=SECOND_KEY, idempotency_key="k"
        )
        check_refusal(spaced, 400, "idempotency_key_reuse")
        request = {"prompt_cache_key": "c"}
        async with opened(process, key=SECOND_KEY) as ws:
            await ws.say(**start("same", mode="on_change", request=request, idempotency_key="k"))
            assert (await ws.json())["type"] == "ack"
            decision = await ws.json()
            assert decision["type"] == "decision"
            assert json.dumps(decision["reply"], separators=(",", ":")).encode() == first.body
        assert len(decides(process)) == 1
        other = await answer(process, compact, key=KEY, idempotency_key="k")
        assert other.header("x-rightnow-idempotent-replay") is None
        keys = [call["key"] for call in decides(process)]
        assert len(set(keys)) == 2
        rows = await books.rows(2)
        assert [(row.org, row.plane, row.cost_micro_usd) for row in rows] == [
            ("second", "decision", BILLED),
            ("test", "decision", BILLED),
        ]
        assert rows[0].request_id == first.header("x-request-id")


async def test_a_key_in_use_is_409_and_one_decide_is_done(shared: GatewayProcess) -> None:
    key = fresh_key()
    async with asyncio.TaskGroup() as group:
        what = body("!until=refused in use")
        running = group.create_task(answer(shared, what, key=key, idempotency_key="k"))
        await until(lambda: [c for c in decides(shared) if "in use" in c["state"]])
        refused = await answer(shared, what, key=key, idempotency_key="k")
        check_refusal(refused, 409, "idempotency_conflict")
        let_end(shared, "refused")
    assert running.result().status == 200
    assert len([c for c in decides(shared) if "in use" in c["state"]]) == 1


async def test_the_windows_of_a_key() -> None:
    """D6.2: after its time the answer is gone and the key still knows its body; then it is free."""
    limits = {"idempotency_answer_ms": 500, "idempotency_tombstone_ms": 2500}
    async with gateway(config(limits=limits)) as process:
        assert (await answer(process, idempotency_key="k")).status == 200
        began = time.monotonic()
        await asyncio.sleep(0.6)
        gone = await answer(process, idempotency_key="k")
        check_refusal(gone, 409, "idempotency_replay_unavailable")
        changed = await answer(process, body("other"), idempotency_key="k")
        check_refusal(changed, 400, "idempotency_key_reuse")
        await asyncio.sleep(max(0.0, 3.1 - (time.monotonic() - began)))
        assert (await answer(process, body("other"), idempotency_key="k")).status == 200
        assert len(decides(process)) == 2


async def test_what_each_decide_costs() -> None:
    """D6.7: images each time, questions, the call; a trial is written down and not debited."""
    over = config(price={"image_usd": 0.5, "question_usd": 0.02, "call_usd": 0.001})
    over["keys"][0] |= {"balance_usd": 2}
    over["keys"][1] |= {"trial": True, "balance_usd": 1}
    async with gateway(over) as process, books_of(process.workdir) as books:
        image = {"name": "a", "type": "image", "data": PNG}
        what = body(attachments=[image], questions=ALL_QUESTIONS)
        for key in (KEY, SECOND_KEY):
            for _ in range(2):
                assert (await answer(process, what, key=key)).status == 200
        failed = await answer(process, body("!error=capacity_exhausted:1", attachments=[image]))
        assert failed.status == 429
        rows = await books.rows(5)
        each = 500_000 + 3 * 20_000 + 1_000
        assert sorted(row.cost_micro_usd for row in rows) == [0, each, each, each, each]
        assert await books.balance("test") == 2_000_000 - 2 * each
        assert await books.balance("second") == 1_000_000
        assert (await answer(process, body(attachments=[image]))).status == 200
        refused = await answer(process, what)
        check_refusal(refused, 402, "insufficient_credits")


# --- a client that leaves -------------------------------------------------------------------------


@pytest.mark.parametrize("events", [False, True])
async def test_a_hang_up_is_settled_and_its_answer_kept(
    shared: GatewayProcess, events: bool
) -> None:
    """D5.7."""
    go = f"hang-up-{events}"
    key, state = fresh_key(), f"!until={go} {events}"
    async with books_of(shared.workdir) as books:
        async with shared.client() as client:
            await ask(client, body(state), key=key, idempotency_key="k", events=events)
            await until(lambda: [c for c in decides(shared) if state in c["state"]])
        found = await answer(shared, body(state), key=key, idempotency_key="k")
        check_refusal(found, 409, "idempotency_conflict")
        let_end(shared, go)
        await until(lambda: decides_ended(shared, state), 10)
        await until_replayed(shared, body(state), key=key)
        assert len([c for c in decides(shared) if state in c["state"]]) == 1
        org = key.split("_")[3]
        rows = [row for row in await books.settled() if row.org == f"org-{org}"]
        assert [(row.status, row.cost_micro_usd) for row in rows] == [(200, BILLED)]


async def until_replayed(process: GatewayProcess, what: Any, *, key: str) -> RawClient:
    async with asyncio.timeout(10):
        while True:
            found = await answer(process, what, key=key, idempotency_key="k")
            if found.status == 200:
                assert found.header("x-rightnow-idempotent-replay") == "true"
                return found
            await asyncio.sleep(0.05)


async def test_a_decide_that_does_not_settle_after_a_hang_up_is_ended() -> None:
    """D5.7: its key is free then, and nothing is billed."""
    limits = {"decision_settlement_timeout_ms": 300}
    async with gateway(config(limits=limits)) as process, books_of(process.workdir) as books:
        async with process.client() as client:
            await ask(client, body("!delay=60"), idempotency_key="k")
            await until(lambda: decides(process))
        await until(lambda: decides(process, "cancelled"), 10)
        (row,) = await books.rows(1)
        assert (row.status, row.error_code, row.cost_micro_usd) == (499, "client_abort", 0)
        assert (await answer(process, idempotency_key="k")).status == 200
        lines = [line for line in process.log_lines() if line["event"] == "request"]
        assert (lines[0]["status"], lines[0]["outcome"]) == (499, "client_abort")


# --- a gateway that stops -------------------------------------------------------------------------


async def test_a_drain_lets_a_decide_end() -> None:
    async with gateway(config()) as process, process.client() as waiting:
        await ask(waiting, body("!until=refused"))
        await until(lambda: decides(process))
        async with process.client() as late:
            await late.request("GET", "/health")
            await late.read_all()
            process.terminate()
            await until(lambda: "draining" in process.stderr())
            await ask(late, events=True)
            await late.read_all()
            check_refusal(late, 503, "service_unavailable")
        let_end(process, "refused")
        await waiting.read_all()
        assert waiting.status == 200
        assert await process.wait() == 0


@pytest.mark.parametrize("events", [False, True])
async def test_the_end_of_the_grace_is_told(tmp_path: Path, events: bool) -> None:
    """Retryable; its key is free for the next process, and nothing is billed."""
    short = config(server={"shutdown_grace_s": 0.5})
    async with gateway(short, workdir=tmp_path) as process, process.client() as client:
        await ask(client, body("!delay=60"), idempotency_key="k", events=events)
        await until(lambda: decides(process))
        process.terminate()
        await client.read_all()
        assert await process.wait() == 0
    if events:
        failed, done = client.events
        envelope = json.loads(failed.partition(b"\ndata: ")[2])
        assert done == b"event: done\ndata: {}"
    else:
        check_refusal(client, 503, "service_unavailable")
        envelope = client.json
    assert envelope["error"]["retryable"] is True
    async with gateway(short, workdir=tmp_path) as process, books_of(tmp_path) as books:
        assert (await answer(process, body("other"), idempotency_key="k")).status == 200
        rows = await books.rows(2)
        assert [(row.status, row.cost_micro_usd) for row in rows] == [(503, 0), (200, BILLED)]


@pytest.mark.slow
async def test_a_key_outlives_a_kill(tmp_path: Path) -> None:
    """kill -9 with a decide in flight: not billed twice, not stuck beyond its lease."""
    over = config(limits={"idempotency_lease_ms": 2000, "idempotency_renew_interval_ms": 500})
    over["billing"] = {"hold_ttl_s": 1, "sweep_interval_s": 0.5}
    what = body("!until=killed")
    async with gateway(over, workdir=tmp_path) as process, process.client() as client:
        await ask(client, what, idempotency_key="k")
        await until(lambda: decides(process))
        process.kill()
        await process.wait()
        let_end(process, "killed")
    began = time.monotonic()
    async with gateway(over, workdir=tmp_path) as process, books_of(tmp_path) as books:
        first = await answer(process, what, idempotency_key="k")
        check_refusal(first, 409, "idempotency_conflict")
        async with asyncio.timeout(20):
            while (found := await answer(process, what, idempotency_key="k")).status != 200:
                error = check_refusal(found, 409, "idempotency_conflict")
                assert error["retryable"]
                await asyncio.sleep(int(found.header("retry-after-ms") or "0") / 1000)
        assert time.monotonic() - began < 15
        again = await answer(process, what, idempotency_key="k")
        assert (again.body, again.header("x-rightnow-idempotent-replay")) == (found.body, "true")
        rows = await books.rows(2, timeout=40)  # the lost one when its worker's lease is over
        assert sorted((row.cost_micro_usd, row.error_code) for row in rows) == [
            (0, "worker_lost"),
            (BILLED, None),
        ]
