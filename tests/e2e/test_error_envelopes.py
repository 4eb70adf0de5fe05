"""M1.1, M1.2: whatever is wrong with a request, its answer is one envelope with an id."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any, Final

import pytest

from tests.support.checks import until
from tests.support.fake_upstream import openai_stream
from tests.support.gateway import KEY, MODEL
from tests.support.stack import API_V1, BODY_LIMIT_BYTES, MESSAGES, V1, Answer, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEARER: Final = f"authorization: Bearer {KEY}".encode()
BOTH_BASES: Final = pytest.mark.parametrize("base", [V1, API_V1])


async def exchange(stack: Stack, *parts: bytes) -> Answer:
    """Sends exactly these bytes and reads one answer."""
    async with stack.gateway.client() as client:
        for part in parts:
            await client.send(part)
        await client.read_all()
    return Answer(client.status, client.headers, client.body)


def post(*headers: bytes, body: bytes = b"", key: bytes = BEARER) -> bytes:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", key, *headers]
    return b"\r\n".join([line for line in head if line]) + b"\r\n\r\n" + body


# --- JSON -----------------------------------------------------------------------------------------

GOOD: Final = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True})
BROKEN: Final[dict[str, tuple[bytes, int, int]]] = {
    "empty": (b"", 1, 1),
    "blank": (b" \n\t ", 1, 1),
    "no value": (b'{"model": }', 1, 11),
    "second line": (b'{"model": "m",\n "messages": [}', 2, 15),
    "third line": (b'{\n"a": 1,\n  x}', 3, 3),
    "cut": (GOOD[:-1].encode(), 1, len(GOOD)),
    "more behind": (GOOD.encode() + b"x", 1, len(GOOD) + 1),
    "comma": (b'{"model": "m",}', 1, 14),
    "quotes": (b"{'model': 1}", 1, 2),
    "nan": (b'{"temperature": NaN}', 1, 17),
    "word": (b"hello", 1, 1),
    "form": (b"model=m", 1, 1),
    "not utf-8": ('{"a":\n"ü'.encode() + b'\xff"}', 2, 3),
    "utf-16": (GOOD.encode("utf-16"), 1, 1),
    "nul": (b'{"a": "\x00"}', 1, 8),
    "open brackets": (b"[" * 100_000, 1, 0),
}


@BOTH_BASES
@pytest.mark.parametrize(("body", "line", "column"), BROKEN.values(), ids=BROKEN.keys())
async def test_json_that_is_none(
    stack: Stack, base: str, body: bytes, line: int, column: int
) -> None:
    """M1.2: 400 `invalid_json`, with line and column; nobody is asked."""
    answer = await stack.ask(raw=body, base=base)
    error = answer.error
    assert (answer.status, error["code"], error["type"], error["param"]) == (
        400,
        "invalid_json",
        "invalid_request_error",
        None,
    )
    assert f"line {line}, column {column or ''}" in error["message"]
    assert not stack.requests


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', b"true", b"[{}]"])
async def test_json_that_is_no_object(stack: Stack, body: bytes) -> None:
    """M1.2: is valid JSON, and an invalid request."""
    answer = await stack.ask(raw=body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("depth", [300, 990, 1010])
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
async def test_json_that_is_too_deep(
    stack: Stack, depth: int, brackets: tuple[bytes, bytes]
) -> None:
    """M1.2: what no encoder takes is refused, and never a fault of ours."""
    start, end = brackets
    body = b'{"model":"m","messages":[{}],"x":' + start * depth + b"1" + end * depth + b"}"
    answer = await stack.ask(raw=body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"temperature": 1e400', "temperature"),
        (b'"tools": [{"function": {"parameters": {"maximum": -1e999}}}]', None),
        (b'"seed": %b' % (b"9" * 5000), "seed"),
    ],
)
async def test_a_number_that_would_go_on_as_null_is_refused(
    stack: Stack, field: bytes, param: str | None
) -> None:
    """M1.2: JSON has no bound for its numbers, a double has one; the place is named."""
    answer = await stack.ask(raw=GOOD[:-1].encode() + b", " + field + b"}")
    error = answer.error
    assert (answer.status, error["code"]) == (400, "invalid_request")
    assert error["param"] == (param or "tools.0.function.parameters.maximum")
    assert not stack.requests


async def test_a_whole_number_of_any_size_goes_on_as_it_came(stack: Stack) -> None:
    """M1.1: fields that the gateway does not know are passed to the provider."""
    await stack.ask(*openai_stream(["Hi"]), seed=123456789012345678901, x=[2**64, -(2**63) - 1])
    asked = await stack.request()
    assert b'"seed":123456789012345678901' in asked.body
    assert asked.json["x"] == [2**64, -(2**63) - 1]


async def test_json_behind_a_byte_order_mark_is_taken(stack: Stack) -> None:
    """M1.1: some editors and shells write one; RFC 8259 §8.1 lets us pass it over."""
    answer = await stack.ask(*openai_stream(["Hi"]), raw=b"\xef\xbb\xbf" + GOOD.encode())
    assert answer.text == "Hi"


async def test_json_that_is_deep_enough_passes(stack: Stack) -> None:
    """M1.1: schemas and tool results are nested, and go on as they came."""
    deep: Any = 1
    for _ in range(90):
        deep = {"a": [deep]}
    await stack.ask(*openai_stream(["Hi"]), x=deep)
    assert (await stack.request()).json["x"] == deep


# --- fields ---------------------------------------------------------------------------------------

WRONG: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "model null": ({"model": None}, "model"),
    "model empty": ({"model": ""}, "model"),
    "model number": ({"model": 5}, "model"),
    "model list": ({"model": ["m"]}, "model"),
    "messages null": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "messages"),
    "messages text": ({"messages": "Hello"}, "messages"),
    "messages object": ({"messages": {"role": "user"}}, "messages"),
    "message text": ({"messages": [*MESSAGES, "Hello"]}, "messages.1"),
    "stream text": ({"stream": "true"}, "stream"),
    "stream number": ({"stream": 1}, "stream"),
    "options list": ({"stream_options": []}, "stream_options"),
    "options true": ({"stream_options": True}, "stream_options"),
    "include_usage text": (
        {"stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
    ),
    "include_usage number": (
        {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    "n zero": ({"n": 0}, "n"),
    "n negative": ({"n": -1}, "n"),
    "n text": ({"n": "2"}, "n"),
    "n fraction": ({"n": 1.5}, "n"),
    "n true": ({"n": True}, "n"),
    "model of half a character": ({"model": "\ud800"}, "model"),
}


@pytest.mark.parametrize(("change", "param"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_field_is_named(stack: Stack, change: dict[str, Any], param: str) -> None:
    """M1.2: 400 `invalid_request` with `param`, on both bases; nobody is asked."""
    for base in (V1, API_V1):
        answer = await stack.ask(base=base, **change)
        error = answer.error
        assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", param)
        assert error["type"] == "invalid_request_error"
        assert param in error["message"]
    assert not stack.requests


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_a_missing_field_is_named(stack: Stack, field: str) -> None:
    """M1.2: with `param`."""
    body = {"model": MODEL, "messages": MESSAGES}
    del body[field]
    answer = await stack.ask(raw=json.dumps(body).encode())
    assert (answer.status, answer.error["code"], answer.error["param"]) == (
        400,
        "invalid_request",
        field,
    )


@pytest.mark.parametrize(
    "slug", ["gpt-4", "fake", "fake/", "/m", "nobody/m", "TEST/MODEL", " test/model", "a\nb", "🙂"]
)
async def test_a_model_that_is_not_served(stack: Stack, slug: str) -> None:
    """M1.2: 404 `model_not_found`; whatever the slug is made of."""
    answer = await stack.ask(model=slug)
    error = answer.error
    assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("slug", ["fake/" + "m" * 600, "m" * 500_000])
async def test_a_name_without_end_is_no_model(stack: Stack, slug: str) -> None:
    """M1.2: and it is repeated neither to the client nor in the log."""
    answer = await stack.ask(model=slug)
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert len(answer.error["message"]) < 1000
    await stack.line(answer)
    assert len(stack.log) < 10_000


# --- paths and methods ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v2/models", "//v1/models", "/%00",
     "/v1/completions", "/api/v1/", "/V1/models", "/v1/chat/completions/x", "/%ff", "/a%22b"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_paths_that_are_none(stack: Stack, path: str, method: str) -> None:
    """M1.2: 404 `not_found`, with or without a key."""
    for key in (KEY, None):
        answer = await stack.get(path, method=method, key=key)
        assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/models", "; did you mean /v1/models?"),
        ("/v1/v1/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/models/", "; did you mean /v1/models?"),
        ("/v1/embeddings", "; of OpenAI's endpoints only chat completions and models are served"),
        ("/v1/responses/x", "; of OpenAI's endpoints only chat completions and models are served"),
        ("/v1/chats", ""),
        ("/", ""),
    ],
)
async def test_a_wrong_base_url_is_told(stack: Stack, path: str, hint: str) -> None:
    """M1.2: the mistakes that a base URL invites; and the log has the code."""
    answer = await stack.get(path, method="POST")
    assert answer.error["message"] == f"there is nothing at {path}{hint}"
    assert (await stack.line(answer))["error_code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("DELETE", "/api/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("PATCH", "/api/v1/models", "GET,HEAD"),
        ("DELETE", "/v1/models/test/model", "GET,HEAD"),
    ],
)
async def test_methods_that_are_none(stack: Stack, method: str, path: str, allowed: str) -> None:
    """M1.2: 405 `method_not_allowed`, with `Allow`."""
    answer = await stack.get(path, method=method)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.header("allow") == allowed


async def test_every_answer_has_an_id_of_its_own(stack: Stack) -> None:
    """M1.2: `x-request-id`, and it is the log's too."""
    answers = [
        await stack.get("/health", key=None),
        await stack.get("/ready", key=None),
        await stack.get("/v1/models"),
        await stack.get("/v1/models", method="HEAD"),
        await stack.get("/v1/models", key=None),
        await stack.get("/nothing"),
        await stack.ask(*openai_stream(["Hi"])),
        await stack.ask(raw=b"{"),
    ]
    ids = [answer.header("x-request-id") for answer in answers]
    assert all(id_ and id_.startswith("req_") for id_ in ids)
    assert len(set(ids)) == len(ids)
    for answer in answers[2:]:
        assert (await stack.line(answer))["status"] == answer.status


