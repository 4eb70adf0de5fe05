"""M2.1, M2.4, M3.4 as the clients of the world see them: the OpenAI SDKs and curl."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest

from tests.support.fake_upstream import (
    DONE,
    Eof,
    Head,
    Rst,
    Send,
    Step,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.gateway import KEY, MODEL
from tests.support.node import run_node
from tests.support.stack import API_V1, MESSAGES, SUSPENDED_KEY, V1, Stack

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = chunk("a", role="assistant")
REPLY: Final[dict[str, Any]] = {
    "id": "w",
    "object": "chat.completion",
    "created": 1,
    "model": "up",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
}
BOTH_BASES: Final = pytest.mark.parametrize("base", [V1, API_V1])
BOTH_CLIENTS: Final = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])


class Sdk:
    """The Python SDK, in either of its forms."""

    def __init__(self, stack: Stack, base: str, *, asynchronous: bool, key: str = KEY) -> None:
        self._options: dict[str, Any] = {
            "base_url": stack.gateway.base_url + base,
            "api_key": key,
            "max_retries": 0,
        }
        self._asynchronous = asynchronous

    async def stream(
        self, leave_after: int | None = None, **request: Any
    ) -> tuple[list[ChatCompletionChunk], Exception | None]:
        """All chunks of a stream, or the first few, and what ended it."""
        if not self._asynchronous:
            return await asyncio.to_thread(self._stream, leave_after, request)
        seen: list[ChatCompletionChunk] = []
        async with openai.AsyncOpenAI(**self._options) as client:
            try:
                async with await client.chat.completions.create(
                    **_asked(request), stream=True
                ) as stream:
                    async for chunk in stream:
                        seen.append(chunk)
                        if len(seen) == leave_after:
                            break
            except openai.APIError as error:
                return seen, error
        return seen, None

    def _stream(
        self, leave_after: int | None, request: dict[str, Any]
    ) -> tuple[list[ChatCompletionChunk], Exception | None]:
        seen: list[ChatCompletionChunk] = []
        with openai.OpenAI(**self._options) as client:
            try:
                with client.chat.completions.create(**_asked(request), stream=True) as stream:
                    for chunk in stream:
                        seen.append(chunk)
                        if len(seen) == leave_after:
                            break
            except openai.APIError as error:
                return seen, error
        return seen, None

    async def call(self, method: str, *args: Any, **request: Any) -> Any:
        """The result of a method, by its path in the client."""

        def found(client: Any) -> Any:
            for name in method.split("."):
                client = getattr(client, name)
            return client(*args, **request)

        if self._asynchronous:
            async with openai.AsyncOpenAI(**self._options) as client:
                return await found(client)
        with openai.OpenAI(**self._options) as blocking:
            return await asyncio.to_thread(found, blocking)


def _asked(request: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES} | request


@BOTH_BASES
@BOTH_CLIENTS
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_a_stream(
    stack: Stack, base: str, asynchronous: bool, options: dict[str, bool] | None
) -> None:
    """M2.1, M2.4, B24: text, finish, model, and usage only if asked; `choices[0]` is safe else."""
    sends: list[Step] = [Head(), *openai_stream(["Hel", "lo 🙂"])]
    stack.up.script(*sends)
    more: dict[str, Any] = {} if options is None else {"stream_options": options}
    seen, error = await Sdk(stack, base, asynchronous=asynchronous).stream(**more)
    assert error is None
    asked = bool(options and options["include_usage"])
    counted = seen.pop() if asked else None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == "Hello 🙂"
    assert seen[-1].choices[0].finish_reason == "stop"
    assert {chunk.model for chunk in seen} == {MODEL}
    assert {(chunk.model_extra or {}).get("provider") for chunk in seen} == {"fake"}
    assert all(chunk.usage is None for chunk in seen)
    if counted is not None:
        assert counted.usage is not None
        assert (counted.choices, counted.usage.completion_tokens) == ([], 2)


@BOTH_BASES
@BOTH_CLIENTS
async def test_comments_ids_and_controls_are_no_chunks(
    stack: Stack, base: str, asynchronous: bool
) -> None:
    """B11, B12: an upstream's blocks without data never become empty events."""
    noise = b"id: 1\nretry: 5\n\n: PROCESSING\n\nevent: ping\n\nid: 2\n"
    stack.up.script(Head(), Send(noise + sse(A) + noise + sse(chunk("b")) + noise + DONE))
    seen, error = await Sdk(stack, base, asynchronous=asynchronous).stream()
    assert error is None
    assert [chunk.choices[0].delta.content for chunk in seen] == ["a", "b"]


