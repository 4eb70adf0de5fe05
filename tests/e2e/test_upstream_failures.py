"""M1.2, M3.2: what becomes of an upstream that refuses or fails before the first byte.

Cases B51 to B59 of the hazards.
"""

from __future__ import annotations

import asyncio
import json
import time
from email.utils import formatdate
from typing import Any, Final

import pytest

from tests.support.fake_upstream import (
    DONE,
    Fin,
    Head,
    Raw,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    compact,
    json_answer,
    sse,
)
from tests.support.stack import HEADER_TIMEOUT_S, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")
B: Final = chunk("b")
STOP: Final = chunk(None, finish_reason="stop")
ASKED_ONCE: Final = "plain/m"  # of a provider that is sent no `stream_options` (M3.3)
STREAM_OR_NOT: Final = pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])

# --- before the first byte ------------------------------------------------------------------------

OWN_FAULT: Final = (400, 404, 413, 422)
STATUSES: Final[dict[int, tuple[int, str, str]]] = {
    400: (400, "invalid_request", "invalid_request_error"),
    401: (502, "provider_credentials", "upstream_error"),
    402: (502, "provider_credentials", "upstream_error"),
    403: (502, "provider_credentials", "upstream_error"),
    404: (404, "model_not_found", "invalid_request_error"),
    405: (502, "upstream_error", "upstream_error"),
    408: (502, "upstream_error", "upstream_error"),
    409: (502, "upstream_error", "upstream_error"),
    413: (413, "invalid_request", "invalid_request_error"),
    422: (422, "invalid_request", "invalid_request_error"),
    425: (502, "upstream_error", "upstream_error"),
    429: (429, "rate_limit_exceeded", "rate_limit_error"),
    500: (502, "upstream_error", "upstream_error"),
    501: (502, "upstream_error", "upstream_error"),
    502: (502, "upstream_error", "upstream_error"),
    503: (503, "upstream_unavailable", "upstream_error"),
    504: (502, "upstream_error", "upstream_error"),
    520: (502, "upstream_error", "upstream_error"),
    529: (503, "upstream_unavailable", "upstream_error"),
    302: (502, "upstream_error", "upstream_error"),
}
BODIES: Final[dict[str, bytes]] = {
    "openai": b'{"error":{"message":"it says so","type":null,"param":null,"code":null}}',
    "text": b"it says so",
    "empty": b"",
    "cut": b'{"error":{"message":"it s',
}


@STREAM_OR_NOT
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize(("status", "expected"), STATUSES.items(), ids=map(str, STATUSES))
async def test_statuses(
    stack: Stack, status: int, expected: tuple[int, str, str], body: bytes, stream: bool
) -> None:
    """M1.2, B51, B52: the status is ours, the body JSON with its length; nothing is committed."""
    headers = {"content-type": "application/json", "location": "http://127.0.0.1:1/"}
    steps: list[Step] = [Head(status, headers, "length"), Send(body)]
    asked_twice = stream and status == 400  # M3.3: it may be our own `stream_options`
    if asked_twice:
        stack.up.script(*steps)
    answer = await stack.ask(*steps, stream=stream)
    error = answer.error
    assert (answer.status, error["code"], error["type"]) == expected
    assert answer.header("content-length") == str(len(answer.body))
    told = b"it says so" in body and body.startswith(b"{") and expected[1] != "provider_credentials"
    assert ("it says so" in error["message"]) == told
    assert len(stack.requests) == 1 + asked_twice


@pytest.mark.parametrize("status", OWN_FAULT)
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "M", "code": "C", "type": "T", "param": "P"}},
        [{"error": {"message": "M", "code": "C", "type": "T", "param": "P"}}],
        {"object": "error", "message": "M", "code": "C", "type": "T", "param": "P"},
    ],
    ids=["openai", "list", "flat"],
)
async def test_the_clients_own_fault_is_told_as_it_was(
    stack: Stack, status: int, body: Any
) -> None:
    """M1.2: status, message, code, type and param of the upstream."""
    answer = await stack.ask(*json_answer(body, status=status), model=ASKED_ONCE)
    assert answer.status == status
    assert answer.error == {"message": "M", "code": "C", "type": "T", "param": "P"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "M"}, "M"),
        ({"message": "M"}, "M"),
        ({"detail": "M"}, "M"),
        ({"detail": [{"loc": ["x"], "msg": "M"}]}, '[{"loc":["x"],"msg":"M"}]'),
        ({"error": {"code": 400, "message": "M"}}, "M"),
        ({"error": {"message": {"a": 1}}}, '{"a":1}'),
        ({"error": {"message": "\ud83d"}}, "\ud83d"),
        ({"x": 1}, "plain refused the request with status 400"),
        (17, "plain refused the request with status 400"),
    ],
)
async def test_spellings_of_a_refusal(stack: Stack, body: Any, message: str) -> None:
    """M1.2: the message, in whatever way it is wrapped; the code is ours where there is none."""
    head = Head(400, {"content-type": "application/json"}, "length")
    answer = await stack.ask(head, Send(json.dumps(body).encode()), model=ASKED_ONCE)
    assert (answer.error["message"], answer.error["code"]) == (message, "invalid_request")


# --- Retry-After ----------------------------------------------------------------------------------

