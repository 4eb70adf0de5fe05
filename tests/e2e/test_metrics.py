"""O3.1 to O3.5: what `GET /metrics` tells of traffic that is known."""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from bench.ports import free_port
from planes.metrics import UNLISTED_MODELS_MAX
from planes.version import version
from tests.support.books import books_of
from tests.support.checks import ask, payload, until
from tests.support.fake_upstream import FakeUpstream
from tests.support.gateway import AUTH, KEY, MODEL, UPSTREAM_KEY, GatewayProcess, config_for
from tests.support.metrics import increasing, scrape, scrape_after, scrape_until
from tests.support.script import (
    DONE,
    PING,
    Eof,
    Fin,
    Head,
    Send,
    Sleep,
    Step,
    Wait,
    chunk,
    json_answer,
    openai_stream,
    sse,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.wire import RawClient

SPARE: Final = "spare/model"
DEAD: Final = "dead/model"
USAGE: Final = {
    "prompt_tokens": 90,
    "completion_tokens": 30,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 7},
}
PRICE: Final = {"prompt_usd_per_mtok": 2, "completion_usd_per_mtok": 8}
REQUEST: Final = ("plane", "model", "provider", "outcome", "status_class", "error_code")
CALL: Final = ("gen_ai_provider_name", "gen_ai_request_model", "error_type")