# --- size -----------------------------------------------------------------------------------------


def sized(size: int) -> bytes:
    """A good body of that many bytes."""
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True, "x": "@"}).encode()
    return body.replace(b"@", b"x" * (size - len(body) + 1))


def chunked(body: bytes, size: int = 65536) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_a_body_of_the_limit_passes(stack: Stack) -> None:
    """M1.1: with its length and in chunks."""
    body = sized(BODY_LIMIT_BYTES)
    requests = [
        post(b"content-length: %d" % len(body), body=body),
        post(b"transfer-encoding: chunked", body=chunked(body)),
    ]
    for request in requests:
        stack.up.script(*openai_stream(["Hi"]))
        assert (await exchange(stack, request)).status == 200
    assert [len(request.json["x"]) for request in stack.requests] == [
        len(json.loads(body)["x"])
    ] * 2


@pytest.mark.parametrize("over", [1, 10 * BODY_LIMIT_BYTES])
@pytest.mark.parametrize("framing", ["length", "only the length", "chunked"])
async def test_a_body_over_the_limit(stack: Stack, over: int, framing: str) -> None:
    """M1.1, M1.2: 413, decided on the head where it tells; nobody is asked."""
    body = sized(BODY_LIMIT_BYTES + over)
    requests = {
        "length": post(b"content-length: %d" % len(body), body=body),
        "only the length": post(b"content-length: %d" % len(body)),
        "chunked": post(b"transfer-encoding: chunked", body=chunked(body)),
    }
    answer = await exchange(stack, requests[framing])
    error = answer.error
    assert (answer.status, error["code"]) == (413, "payload_too_large")
    assert str(BODY_LIMIT_BYTES) in error["message"]
    assert not stack.requests


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"x"])
@pytest.mark.parametrize("key", [BEARER, b"x-api-key: no"])
async def test_a_packed_body_is_not_unpacked(stack: Stack, coding: bytes, key: bytes) -> None:
    """3 KB may unpack to 2 GB, and aiohttp unpacks also what nobody reads."""
    packed = zlib.compress(GOOD.encode())
    lines = (b"content-encoding: " + coding, b"content-length: %d" % len(packed))
    answer = await exchange(stack, post(*lines, body=packed, key=key))
    expected = (400, "invalid_request") if key == BEARER else (401, "invalid_api_key")
    assert (answer.status, answer.error["code"]) == expected
    assert not stack.requests


