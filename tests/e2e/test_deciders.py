"""D5.5, D5.6, D6.5: the decision socket over its three backends, well and ill."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from system_zero import decisions_for

from bench.ports import free_port
from encoders.decision_reply import Usage, make_answer, make_reply
from tests.support.checks import until
from tests.support.decisions import MODEL, auth, fresh_key, opened, start
from tests.support.decisions import config as decision_config
from tests.support.fake_upstream import (
    Eof,
    FakeUpstream,
    Head,
    Rst,
    Send,
    Sleep,
    Wait,
    json_answer,
)
from tests.support.gateway import GatewayProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.script import Step
    from tests.support.wire import RawClient

KINDS = ("chat-logprobs", "systemone", "system-zero")
OUR_KEY = "sk-backend-secret-0123456789"
TIMEOUT_S = 2.0
BOUND_S = 20.0
READY: dict[str, Any] = {"ready": {"type": "boolean", "instructions": "Is it ready?"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config(kind: str, origin: str, **backend: Any) -> dict[str, Any]:
    """A gateway whose backend is at `origin`."""
    whole = decision_config(limits={"decision_settlement_timeout_ms": 300})
    if kind == "chat-logprobs":
        whole["providers"] = {
            "fake": {
                "shape": "openai",
                "base_url": f"{origin}/v1",
                "api_key": OUR_KEY,
                "header_timeout_s": TIMEOUT_S,
            }
        }
        settings: dict[str, Any] = {"kind": kind, "model": "fake/chat"}
    else:
        settings = {"kind": kind, "base_url": origin, "timeout_s": TIMEOUT_S, "api_key": OUR_KEY}
        if kind == "systemone":
            settings["model"] = "their-model"
    whole["decision"]["backend"] = settings | backend
    return whole


def answer(kind: str, true: float = 0.75) -> list[Step]:
    """What the backend answers to `READY`."""
    if kind == "chat-logprobs":
        tokens = [
            {"token": "A", "logprob": math.log(true)},
            {"token": "B", "logprob": math.log(1 - true)},
        ]
        content = [{"token": "A", "logprob": -1, "top_logprobs": tokens}]
        return json_answer(
            {
                "object": "chat.completion",
                "choices": [{"index": 0, "logprobs": {"content": content}}],
                "usage": {"prompt_tokens": 11, "completion_tokens": 1},
            }
        )
    if kind == "systemone":
        return json_answer(
            {
                "model": "their-model",
                "answers": {"ready": {"type": "noul", "noul": true}},
                "usage": {"input_tokens": 11, "output_tokens": 1},
            }
        )
    reply = make_reply(
        reply_id="szd_1",
        model=MODEL,
        served_by="a service",
        created=1,
        answers={"ready": make_answer(READY["ready"], {"true": true, "false": 1 - true})},
        usage=Usage(input_tokens=11),
    )
    return json_answer(json.loads(reply))


def failure(kind: str, status: int, code: str, message: str = "no", **headers: str) -> list[Step]:
    """How the backend says that it failed."""
    error: Any = message
    if kind == "chat-logprobs":
        error = {"message": message, "code": code}
    elif kind == "system-zero":
        error = {"message": message, "code": code, "retryable": status in (429, 503)}
    return json_answer({"error": error, "request_id": "r"}, status=status, **headers)


class Rig:
    """One gateway over one scripted backend."""

    def __init__(self, kind: str, upstream: FakeUpstream, process: GatewayProcess) -> None:
        self.kind = kind
        self.upstream = upstream
        self.process = process

    async def ask(self, *steps: Step, mode: str = "on_request", **more: Any) -> dict[str, Any]:
        """Decide once; returns the decision or error frame."""
        self.upstream.script(*steps)
        return await ask(self.process, mode=mode, **more)


async def ask(process: GatewayProcess, **more: Any) -> dict[str, Any]:
    """Decide once on a stream of an account of its own."""
    async with opened(process) as socket:
        request = {"questions": READY} | more.pop("request", {})
        await socket.say(**start("done", request=request, **more))
        assert (await socket.json())["type"] == "ack"
        if more.get("mode") != "on_change":
            await socket.say(type="decide", state_version=1)
            assert (await socket.json())["type"] == "scheduled"
        told = await socket.json(BOUND_S)
        assert told["type"] in ("decision", "error")
        return told


def told(frame: dict[str, Any]) -> tuple[int, str, bool, int | None]:
    """Status, code, and whether and when to try again."""
    assert frame["type"] == "error", frame
    error, retry = frame["envelope"]["error"], frame["retry"]
    assert frame["phase"] == "decide"
    assert error["retryable"] == retry["should_retry"]
    assert OUR_KEY not in json.dumps(frame)
    return frame["http_status"], error["code"], retry["should_retry"], retry["retry_after_ms"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    kind = request.param
    async with FakeUpstream() as upstream, GatewayProcess(config(kind, upstream.origin)) as process:
        yield Rig(kind, upstream, process)
        log = process.stderr()
        assert "Traceback" not in log
        assert '"event":"fault"' not in log
        assert OUR_KEY not in log


async def test_d6_6_a_decision(rig: Rig) -> None:
    found = await rig.ask(*answer(rig.kind))
    assert found["type"] == "decision", found
    reply = found["reply"]
    decision = decisions_for(reply, {"questions": READY})["ready"]
    assert (decision.decision, decision.confidence) == (True, 0.75)
    assert reply["model"] == MODEL
    assert reply["usage"]["input_tokens"] == 11
    assert len(reply["usage"]) == 6


async def test_d6_5_what_a_backend_is_asked(rig: Rig) -> None:
    known = len(rig.upstream.requests)
    key = {"idempotency_key": "k 1"}
    await rig.ask(*answer(rig.kind), **key)
    sent = await rig.upstream.request(known)
    assert sent.method == "POST"
    assert sent.headers["authorization"] == f"Bearer {OUR_KEY}"
    match rig.kind:
        case "chat-logprobs":
            assert sent.path == "/v1/chat/completions"
            assert (sent.json["model"], sent.json["top_logprobs"]) == ("chat", 20)
            assert "stream" not in sent.json
        case "systemone":
            assert sent.path == "/v1/systemone"
            assert sent.json == {
                "model": "their-model",
                "state": "done",
                "questions": {"ready": {"type": "noul", "instructions": "Is it ready?"}},
            }
        case _:
            assert sent.path == "/v1/system-zero/decide"
            assert list(sent.json) == ["model", "state", "questions", "prompt_cache_key"]
            assert sent.body == json.dumps(sent.json, separators=(",", ":")).encode()
            assert len(sent.headers["idempotency-key"]) == 64  # derived, not the client's


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [({}, None), ({"retry-after": "3"}, 3000), ({"retry-after-ms": "40", "retry-after": "3"}, 40)],
    ids=["no header", "Retry-After", "Retry-After-Ms"],
)
@pytest.mark.parametrize(
    ("status", "code"), [(429, "capacity_exhausted"), (503, "system_zero_unavailable")]
)
async def test_d5_6_busy(
    rig: Rig, status: int, code: str, headers: dict[str, str], wait_ms: int | None
) -> None:
    if rig.kind == "chat-logprobs" and wait_ms == 40:
        wait_ms = 1000  # a provider's wait is told in whole seconds on every plane
    steps = failure(rig.kind, status, "service_unavailable", **headers)
    assert told(await rig.ask(*steps)) == (status, code, True, wait_ms)


async def test_d5_5_a_stream_tries_again_when_it_was_told_to(rig: Rig) -> None:
    rig.upstream.script(*failure(rig.kind, 503, "service_unavailable", **{"retry-after": "1"}))
    rig.upstream.script(*answer(rig.kind))
    async with opened(rig.process) as socket:
        await socket.say(**start("done", mode="on_change", request={"questions": READY}))
        frames = [await socket.json(BOUND_S) for _ in range(3)]
    assert [frame["type"] for frame in frames] == ["ack", "error", "decision"]
    assert frames[1]["retry"] == {
        "should_retry": True,
        "retry_after_ms": 1000,
        "retry_after": "1",
    }


async def test_d5_6_a_backend_that_still_loads(rig: Rig) -> None:
    code = "starting" if rig.kind == "system-zero" else "unavailable_error"
    steps = failure(rig.kind, 503, code, "Loading model")
    assert told(await rig.ask(*steps)) == (503, "starting", True, 1000)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (301, (503, "system_zero_unavailable", False, None)),
        (404, (503, "system_zero_unavailable", False, None)),
        (500, (503, "system_zero_unavailable", True, None)),
        (501, (503, "system_zero_unavailable", False, None)),
        (504, (504, "system_zero_timeout", False, None)),
    ],
)
async def test_d5_6_a_page_of_somebody_elses(
    rig: Rig, status: int, expected: tuple[int, str, bool, int | None]
) -> None:
    """A proxy, or another server than was meant; a redirect is not followed, it has our key."""
    known = len(rig.upstream.requests)
    head = Head(status, {"content-type": "text/html", "location": "/elsewhere"})
    assert told(await rig.ask(head, Send(b"<html>"), Eof())) == expected
    assert len(rig.upstream.requests) == known + 1


async def test_d5_6_a_backend_that_refuses_our_credential(rig: Rig) -> None:
    steps = failure(rig.kind, 401, "invalid_api_key", f"Incorrect API key provided: {OUR_KEY}")
    assert told(await rig.ask(*steps)) == (503, "system_zero_unavailable", False, None)
    await until(
        lambda: "the gateway's own credential" in rig.process.stderr(), BOUND_S, what="a log line"
    )


async def test_d5_6_a_backend_that_is_slow(rig: Rig) -> None:
    known = len(rig.upstream.requests)
    steps = [Sleep(30), *answer(rig.kind)]
    assert told(await rig.ask(*steps)) == (504, "system_zero_timeout", False, None)
    await (await rig.upstream.request(known)).wait_closed()


async def test_d5_6_a_backend_that_stops_in_the_middle(rig: Rig) -> None:
    """Silence after the head has a limit of its own, and a reset is a failure."""
    begun: list[Step] = [Head(), Send(b'{"answers":')]
    assert told(await rig.ask(*begun, Rst())) == (503, "system_zero_unavailable", True, None)
    if rig.kind != "chat-logprobs":  # there it is the decide's own deadline
        assert told(await rig.ask(*begun, Sleep(30), Eof())) == (
            504,
            "system_zero_timeout",
            False,
            None,
        )


@pytest.mark.parametrize(
    "body", [b"", b"<html>hello</html>", b"[]", b"{}", b'{"answers":{}}', b'{"choices":[]}']
)
async def test_d5_6_garbage(rig: Rig, body: bytes) -> None:
    found = told(await rig.ask(Head(), Send(body) if body else Sleep(0), Eof()))
    assert found == (503, "system_zero_unavailable", False, None)


async def test_d6_5_an_overflow_of_the_context(rig: Rig) -> None:
    if rig.kind == "system-zero":
        steps = failure(rig.kind, 413, "state_too_large")
    else:
        message = "request (20031 tokens) exceeds the available context size (2048 tokens)"
        steps = failure(rig.kind, 400, "exceed_context_size_error", message)
    assert told(await rig.ask(*steps)) == (413, "state_too_large", False, None)


async def test_d6_5_a_refused_request_is_the_clients(rig: Rig) -> None:
    steps = failure(rig.kind, 400, "invalid_request", "the state is not understood")
    frame = await rig.ask(*steps)
    assert told(frame) == (400, "invalid_request", False, None)
    assert "the state is not understood" in frame["envelope"]["error"]["message"]


async def test_d5_7_a_decide_that_nobody_waits_for_is_cancelled(rig: Rig) -> None:
    """After its time for settling the connection to the backend is closed at once."""
    known = len(rig.upstream.requests)
    rig.upstream.script(Wait(asyncio.Event()), *answer(rig.kind))
    async with opened(rig.process) as socket:
        await socket.say(**start("done", mode="on_change", request={"questions": READY}))
        sent = await rig.upstream.request(known)
        assert not sent.closed.is_set()
    closed_at = await sent.wait_closed()
    assert closed_at - sent.received_at < TIMEOUT_S  # and not because of the time-out


async def test_d6_6_a_large_reply(rig: Rig) -> None:
    """Over 64 KiB: it is read beside the loop."""
    if rig.kind == "chat-logprobs":
        return  # its replies are of one question each
    criteria = {f"option-{number:03}": None for number in range(255)}
    questions = {
        f"q{number}": {"type": "choice", "instructions": "?", "criteria": criteria}
        for number in range(20)
    }
    odds = {"type": "choice", "probabilities": {name: 0.01 for name in criteria}}
    reply = {"id": "szd_1", "model": "m", "served_by": "s", "created": 1}
    reply |= {"answers": dict.fromkeys(questions, odds)}
    found = await rig.ask(*json_answer(reply), request={"questions": questions})
    assert found["type"] == "decision", found
    read = decisions_for(found["reply"], {"questions": questions})
    assert {decision.decision for decision in read.values()} == {"option-000"}


@pytest.mark.parametrize(
    ("steps", "status", "code", "wait_ms"),
    [
        ((429, "x", {}), 429, "capacity_exhausted", "1000"),
        ((429, "x", {"retry-after": "7"}), 429, "capacity_exhausted", "7000"),
        ((503, "x", {"retry-after": "2"}), 503, "system_zero_unavailable", "2000"),
        ((401, "invalid_api_key", {}), 503, "system_zero_unavailable", None),
        ((400, "invalid_request", {}), 400, "invalid_request", None),
    ],
)
async def test_d1_6_d5_6_the_same_over_http(
    rig: Rig,
    steps: tuple[int, str, dict[str, str]],
    status: int,
    code: str,
    wait_ms: str | None,
) -> None:
    rig.upstream.script(*failure(rig.kind, steps[0], steps[1], **steps[2]))
    client = await post(rig.process)
    assert (client.status, client.json["error"]["code"]) == (status, code)
    assert client.json["error"]["retryable"] is (wait_ms is not None)
    assert client.header("x-should-retry") == ("true" if wait_ms else "false")
    assert client.header("retry-after-ms") == wait_ms
    assert OUR_KEY not in client.body.decode()


async def test_d6_6_a_decision_over_http(rig: Rig) -> None:
    rig.upstream.script(*answer(rig.kind, 0.2))
    client = await post(rig.process)
    assert client.status == 200
    decision = decisions_for(client.json, {"questions": READY})["ready"]
    assert (decision.decision, decision.confidence) == (False, 0.8)


async def post(process: GatewayProcess) -> RawClient:
    """The whole answer to a decide over HTTP."""
    body = json.dumps({"model": MODEL, "state": "done", "questions": READY}).encode()
    async with process.client() as client:
        headers = [auth(fresh_key())]
        await client.request("POST", "/v1/system-zero/decide", headers=headers, body=body)
        await client.read_all(timeout=BOUND_S)
        return client


@pytest.mark.parametrize("kind", KINDS)
async def test_d5_6_a_backend_that_is_down(kind: str) -> None:
    origin = f"http://127.0.0.1:{free_port()}"
    async with GatewayProcess(config(kind, origin)) as process:
        frame = await ask(process)
        assert told(frame) == (503, "system_zero_unavailable", True, None)
        assert "cannot be reached" in frame["envelope"]["error"]["message"]


async def test_d6_5_several_questions_are_asked_at_once_and_no_more_than_are_allowed() -> None:
    kind = "chat-logprobs"
    names = [f"q{number}" for number in range(5)]
    questions = {name: READY["ready"] for name in names}
    gate = asyncio.Event()
    async with FakeUpstream() as upstream:
        upstream.script_for("chat", Wait(gate), *answer(kind))
        settings = config(kind, upstream.origin, questions_at_once=3)
        async with GatewayProcess(settings) as process:
            asking = asyncio.ensure_future(ask(process, request={"questions": questions}))
            await upstream.request(2)
            await asyncio.sleep(0.3)
            assert len(upstream.requests) == 3
            gate.set()
            found = await asking
            assert found["reply"]["usage"]["input_tokens"] == 5 * 11
            assert list(found["reply"]["answers"]) == names


async def test_d6_5_one_question_that_fails_ends_the_others() -> None:
    kind = "chat-logprobs"
    questions = {name: READY["ready"] for name in ("a", "b")}
    async with FakeUpstream() as upstream:
        upstream.script(Wait(asyncio.Event()), *answer(kind))
        upstream.script(*failure(kind, 429, "x"))
        async with GatewayProcess(config(kind, upstream.origin)) as process:
            frame = await ask(process, request={"questions": questions})
            assert told(frame) == (429, "capacity_exhausted", True, None)
            first = await upstream.request(0)
            assert await first.wait_closed() - first.received_at < TIMEOUT_S


async def test_d4_4_limits_of_the_backend_are_those_of_the_model() -> None:
    """As many options as the model lists tokens; attachments only where it takes them."""
    kind = "chat-logprobs"
    many = {"type": "choice", "instructions": "?", "criteria": {f"o{n}": None for n in range(21)}}
    png = "data:image/png;base64,iVBORw0KGgo="
    shot = [{"name": "shot", "type": "image", "data": png}]
    async with FakeUpstream() as upstream:
        async with GatewayProcess(config(kind, upstream.origin)) as process:
            frame = await ask(process, request={"questions": {"q": many}})
            assert told(frame)[:2] == (422, "invalid_criteria")
            frame = await ask(process, request={"attachments": shot})
            assert told(frame)[:2] == (404, "image_not_available")
            assert upstream.requests == []
        upstream.script(*answer(kind))
        async with GatewayProcess(config(kind, upstream.origin, images=True)) as process:
            found = await ask(process, request={"attachments": shot})
            assert found["type"] == "decision"
            parts = upstream.requests[0].json["messages"][1]["content"]
            assert [part["type"] for part in parts] == ["text", "image_url", "text"]
            assert parts[1]["image_url"] == {"url": png}


async def test_d4_3_images_for_systemone() -> None:
    """Plain base64, as that wire has them."""
    kind = "systemone"
    shot = [{"name": "s", "type": "image", "data": "data:image/png;base64,iVBORw0KGgo="}]
    async with FakeUpstream() as upstream:
        upstream.script(*answer(kind))
        async with GatewayProcess(config(kind, upstream.origin, images=True)) as process:
            found = await ask(process, request={"attachments": shot})
            assert found["type"] == "decision"
            assert upstream.requests[0].json["images"] == ["iVBORw0KGgo="]


async def test_d6_5_failover_passes_a_candidate_by() -> None:
    kind = "chat-logprobs"
    async with FakeUpstream() as upstream:
        settings = config(kind, upstream.origin)
        settings["providers"]["down"] = {
            "shape": "openai",
            "base_url": f"http://127.0.0.1:{free_port()}",
        }
        candidates = [
            {"provider": "down", "model": "x"},
            {"provider": "fake", "model": "chat"},
        ]
        settings["models"] = {"both": {"candidates": candidates}}
        settings["decision"]["backend"]["model"] = "both"
        upstream.script(*answer(kind))
        async with GatewayProcess(settings) as process:
            found = await ask(process)
            assert found["reply"]["served_by"] == "fake/chat"


async def test_d6_5_without_a_key_of_its_own_the_clients_key_is_forwarded() -> None:
    kind = "system-zero"
    async with FakeUpstream() as upstream:
        settings = config(kind, upstream.origin)
        del settings["decision"]["backend"]["api_key"]
        async with GatewayProcess(settings) as process:
            for steps in (answer(kind), failure(kind, 401, "invalid_api_key")):
                upstream.script(*steps)
            key = fresh_key()
            async with opened(process, key=key) as socket:
                await socket.say(**start("done", request={"questions": READY}))
                await socket.json()
                frames = []
                for _ in range(2):
                    await socket.say(type="decide", state_version=1)
                    assert (await socket.json())["type"] == "scheduled"
                    frames.append(await socket.json(BOUND_S))
                assert frames[0]["type"] == "decision"
                # what it says of the key is the client's to know, and ends its stream
                assert told(frames[1]) == (401, "invalid_api_key", False, None)
                assert (await socket.json())["reason"] == "auth"
            for sent in upstream.requests:
                assert sent.headers["authorization"] == f"Bearer {key}"
            assert key not in process.stderr()


async def test_d6_5_a_gateway_in_front_of_another() -> None:
    """The inner one has the chat model, the outer one forwards; a replay costs nothing twice."""
    async with FakeUpstream() as upstream:
        upstream.script_for("chat", *answer("chat-logprobs", 0.9))
        async with GatewayProcess(config("chat-logprobs", upstream.origin)) as inner:
            origin = f"{inner.base_url}/v1"
            settings = config("system-zero", origin, api_key=fresh_key())
            async with GatewayProcess(settings) as outer:
                found = await ask(outer)
                reply = found["reply"]
                decision = decisions_for(reply, {"questions": READY})["ready"]
                assert (decision.decision, decision.confidence) == (True, 0.9)
                assert reply["served_by"] == "fake/chat"
                assert reply["usage"]["input_tokens"] == 11
                frame = await ask(outer, request={"model": "system-zero", "questions": READY})
                assert frame["type"] == "decision"
                many = {f"o{number}": None for number in range(21)}
                asked = {"q": {"type": "choice", "instructions": "?", "criteria": many}}
                frame = await ask(outer, request={"questions": asked})
                assert told(frame)[:2] == (422, "invalid_criteria")
            settings["decision"]["backend"]["api_key"] = "ozk_unknown_0123456789"
            async with GatewayProcess(settings) as outer:
                frame = await ask(outer)
                assert told(frame) == (503, "system_zero_unavailable", False, None)