def observed_config(up: FakeUpstream, **overrides: Any) -> dict[str, Any]:
    config = config_for(up, **overrides)
    config["models"][MODEL]["price"] = PRICE
    config["keys"].append({"key": "ozk_test_poor_0123456789", "org": "poor", "balance_usd": 0})
    config["providers"]["gone"] = {
        "shape": "openai",
        "base_url": f"http://127.0.0.1:{free_port()}/v1",
    }
    gone, fake = {"provider": "gone", "model": "g"}, {"provider": "fake", "model": "f"}
    config["models"][SPARE] = {"candidates": [gone, fake]}
    config["models"][DEAD] = {"candidates": [gone]}
    return config


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def gateway(up: FakeUpstream, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(observed_config(up), workdir=tmp_path) as process:
        yield process


async def get(gateway: GatewayProcess, path: str, *headers: tuple[str, str]) -> RawClient:
    async with gateway.client() as client:
        await client.request("GET", path, headers=headers)
        await client.read_all()
        return client


async def post(gateway: GatewayProcess, *, key: str = KEY, **body: Any) -> RawClient:
    async with gateway.client() as client:
        headers = [("authorization", f"Bearer {key}")]
        await client.request("POST", "/v1/chat/completions", headers=headers, json=payload(**body))
        await client.read_all()
        return client


def answer(*words: str, usage: dict[str, Any] | None) -> list[Step]:
    sends = [sse(chunk(word)) for word in words] + [sse(chunk("", finish_reason="stop"))]
    if usage is not None:
        sends.append(sse(json.dumps({"choices": [], "usage": usage})))
    return [Head(), *map(Send, sends), Send(DONE), Eof()]


async def hang_up(up: FakeUpstream, gateway: GatewayProcess, *steps: Step, events: int) -> None:
    up.script(*steps, Wait(asyncio.Event()))
    asked = len(up.requests)
    async with gateway.client() as client:
        await ask(client)
        await up.request(asked)
        if events:
            await client.read_until(lambda c: len(c.events) >= events)
        client.reset()


# --- counts ---------------------------------------------------------------------------------------


async def test_every_request_is_counted_once_under_what_became_of_it(
    up: FakeUpstream, gateway: GatewayProcess
) -> None:
    """O3.2. Refused before and after its key, answered, failed, failed over, hung up."""
    assert (await get(gateway, "/v1/models")).status == 401
    assert (await get(gateway, "/v1/models", AUTH)).status == 200
    assert (await get(gateway, "/nowhere", AUTH)).status == 404
    assert (await get(gateway, "/v1/chat/completions", AUTH)).status == 405
    assert (await post(gateway, key="ozk_test_wrong")).status == 401
    assert (await post(gateway, model="nobody/x")).status == 404
    assert (await post(gateway, key="ozk_test_poor_0123456789")).status == 402
    up.script(*openai_stream(["a", "b"]))
    assert (await post(gateway)).status == 200
    message = {"role": "assistant", "content": "hi"}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    up.script(*json_answer(reply))
    assert (await post(gateway, stream=False)).status == 200
    up.script(*openai_stream(["a"]))
    assert (await post(gateway, model=SPARE)).status == 200  # `gone` fails first
    assert (await post(gateway, model=DEAD)).status == 503
    own = {"error": {"message": "too long", "type": "x", "code": "context_length_exceeded"}}
    up.script(*json_answer(own, status=413))
    assert (await post(gateway)).status == 413
    up.script(Head(), Send(sse(chunk("a"))), Fin())
    assert (await post(gateway)).status == 200  # and failed in-band
    await hang_up(up, gateway, Head(), Send(sse(chunk("a"))), events=1)
    await hang_up(up, gateway, events=0)

    seen = await scrape_after(gateway, 15)
    assert seen.values("sluicegate_requests_total", *REQUEST) == {
        ("models", "", "", "rejected", "4xx", "invalid_api_key"): 2,
        ("models", "", "", "completed", "2xx", ""): 1,
        ("", "", "", "rejected", "4xx", "not_found"): 1,
        ("", "", "", "rejected", "4xx", "method_not_allowed"): 1,
        ("models", "other", "", "rejected", "4xx", "model_not_found"): 1,
        ("models", MODEL, "", "rejected", "4xx", "insufficient_credits"): 1,
        ("models", MODEL, "fake", "completed", "2xx", ""): 2,
        ("models", SPARE, "fake", "completed", "2xx", ""): 1,
        ("models", DEAD, "gone", "upstream_error", "5xx", "upstream_unavailable"): 1,
        ("models", MODEL, "fake", "upstream_error", "4xx", "context_length_exceeded"): 1,
        ("models", MODEL, "fake", "upstream_error", "5xx", "upstream_error"): 1,
        ("models", MODEL, "fake", "client_abort", "4xx", "client_abort"): 2,
    }
    assert seen.values("sluicegate_client_aborts_total", "model", "stage") == {
        (MODEL, "after_output"): 1,
        (MODEL, "before_output"): 1,
    }
    assert seen.values(
        "sluicegate_upstream_errors_total", "provider", "model", "error_code", "stage"
    ) == {
        ("gone", SPARE, "upstream_unavailable", "dial"): 1,
        ("gone", DEAD, "upstream_unavailable", "dial"): 1,
        ("fake", MODEL, "context_length_exceeded", "dial"): 1,
        ("fake", MODEL, "upstream_error", "body"): 1,
    }
    assert seen.values("gen_ai_client_inference_duration_seconds_count", *CALL) == {
        ("fake", MODEL, ""): 2,
        ("gone", SPARE, "upstream_unavailable"): 1,
        ("fake", SPARE, ""): 1,
        ("gone", DEAD, "upstream_unavailable"): 1,
        ("fake", MODEL, "context_length_exceeded"): 1,
        ("fake", MODEL, "upstream_error"): 1,
        ("fake", MODEL, "client_abort"): 1,
        ("fake", MODEL, "cancelled"): 1,
    }
    # The ten that named a model.
    assert seen.value("gen_ai_server_request_duration_seconds_count") == 10
    # Of the streams that had output: completed, failed over, failed in-band, hung up after it.
    assert seen.value("gen_ai_server_time_to_first_token_seconds_count") == 4
    assert seen.value("gen_ai_client_inference_time_to_first_chunk_seconds_count") == 4
    for gauge in ("active_streams", "requests_in_flight", "open_holds", "draining"):
        assert seen.value(f"sluicegate_{gauge}") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_what_no_shape_can_say_was_asked_of_no_provider(
    up: FakeUpstream, tmp_path: Path, stream: bool
) -> None:
    """M5: log, metric and row say `rejected`; where another serves, the mute one has no failure."""
    config = observed_config(up)
    config["providers"]["mute"] = {**config["providers"]["fake"], "shape": "anthropic"}
    mute, fake = {"provider": "mute", "model": "c"}, {"provider": "fake", "model": "f"}
    config["models"]["mute/only"] = {"candidates": [mute]}
    config["models"]["mute/first"] = {"candidates": [mute, fake]}
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    said: dict[str, Any] = {"stream": stream, "messages": [{"role": "user", "content": [audio]}]}
    async with GatewayProcess(config, workdir=tmp_path) as gateway:
        refused = await post(gateway, model="mute/only", **said)
        assert refused.status == 400
        assert up.requests == []
        reply = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
        up.script(*(openai_stream(["a"]) if stream else json_answer(reply)))
        assert (await post(gateway, model="mute/first", **said)).status == 200
        seen = await scrape_after(gateway, 2)
        assert seen.values("sluicegate_requests_total", *REQUEST) == {
            ("models", "mute/only", "mute", "rejected", "4xx", "invalid_request"): 1,
            ("models", "mute/first", "fake", "completed", "2xx", ""): 1,
        }
        assert seen.values("sluicegate_upstream_errors_total", "provider") == {}
        assert seen.values("gen_ai_client_inference_duration_seconds_count", *CALL) == {
            ("fake", "mute/first", ""): 1
        }
        async with books_of(tmp_path) as books:
            rows = {row.model: row for row in await books.rows(2)}
        row = rows["mute/only"]
        assert (row.status, row.error_code, row.cost_micro_usd) == (400, "invalid_request", 0)
        assert row.attempts == ("mute/c: not asked, invalid_request",)
        assert rows["mute/first"].attempts[0] == row.attempts[0]
        (line,) = [each for each in gateway.log_lines() if each.get("model") == "mute/only"]
    told = (line["status"], line["outcome"], line["error_code"], line["attempts"])
    assert told == (400, "rejected", "invalid_request", list(row.attempts))


async def test_a_refusal_before_the_body_is_counted_once(gateway: GatewayProcess) -> None:
    """O3.2: `Expect: 100-continue` is refused before any middleware runs."""
    async with gateway.client() as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
            b"expect: 100-continue\r\n\r\n"
        )
        await client.read_head()
        assert client.status == 401
    seen = await scrape_after(gateway, 1)
    assert seen.values("sluicegate_requests_total", "plane", "error_code") == {
        ("models", "invalid_api_key"): 1
    }


