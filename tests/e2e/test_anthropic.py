"""M5, M2.3 to M2.6, M3.4, M4.2 with an upstream that speaks the Messages API."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from tests.support.books import books_of
from tests.support.fake_upstream import (
    Eof,
    FakeUpstream,
    Fin,
    Rst,
    Send,
    Step,
    Wait,
    compact,
    json_answer,
    openai_stream,
)
from tests.support.gateway import GatewayProcess, config_for
from tests.support.stack import API_V1, V1, Stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET: Final = "sk-ant-secret-0123456789"
BETA: Final = "context-1m-2025-08-07"
SLUG: Final = "anthropic/claude"
USAGE: Final = {"input_tokens": 1, "cache_read_input_tokens": 31, "output_tokens": 1}
ASKED: Final[dict[str, Any]] = {"stream_options": {"include_usage": True}}
WEATHER: Final = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(upstream: FakeUpstream) -> AsyncIterator[GatewayProcess]:
    config = config_for(upstream)
    claude = {
        "shape": "anthropic",
        "base_url": upstream.origin,
        "api_key": SECRET,
        "headers": {"anthropic-beta": BETA},
    }
    config["providers"] |= {
        "claude": claude,
        "aggregated": claude | {"aggregate": True},
        "thoughtless": claude | {"reasoning": False},
    }
    first, second = (
        {"provider": "claude", "model": "up-claude"},
        {"provider": "fake", "model": "up-gpt"},
    )
    config["models"] |= {
        SLUG: {"candidates": [first]},
        "claude-then-gpt": {"candidates": [first, second]},
    }
    for number in range(3):  # who failed comes last for a while (M3.3): each failure has its own
        config["providers"][f"claude-{number}"] = claude
        first = {"provider": f"claude-{number}", "model": "up-claude"}
        second = {"provider": "fake", "model": f"up-gpt-{number}"}
        config["models"] |= {
            f"claude-then-gpt-{number}": {"candidates": [first, second]},
            f"gpt-then-claude-{number}": {"candidates": [second, first]},
        }
    async with GatewayProcess(config) as process:
        yield process


@pytest.fixture
def stack(upstream: FakeUpstream, gateway: GatewayProcess) -> Iterator[Stack]:
    stack = Stack(upstream, gateway)
    yield stack
    stack.check()


def event(kind: str, **fields: Any) -> bytes:
    """One event as the API frames it."""
    data = compact({"type": kind, **fields})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def block(index: int, first: dict[str, Any], *deltas: dict[str, Any]) -> bytes:
    return b"".join(
        [
            event("content_block_start", index=index, content_block=first),
            *(event("content_block_delta", index=index, delta=delta) for delta in deltas),
            event("content_block_stop", index=index),
        ]
    )


def text(index: int, *pieces: str) -> bytes:
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
    return block(index, {"type": "text", "text": ""}, *deltas)


def tool(index: int, call_id: str, *pieces: str) -> bytes:
    first = {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return block(index, first, *deltas)


START: Final = event("message_start", message={"id": "msg_1", "content": [], "usage": USAGE})
PING: Final = event("ping")
ERROR: Final = event("error", error={"type": "overloaded_error", "message": "Overloaded"})


def end(reason: str = "end_turn", output: int = 15) -> bytes:
    delta = {"stop_reason": reason, "stop_sequence": None}
    usage = event("message_delta", delta=delta, usage={"output_tokens": output})
    return usage + event("message_stop")


def answer_of(*body: bytes) -> list[Step]:
    return [Send(START), *map(Send, body)]


# --- asked and answered ---------------------------------------------------------------------------


@pytest.mark.parametrize("base", [V1, API_V1])
async def test_a_stream(stack: Stack, base: str) -> None:
    """M2.2 to M2.4; what the provider received (M5); B29 and cached tokens."""
    steps = answer_of(PING, text(0, "Hel", "lo 🙂"), PING, end())
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answer = await stack.ask(
        *steps, base=base, model=SLUG, messages=said, temperature=1.5, seed=7, **ASKED
    )
    assert answer.text == "Hello 🙂"
    assert {(c["model"], c["provider"], c["id"]) for c in answer.chunks} == {
        (SLUG, "claude", "msg_1")
    }
    roles = [c["choices"][0]["delta"].get("role") for c in answer.chunks[:-1]]
    assert roles == ["assistant", *[None] * (len(roles) - 1)]
    assert answer.chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert answer.chunks[-1]["choices"] == []
    assert answer.chunks[-1]["usage"] == {
        "prompt_tokens": 32,
        "completion_tokens": 15,
        "total_tokens": 47,
        "prompt_tokens_details": {"cached_tokens": 31},
    }
    request = await stack.request()
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert request.headers["x-api-key"] == SECRET
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert request.headers["anthropic-beta"] == BETA
    assert "authorization" not in request.headers
    assert request.json == {
        "model": "up-claude",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": "Hi"}],
        "system": "Be brief.",
        "temperature": 1,
        "stream": True,
    }
    line = await stack.line(answer)
    assert (line["outcome"], line["prompt_tokens"], line["completion_tokens"]) == (
        "completed", 32, 15,
    )  # fmt: skip


MESSAGE: Final = {
    "id": "msg_2",
    "type": "message",
    "role": "assistant",
    "model": "up-claude",
    "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "sig"},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
    ],
    "stop_reason": "tool_use",
    "usage": USAGE | {"output_tokens": 9},
}


@pytest.mark.parametrize(("base", "field"), [(V1, "reasoning_content"), (API_V1, "reasoning")])
async def test_a_plain_reply(stack: Stack, base: str, field: str) -> None:
    """M1.1, M2.6: through the same code."""
    answer = await stack.ask(*json_answer(MESSAGE), base=base, model=SLUG, stream=False)
    reply = answer.json
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hello"
    assert choice["message"][field] == "Hm."
    assert choice["message"]["reasoning_details"][0]["signature"] == "sig"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert (reply["model"], reply["provider"], reply["id"]) == (SLUG, "claude", "msg_2")
    assert reply["usage"]["total_tokens"] == 41
    assert "stream" not in (await stack.request()).json


async def test_a_plain_request_that_is_dialled_as_a_stream(stack: Stack) -> None:
    """M4.1."""
    answer = await stack.ask(
        *answer_of(tool(0, "toolu_1", '{"city":', '"Å"}'), end("tool_use")),
        model="aggregated/x",
        stream=False,
    )
    (choice,) = answer.json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("toolu_1", {"city": "Å"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert (await stack.request()).json["stream"] is True


async def test_a_whole_reply_to_a_streaming_request(stack: Stack) -> None:
    """M3.2."""
    answer = await stack.ask(*json_answer(MESSAGE), model=SLUG)
    assert answer.text == "Hello"
    assert answer.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_tools_and_thinking_over_two_turns(stack: Stack) -> None:
    """M2.6, M5: what the client collects from the stream and sends back is what the API signed."""
    thought = block(
        0,
        {"type": "thinking", "thinking": ""},
        {"type": "thinking_delta", "thinking": "Two "},
        {"type": "thinking_delta", "thinking": "cities."},
        {"type": "signature_delta", "signature": "c2ln+/=="},
    )
    hidden = block(1, {"type": "redacted_thinking", "data": "ZGF0YQ=="})
    calls = tool(2, "toolu_a", "", '{"city"', ': "Paris"}') + tool(3, "toolu_b")
    ask: dict[str, Any] = {"tools": [WEATHER], "model": SLUG, "reasoning_effort": "high"}
    answer = await stack.ask(*answer_of(thought + hidden + calls, end("tool_use")), **ask)
    first = (await stack.request()).json
    assert first["thinking"] == {"type": "enabled", "budget_tokens": 3276}
    assert [t["name"] for t in first["tools"]] == ["get_weather"]
    deltas = [chunk["choices"][0]["delta"] for chunk in answer.chunks]
    details = [entry for delta in deltas for entry in delta.get("reasoning_details", ())]
    made: dict[int, dict[str, Any]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        call = made.setdefault(part["index"], {**part, "function": {**part["function"]}})
        if call is not part and "id" not in part:
            call["function"]["arguments"] += part["function"]["arguments"]
    assert [call["function"]["arguments"] for call in made.values()] == ['{"city": "Paris"}', "{}"]
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_details": details,
            "tool_calls": list(made.values()),
        },
        {"role": "tool", "tool_call_id": "toolu_a", "content": "18 C"},
        {"role": "tool", "tool_call_id": "toolu_b", "content": "?"},
    ]
    await stack.ask(*answer_of(text(0, "18 C"), end()), messages=history, **ask)
    assert (await stack.request(1)).json["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two cities.", "signature": "c2ln+/=="},
                {"type": "redacted_thinking", "data": "ZGF0YQ=="},
                {
                    "type": "tool_use",
                    "id": "toolu_a",
                    "name": "get_weather",
                    "input": {"city": "Paris"},
                },
                {"type": "tool_use", "id": "toolu_b", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_a", "content": "18 C"},
                {"type": "tool_result", "tool_use_id": "toolu_b", "content": "?"},
            ],
        },
    ]


async def test_a_deployment_without_reasoning(stack: Stack) -> None:
    """M2.7."""
    await stack.ask(*answer_of(end()), model="thoughtless/x", reasoning_effort="high")
    assert "thinking" not in (await stack.request()).json


# --- what cannot be said --------------------------------------------------------------------------


async def test_a_request_without_words(stack: Stack) -> None:
    """M5: 400 with the field; nobody is asked."""
    audio = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    said = [{"role": "user", "content": audio}]
    for fields, param in (({"n": 2}, "n"), ({"messages": said}, "messages.0.content.0")):
        answer = await stack.ask(model=SLUG, **fields)
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert answer.error["param"] == param
    assert stack.requests == []
    answer = await stack.ask(*openai_stream(["ok"]), model="claude-then-gpt", messages=said)
    assert (answer.text, answer.chunks[0]["provider"]) == ("ok", "fake")
    assert [request.path for request in stack.requests] == ["/v1/chat/completions"]


# --- failures -------------------------------------------------------------------------------------


def refusal(status: int, kind: str, message: str, **headers: str) -> list[Step]:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return json_answer(body, status=status, **headers)


@pytest.mark.parametrize(
    ("status", "kind", "message", "told"),
    [
        (400, "invalid_request_error", "max_tokens: too large", (400, "invalid_request")),
        (404, "not_found_error", "model: up-claude", (404, "model_not_found")),
        (413, "request_too_large", "too large", (413, "invalid_request")),
        (401, "authentication_error", f"invalid {SECRET}", (502, "provider_credentials")),
        (400, "invalid_request_error", "Your credit balance is too low to access the API",
         (502, "provider_credentials")),
        (429, "rate_limit_error", "slow", (429, "rate_limit_exceeded")),
        (529, "overloaded_error", "Overloaded", (503, "upstream_unavailable")),
        (500, "api_error", "Internal", (502, "upstream_error")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_refusals(
    stack: Stack, status: int, kind: str, message: str, told: tuple[int, str], stream: bool
) -> None:
    """M1.2: a real status and OpenAI's envelope, Retry-After and no secret."""
    retry = {"retry_after": "30"} if status in (429, 529) else {}
    answer = await stack.ask(*refusal(status, kind, message, **retry), model=SLUG, stream=stream)
    assert (answer.status, answer.error["code"]) == told
    assert answer.header("retry-after") == ("30" if retry else None)
    assert SECRET.encode() not in answer.body
    if told[1] in ("invalid_request", "model_not_found"):
        assert (answer.error["message"], answer.error["type"]) == (message, kind)