# --- Expect ---------------------------------------------------------------------------------------


async def test_a_request_that_may_be_served_is_asked_for_its_body(stack: Stack) -> None:
    """M1.1: `Expect: 100-continue`."""
    body = GOOD.encode()
    stack.up.script(*openai_stream(["Hi"]))
    async with stack.gateway.client() as client:
        await client.send(post(b"expect: 100-Continue", b"content-length: %d" % len(body)))
        await client.read_until(lambda c: c.status == 100)
        await client.send(body)
        await client.read_all()
        assert (client.status, client.complete) == (200, True)


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        ([b"content-length: 99999999"], 413, "payload_too_large"),
        ([b"authorization: Bearer no", b"content-length: 9"], 401, "invalid_api_key"),
        ([b"expect: banana", b"content-length: 9"], 417, "invalid_request"),
    ],
)
async def test_a_request_that_will_not_be_served_is_not_asked_for_its_body(
    stack: Stack, lines: list[bytes], status: int, code: str
) -> None:
    """M1.2: the answer comes at once, in the envelope, and no `100 Continue` before it."""
    expected = [] if lines[0].startswith(b"expect") else [b"expect: 100-continue"]
    key = b"" if lines[0].startswith(b"auth") else BEARER
    async with stack.gateway.client() as client:
        await client.send(post(*expected, *lines, key=key))
        await client.read_some()
        assert client.status == status
        await client.read_all()
    answer = Answer(client.status, client.headers, client.body)
    assert (answer.status, answer.error["code"]) == (status, code)


