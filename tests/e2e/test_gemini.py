"""M5, M2.3 to M2.6, M3.3, M3.4, M4.2 with an upstream that speaks the Gemini API."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio

from encoders.translator import CHOICES_MAX
from tests.support.books import books_of
from tests.support.fake_upstream import (
    Eof,
    FakeUpstream,
    Fin,
    Head,
    Rst,
    Send,
    Step,
    Wait,
    compact,
    json_answer,
    openai_stream,
)
from tests.support.gateway import KEY, GatewayProcess, config_for
from tests.support.stack import API_V1, V1, Stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET: Final = "AIzaSy-secret-0123456789"
SLUG: Final = "google/gemini"
ASKED: Final[dict[str, Any]] = {"stream_options": {"include_usage": True}}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
PATH: Final = "/v1beta/models/up-gemini-3"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(upstream: FakeUpstream) -> AsyncIterator[GatewayProcess]:
    config = config_for(upstream)
    google = {"shape": "gemini", "base_url": upstream.origin, "api_key": SECRET}
    config["providers"] |= {
        "google": google,
        "versioned": google | {"base_url": f"{upstream.origin}/v1alpha"},
        "aggregated": google | {"aggregate": True},
        "thoughtless": google | {"reasoning": False},
    }
    first, second = (
        {"provider": "google", "model": "up-gemini-3"},
        {"provider": "fake", "model": "up-gpt"},
    )
    config["models"] |= {
        SLUG: {"candidates": [first]},
        "gemini-then-gpt": {"candidates": [first, second]},
    }
    for number in range(3):  # who failed comes last for a while (M3.3): each failure has its own
        config["providers"][f"google-{number}"] = google
        first = {"provider": f"google-{number}", "model": "up-gemini-3"}
        second = {"provider": "fake", "model": f"up-gpt-{number}"}
        config["models"] |= {
            f"gemini-then-gpt-{number}": {"candidates": [first, second]},
            f"gpt-then-gemini-{number}": {"candidates": [second, first]},
        }
    async with GatewayProcess(config) as process:
        yield process


@pytest.fixture
def stack(upstream: FakeUpstream, gateway: GatewayProcess) -> Iterator[Stack]:
    stack = Stack(upstream, gateway)
    yield stack
    stack.check()


def response(
    *parts: dict[str, Any], finish: str | None = None, usage: dict[str, int] | None = None
) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return {
        "candidates": [candidate],
        "usageMetadata": usage or {"promptTokenCount": 8},
        "modelVersion": "up-gemini-3",
        "responseId": "resp_1",
    }


def sent(*responses: Any) -> bytes:
    """Events as Google frames them."""
    return b"".join(b"data: %s\r\n\r\n" % compact(item) for item in responses)


def call(name: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args}, **more}


HELLO: Final = (
    response({"text": "Hel"}, usage={"promptTokenCount": 8, "candidatesTokenCount": 1}),
    response({"text": "lo 🙂"}, usage={"promptTokenCount": 8, "candidatesTokenCount": 3}),
    response(
        finish="STOP",
        usage={"promptTokenCount": 8, "candidatesTokenCount": 4, "thoughtsTokenCount": 11},
    ),
)


# --- asked and answered ---------------------------------------------------------------------------


@pytest.mark.parametrize("base", [V1, API_V1])
async def test_a_stream(stack: Stack, base: str) -> None:
    """M2.2 to M2.5, B28; what the provider received (M5)."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    steps = [Send(sent(item)) for item in HELLO]
    answer = await stack.ask(
        *steps, base=base, model=SLUG, messages=said, temperature=1.5, max_tokens=50, user="u",
        **ASKED,
    )  # fmt: skip
    assert answer.text == "Hello 🙂"
    assert {(c["model"], c["provider"], c["id"]) for c in answer.chunks} == {
        (SLUG, "google", "resp_1")
    }
    deltas = [c["choices"][0]["delta"] for c in answer.chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    end = answer.chunks[-2]["choices"][0]
    assert (end["finish_reason"], end["native_finish_reason"]) == ("stop", "STOP")
    assert answer.chunks[-1]["choices"] == []
    assert answer.chunks[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 15,
        "total_tokens": 23,
        "completion_tokens_details": {"reasoning_tokens": 11},
    }
    assert all("usage" not in chunk for chunk in answer.chunks[:-1])
    request = await stack.request()
    assert (request.method, request.path) == ("POST", f"{PATH}:streamGenerateContent?alt=sse")
    assert request.headers["x-goog-api-key"] == SECRET
    assert "authorization" not in request.headers
    assert request.json == {
        "contents": [{"role": "user", "parts": [{"text": "Hi"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"temperature": 1.5, "maxOutputTokens": 50},
    }
    line = await stack.line(answer)
    assert (line["outcome"], line["prompt_tokens"], line["completion_tokens"]) == (
        "completed", 8, 15,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("tunedModels/a b", "tunedModels/a%20b"),
        ("odd/na%2Fme?é#", "models/odd%2Fna%252Fme%3F%C3%A9%23"),
        ("../x", "models/..%2Fx"),
    ],
)
async def test_a_base_url_with_a_version(stack: Stack, model: str, path: str) -> None:
    """And names that are no part of a path arrive as they are."""
    await stack.ask(Send(sent(*HELLO)), model=f"versioned/{model}")
    asked = await stack.request()
    assert asked.path == f"/v1alpha/{path}:streamGenerateContent?alt=sse"


WHOLE: Final = response(
    {"text": "Hm.", "thought": True},
    {"text": "Hello"},
    call("get_weather", {"city": "Zürich"}, thoughtSignature="SIG"),
    finish="STOP",
    usage={"promptTokenCount": 8, "candidatesTokenCount": 4, "totalTokenCount": 12},
)


@pytest.mark.parametrize(("base", "field"), [(V1, "reasoning_content"), (API_V1, "reasoning")])
async def test_a_plain_reply(stack: Stack, base: str, field: str) -> None:
    """M1.1, M2.6: through the same code."""
    answer = await stack.ask(*json_answer(WHOLE), base=base, model=SLUG, stream=False)
    reply = answer.json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hello"
    assert choice["message"][field] == "Hm."
    (made,) = choice["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"city": "Zürich"}
    assert made["extra_content"] == {"google": {"thought_signature": "SIG"}}
    assert (reply["model"], reply["provider"], reply["id"]) == (SLUG, "google", "resp_1")
    assert reply["usage"] == {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    assert (await stack.request()).path == f"{PATH}:generateContent"


async def test_a_plain_request_that_is_dialled_as_a_stream(stack: Stack) -> None:
    """M4.1."""
    steps = [Send(sent(item)) for item in HELLO]
    answer = await stack.ask(*steps, model="aggregated/x", stream=False)
    (choice,) = answer.json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello 🙂", "stop")
    assert answer.json["usage"]["completion_tokens"] == 15
    assert (await stack.request()).path.endswith(":streamGenerateContent?alt=sse")


@pytest.mark.parametrize("array", [True, False], ids=["a list", "one response"])
async def test_a_stream_that_came_as_json(stack: Stack, array: bool) -> None:
    """M3.2: a proxy lost `alt=sse`."""
    answer = await stack.ask(*json_answer(list(HELLO) if array else WHOLE), model=SLUG, **ASKED)
    assert answer.text == ("Hello 🙂" if array else "Hello")
    assert answer.chunks[-1]["usage"]["completion_tokens"] == (15 if array else 4)


async def test_parallel_calls_over_two_turns(stack: Stack) -> None:
    """B38, M2.6: what the client collects and sends back is what the provider said."""
    signed = call("get_weather", {"city": "Paris"}, thoughtSignature="c2ln+/==")
    steps = [
        Send(sent(response({"text": "Two cities.", "thought": True}))),
        Send(sent(response(signed), response(call("get_weather", {"city": "Å"})))),
        Send(sent(response(finish="STOP"))),
    ]
    client = openai.AsyncOpenAI(
        base_url=stack.gateway.base_url + V1, api_key=KEY, max_retries=0, timeout=20
    )
    question: Any = {"role": "user", "content": "Weather?"}
    tools: Any = [WEATHER]
    stack.up.script(*steps)
    async with (
        client,
        client.chat.completions.stream(
            model=SLUG, messages=[question], tools=tools, reasoning_effort="low"
        ) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    first, second = message.tool_calls
    assert first.id != second.id
    assert [json.loads(c.function.arguments) for c in (first, second)] == [
        {"city": "Paris"},
        {"city": "Å"},
    ]
    history = [
        question,
        message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": first.id, "content": '{"degrees":18}'},
        {"role": "tool", "tool_call_id": second.id, "content": "?"},
    ]
    await stack.ask(Send(sent(*HELLO)), model=SLUG, messages=history, tools=[WEATHER])
    asked, followed = [(await stack.request(number)).json for number in (0, 1)]
    assert asked["generationConfig"]["thinkingConfig"]["includeThoughts"] is True
    declared = asked["tools"][0]["functionDeclarations"]
    assert declared == [
        {"name": "get_weather", "parametersJsonSchema": {"type": "object", "properties": {}}}
    ]
    paris = {"id": first.id, "name": "get_weather", "args": {"city": "Paris"}}
    angstrom = {"id": second.id, "name": "get_weather", "args": {"city": "Å"}}
    assert followed["contents"][1:] == [
        {
            "role": "model",
            "parts": [
                {"functionCall": paris, "thoughtSignature": "c2ln+/=="},
                {"functionCall": angstrom},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": i, "name": "get_weather", "response": answer}}
                for i, answer in ((first.id, {"degrees": 18}), (second.id, {"result": "?"}))
            ],
        },
    ]


async def test_a_deployment_without_reasoning(stack: Stack) -> None:
    """M2.7."""
    await stack.ask(Send(sent(*HELLO)), model="thoughtless/x", reasoning_effort="high")
    assert "generationConfig" not in (await stack.request()).json


@pytest.mark.parametrize("stream", [True, False])
async def test_a_blocked_prompt(stack: Stack, stream: bool) -> None:
    """M2.5: an answer that was filtered, not a failure."""
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {}}
    steps = [Send(sent(blocked))] if stream else json_answer(blocked)
    answer = await stack.ask(*steps, model=SLUG, stream=stream)
    choice = (answer.chunks[-1] if stream else answer.json)["choices"][0]
    assert (choice["finish_reason"], choice["native_finish_reason"]) == (
        "content_filter", "SAFETY",
    )  # fmt: skip
    assert (await stack.line(answer))["outcome"] == "completed"


async def test_two_candidates(stack: Stack) -> None:
    """B86: each has its primer and its end."""
    both = {
        "candidates": [
            {"index": index, "content": {"parts": [{"text": word}]}, "finishReason": "STOP"}
            for index, word in enumerate(("a", "b"))
        ]
    }
    answer = await stack.ask(Send(sent(both)), model=SLUG, n=2)
    said = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    assert [c["index"] for c in said if "role" in c["delta"]] == [0, 1]
    assert [c["index"] for c in said if c["finish_reason"] == "stop"] == [0, 1]
    assert (await stack.request()).json["generationConfig"] == {"candidateCount": 2}


# --- what cannot be said --------------------------------------------------------------------------


async def test_a_request_without_words(stack: Stack) -> None:
    """M5: 400 with the field; nobody is asked. Another candidate may have the words."""
    said = [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]
    answer = await stack.ask(model=SLUG, messages=said)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["param"] == "messages.0.content.0.file.file_id"
    assert stack.requests == []
    answer = await stack.ask(*openai_stream(["ok"]), model="gemini-then-gpt", messages=said)
    assert (answer.text, answer.chunks[0]["provider"]) == ("ok", "fake")
    assert [request.path for request in stack.requests] == ["/v1/chat/completions"]


# --- failures -------------------------------------------------------------------------------------


def google_error(code: int, status: str, message: str, *details: dict[str, Any]) -> dict[str, Any]:
    error = {"code": code, "message": message, "status": status, "details": list(details)}
    return {"error": error}


BAD_KEY: Final = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}
RETRY: Final = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "29.5s"}
OVERLOADED: Final = google_error(503, "UNAVAILABLE", "The model is overloaded.")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (google_error(400, "INVALID_ARGUMENT", "bad topK"), (400, "INVALID_ARGUMENT")),
        (google_error(404, "NOT_FOUND", "no such model"), (404, "NOT_FOUND")),
        (
            google_error(400, "INVALID_ARGUMENT", f"API key {SECRET} not valid.", BAD_KEY),
            (502, "provider_credentials"),
        ),
        (google_error(403, "PERMISSION_DENIED", "blocked"), (502, "provider_credentials")),
        (
            google_error(429, "RESOURCE_EXHAUSTED", "quota", RETRY),
            (429, "rate_limit_exceeded"),
        ),
        (google_error(500, "INTERNAL", "oops"), (502, "upstream_error")),
        (google_error(503, "UNAVAILABLE", "busy", RETRY), (503, "upstream_unavailable")),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_refusals(
    stack: Stack, error: dict[str, Any], told: tuple[int, str], stream: bool
) -> None:
    """M1.2: a real status and OpenAI's envelope, the wait of the body, no secret."""
    status = error["error"]["code"]
    answer = await stack.ask(*json_answer([error], status=status), model=SLUG, stream=stream)
    assert (answer.status, answer.error["code"]) == told
    assert answer.header("retry-after") == ("30" if RETRY in error["error"]["details"] else None)
    assert SECRET.encode() not in answer.body
    assert SECRET not in stack.log


async def test_failover(stack: Stack) -> None:
    """M3.3: each is asked in its own words; Google's 400 for a bad key is no fault of the
    client's.
    """
    bad_key = google_error(400, "INVALID_ARGUMENT", "API key not valid.", BAD_KEY)
    for number, error in enumerate((bad_key, OVERLOADED)):
        slug = f"gemini-then-gpt-{number}"
        stack.up.script(*json_answer(error, status=error["error"]["code"]))
        answer = await stack.ask(*openai_stream(["ok"]), model=slug, tools=[WEATHER])
        assert (answer.text, answer.chunks[0]["provider"]) == ("ok", "fake")
        assert {chunk["model"] for chunk in answer.chunks} == {slug}
    assert stack.requests[1].json["tools"] == [WEATHER]
    assert stack.requests[1].headers["authorization"].startswith("Bearer ")
    assert "x-goog-api-key" not in stack.requests[1].headers
    stack.up.script(*json_answer({"error": {"message": "down"}}, status=500))
    answer = await stack.ask(Send(sent(*HELLO)), model="gpt-then-gemini-2")
    assert (answer.text, answer.chunks[0]["provider"]) == ("Hello 🙂", "google-2")
    refused = google_error(400, "INVALID_ARGUMENT", "bad topK")
    answer = await stack.ask(*json_answer(refused, status=400), model="gemini-then-gpt-2")
    assert (answer.status, answer.error["message"]) == (400, "bad topK")


async def test_an_error_with_status_200(stack: Stack) -> None:
    """M3.2: it has the status that it names."""
    for stream in (True, False):
        answer = await stack.ask(*json_answer([OVERLOADED]), model=SLUG, stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "upstream_unavailable")


@pytest.mark.parametrize("before", [0, 2, 3])
@pytest.mark.parametrize("wrapped", [True, False])
async def test_an_error_event(stack: Stack, before: int, wrapped: bool) -> None:
    """M3.4, B47, B54: in-band, whenever it comes; no usage behind it."""
    error = [OVERLOADED] if wrapped else OVERLOADED
    answer = await stack.ask(Send(sent(*HELLO[:before], error)), Eof(), model=SLUG, **ASKED)
    told = answer.in_band
    assert told["message"] == "google failed: The model is overloaded."
    assert told["metadata"]["provider_name"] == "google"
    assert not any(chunk.get("usage") for chunk in answer.chunks)
    assert (await stack.line(answer))["outcome"] == "upstream_error"


async def test_an_error_event_that_repeats_our_key(stack: Stack) -> None:
    """M3.4: and the key is never in a URL."""
    leak = google_error(400, "INVALID_ARGUMENT", f"bad key {SECRET}", BAD_KEY)
    answer = await stack.ask(Send(sent(HELLO[0], leak)), Eof(), model=SLUG)
    assert "bad key ***" in answer.in_band["message"]
    assert SECRET.encode() not in answer.body
    await stack.line(answer)
    assert SECRET not in stack.log
    assert SECRET not in (await stack.request()).path


@pytest.mark.parametrize("end", [Eof(), Fin(), Rst()])
async def test_a_stream_that_ends_too_early(stack: Stack, end: Step) -> None:
    """M3.4, B44: no reason to finish came."""
    answer = await stack.ask(Send(sent(*HELLO[:2])), end, model=SLUG, **ASKED)
    assert answer.in_band["code"] == "upstream_error"
    reasons = [c["finish_reason"] for k in answer.chunks for c in k["choices"]]
    assert [reason for reason in reasons if reason] == ["error"]
    assert (await stack.line(answer))["error_code"] == "upstream_error"


@pytest.mark.parametrize("end", [Eof(), Fin(), Rst()])
async def test_a_death_behind_the_answer_takes_nothing_from_it(stack: Stack, end: Step) -> None:
    """M3.4."""
    answer = await stack.ask(Send(sent(*HELLO)), end, model=SLUG, **ASKED)
    assert answer.text == "Hello 🙂"
    assert answer.chunks[-1]["usage"]["total_tokens"] == 23


@pytest.mark.parametrize("body", [b"", sent({"usageMetadata": {"promptTokenCount": 8}}), sent({})])
async def test_a_stream_without_an_answer(stack: Stack, body: bytes) -> None:
    """M3.4."""
    answer = await stack.ask(Head(), Send(body), Eof(), model=SLUG)
    assert answer.in_band["code"] == "upstream_error"


# --- money ----------------------------------------------------------------------------------------


async def test_a_hang_up_is_billed_by_the_last_usage(stack: Stack) -> None:
    """M4.1, M4.2, B28: closed at once; the counts as far as they were told."""
    gate = asyncio.Event()
    steps: list[Step] = [Send(sent(*HELLO[:2])), Wait(gate), Send(sent(HELLO[2]))]
    async with stack.client(*steps, model=SLUG) as client:
        await client.read_until(lambda c: b"lo \xf0\x9f\x99\x82" in c.body)
        request_id = next(v for k, v in client.headers if k.lower() == "x-request-id")
        client.reset()
    await (await stack.request()).wait_closed()
    async with books_of(stack.gateway.workdir) as books:
        rows = {row.request_id: row for row in await books.settled()}
    row = rows[request_id]
    assert (row.status, row.error_code, row.provider) == (499, "client_abort", "google")
    assert (row.prompt_tokens, row.completion_tokens) == (8, 3)


async def test_usage_without_output_counts_what_was_streamed(stack: Stack) -> None:
    """M4.2: the prompt as reported, the output by its characters, arguments included."""
    said = response({"text": "x" * 40}, call("f", {"a": "y" * 32}))
    answer = await stack.ask(Send(sent(said)), Rst(), model=SLUG)
    assert answer.in_band
    await stack.line(answer)
    async with books_of(stack.gateway.workdir) as books:
        rows = {row.request_id: row for row in await books.settled()}
    row = rows[str(answer.header("x-request-id"))]
    assert (row.prompt_tokens, row.completion_tokens) == (8, 20)  # 40 + len('{"a":"yy…"}') = 80
    assert (row.status, row.error_code) == (502, "upstream_error")


async def test_a_plain_reply_of_more_than_is_kept_is_the_providers_fault(stack: Stack) -> None:
    """M3.5, M1.2: what is remembered of an answer is bounded; that is no fault of ours."""
    candidate = {"content": {"parts": [{"text": "a"}]}, "finishReason": "STOP"}
    reply = json_answer({"candidates": [candidate] * (CHOICES_MAX + 1)})
    answer = await stack.ask(*reply, model="google/many", stream=False)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