WAITS: Final[dict[str, tuple[dict[str, str], str | None]]] = {
    "seconds": ({"retry-after": "30"}, "30"),
    "zero": ({"retry-after": "0"}, "0"),
    "fraction": ({"retry-after": "1.2"}, "2"),
    "milliseconds": ({"retry-after-ms": "1500"}, "2"),
    "both": ({"retry-after": "9", "retry-after-ms": "2500"}, "3"),
    "past date": ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, "0"),
    "far": ({"retry-after": "99999999"}, "86400"),
    "padded": ({"retry-after": " 7 "}, "7"),
    "none": ({}, None),
    "empty": ({"retry-after": ""}, None),
    "negative": ({"retry-after": "-5"}, None),
    "word": ({"retry-after": "soon"}, None),
    "nan": ({"retry-after": "nan"}, None),
    "infinite": ({"retry-after": "inf"}, None),
    "bad milliseconds": ({"retry-after": "4", "retry-after-ms": "x"}, "4"),
    "bad date": ({"retry-after": "Wed, 99 Foo 2015 77:28:00 GMT"}, None),
}


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(("headers", "expected"), WAITS.values(), ids=WAITS.keys())
async def test_retry_after(
    stack: Stack, status: int, headers: dict[str, str], expected: str | None
) -> None:
    """M1.2, B56: in whole seconds, rounded up, whatever its form; none if there is none."""
    answer = await stack.ask(Head(status, headers, "length"), Send(b"{}"))
    assert answer.header("retry-after") == expected


async def test_retry_after_as_a_date(stack: Stack) -> None:
    """M1.2, B56: the seconds that are left until then."""
    date = formatdate(time.time() + 90, usegmt=True)
    answer = await stack.ask(*json_answer({}, status=429, retry_after=date))
    assert 80 <= int(answer.header("retry-after") or "") <= 91


@pytest.mark.parametrize("status", [400, 401, 408, 500])
async def test_no_retry_after_where_none_is_due(stack: Stack, status: int) -> None:
    """M1.2: only with 429 and 503."""
    steps = json_answer({}, status=status, retry_after="30")
    answer = await stack.ask(*steps, model=ASKED_ONCE)
    assert answer.header("retry-after") is None


# --- no answer at all -----------------------------------------------------------------------------


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("provider", "status", "code"),
    [
        ("refusing", 503, "upstream_unavailable"),
        ("nameless", 503, "upstream_unavailable"),
        ("mute", 503, "upstream_unavailable"),
        ("impatient", 504, "upstream_timeout"),
    ],
)
async def test_an_upstream_that_cannot_be_reached(
    stack: Stack, provider: str, status: int, code: str, stream: bool
) -> None:
    """M1.2, B51, B59: refused, no such name, no connection in time, no status in time."""
    started = time.monotonic()
    steps: list[Step] = [Wait(asyncio.Event())] if provider == "impatient" else []
    answer = await stack.ask(*steps, model=f"{provider}/m", stream=stream)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert provider in answer.error["message"]
    assert time.monotonic() - started < 10 * HEADER_TIMEOUT_S
    if steps:
        await (await stack.request()).wait_closed()


@STREAM_OR_NOT
@pytest.mark.parametrize(
    "steps",
    [
        [Fin()],
        [Rst()],
        [Raw(b"HELLO\r\n\r\n"), Fin()],
        [Raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), Fin()],
        [Raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"), Fin()],
        [Raw(b"SSH-2.0-OpenSSH_9.2\r\n"), Wait(asyncio.Event())],
    ],
    ids=["closed", "reset", "not HTTP", "half a head", "endless head", "another protocol"],
)
async def test_an_upstream_that_answers_no_http(
    stack: Stack, steps: list[Step], stream: bool
) -> None:
    """M1.2: 502, whatever came instead of a status."""
    answer = await stack.ask(*steps, stream=stream)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")


@pytest.mark.parametrize(
    "interim", [b"100 Continue\r\n", b"103 Early Hints\r\nlink: </x>\r\n", b"102 Processing\r\n"]
)
async def test_interim_answers_are_passed_over(stack: Stack, interim: bytes) -> None:
    """M1.3: only the final status counts."""
    steps: list[Step] = [
        Raw(b"HTTP/1.1 " + interim + b"\r\n"),
        Head(),
        Send(sse(A) + sse(STOP) + DONE),
    ]
    answer = await stack.ask(*steps)
    assert (answer.status, answer.text) == (200, "a")


# --- 200 that is none -----------------------------------------------------------------------------


@STREAM_OR_NOT
@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/problem+JSON"]
)
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"error": {"message": "it says so"}}, 502, "upstream_error"),
        ({"error": {"message": "it says so", "code": 429}}, 429, "rate_limit_exceeded"),
        ({"error": {"message": "it says so", "code": 400}}, 400, "invalid_request"),
        ({"error": {"message": "it says so", "code": 503}}, 503, "upstream_unavailable"),
        ({"error": "it says so"}, 502, "upstream_error"),
        ([{"error": {"message": "it says so"}}], 502, "upstream_error"),
        ({"detail": "it says so"}, 502, "upstream_error"),
        ({"choices": [], "error": {"message": "it says so"}}, 502, "upstream_error"),
    ],
)
async def test_a_json_error_with_status_200(
    stack: Stack, body: Any, status: int, code: str, kind: str, stream: bool
) -> None:
    """M3.2: is an error, with the status that it carries, else 502."""
    head = Head(200, {"content-type": kind}, "length")
    answer = await stack.ask(head, Send(compact(body)), stream=stream, model=ASKED_ONCE)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert "it says so" in answer.error["message"]


@STREAM_OR_NOT
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b'{"choices":', b'{"choices":{}}'])
async def test_json_that_is_no_completion(stack: Stack, body: bytes, stream: bool) -> None:
    """M3.2: 502, never an empty success."""
    head = Head(200, {"content-type": "application/json"}, "length")
    answer = await stack.ask(head, Send(body), stream=stream)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")


async def test_a_page_with_status_200(stack: Stack) -> None:
    """M3.2: what a captive portal or a wrong base URL sends."""
    head = Head(200, {"content-type": "text/html"}, "length")
    answer = await stack.ask(head, Send(b"<h1>Sign in</h1>"))
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