async def test_http_1_0_knows_no_interim_answers(stack: Stack) -> None:
    """RFC 9110 §10.1.1: `Expect` of an HTTP/1.0 client is passed over."""
    stack.up.script(*openai_stream(["Hi"]))
    body = GOOD.encode()
    request = post(b"expect: 100-continue", b"content-length: %d" % len(body), body=body)
    reader, writer = await asyncio.open_connection(stack.gateway.host, stack.gateway.port)
    writer.write(request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    async with asyncio.timeout(10):
        said = await reader.read(-1)
    writer.close()
    assert said.startswith(b"HTTP/1.0 200 OK\r\n")


@pytest.mark.parametrize(
    "line",
    [
        b"GET /v1/models",
        b"GET /v1/agents",
        b"GET /v1/agents/one/models",
        b"GET /v1/workflows",
        b"DELETE /v1/workflows/w",
        b"POST /v1/workflows/executions/x/cancel",
        b"GET /ready",
        b"GET /nowhere",
        b"PUT /v1/models",
    ],
)
async def test_a_strange_expectation_is_answered_in_the_envelope(stack: Stack, line: bytes) -> None:
    """M1.2: before any handler, wherever it is sent; with an id, and a line of the log."""
    head = line + b" HTTP/1.1\r\nhost: x\r\nexpect: banana\r\n" + BEARER + b"\r\n\r\n"
    answer = await exchange(stack, head)
    assert (answer.status, answer.error["code"]) == (417, "invalid_request")
    assert "100-continue" in answer.error["message"]
    assert answer.header("server") == "sluicegate"
    request_id = answer.header("x-request-id")
    await until(
        lambda: (
            [
                told["status"]
                for told in stack.gateway.log_lines()
                if told.get("request_id") == request_id
            ]
            == [417]
        ),
        what="its line",
    )


async def test_a_usual_expectation_is_met_where_no_body_is_read(stack: Stack) -> None:
    """RFC 9110 §10.1.1: on every path."""
    head = b"GET /v1/agents HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    answer = await exchange(stack, head + BEARER + b"\r\n\r\n")
    assert (answer.status, answer.json["object"]) == (200, "list")
