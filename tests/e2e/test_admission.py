"""M1.1, M1.2: who may call, how often at once, and what is served."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Fin,
    Head,
    Raw,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import KEY, MODEL, UPSTREAM_KEY
from tests.support.stack import (
    API_V1,
    REVOKED_KEY,
    SINGLE_KEY,
    SINGLE_KEY_2,
    SUSPENDED_KEY,
    V1,
    Answer,
    Stack,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = sse(chunk("a", role="assistant"))
PATHS: Final = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/api/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/api/v1/models"),
    ("GET", "/v1/models/test/model"),
]

# --- keys -----------------------------------------------------------------------------------------


async def present(stack: Stack, method: str, path: str, *lines: bytes) -> Answer:
    """One request without a body, with these header lines."""
    head = [f"{method} {path} HTTP/1.1".encode(), b"host: x", *lines]
    async with stack.gateway.client() as client:
        await client.send(b"\r\n".join(head) + b"\r\n\r\n")
        await client.read_all()
    return Answer(client.status, client.headers, client.body)


REFUSED: Final[dict[str, tuple[list[bytes], int, str]]] = {
    "none": ([], 401, "invalid_api_key"),
    "unknown": ([b"authorization: Bearer nope"], 401, "invalid_api_key"),
    "empty": ([b"authorization:"], 401, "invalid_api_key"),
    "bearer alone": ([b"authorization: Bearer"], 401, "invalid_api_key"),
    "no scheme": ([f"authorization: {KEY}".encode()], 401, "invalid_api_key"),
    "basic": ([f"authorization: Basic {KEY}".encode()], 401, "invalid_api_key"),
    "part": ([f"authorization: Bearer {KEY[:-1]}".encode()], 401, "invalid_api_key"),
    "longer": ([f"authorization: Bearer {KEY}x".encode()], 401, "invalid_api_key"),
    "upper case": ([f"authorization: Bearer {KEY.upper()}".encode()], 401, "invalid_api_key"),
    "two keys": ([f"authorization: Bearer {KEY} {KEY}".encode()], 401, "invalid_api_key"),
    "latin-1": ([b"authorization: Bearer \xe9\xff"], 401, "invalid_api_key"),
    "utf-8": ("authorization: Bearer ключ🙂".encode().splitlines(), 401, "invalid_api_key"),
    "latin-1 x-api-key": ([b"x-api-key: \xe9\xff\x80"], 401, "invalid_api_key"),
    "empty x-api-key": ([b"x-api-key:"], 401, "invalid_api_key"),
    "the provider's": ([f"x-api-key: {UPSTREAM_KEY}".encode()], 401, "invalid_api_key"),
    "revoked": ([f"authorization: Bearer {REVOKED_KEY}".encode()], 401, "invalid_api_key"),
    "suspended": ([f"authorization: Bearer {SUSPENDED_KEY}".encode()], 403, "account_suspended"),
    "suspended x-api-key": ([f"x-api-key: {SUSPENDED_KEY}".encode()], 403, "account_suspended"),
}


@pytest.mark.parametrize(("lines", "status", "code"), REFUSED.values(), ids=REFUSED.keys())
async def test_keys_that_open_nothing(
    stack: Stack, lines: list[bytes], status: int, code: str
) -> None:
    """M1.2: before the body is looked at, on every path; any bytes are a plain 401."""
    for method, path in PATHS:
        answer = await present(stack, method, path, *lines)
        error = answer.error
        assert (answer.status, error["code"], error["param"]) == (status, code, None)
        assert KEY not in answer.body.decode()
    assert not stack.requests


@pytest.mark.parametrize(
    "line",
    [
        f"authorization: Bearer {KEY}",
        f"Authorization: bearer {KEY}",
        f"AUTHORIZATION:BEARER   {KEY}  ",
        f"x-api-key: {KEY}",
        f"X-API-Key:{KEY}",
        f"authorization: Basic abc\r\nx-api-key: {KEY}",
        f"authorization: Bearer\r\nx-api-key: {KEY}",
    ],
)
async def test_keys_that_open(stack: Stack, line: str) -> None:
    """M1.1: `Authorization: Bearer` in any case, or `x-api-key`."""
    answer = await present(stack, "GET", "/v1/models", line.encode())
    assert answer.status == 200


async def test_no_key_is_logged(stack: Stack) -> None:
    """M1.1: neither a good key nor a bad one."""
    await stack.ask(*openai_stream(["Hi"]))
    answer = await stack.ask(key="ozk_bad_key_that_somebody_mistyped")
    line = await stack.line(answer)
    assert line["status"] == 401
    assert KEY not in stack.log
    assert "mistyped" not in stack.log


# --- max_concurrent -------------------------------------------------------------------------------


async def test_the_limit_of_an_org(stack: Stack) -> None:
    """M1.2: one slot for each request, of whichever key and plane; 429 with Retry-After."""
    gate = asyncio.Event()
    async with stack.client(Send(A), Wait(gate), Send(DONE), key=SINGLE_KEY) as client:
        await client.read_until(lambda c: c.events)
        for key, base, stream in itertools.product(
            (SINGLE_KEY, SINGLE_KEY_2), (V1, API_V1), (True, False)
        ):
            answer = await stack.ask(key=key, base=base, stream=stream)
            error = answer.error
            assert (answer.status, error["code"], error["type"]) == (
                429,
                "concurrency_limit_exceeded",
                "rate_limit_error",
            )
            assert int(answer.header("retry-after") or "") >= 1
        assert (await stack.ask(*openai_stream(["b"]))).text == "b", "another org"
        assert (await stack.get("/v1/models", key=SINGLE_KEY)).status == 200
        gate.set()
        await client.read_all()
    assert len(stack.requests) == 2


async def test_a_refused_request_takes_no_slot(stack: Stack) -> None:
    """M1.2: nor frees one that is another's."""
    for _ in range(3):
        assert (await stack.ask(raw=b"{", key=SINGLE_KEY)).status == 400
        assert (await stack.ask(model="no", key=SINGLE_KEY)).status == 404
    gate = asyncio.Event()
    async with stack.client(Send(A), Wait(gate), Send(DONE), key=SINGLE_KEY) as client:
        await client.read_until(lambda c: c.events)
        for _ in range(3):
            assert (await stack.ask(key=SINGLE_KEY)).status == 429
        gate.set()
        await client.read_all()