async def test_tokens_and_cost_are_those_of_the_ledger(
    up: FakeUpstream, gateway: GatewayProcess
) -> None:
    """O3.2, M4.2: reported ones and counted ones apart; cost in millionths of a dollar."""
    up.script(*answer("a", "b", usage=USAGE))
    await post(gateway)
    prompt = "p" * 400  # 100 tokens
    up.script(*answer("abcd", "efgh", usage=None))  # 2 tokens
    await post(gateway, messages=[{"role": "user", "content": prompt}])
    seen = await scrape_after(gateway, 2)
    expected = {"input": (90, 100), "output": (30, 2), "cache_read_input": (64, 0)}
    expected["reasoning_output"] = (7, 0)
    for name, (reported, counted) in expected.items():
        metric = f"gen_ai_client_inference_usage_{name}_tokens_total"
        found = seen.values(metric, "gen_ai_request_model", "source")
        assert found.get((MODEL, "reported"), 0) == reported, name
        assert found.get((MODEL, "counted"), 0) == counted, name
    cost = 90 * 2 + 30 * 8 + 100 * 2 + 2 * 8
    assert seen.values("sluicegate_cost_micro_usd_total", "plane", "model", "provider") == {
        ("models", MODEL, "fake"): cost
    }


async def test_gaps_and_first_tokens_are_measured(
    up: FakeUpstream, gateway: GatewayProcess
) -> None:
    """O3.3: a gap for each read that gave output, not for a comment."""
    a, b = Send(sse(chunk("a"))), Send(sse(chunk("b")))
    finish = Send(sse(chunk("", finish_reason="stop")))
    words: list[Step] = [Sleep(0.3), a, Sleep(0.4), Send(PING), Sleep(0.4), b, Sleep(0.8)]
    up.script(Head(), *words, finish, Send(DONE), Eof())
    await post(gateway)
    seen = await scrape_after(gateway, 1)
    name = "gen_ai_client_inference_time_per_output_chunk_seconds"
    # a → b, b → finish, and finish → [DONE] if they came in two reads
    assert seen.value(f"{name}_count") in (2, 3)
    assert 1.2 < seen.value(f"{name}_sum") < 16
    assert seen.value(f"{name}_bucket", le="0.16") == seen.value(f"{name}_count") - 2
    assert increasing(seen.values(f"{name}_bucket", "le").values())
    for first in (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_client_inference_time_to_first_chunk_seconds",
    ):
        assert seen.value(f"{first}_count") == 1
        assert 0.29 < seen.value(f"{first}_sum") < 3
    duration = "gen_ai_server_request_duration_seconds"
    assert 1.89 < seen.value(f"{duration}_sum") < 19