FAILURES: Final[dict[str, list[Step]]] = {
    "reset": [Rst()],
    "eof": [Eof()],
    "own error": [Send(sse(b'{"error":{"message":"Overloaded","code":"c"}}'))],
    "named error": [Send(b'event: error\ndata: {"message":"Overloaded"}\n\n')],
    "not JSON": [Send(b"data: {\n\n")],
}


@BOTH_BASES
@BOTH_CLIENTS
@pytest.mark.parametrize("end", FAILURES.values(), ids=FAILURES.keys())
async def test_a_failure_in_mid_stream_is_raised(
    stack: Stack, base: str, asynchronous: bool, end: list[Step]
) -> None:
    """M3.4, B45: after the text that came, as an APIError with the message; never a silent end."""
    stack.up.script(Send(sse(A)), *end)
    seen, error = await Sdk(stack, base, asynchronous=asynchronous).stream()
    assert [chunk.choices[0].delta.content for chunk in seen] == ["a"]
    assert type(error) is openai.APIError
    assert error.message
    assert "error occurred during streaming" not in error.message
    assert isinstance(error.body, dict)


@BOTH_CLIENTS
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, openai.BadRequestError),
        (401, openai.InternalServerError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
    ],
)
async def test_a_refusal_is_raised_by_its_status(
    stack: Stack,
    asynchronous: bool,
    stream: bool,
    status: int,
    expected: type[openai.APIStatusError],
) -> None:
    """M1.2: with the message and the id of the request."""
    for _ in range(2 if stream and status == 400 else 1):  # M3.3: once more without our options
        stack.up.script(*json_answer({"error": {"message": "M"}}, status=status))
    sdk = Sdk(stack, V1, asynchronous=asynchronous)
    with pytest.raises(expected) as caught:
        await sdk.call("chat.completions.create", **_asked({"stream": stream}))
    assert (caught.value.request_id or "").startswith("req_")
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] in caught.value.message


@BOTH_CLIENTS
async def test_keys(stack: Stack, asynchronous: bool) -> None:
    """M1.2: 401 and 403 are what the SDK makes of them."""
    for key, expected in (
        ("no", openai.AuthenticationError),
        (SUSPENDED_KEY, openai.PermissionDeniedError),
    ):
        with pytest.raises(expected):
            await Sdk(stack, V1, asynchronous=asynchronous, key=key).call("models.list")


@BOTH_BASES
@BOTH_CLIENTS
async def test_a_plain_reply(stack: Stack, base: str, asynchronous: bool) -> None:
    """M1.1: one `chat.completion`."""
    stack.up.script(*json_answer(REPLY))
    sdk = Sdk(stack, base, asynchronous=asynchronous)
    reply = await sdk.call("chat.completions.create", **_asked({}))
    assert reply.choices[0].message.content == "Hi there"
    assert (reply.model, reply.usage.total_tokens) == (MODEL, 9)


@BOTH_BASES
@BOTH_CLIENTS
async def test_models(stack: Stack, base: str, asynchronous: bool) -> None:
    """M1.1: listed, and one by one with a slash in its name."""
    sdk = Sdk(stack, base, asynchronous=asynchronous)
    assert MODEL in [model.id for model in (await sdk.call("models.list")).data]
    assert (await sdk.call("models.retrieve", MODEL)).owned_by == "fake"
    with pytest.raises(openai.NotFoundError):
        await sdk.call("models.retrieve", "no/such")