async def test_an_error_with_status_200(stack: Stack) -> None:
    """M3.2: it has the status that its type means."""
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    for stream in (True, False):
        answer = await stack.ask(*json_answer(body), model=SLUG, stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "upstream_unavailable")


@pytest.mark.parametrize("sent", [b"", START, START + text(0, "Hel", "lo")])
async def test_an_error_event(stack: Stack, sent: bytes) -> None:
    """M3.4, B47, B49: in-band, no success beside it, whenever it comes."""
    answer = await stack.ask(Send(sent + ERROR), Send(end()), Eof(), model=SLUG, **ASKED)
    error = answer.in_band
    assert "Overloaded" in error["message"]
    assert error["metadata"]["provider_name"] == "claude"
    assert error["metadata"]["raw"]["error"]["type"] == "overloaded_error"
    assert not any(chunk.get("usage") for chunk in answer.chunks)
    reasons = {c["choices"][0]["finish_reason"] for c in answer.chunks} - {None}
    assert reasons == {"error"}
    assert (await stack.line(answer))["outcome"] == "upstream_error"


async def test_an_error_event_that_repeats_our_key(stack: Stack) -> None:
    """M3.4."""
    leak = event("error", error={"type": "api_error", "message": f"bad header {SECRET} {BETA}"})
    answer = await stack.ask(Send(START + text(0, "a") + leak), Eof(), model=SLUG)
    assert "bad header" in answer.in_band["message"]
    assert SECRET.encode() not in answer.body
    assert BETA.encode() not in answer.body
    assert SECRET not in stack.log


