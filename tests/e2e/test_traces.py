"""O3.6, O3.7: one span for each request and each attempt, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from bench.ports import free_port
from planes.tracing import FLUSH_WAIT_S
from planes.version import version
from tests.support.checks import ask, payload
from tests.support.collector import Collector, Span
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import (
    AUTH,
    KEY,
    MODEL,
    UPSTREAM_KEY,
    UPSTREAM_MODEL,
    GatewayProcess,
    config_for,
)
from tests.support.script import (
    DONE,
    Eof,
    Fin,
    Head,
    Send,
    Sleep,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)
from tests.support.stack import mute_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.wire import RawClient

SPARE: Final = "spare/model"
SERVER, CLIENT = 2, 3
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID: Final = "b7ad6b7169203331"
SOON: Final = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
NEVER: Final = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}


def process(
    up: FakeUpstream, url: str, workdir: Path, env: dict[str, str], *, grace_s: float = 25
) -> GatewayProcess:
    server = {"shutdown_grace_s": grace_s}
    config = config_for(up, telemetry={"otlp_endpoint": url}, server=server)
    gone = {"shape": "openai", "base_url": f"http://127.0.0.1:{free_port()}/v1"}
    config["providers"]["gone"] = gone
    config["providers"]["mute"] = {**config["providers"]["fake"], "shape": "anthropic"}
    config["models"]["mute/only"] = {"candidates": [{"provider": "mute", "model": "c"}]}
    candidates = [{"provider": "gone", "model": "g"}, {"provider": "fake", "model": "f"}]
    config["models"][SPARE] = {"candidates": candidates}
    config["models"][MODEL]["price"] = {"prompt_usd_per_mtok": 2, "completion_usd_per_mtok": 8}
    return GatewayProcess(config, workdir=workdir, env=env)


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as made:
        yield made


@pytest.fixture
async def gateway(
    up: FakeUpstream, collector: Collector, tmp_path: Path
) -> AsyncIterator[GatewayProcess]:
    async with process(up, collector.url, tmp_path, SOON) as made:
        yield made


async def post(gateway: GatewayProcess, *headers: tuple[str, str], **body: Any) -> RawClient:
    async with gateway.client() as client:
        sent = [*(headers or [AUTH])]
        await client.request("POST", "/v1/chat/completions", headers=sent, json=payload(**body))
        await client.read_all()
        return client


def parted(spans: list[Span]) -> tuple[Span, list[Span]]:
    """The one span of a request, and those of its attempts, which lie inside of it."""
    (request,) = [span for span in spans if span.kind == SERVER]
    attempts = [span for span in spans if span.kind == CLIENT]
    assert len(attempts) == len(spans) - 1
    for attempt in attempts:
        assert (attempt.trace_id, attempt.parent_id) == (request.trace_id, request.span_id)
        assert request.start <= attempt.start <= attempt.end <= request.end + 0.001
    return request, attempts


async def test_a_request_and_its_attempt_are_two_spans(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 7},
    }
    tail = [Send(sse(chunk("b"))), Send(sse(chunk("", finish_reason="stop")))]
    told = Send(sse(json.dumps({"choices": [], "usage": usage})))
    up.script(Head(), Sleep(0.2), Send(sse(chunk("a"))), Sleep(0.2), *tail, told, Send(DONE), Eof())
    before = time.time()
    client = await post(gateway)
    request, (attempt,) = parted(await collector.spans(2))
    assert before - 1 < request.start < request.end < time.time() + 1
    assert request.name == "POST /v1/chat/completions"
    assert request.parent_id == ""
    assert not request.failed
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "sluicegate.request_id": client.header("x-request-id"),
        "sluicegate.plane": "models",
        "sluicegate.outcome": "completed",
        "sluicegate.cost_micro_usd": 90 * 2 + 30 * 8,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.provider.name": "fake",
    }
    assert attempt.name == f"chat {UPSTREAM_MODEL}"
    assert not attempt.failed
    first = attempt.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0.19 < first < attempt.end - attempt.start
    assert attempt.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fake",
        "gen_ai.request.model": UPSTREAM_MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.reasoning.output_tokens": 7,
    }
    assert request.resource["service.name"] == "sluicegate"
    assert request.resource["service.version"] == version()


async def test_a_failover_is_a_failed_attempt_and_one_that_answered(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    up.script(*openai_stream(["a"]))
    await post(gateway, model=SPARE)
    request, (failed, answered) = parted(await collector.spans(3))
    assert request.attributes["gen_ai.request.model"] == SPARE
    assert not request.failed
    assert (failed.name, failed.failed) == ("chat g", True)
    assert failed.attributes["error.type"] == "upstream_unavailable"
    assert "gen_ai.usage.output_tokens" not in failed.attributes
    assert (answered.name, answered.failed) == ("chat f", False)
    assert failed.end <= answered.start + 0.001


async def test_failures_and_hang_ups_are_told_apart(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    """A provider's failure is an error of its attempt; a client that leaves is nobody's."""
    up.script(Head(), Send(sse(chunk("a"))), Fin())
    await post(gateway)
    request, (attempt,) = parted(await collector.spans(2))
    assert (request.failed, attempt.failed) == (True, True)
    assert request.attributes["http.response.status_code"] == 502
    assert request.attributes["error.type"] == attempt.attributes["error.type"] == "upstream_error"
    collector.received.clear()

    up.script(Head(), Send(sse(chunk("a"))), Wait(asyncio.Event()))
    async with gateway.client() as client:
        await ask(client)
        await client.read_until(lambda c: c.events)
        client.reset()
    request, (attempt,) = parted(await collector.spans(2))
    assert (request.failed, attempt.failed) == (False, False)
    assert request.attributes["http.response.status_code"] == 499
    assert request.attributes["sluicegate.outcome"] == "client_abort"
    assert attempt.attributes["error.type"] == "client_abort"
    collector.received.clear()

    up.script(Wait(asyncio.Event()))
    asked = len(up.requests)
    async with gateway.client() as client:
        await ask(client)
        await up.request(asked)
        client.reset()
    request, (attempt,) = parted(await collector.spans(2))
    assert (request.failed, attempt.failed) == (False, False)
    assert attempt.attributes["error.type"] == "cancelled"
    collector.received.clear()

    assert (await post(gateway, ("authorization", "Bearer ozk_test_wrong"))).status == 401
    request, attempts = parted(await collector.spans(1))
    assert attempts == []
    assert not request.failed
    assert request.attributes["error.type"] == "invalid_api_key"
    assert "gen_ai.operation.name" not in request.attributes


async def test_a_clients_trace_is_continued(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    """W3C Trace Context; what is not one begins a trace of its own, and none goes upstream."""
    for sent, continued in [
        (f"00-{TRACE_ID}-{PARENT_ID}-01", True),
        (f"00-{TRACE_ID}-{PARENT_ID}", False),
        (f"00-{'0' * 32}-{PARENT_ID}-01", False),
        ("\u00ff" * 55, False),
    ]:
        up.script(*openai_stream(["a"]))
        asked = len(up.requests)
        await post(gateway, AUTH, ("traceparent", sent), ("tracestate", "vendor=1"))
        request, _ = parted(await collector.spans(2))
        assert (request.trace_id == TRACE_ID) is continued, sent
        assert request.parent_id == (PARENT_ID if continued else "")
        assert request.trace_state == ("vendor=1" if continued else "")
        assert not {"traceparent", "tracestate"} & up.requests[asked].headers.keys()
        collector.received.clear()


async def test_a_client_that_does_not_sample_is_obeyed(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    for flags in ("00", "01"):
        up.script(*openai_stream(["a"]))
        await post(gateway, AUTH, ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}"))
    parted(await collector.spans(2))  # those of the second; batches are in order


async def test_probes_make_no_spans(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    for path in ("/health", "/ready", "/metrics", "/nowhere"):
        async with gateway.client() as client:
            await client.request("GET", path)
            await client.read_all()
    (span,) = await collector.spans(1)
    assert (span.name, span.attributes["http.response.status_code"]) == ("GET", 404)


async def test_no_content_and_no_secret_is_sent(
    up: FakeUpstream, gateway: GatewayProcess, collector: Collector
) -> None:
    """O3.7: neither side's words, not even in a provider's error message."""
    up.script(*openai_stream(["OUTPUT-WORDS"]))
    up.script(*json_answer({"error": {"message": "you said PROMPT-WORDS"}}, status=422))
    words = [{"role": "user", "content": "PROMPT-WORDS"}]
    await post(gateway, messages=words)
    await post(gateway, messages=words)
    odd = await post(gateway, model="fake/\u00e9" + "x" * 400)
    assert odd.status >= 400  # the provider has no script for it
    await collector.spans(6)
    sent = b"".join(collector.raw)
    for secret in (KEY, UPSTREAM_KEY, "OUTPUT-WORDS", "PROMPT-WORDS", "Bearer"):
        assert secret.encode() not in sent
    assert all(len(str(v)) <= 256 for s in collector.received for v in s.attributes.values())


async def test_what_is_left_is_sent_at_the_stop(
    up: FakeUpstream, collector: Collector, tmp_path: Path
) -> None:
    """O3.7: also the spans of requests that the drain interrupted."""
    async with process(up, collector.url, tmp_path, NEVER, grace_s=0.3) as gateway:
        for _ in range(3):
            up.script(*openai_stream(["a"]))
            await post(gateway)
        up.script(Head(), Send(sse(chunk("a"))), Wait(asyncio.Event()))
        async with gateway.client() as client:
            await ask(client)
            await client.read_until(lambda c: c.events)
            assert collector.received == []
            gateway.terminate()
            await client.read_all()
            assert await gateway.wait() == 0
    last = (await collector.spans(8))[-2]
    assert last.attributes["sluicegate.outcome"] == "shutdown"


@pytest.mark.slow
async def test_a_collector_that_is_dead_or_mute_harms_nobody(
    up: FakeUpstream, tmp_path: Path
) -> None:
    """O3.7: requests run on, and the stop takes its bound at most."""
    listener, fillers = mute_socket()
    try:
        host, port = listener.getsockname()
        for number, url in enumerate((f"http://{host}:{port}", f"http://127.0.0.1:{free_port()}")):
            workdir = tmp_path / str(number)
            workdir.mkdir()
            async with process(up, url, workdir, SOON) as gateway:
                for _ in range(5):
                    up.script(*openai_stream(["a"]))
                    assert (await post(gateway)).body.endswith(DONE)
                started = time.monotonic()
                gateway.terminate()
                assert await gateway.wait(timeout=30) == 0
                assert time.monotonic() - started < FLUSH_WAIT_S + 7
                assert "Traceback" not in gateway.stderr()
                assert '"event":"fault"' not in gateway.stderr()
    finally:
        for sock in (*fillers, listener):
            sock.close()


async def test_without_the_extra_the_start_names_it(up: FakeUpstream, tmp_path: Path) -> None:
    """O3.6: an installation without it, as Python sees it."""
    hidden = tmp_path / "hidden" / "opentelemetry"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('no opentelemetry')\n")
    env = {"PYTHONPATH": str(hidden.parent)}
    with pytest.raises(RuntimeError, match=r"ended at its start \(1\)") as caught:
        async with process(up, "http://127.0.0.1:4318", tmp_path, env):
            pass
    assert "telemetry.otlp_endpoint needs the extra `otel`" in str(caught.value)
    assert "pip install 'sluicegate[otel]'" in str(caught.value)
    assert "Traceback" not in str(caught.value)


async def test_who_was_never_asked_has_no_span(
    gateway: GatewayProcess, collector: Collector
) -> None:
    """O3.6: of what a shape cannot say (M5) there was no attempt at the provider."""
    assert (await post(gateway, model="mute/only", n=2)).status == 400
    request, attempts = parted(await collector.spans(1))
    assert attempts == []
    assert request.attributes["sluicegate.outcome"] == "rejected"