async def test_gauges_follow_what_runs(
    up: FakeUpstream, gateway: GatewayProcess, tmp_path: Path
) -> None:
    """O3.2: a running stream, its hold, and its settlement while the store is locked."""
    end = asyncio.Event()
    tail = (Send(sse(chunk("", finish_reason="stop"))), Send(DONE), Eof())
    up.script(Head(), Send(sse(chunk("a"))), Wait(end), *tail)
    async with gateway.client() as client:
        await ask(client)
        await client.read_until(lambda c: c.events)
        seen = await scrape(gateway)
        assert seen.values("sluicegate_active_streams", "model", "provider") == {(MODEL, "fake"): 1}
        assert seen.value("sluicegate_requests_in_flight") == 1
        assert seen.value("sluicegate_open_holds") == 1
        assert seen.value("sluicegate_settlements_pending") == 0
        assert seen.value("sluicegate_requests_total") == 0
        database = sqlite3.connect(tmp_path / "sluicegate.db", isolation_level=None)
        try:
            database.execute("BEGIN IMMEDIATE")
            end.set()
            await client.read_all()
            await scrape_until(gateway, lambda s: s.value("sluicegate_settlements_pending") == 1)
            database.execute("ROLLBACK")
        finally:
            database.close()
    await scrape_until(gateway, lambda s: s.value("sluicegate_settlements_pending") == 0)
    seen = await scrape_after(gateway, 1)
    assert seen.values("sluicegate_active_streams", "model", "provider") == {(MODEL, "fake"): 0}
    assert seen.value("sluicegate_open_holds") == 0


async def test_what_runs_is_told(gateway: GatewayProcess) -> None:
    """O3.2: build, memory, and a loop whose lag has been sampled."""
    seen = await scrape_until(
        gateway, lambda s: s.value("sluicegate_event_loop_lag_seconds_count") >= 2
    )
    assert seen.value("sluicegate_build_info", version=version()) == 1
    assert abs(seen.value("process_resident_memory_bytes") / gateway.rss_bytes() - 1) < 0.5
    assert seen.value("process_open_fds") > 0
    assert seen.value("sluicegate_requests_total") == 0  # neither probes nor scrapes


# --- what is bounded ------------------------------------------------------------------------------


async def test_names_that_clients_invent_do_not_grow_the_scrape(
    up: FakeUpstream, gateway: GatewayProcess
) -> None:
    """O3.4: what no provider served is `other`, and of what one serves only so many are named."""
    served = UNLISTED_MODELS_MAX + 30
    async with asyncio.TaskGroup() as group:
        for number in range(served):
            up.script_for(f"served-{number}", *openai_stream(["a"]), repeat=False)
            group.create_task(post(gateway, model=f"fake/served-{number}"))
            group.create_task(post(gateway, model=f"gone/failed-{number}"))
            group.create_task(post(gateway, model=f"nobody/unknown-{number}"))
    seen = await scrape_after(gateway, 3 * served)
    models = {
        labels[0]: n for labels, n in seen.values("sluicegate_requests_total", "model").items()
    }
    assert models.pop("other") == 2 * served + (served - UNLISTED_MODELS_MAX)
    assert len(models) == UNLISTED_MODELS_MAX
    assert all(name.startswith("fake/served-") and n == 1 for name, n in models.items())
    assert seen.label_values("gen_ai_request_model") == {*models, "other"}


