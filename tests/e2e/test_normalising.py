"""M2.6, M2.7 through the process and the real SDK: odd providers, right calls, right money."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio

from relay.money import Source
from tests.support.assembled import assembled
from tests.support.books import Books, books_of
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, KEY, UPSTREAM_KEY, GatewayProcess, config_for
from tests.support.script import DONE, Fin, Head, Send, chunk, json_answer, sse
from tests.support.wire import chunks as chunks_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from openai.types.chat import ChatCompletion

    from tests.support.script import Step

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD: Final = "odd/m"  # both flags
COLLECTED: Final = "collected/m"  # and plain requests dialled as streams
PLAIN: Final = "fake/m"
MODELS: Final = (ODD, COLLECTED, PLAIN)
MESSAGES: Final[list[Any]] = [{"role": "user", "content": "p" * 40}]
USAGE: Final = {"prompt_tokens": 90, "completion_tokens": 30, "total_tokens": 120}
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"content": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
XML: Final = (
    '<tool_call>\n<function=write>\n<parameter=content>\nprint("é")\n</parameter>\n'
    "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
)
JSON_CALL: Final = '<tool_call>\n{"name": "get", "arguments": {"a": [1]}}\n</tool_call>'
ANSWER: Final = f"I will.\n{XML}\n{JSON_CALL}"
CALLS: Final = [("write", {"content": 'print("é")', "n": 5}), ("get", {"a": [1]})]


class Place:
    """A gateway, its fake provider and its books."""

    def __init__(self, up: FakeUpstream, gateway: GatewayProcess, books: Books) -> None:
        self.up = up
        self.gateway = gateway
        self._books = books
        self._seen: set[str] = set()

    @property
    def sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.gateway.base_url}/v1", api_key=KEY, max_retries=0
        )

    async def row(self) -> Any:
        """The row of the request that was made since the last call; there is this one."""
        rows = await self._books.rows(len(self._seen) + 1)
        (row,) = [row for row in rows if row.request_id not in self._seen]
        self._seen.add(row.request_id)
        return row


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    workdir: Path = tmp_path_factory.mktemp("normalising")
    async with FakeUpstream() as up:
        odd = {
            "shape": "openai", "base_url": up.base_url, "api_key": UPSTREAM_KEY,
            "cumulative_deltas": True, "inline_tool_calls": True, "reasoning": False,
        }  # fmt: skip
        config = config_for(up, providers={"odd": odd, "collected": odd | {"aggregate": True}})
        async with GatewayProcess(config, workdir=workdir) as gateway, books_of(workdir) as books:
            yield Place(up, gateway, books)


def stream(texts: Iterable[str], finish: str | None = "stop", *end: Step) -> list[Step]:
    """A stream of these contents, and its finish chunk."""
    sends: list[Step] = [
        Send(sse(chunk(text, role=None if number else "assistant")))
        for number, text in enumerate(texts)
    ]
    if finish:
        sends.append(Send(sse(chunk(None, finish_reason=finish, delta={}))))
    return [Head(), *sends, *(end or (Send(DONE),))]


def snapshots(answer: str, size: int = 7) -> list[str]:
    """All so far, with every chunk."""
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    return list(itertools.accumulate(pieces))


def calls_of(completion: ChatCompletion) -> list[tuple[str, Any]]:
    calls: Any = completion.choices[0].message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def test_the_sdk_reads_inline_calls_of_cumulative_deltas(place: Place) -> None:
    """M2.7 with both flags: the SDK's own accumulator finds calls, text and reason."""
    place.up.script(*stream(snapshots(ANSWER)))
    async with (
        place.sdk as sdk,
        sdk.chat.completions.stream(model=ODD, messages=MESSAGES, tools=TOOLS) as events,
    ):
        deltas = [e.delta async for e in events if e.type == "content.delta"]
        completion = await events.get_final_completion()
    assert "".join(deltas) == completion.choices[0].message.content == "I will."
    assert calls_of(completion) == CALLS
    assert completion.choices[0].finish_reason == "tool_calls"
    row = await place.row()
    assert (row.status, row.source) == (200, Source.COUNTED)
    assert row.completion_tokens == -(-len(ANSWER) // 4)  # once, and markers included


async def test_reported_usage_beats_counting(place: Place) -> None:
    usage = Send(sse(json.dumps({"choices": [], "usage": USAGE})))
    place.up.script(*stream(snapshots(ANSWER), "stop", usage, Send(DONE)))
    async with place.sdk as sdk:
        told = [
            part
            async for part in await sdk.chat.completions.create(
                model=ODD, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        ]
    assert told[-1].usage is not None
    assert told[-1].usage.completion_tokens == 30
    assert all(part.choices and part.usage is None for part in told[:-1])
    row = await place.row()
    assert (row.source, row.prompt_tokens, row.completion_tokens) == (Source.REPORTED, 90, 30)


@pytest.mark.parametrize("model", [ODD, COLLECTED])
async def test_a_plain_request_gets_the_same_calls(place: Place, model: str) -> None:
    """M1.1, M4.1: a whole reply, and one put together from a stream."""
    message = {"role": "assistant", "content": ANSWER}
    reply = {"id": "w", "object": "chat.completion", "created": 1, "model": "up", "choices": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = json_answer({**reply, "choices": [choice]})
    place.up.script(*(whole if model == ODD else stream(snapshots(ANSWER))))
    async with place.sdk as sdk:
        completion = await sdk.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS)
    assert completion.choices[0].message.content == "I will."
    assert calls_of(completion) == CALLS
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.model == model
    row = await place.row()
    assert row.completion_tokens == -(-len(ANSWER) // 4)


@pytest.mark.parametrize("cut", [len(XML) - 1, XML.index("é"), XML.index("5")])
async def test_a_call_cut_by_the_limit_is_not_dispatchable(place: Place, cut: int) -> None:
    place.up.script(*stream(snapshots(XML[:cut]), "length"))
    async with place.gateway.client() as client:
        body = {"model": ODD, "messages": MESSAGES, "stream": True, "tools": TOOLS}
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
        await client.read_all(timeout=20)
        (choice,) = assembled(chunks_of(client.body)).values()
    assert choice.reasons == ["length"]
    ((_, name, arguments),) = choice.calls
    assert name == "write"
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    await place.row()


async def test_what_is_withheld_comes_before_an_error(place: Place) -> None:
    """M3.4: a provider that dies in mid-call."""
    place.up.script(*stream(["Look: ", "Look: <tool_call>{"], None, Fin()))
    async with place.gateway.client() as client:
        body = {"model": ODD, "messages": MESSAGES, "stream": True}
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
        await client.read_all(timeout=20)
        *before, last = chunks_of(client.body)
    (choice,) = assembled(before).values()
    assert choice.content == "Look: <tool_call>{"
    assert last["error"]["code"] == "upstream_error"
    assert last["choices"][0]["finish_reason"] == "error"
    row = await place.row()
    assert (row.status, row.completion_tokens) == (502, -(-len("Look: <tool_call>{") // 4))


async def test_the_sdk_reads_healed_calls_of_any_provider(place: Place) -> None:
    """M2.6, without a flag: whole calls of index 0, one without arguments, no ids on fragments."""

    def calls(*entries: dict[str, Any]) -> Send:
        return Send(sse(chunk(None, delta={"tool_calls": list(entries)})))

    place.up.script(
        Head(),
        Send(sse(chunk("", role="assistant"))),
        calls({"id": "a", "function": {"name": "f", "arguments": '{"x"'}}),
        calls({"function": {"arguments": ":1}"}}),
        calls({"index": 0, "id": "b", "type": "function", "function": {"name": "g"}}),
        calls({"index": 0, "id": "b", "function": {"name": "g", "arguments": ""}}),
        Send(sse(chunk(None, finish_reason="tool_calls", delta={}))),
        Send(DONE),
    )
    async with (
        place.sdk as sdk,
        sdk.chat.completions.stream(model=PLAIN, messages=MESSAGES) as events,
    ):
        completion = await events.get_final_completion()
    assert calls_of(completion) == [("f", {"x": 1}), ("g", {})]
    await place.row()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streamed", [True, False])
async def test_reasoning_parameters_are_removed_where_the_deployment_takes_none(
    place: Place, model: str, streamed: bool
) -> None:
    """M2.7 `reasoning: false`: from the request of that provider, and from no other."""
    asked: dict[str, Any] = {
        "reasoning_effort": "high", "reasoning": {"max_tokens": 5}, "include_reasoning": True,
        "thinking": {"type": "enabled"}, "enable_thinking": True, "thinking_budget": 9,
        "reasoning_format": "parsed", "temperature": 0.5, "x_unknown": {"reasoning": 1},
    }  # fmt: skip
    message = {"role": "assistant", "content": "Hi"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = json_answer({"choices": [choice]})
    place.up.script(*(stream(["Hi"]) if streamed or model == COLLECTED else whole))
    async with place.gateway.client() as client:
        body = {"model": model, "messages": MESSAGES, "stream": streamed} | asked
        await client.request("POST", "/v1/chat/completions", headers=[AUTH], json=body)
        await client.read_all(timeout=20)
        assert client.status == 200
    sent = place.up.requests[-1].json
    kept = {"temperature", "x_unknown"}
    assert {key for key in asked if key in sent} == (set(asked) if model == PLAIN else kept)
    assert all(sent[key] == asked[key] for key in asked if key in sent)
    await place.row()
