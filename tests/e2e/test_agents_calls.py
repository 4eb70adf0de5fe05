"""W3.4: calls of agents through a gateway's real relay, its store and a scripted provider."""

from __future__ import annotations

import asyncio
import io
import time
from typing import TYPE_CHECKING, Any

import pytest

from relay.agents import asking
from relay.agents.base import AgentError
from relay.errors import GatewayShutdown
from relay.money import Source
from tests.support.agents import Sink, agents_on, call_lines, logging_to
from tests.support.collector import Collector
from tests.support.fake_upstream import (
    DONE,
    FakeUpstream,
    Flood,
    Head,
    Rst,
    Send,
    Wait,
    chunk,
    json_answer,
    sse,
)
from tests.support.gateway import MODEL, UPSTREAM_MODEL
from tests.support.metrics import Scrape
from tests.support.shapes import EVERY_SHAPE, PROMPT_TOKENS, provider_of, script_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

ONE: dict[str, Any] = {"model": MODEL, "system": "Be brief.", "parameters": {"temperature": 0}}


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the gateway logs, as JSON."""
    out = io.StringIO()
    with logging_to(out):
        yield out


def ended_early(*words: str) -> list[Send]:
    """An answer that stands still after these words."""
    return [Send(sse(chunk(word))) for word in words]


@EVERY_SHAPE
async def test_each_shape_is_text_usage_and_a_row(
    shape: str, up: FakeUpstream, tmp_path: Path
) -> None:
    providers = {"fake": provider_of(shape, up)}
    price = {"prompt_usd_per_mtok": 1000, "completion_usd_per_mtok": 1000}
    models = {MODEL: {"price": price}}
    async with agents_on(
        up, tmp_path, providers=providers, models=models, agents={"one": ONE}
    ) as stack:
        up.script(*script_for(shape, words=["Hel", "lo", ' "you"\n']))
        sink = Sink()
        reply = await stack.call("one", sink, call_id="exec.t1.1", plane="agents")
        assert reply.text == sink.whole == 'Hello "you"\n'
        assert sink.starts == [(MODEL, "fake")]
        assert (reply.finish_reason, reply.model, reply.provider) == ("stop", MODEL, "fake")
        assert reply.reported
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (PROMPT_TOKENS, 3)
        assert reply.usage.cost_micro_usd == (PROMPT_TOKENS + 3) * 1000
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert (row.request_id, row.plane, row.model) == ("exec.t1.1", "agents", MODEL)
    assert (row.status, row.error_code, row.source) == (200, None, Source.REPORTED)
    assert (row.org, row.key_id) == ("test", "key_test")
    assert row.cost_micro_usd == reply.usage.cost_micro_usd


async def test_what_a_model_is_asked(up: FakeUpstream, tmp_path: Path) -> None:
    agents = {"one": {**ONE, "max_tokens": 50}}
    async with agents_on(up, tmp_path, agents=agents) as stack:
        for _ in range(2):
            up.script(*script_for("openai", words=["x"]))
        await stack.call("one", overrides={"temperature": 1, "n": 4, "tools": [{}], "model": "m"})
        await stack.call("one", max_tokens=7)
    first, second = [request.json for request in up.requests]
    assert first == {
        "temperature": 1,
        "max_tokens": 50,
        "model": UPSTREAM_MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Say hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (second["temperature"], second["max_tokens"]) == (0, 7)


async def test_another_candidate_takes_over_inside_a_call(
    up: FakeUpstream, tmp_path: Path, log: io.StringIO
) -> None:
    candidates = [
        {"provider": "fake", "model": "broken"},
        {"provider": "fake", "model": "sound"},
    ]
    async with agents_on(up, tmp_path, agents={"one": {"candidates": candidates}}) as stack:
        assert stack.caller.agents() == {"one": "fake/broken"}
        up.script_for("broken", *json_answer({"error": {"message": "no"}}, status=503))
        up.script_for("sound", *script_for("openai", words=["ok"]))
        sink = Sink()
        reply = await stack.call("one", sink, call_id="c", plane="workflows")
        assert (reply.text, reply.model) == ("ok", "fake/sound")
        assert sink.starts == [("fake/sound", "fake")]
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert [line.partition(":")[0] for line in row.attempts] == ["fake/broken", "fake/sound"]
    (line,) = call_lines(log)
    assert (line["request_id"], line["agent"], line["plane"]) == ("c", "one", "workflows")
    assert (line["status"], line["outcome"], line["level"]) == (200, "completed", "info")
    assert len(line["attempts"]) == 2


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (429, "rate_limit_exceeded", True),
        (500, "upstream_error", True),
        (503, "upstream_unavailable", True),
        (400, "invalid_request", False),
        (401, "provider_credentials", False),
    ],
)
async def test_refusals(
    status: int, code: str, retryable: bool, up: FakeUpstream, tmp_path: Path
) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        answer = json_answer({"error": {"message": "no"}}, status=status, **{"retry-after": "9"})
        for _ in range(2):
            up.script(*answer)
        sink = Sink()
        with pytest.raises(AgentError) as caught:
            await stack.call("one", sink)
        up.forget()
    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert caught.value.retry_after_s == (9 if status in (429, 503) else None)
    assert caught.value.usage.cost_micro_usd == 0
    assert sink.starts == []


async def test_a_stream_that_dies_is_told_with_what_it_used(
    up: FakeUpstream, tmp_path: Path
) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*ended_early("Hel", "lo"), Rst())
        sink = Sink()
        with pytest.raises(AgentError) as caught:
            await stack.call("one", sink)
        assert sink.whole == "Hello"
        assert (caught.value.code, caught.value.retryable) == ("upstream_error", True)
        assert caught.value.usage.completion_tokens == 2  # 5 characters
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert (row.status, row.error_code, row.completion_tokens) == (502, "upstream_error", 2)


async def test_an_error_in_the_stream(up: FakeUpstream, tmp_path: Path) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*ended_early("Hel"), Send(sse(b'{"error":{"message":"slow down","code":429}}')))
        with pytest.raises(AgentError) as caught:
            await stack.call("one")
    assert "slow down" in caught.value.message
    assert (caught.value.code, caught.value.retryable) == ("upstream_error", True)


async def test_a_cancellation_closes_the_provider_and_settles(
    up: FakeUpstream, tmp_path: Path, log: io.StringIO
) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*ended_early("Hel", "lo"), Wait(asyncio.Event()))
        sink = Sink()
        task = asyncio.create_task(stack.call("one", sink))
        async with asyncio.timeout(5):
            while sink.whole != "Hello":
                await asyncio.sleep(0.01)
        cancelled_at = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closed_at = await up.requests[0].wait_closed()
        assert closed_at - cancelled_at < 1.0
        async with stack.books() as books:
            (row,) = await books.rows(1)
        assert stack.gateway.billing.open_holds == 0
    assert (row.status, row.error_code, row.source) == (499, "client_abort", Source.COUNTED)
    assert row.completion_tokens == 2
    (line,) = call_lines(log)
    assert (line["status"], line["outcome"]) == (499, "client_abort")


async def test_a_cancellation_before_the_status(up: FakeUpstream, tmp_path: Path) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(Wait(asyncio.Event()), Head())
        task = asyncio.create_task(stack.call("one"))
        request = await up.request(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await request.wait_closed(timeout=1.0)
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert (row.status, row.error_code, row.completion_tokens) == (499, "client_abort", 0)


async def test_a_sink_that_is_full_stops_the_reading(tmp_path: Path) -> None:
    block = sse(chunk("x" * 1000)) * 30
    end = [Send(sse(chunk(None, finish_reason="stop"))), Send(DONE)]
    async with (
        FakeUpstream(sndbuf=16 * 1024) as up,
        agents_on(up, tmp_path, agents={"one": ONE}) as stack,
    ):
        up.script(Flood(block, 100), *end)
        sink = Sink()
        sink.open.clear()
        task = asyncio.create_task(stack.call("one", sink))
        async with asyncio.timeout(5):
            while not sink.waits:
                await asyncio.sleep(0.01)
        at = len(sink.raws)
        await asyncio.sleep(0.3)
        assert len(sink.raws) == at, "something came while it could take no more"
        assert up.requests[0].bytes_written < 1_000_000
        sink.open.set()
        reply = await task
    assert len(reply.text) == 3_000_000
    assert reply.text == sink.whole


async def test_an_empty_stop_at_the_limit_is_asked_once_more(
    up: FakeUpstream, tmp_path: Path
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    empty = [
        Send(sse(chunk(None, delta={"role": "assistant", "content": ""}))),
        Send(sse(chunk(None, finish_reason="length"))),
        Send(sse(chunk(None, choices=[], usage=usage))),
        Send(DONE),
    ]
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*empty)
        up.script(*script_for("openai", words=["at", "last"]))
        sink = Sink()
        reply = await stack.call("one", sink, call_id="c")
        assert (reply.text, reply.finish_reason) == ("atlast", "stop")
        assert reply.usage.completion_tokens == 4 + 2
        assert len(sink.starts) == 1
        up.script(*empty)
        up.script(*empty)
        with pytest.raises(AgentError) as caught:
            await stack.call("one", call_id="d")
        assert (caught.value.code, caught.value.retryable) == ("empty_reply", False)
        assert caught.value.usage.completion_tokens == 8
        async with stack.books() as books:
            rows = await books.rows(4)
    assert {row.request_id for row in rows} == {"c", "c/2", "d", "d/2"}


async def test_reasoning_is_no_content(up: FakeUpstream, tmp_path: Path) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        thought = [Send(sse(chunk(None, delta={"reasoning_content": "hm"}))) for _ in range(3)]
        up.script(*thought, *script_for("openai", words=["yes"]))
        assert (await stack.call("one")).text == "yes"


async def test_credits(up: FakeUpstream, tmp_path: Path) -> None:
    price = {"prompt_usd_per_mtok": 1_000_000, "completion_usd_per_mtok": 1_000_000}
    async with agents_on(
        up,
        tmp_path,
        keys=[{"key": "ozk_test_0123456789abcdef", "org": "test", "balance_usd": 0.01}],
        models={MODEL: {"price": price}},
        agents={"one": ONE},
    ) as stack:
        with pytest.raises(AgentError) as caught:
            await stack.call("one")
        assert stack.gateway.billing.open_holds == 0
    assert (caught.value.code, caught.value.retryable) == ("insufficient_credits", False)
    assert up.requests == []


async def test_who_is_not_there(up: FakeUpstream, tmp_path: Path) -> None:
    off = {"shape": "openai", "base_url": "https://example.invalid/v1", "api_key": ""}
    agents = {"one": ONE, "off": {"model": "dark/model"}}
    async with agents_on(up, tmp_path, providers={"dark": off}, agents=agents) as stack:
        assert stack.caller.agents() == {"one": MODEL}
        for agent, more, code in (
            ("nobody", dict[str, Any](), "agent_not_found"),
            ("off", {}, "model_not_found"),
            ("one", {"model": "nothing/here"}, "model_not_found"),
            ("one", {"provider": "nobody"}, "model_not_found"),
        ):
            with pytest.raises(AgentError) as caught:
                await stack.call(agent, Sink(), **more)
            assert (caught.value.code, caught.value.retryable) == (code, False)


async def test_the_default_model_of_a_provider(up: FakeUpstream, tmp_path: Path) -> None:
    agents = {"one": {"provider": "fake"}}
    async with agents_on(up, tmp_path, agents=agents) as stack:
        assert stack.caller.agents() == {"one": "fake/default"}
        up.script(*json_answer({"status": "ok", "default_model": "own-model"}))
        up.script_for("own-model", *script_for("openai", words=["hi"]))
        sink = Sink()
        replies = [await stack.call("one", sink) for _ in range(2)]
        assert [reply.model for reply in replies] == ["fake/own-model"] * 2
        assert stack.caller.agents() == {"one": "fake/own-model"}
    assert [request.path for request in up.requests] == [
        "/v1/health",
        "/v1/chat/completions",
        "/v1/chat/completions",
    ]


async def test_a_provider_without_health_serves_its_default(
    up: FakeUpstream, tmp_path: Path
) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(Head(status=404))
        up.script_for("default", *script_for("openai", words=["hi"]))
        reply = await stack.call("one", provider="fake")
    assert reply.model == "fake/default"


async def test_recorded_transcripts_serve_an_agent(up: FakeUpstream, tmp_path: Path) -> None:
    """The default of `replay` is what the package has; so `one-agent` answers without a model."""
    agents = {"one": {"provider": "replay"}}
    async with agents_on(
        up, tmp_path, providers={"replay": {"kind": "replay"}}, agents=agents
    ) as stack:
        reply = await stack.call("one")
    assert reply.text
    assert (reply.model, reply.provider) == ("replay/smollm2-135m", "replay")


async def test_a_shutdown_passes_through(up: FakeUpstream, tmp_path: Path) -> None:
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*ended_early("Hel"), Wait(asyncio.Event()))
        sink = Sink()

        async def run() -> None:
            with stack.gateway.inflight.request():
                await stack.call("one", sink)

        task = asyncio.create_task(run())
        await asyncio.wait_for(sink.said.wait(), 5)
        await stack.gateway.inflight.drain(0.05)
        with pytest.raises(GatewayShutdown):
            await task
        await up.requests[0].wait_closed(timeout=1.0)
        async with stack.books() as books:
            (row,) = await books.rows(1)
    assert row.error_code == "gateway_shutdown"


@pytest.mark.parametrize("ended", [False, True])
async def test_a_bug_of_the_sink_is_raised_as_it_is(
    ended: bool, up: FakeUpstream, tmp_path: Path
) -> None:
    class Broken(Sink):
        def text(self, raw: bytes) -> bool:
            raise KeyError("a bug")

    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        if ended:
            up.script(Send(sse(chunk("Hi", finish_reason="stop")) + DONE))
        else:
            up.script(*ended_early("Hi"), Wait(asyncio.Event()))
        with pytest.raises(KeyError):
            await stack.call("one", Broken())
        if not ended:
            await up.requests[0].wait_closed(timeout=1.0)
        assert stack.gateway.billing.open_holds == 0


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_chunk_that_is_not_json_fails_the_call(
    at_once: bool, up: FakeUpstream, tmp_path: Path
) -> None:
    """A client of the models plane would be sent it; nobody could put it into an event. Also where
    the provider's end came in the same read.
    """
    odd = sse(chunk("MARK")).replace(b"MARK", rb"\q")
    before = b"".join(sse(chunk(word)) for word in "abc")
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        if at_once:
            up.script(Send(before + odd + sse(chunk("d", finish_reason="stop")) + DONE))
        else:
            up.script(Send(before), Send(odd), Wait(asyncio.Event()))
        sink = Sink()
        with pytest.raises(AgentError) as caught:
            await stack.call("one", sink)
        if not at_once:
            await up.requests[0].wait_closed(timeout=1.0)
    assert (caught.value.code, caught.value.retryable) == ("upstream_error", True)
    assert sink.whole == "abc"


async def test_a_text_is_bounded(
    up: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "TEXT_BYTES_MAX", 1000)
    async with agents_on(up, tmp_path, agents={"one": ONE}) as stack:
        up.script(*ended_early("x" * 600, "y" * 600), Wait(asyncio.Event()))
        with pytest.raises(AgentError) as caught:
            await stack.call("one")
        await up.requests[0].wait_closed(timeout=1.0)
    assert "1000 bytes" in caught.value.message
    assert not caught.value.retryable


async def test_calls_are_counted_and_traced(up: FakeUpstream, tmp_path: Path) -> None:
    """Under the plane of their run, as requests are (O3.2, O3.6)."""
    async with Collector() as collector:
        telemetry = {"otlp_endpoint": collector.url}
        async with agents_on(up, tmp_path, telemetry=telemetry, agents={"one": ONE}) as stack:
            up.script(*script_for("openai", words=["Hel", "lo"]))
            await stack.call("one", call_id="c", plane="agents", execution_id="e")
            metrics = stack.gateway.telemetry.metrics
            assert metrics is not None
            scrape = Scrape((await metrics.scrape()).decode())
        spans = {span.name: span for span in await collector.spans(2)}
    labels = {"plane": "agents", "model": MODEL, "provider": "fake", "outcome": "completed"}
    assert scrape.value("sluicegate_requests_total", **labels) == 1
    tokens = "gen_ai_client_inference_usage_output_tokens_total"
    assert scrape.value(tokens, gen_ai_request_model=MODEL) == 2
    agent, attempt = spans["invoke_agent one"], spans[f"chat {UPSTREAM_MODEL}"]
    assert attempt.parent_id == agent.span_id
    assert agent.attributes["gen_ai.agent.id"] == "one"
    assert agent.attributes["sluicegate.plane"] == "agents"
    assert agent.attributes["sluicegate.request_id"] == "c"
    assert not [name for name in agent.attributes if name.startswith("http.")]