async def test_no_key_and_no_org_is_in_a_scrape(up: FakeUpstream, gateway: GatewayProcess) -> None:
    up.script(*openai_stream(["secret words"]))
    await post(gateway)
    await post(gateway, key="ozk_test_wrong")
    text = (await scrape_after(gateway, 2)).text
    for secret in (KEY, UPSTREAM_KEY, "ozk_", "key_", "org", "secret words", "Say hi"):
        assert secret not in text


async def test_scrapes_do_not_hold_streams_up(up: FakeUpstream, gateway: GatewayProcess) -> None:
    """O3.5: many at once are one rendering; a stream flows on meanwhile."""
    words = [step for _ in range(20) for step in (Send(sse(chunk("a"))), Sleep(0.01))]
    finish = Send(sse(chunk("", finish_reason="stop")))
    up.script(Head(), *words, finish, Send(DONE), Eof())
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(post(gateway))
        scrapes = [group.create_task(scrape(gateway)) for _ in range(50)]
    assert time.monotonic() - started < 10
    assert stream.result().body.endswith(DONE)
    assert all(s.result().value("sluicegate_build_info") == 1 for s in scrapes)


# --- how it is served -----------------------------------------------------------------------------


async def test_it_is_served_as_prometheus_asks_for_it(gateway: GatewayProcess) -> None:
    """O3.1: no key, text format, compressed on demand; nothing but GET; not in the log."""
    plain = await get(gateway, "/metrics")
    assert plain.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert (plain.header("x-request-id") or "").startswith("req_")
    packed = await get(gateway, "/metrics", ("accept-encoding", "gzip"))
    assert packed.header("content-encoding") == "gzip"
    assert b"# TYPE sluicegate_requests_total counter" in gzip.decompress(packed.body)
    async with gateway.client() as client:
        await client.request("POST", "/metrics", json={})
        await client.read_all()
        assert client.status == 405
    await until(lambda: [x for x in gateway.log_lines() if x["event"] == "request"], what="a line")
    lines = [line for line in gateway.log_lines() if line["event"] == "request"]
    assert [line["status"] for line in lines] == [405]


async def test_it_is_served_during_a_drain(up: FakeUpstream, tmp_path: Path) -> None:
    """O3.1: the last minute of a process is worth seeing."""
    end = asyncio.Event()
    config = observed_config(up, server={"shutdown_grace_s": 20})
    async with GatewayProcess(config, workdir=tmp_path) as gateway:
        finish = Send(sse(chunk("", finish_reason="stop")))
        up.script(Head(), Send(sse(chunk("a"))), Wait(end), finish, Send(DONE), Eof())
        async with gateway.client() as client:
            await ask(client)
            await client.read_until(lambda c: c.events)
            gateway.terminate()
            seen = await scrape_until(gateway, lambda s: s.value("sluicegate_draining") == 1)
            assert seen.value("sluicegate_active_streams") == 1
            assert (await post(gateway)).status == 503
            seen = await scrape_after(gateway, 1)
            assert seen.value("sluicegate_requests_total", error_code="gateway_shutdown") == 1
            end.set()
            await client.read_all()
        assert await gateway.wait() == 0


async def test_it_can_be_switched_off(up: FakeUpstream, tmp_path: Path) -> None:
    """O3.1: then there is nothing at its path, and requests are served as before."""
    config = observed_config(up, telemetry={"metrics": False})
    async with GatewayProcess(config, workdir=tmp_path) as gateway:
        up.script(*openai_stream(["a", "b"]))
        assert (await post(gateway)).body.endswith(DONE)
        client = await get(gateway, "/metrics")
        assert client.status == 404
        assert client.json["error"]["code"] == "not_found"