@pytest.mark.parametrize("end_step", [Eof(), Fin(), Rst()])
async def test_a_stream_that_ends_too_early(stack: Stack, end_step: Step) -> None:
    """M3.4, B44: also in the middle of a call, which is not completed."""
    start = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    cut = event("content_block_start", index=0, content_block=start)
    answer = await stack.ask(Send(START + cut), end_step, model=SLUG)
    assert answer.in_band["code"] == "upstream_error"
    parts = [p for c in answer.chunks for p in c["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == ""
    assert (await stack.line(answer))["outcome"] in ("truncated", "upstream_error")


async def test_an_end_without_message_stop(stack: Stack) -> None:
    """M3.4, B21: the reason was told, so nothing is missing."""
    whole = end().partition(b"event: message_stop")[0]
    answer = await stack.ask(Send(START + text(0, "a") + whole), Eof(), model=SLUG, **ASKED)
    assert answer.text == "a"
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 15


async def test_failover_from_one_shape_to_the_other(stack: Stack) -> None:
    """M3.3, M5: each is asked in its own words, and answers in OpenAI's."""
    body: dict[str, Any] = {"max_completion_tokens": 7, "tools": [WEATHER], "stop": "x"}
    stack.up.script(*refusal(529, "overloaded_error", "Overloaded"))
    answer = await stack.ask(*openai_stream(["from gpt"]), model="claude-then-gpt-0", **body)
    assert (answer.text, answer.chunks[0]["provider"]) == ("from gpt", "fake")
    first, second = stack.requests
    assert (first.path, second.path) == ("/v1/messages", "/v1/chat/completions")
    assert (first.json["max_tokens"], first.json["stop_sequences"]) == (7, ["x"])
    assert second.json["max_completion_tokens"] == 7
    assert second.json["tools"] == [WEATHER]
    assert second.headers["authorization"].startswith("Bearer ")
    assert "x-api-key" not in second.headers
    credit = refusal(400, "invalid_request_error", "Your credit balance is too low")
    stack.up.script(*credit)
    answer = await stack.ask(*openai_stream(["ok"]), model="claude-then-gpt-1")
    assert answer.chunks[0]["provider"] == "fake"
    assert {chunk["model"] for chunk in answer.chunks} == {"claude-then-gpt-1"}


async def test_failover_to_the_messages_api(stack: Stack) -> None:
    stack.up.script(*json_answer({"error": {"message": "down"}}, status=500))
    answer = await stack.ask(*answer_of(text(0, "from claude"), end()), model="gpt-then-claude-2")
    assert (answer.text, answer.chunks[0]["provider"]) == ("from claude", "claude-2")
    assert {chunk["model"] for chunk in answer.chunks} == {"gpt-then-claude-2"}


# --- money ----------------------------------------------------------------------------------------


async def test_a_hang_up_is_billed_by_what_was_streamed(stack: Stack) -> None:
    """M4.1, M4.2: not by the first guess of `message_start`; the prompt as it reported it."""
    gate = asyncio.Event()
    pieces = block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "a" * 40})
    steps: list[Step] = [Send(START + pieces), Wait(gate), Send(end())]
    async with stack.client(*steps, model=SLUG) as client:
        await client.read_until(lambda c: b"a" * 40 in c.body)
        request_id = next(v for k, v in client.headers if k.lower() == "x-request-id")
        client.reset()
    await (await stack.request()).wait_closed()
    async with books_of(stack.gateway.workdir) as books:
        rows = {row.request_id: row for row in await books.settled()}
    row = rows[request_id]
    assert (row.status, row.error_code) == (499, "client_abort")
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (32, 31, 10)
    assert row.provider == "claude"