ENDINGS: Final[dict[str, list[Step]]] = {
    "complete": [Send(A + DONE)],
    "complete, upstream stays": [Send(A + DONE), Wait(asyncio.Event())],
    "eof": [Send(A), Eof()],
    "cut": [Send(A), Fin()],
    "reset": [Send(A), Rst()],
    "empty": [Eof()],
    "error event": [Send(A + sse(b'{"error":{"message":"no"}}'))],
    "not JSON": [Send(A + b"data: {\n\n"), Wait(asyncio.Event())],
    "bad framing": [Send(A), Raw(b"zz\r\n")],
    "refused 400": json_answer({}, status=400),
    "refused 500": json_answer({}, status=500),
    "429": json_answer({}, status=429, retry_after="1"),
    "no status": [Rst()],
    "html": [Head(200, {"content-type": "text/html"}), Send(b"<p>")],
    "json error": json_answer({"error": {"message": "no"}}),
}


ENDLESS: Final = {"complete, upstream stays", "not JSON", "bad framing"}  # for a plain reply


@pytest.mark.parametrize(
    ("steps", "stream"),
    [
        pytest.param(steps, stream, id=f"{name}-{'stream' if stream else 'plain'}")
        for name, steps in ENDINGS.items()
        for stream in (True, False)
        if stream or name not in ENDLESS
    ],
)
async def test_every_ending_frees_the_slot(stack: Stack, steps: list[Step], stream: bool) -> None:
    """M1.2: before the client has its answer to the end: the next request may come at once."""
    async with AsyncExitStack() as connections:
        for _ in range(3):  # the first clients keep their connections open
            client = await connections.enter_async_context(
                stack.client(*steps, key=SINGLE_KEY, stream=stream)
            )
            await client.read_all()
            assert client.complete
            assert client.status != 429 or client.header("retry-after")
            assert b"concurrency" not in client.body


@pytest.mark.parametrize("model", ["refusing/m", "nameless/m", "mute/m", "nobody/m"])
async def test_what_is_not_reached_frees_the_slot(stack: Stack, model: str) -> None:
    """M1.2: as every ending."""
    for _ in range(2):
        answer = await stack.ask(model=model, key=SINGLE_KEY)
        assert answer.error["code"] in ("upstream_unavailable", "model_not_found")


async def test_a_hundred_requests_one_after_the_other(stack: Stack) -> None:
    """M1.2: never a 429 for a client that waits for each answer; on new connections and on one."""
    for _ in range(100):
        assert (await stack.ask(*openai_stream(["a"]), key=SINGLE_KEY)).text == "a"


# --- the models -----------------------------------------------------------------------------------


def check_model(model: Mapping[str, object], slug: str, owner: str) -> None:
    assert model["id"] == slug
    assert model["object"] == "model"
    assert model["owned_by"] == owner
    assert isinstance(model["created"], int)


@pytest.mark.parametrize("base", [V1, API_V1])
async def test_the_model_list(stack: Stack, base: str) -> None:
    """M1.1: the slugs of `models:`, in the configuration's order."""
    answer = await stack.get(f"{base}/models")
    assert answer.status == 200
    assert answer.header("content-type") == "application/json"
    assert answer.json["object"] == "list"
    first, second = answer.json["data"]
    check_model(first, MODEL, "fake")
    check_model(second, "failover/model", "refusing")


@pytest.mark.parametrize("base", [V1, API_V1])
@pytest.mark.parametrize("path", ["test/model", "test%2Fmodel", "test%2fmodel", "%74est/model"])
async def test_one_model(stack: Stack, base: str, path: str) -> None:
    """M1.1: its slash may be escaped, as SDKs do."""
    answer = await stack.get(f"{base}/models/{path}")
    assert answer.status == 200
    check_model(answer.json, MODEL, "fake")


@pytest.mark.parametrize("path", ["nope", "test", "test/model/x", "%ff", "test%252Fmodel"])
async def test_a_model_that_is_not_listed(stack: Stack, path: str) -> None:
    """M1.2: 404 `model_not_found`."""
    answer = await stack.get(f"/v1/models/{path}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