@BOTH_CLIENTS
async def test_leaving_in_mid_stream(stack: Stack, asynchronous: bool) -> None:
    """M4.1: closing the SDK's stream closes the upstream's."""
    stack.up.script(Send(sse(A)), Wait(asyncio.Event()))
    sdk = Sdk(stack, V1, asynchronous=asynchronous)
    seen, error = await sdk.stream(leave_after=1)
    assert (len(seen), error) == (1, None)
    await (await stack.request()).wait_closed()


# --- Node -----------------------------------------------------------------------------------------


async def node(stack: Stack, base: str = V1, **payload: Any) -> dict[str, Any]:
    """What the Node SDK saw."""
    usual = {"baseURL": stack.gateway.base_url + base, "apiKey": KEY, "model": MODEL}
    return await run_node("stream.mjs", usual | payload)


@pytest.mark.node
@pytest.mark.parametrize(("base", "asked"), [(V1, False), (V1, True), (API_V1, True)])
async def test_node_streams(stack: Stack, base: str, asked: bool) -> None:
    """M2.1, M2.2, M2.4: as the Python SDK."""
    stack.up.script(Head(), *openai_stream(["Hel", "lo 🙂"]))
    seen = await node(stack, base, include_usage=asked)
    assert (seen["text"], seen["finish_reason"], seen["error"]) == ("Hello 🙂", "stop", None)
    assert (seen["models"], seen["providers"]) == ([MODEL], ["fake"])
    assert (seen["usage"] or {}).get("completion_tokens") == (2 if asked else None)


@pytest.mark.node
async def test_node_raises_and_leaves(stack: Stack) -> None:
    """M1.2, M3.4, M4.1: refusals, failures in mid-stream, and a client that aborts."""
    stack.up.script(*json_answer({"error": {"message": "M"}}, status=429))
    stack.up.script(Send(sse(A)), Rst())
    stack.up.script(Send(sse(A)), Wait(asyncio.Event()))
    stack.up.script(*json_answer(REPLY))
    refused = await node(stack)
    assert (refused["error"]["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    broken = await node(stack, API_V1)
    assert (broken["text"], broken["error"]["code"]) == ("a", "upstream_error")
    assert (await node(stack, abort_after=1))["chunks"] == 1
    await (await stack.request(2)).wait_closed()
    assert (await node(stack, stream=False))["text"] == "Hi there"


# --- curl -----------------------------------------------------------------------------------------


async def curl(stack: Stack, *options: str, base: str = V1) -> tuple[int, bytes]:
    """Its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sN", "--max-time", "20", *options),
        *("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"),
        *("-d", json.dumps(_asked({"stream": True}))),
        f"{stack.gateway.base_url}{base}/chat/completions",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out


@pytest.mark.parametrize("options", [[], ["--http1.0"], ["--compressed"], ["--http2"]])
async def test_curl_sees_a_proper_end(stack: Stack, options: list[str]) -> None:
    """M2.1, B45: exit code 0 after a complete stream, and after an error in-band."""
    for steps in (openai_stream(["Hi"]), [Send(sse(A)), Rst()], [Send(sse(A) + b"data: {\n\n")]):
        stack.up.script(*steps)
        code, out = await curl(stack, *options)
        assert code == 0
        assert out.endswith(DONE)
        assert out.count(DONE) == 1


async def test_curl_prints_each_event_when_it_comes(stack: Stack) -> None:
    """M2.1: nothing between the upstream and the terminal holds it back."""
    gate = asyncio.Event()
    stack.up.script(Send(sse(A)), Wait(gate), Send(DONE))
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sN", "-H", f"x-api-key: {KEY}", "-d", json.dumps(_asked({"stream": True}))),
        f"{stack.gateway.base_url}/v1/chat/completions",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(10):
        assert (await process.stdout.readline()).startswith(b"data: {")
        gate.set()
        assert (await process.stdout.read()).endswith(DONE)
        assert await process.wait() == 0
