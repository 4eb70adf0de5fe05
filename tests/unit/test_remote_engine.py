"""The engine `http` against an engine that is a process of its own: its frames and its ends."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.ports import free_port
from relay.engines.base import Completed, Envelope, Failed, Past, Payer, Yielded
from relay.engines.http import HttpEngine
from relay.engines.remote.link import RemoteLimits
from tests.support.remote_engine import (
    Gate,
    RemoteEngine,
    ended,
    outcome,
    result,
    said,
    started,
)
from tests.support.remote_outlet import KeepingOutlet
from tests.support.script import Eof, Fin, Flood, Head, Pings, Rst, Send, json_answer, spaced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from relay.engines.base import Ending
    from tests.support.script import Step

KEY = "sk-engine-0123456789"
EXECUTION = "0123456789abcdef" * 2
DOCUMENT = "workflow:\n  name: w\n  tasks: []\n"
LIMITS = RemoteLimits(connect_s=5, header_s=10, idle_s=20, stream_idle_s=20, finish_s=20)


def envelope(past: Past | None = None) -> Envelope:
    return Envelope(
        execution_id=EXECUTION,
        workflow_id="wf_1",
        document=DOCUMENT,
        inputs={"n": 1},
        source="inline",
        payer=Payer(org="org", key_id="key"),
        created_at=0.0,
        past=past or Past(),
    )


@asynccontextmanager
async def engine_at(
    base_url: str, limits: RemoteLimits = LIMITS, **more: Any
) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(base_url, api_key=KEY, limits=limits, **more)
    try:
        yield engine
    finally:
        await engine.close()


async def run(*steps: Step | Gate, limits: RemoteLimits = LIMITS) -> tuple[Ending, KeepingOutlet]:
    """What a run of an engine that answers so comes to."""
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url, limits) as engine:
        await remote.script("/execute", *steps)
        async with asyncio.timeout(30):
            ending = await engine.run(envelope(), outlet)
        outlet.check()
        return ending, outlet


# --- what is asked --------------------------------------------------------------------------------


async def test_w3_2_what_is_asked_of_the_engine() -> None:
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script("/execute", Send(outcome() + result()))
        await engine.run(envelope(), KeepingOutlet())
        request = await remote.request("/execute")
    assert request.method == "POST"
    assert request.json == {
        "workflow": DOCUMENT,
        "inputs": {"n": 1},
        "workflow_id": "wf_1",
        "execution_id": EXECUTION,
    }
    assert request.headers["accept"] == "text/event-stream"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["content-type"] == "application/json"


async def test_w2_3_a_resumed_run_is_executed_with_its_answers() -> None:
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script("/execute", Send(outcome() + result()))
        past = Past(emitted=frozenset({("workflow_started", "", 0)}), answers={"ask": {"ok": True}})
        ending = await engine.run(envelope(past), KeepingOutlet())
        request = await remote.request("/execute")
    assert isinstance(ending, Completed)
    assert request.json["answers"] == {"ask": {"ok": True}}


async def test_w2_5_a_run_that_its_process_left_is_not_begun_again() -> None:
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script(f"/executions/{EXECUTION}/cancel", *json_answer({}))
        ending = await engine.run(replace(envelope(), left=True), KeepingOutlet())
        assert await remote.seen("/execute") == []
        assert len(await remote.seen(f"/executions/{EXECUTION}/cancel")) == 1
    assert isinstance(ending, Failed)
    assert ending.code == "orphaned"


# --- its frames -----------------------------------------------------------------------------------


async def test_w2_1_frames_pass_as_they_came() -> None:
    frames = [
        said("request_received", source="inline"),
        said("made_up_by_the_engine", n=1, text="caf\u00e9 \u2028 \U0001f600"),
        b'event: task_dispatched\ndata: {"data" : {"task_id": "a", "n": 1.0e2},\n'
        b'data: "x":"\\u00e9"}\n\n',
        b"event: heartbeat\ndata: not json\n\n",
        said("task_skipped", task_id="b", reason="when"),
    ]
    ending, outlet = await run(*[Send(f) for f in frames], Send(outcome() + result()))
    assert outlet.frames == frames
    assert isinstance(ending, Completed)
    assert ending.verbatim == (("workflow_completed", outcome()), ("workflow_result", result()))


async def test_w2_1_what_sse_has_around_a_frame_does_not_pass() -> None:
    body = (
        b"\xef\xbb\xbf: hello\r\n\r\nid: 7\r\nretry: 10\r\nevent:heartbeat\r\ndata:{}\r\n\r\n"
        b": ping\n\nevent: heartbeat\rdata: {}\r\rdata: {}\n\n"
    )
    _, outlet = await run(*spaced([body[:2], body[2:31], body[31:]]), Send(outcome()))
    heartbeat = b"event: heartbeat\ndata: {}\n\n"
    assert outlet.said == [
        ("heartbeat", heartbeat),
        ("heartbeat", heartbeat),
        ("message", b"data: {}\n\n"),
    ]


async def test_w2_1_a_frame_over_crlf_cut_between_reads_is_one_frame() -> None:
    """B01, B02, B04."""
    crlf = said("heartbeat", running=["a"]).replace(b"\n", b"\r\n") + outcome() + result()
    parts = [crlf[:60], crlf[60:].partition(b"\r\n")[0] + b"\r"]
    parts.append(crlf[len(b"".join(parts)) :])
    _, outlet = await run(*spaced(parts))
    assert outlet.frames == [said("heartbeat", running=["a"])]


async def test_w2_1_a_huge_frame_passes_and_one_over_the_bound_ends_the_run() -> None:
    """B18, B19."""
    big = said("task_completed", task_id="a", output="x" * (3 * 1024 * 1024))
    _, outlet = await run(Send(big), Send(outcome() + result()))
    assert outlet.frames == [big]
    ending, outlet = await run(
        Send(said("heartbeat") + b"event: heartbeat\ndata: "), Flood(b"x" * 1024 * 1024, 64)
    )
    assert isinstance(ending, Failed)
    assert (ending.code, ending.verbatim) == ("engine_error", ())
    assert "16777216 bytes" in ending.message
    assert outlet.order == ["heartbeat"]


async def test_b16_a_name_that_no_reader_could_take_is_dropped() -> None:
    _, outlet = await run(
        Send(b"event: a\0b\ndata: {}\n\nevent: " + b"n" * 201 + b"\ndata: {}\n\n"),
        Send(b"event: " + b"n" * 200 + b"\ndata: {}\n\n" + outcome() + result()),
    )
    assert outlet.frames == [b"event: " + b"n" * 200 + b"\ndata: {}\n\n"]


async def test_the_engines_key_does_not_pass_in_an_error() -> None:
    frame = said("task_error", task_id="a", error={"message": f"refused {KEY}"})
    _, outlet = await run(Send(frame), Send(outcome() + result()))
    assert outlet.frames == [frame.replace(KEY.encode(), b"***")]


async def test_w2_2_tokens_of_the_engine_itself() -> None:
    def token(task: str, delta: str) -> bytes:
        return f"event: token\ndata: {json.dumps({'task_id': task, 'delta': delta})}\n\n".encode()

    _, outlet = await run(
        Send(token("a", "too early") + started("a") + token("a", "H\u00e9") + token("a", '"\n')),
        Send(token("b", "nobody's") + b"event: token\ndata: {}\n\n" + ended("a")),
        Send(token("a", "too late") + outcome() + result()),
    )
    assert outlet.order == [
        "streaming_started a",
        'a:H\u00e9"\n',
        "streaming_completed a",
        "task_completed a",
    ]
    assert outlet.outputs == {"a": 'H\u00e9"\n'}


async def test_w1_3_a_task_that_streamed_nothing_has_the_output_of_its_end() -> None:
    done = said("task_completed", task_id="a", output={"n": [1, 2.5]})
    _, outlet = await run(Send(done + outcome() + result()))
    assert outlet.outputs == {"a": {"n": [1, 2.5]}}


# --- its ends -------------------------------------------------------------------------------------


async def test_w2_3_a_completed_run() -> None:
    ending, _ = await run(Send(outcome("t1") + result()))
    assert isinstance(ending, Completed)
    assert ending.final_task_id == "t1"
    assert ending.summary["tasks"] == 1
    assert (ending.usage.prompt_tokens, ending.usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            {"code": "task_failed", "message": "no", "task_id": "a"},
            ("task_failed", "no", "a"),
        ),
        ("just words", ("engine_error", "just words", None)),
        (None, ("engine_error", "the engine failed", None)),
        ({"code": 5, "message": ["x"]}, ("engine_error", "the engine failed", None)),
    ],
)
async def test_w2_3_a_failed_run(error: object, told: tuple[object, ...]) -> None:
    frame = said("workflow_error", error=error)
    ending, _ = await run(Send(frame + result("failed")))
    assert isinstance(ending, Failed)
    assert (ending.code, ending.message, ending.task_id) == told
    assert ending.verbatim == (("workflow_error", frame), ("workflow_result", result("failed")))


async def test_w2_3_a_run_that_waits() -> None:
    frame = said("workflow_yielded", task_id="ask", prompt="Well?", schema={"type": "string"})
    ending, outlet = await run(Send(said("heartbeat") + frame + result("yielded")))
    assert isinstance(ending, Yielded)
    assert (ending.task_id, ending.prompt, ending.schema) == ("ask", "Well?", {"type": "string"})
    assert ending.verbatim == (("workflow_yielded", frame), ("workflow_result", result("yielded")))
    assert outlet.order == ["heartbeat"]


@pytest.mark.parametrize("schema", [{"type": 5}, {"$ref": "http://127.0.0.1/"}, "text", None])
async def test_w2_3_a_schema_that_no_answer_can_be_held_to_is_the_engines(schema: object) -> None:
    ending, _ = await run(Send(said("workflow_yielded", task_id="ask", schema=schema)))
    assert isinstance(ending, Yielded)
    assert (ending.prompt, ending.schema) == ("", None)


async def test_w2_3_one_outcome_and_one_result(caplog: pytest.LogCaptureFixture) -> None:
    between = said("output_delivered", task_id="a")
    second = said("workflow_error", error={"code": "x", "message": "y"})
    with caplog.at_level(logging.WARNING, "sluicegate.engines"):
        ending, outlet = await run(
            Send(outcome() + second + between + outcome()),
            Send(result() + result("failed") + second + said("heartbeat")),
        )
    assert isinstance(ending, Completed)
    assert ending.verbatim == (
        ("workflow_completed", outcome()),
        ("output_delivered", between),
        ("workflow_result", result()),
    )
    assert outlet.said == []
    assert "2 outcome, 3 late" in caplog.text
    assert EXECUTION in caplog.text


async def test_w2_3_an_engine_that_stays_behind_its_result_is_not_waited_for() -> None:
    """Its connection is closed if it does not end at once."""
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script("/execute", Send(outcome() + result()), Gate("never"))
        async with asyncio.timeout(10):
            assert isinstance(await engine.run(envelope(), outlet), Completed)
        await remote.request("/execute", closed=True)


@pytest.mark.parametrize(
    ("death", "why"),
    [
        (Rst(), "broke off"),
        (Fin(), "broke off"),
        (Eof(), "without an outcome"),
    ],
)
@pytest.mark.parametrize("tail", [b"", b'event: workflow_completed\ndata: {"data": {"fin'])
async def test_w2_3_an_engine_that_dies_without_an_outcome(
    death: Step, why: str, tail: bytes
) -> None:
    """B15, B44: half a frame is no frame."""
    ending, outlet = await run(Send(started("a") + said("heartbeat") + tail), death)
    assert isinstance(ending, Failed)
    assert (ending.code, ending.verbatim) == ("engine_error", ())
    assert why in ending.message
    assert outlet.order == ["streaming_started a", "heartbeat"]


async def test_w2_3_a_result_that_is_missing_is_left_to_the_gateway() -> None:
    ending, _ = await run(Send(outcome()), Rst())
    assert isinstance(ending, Completed)
    assert ending.verbatim == (("workflow_completed", outcome()),)
    limits = RemoteLimits(finish_s=0.3)
    ending, _ = await run(Send(outcome()), Gate("never"), limits=limits)
    assert isinstance(ending, Completed)


async def test_b08_a_last_frame_without_its_blank_line_counts_if_it_is_whole() -> None:
    ending, _ = await run(Send(outcome() + result().rstrip(b"\n")))
    assert isinstance(ending, Completed)
    assert [name for name, _ in ending.verbatim] == ["workflow_completed", "workflow_result"]


async def test_w2_3_a_result_without_an_outcome_is_an_engine_error() -> None:
    ending, _ = await run(Send(result() + outcome()))
    assert isinstance(ending, Failed)
    assert (ending.code, ending.verbatim) == ("engine_error", ())
    assert ending.message == "the engine sent workflow_result without an outcome"


async def test_an_engine_that_falls_silent_is_dead_and_comments_are_sound() -> None:
    limits = RemoteLimits(idle_s=0.8)
    ending, outlet = await run(Pings(4, 0.4), Send(said("heartbeat")), Gate("never"), limits=limits)
    assert isinstance(ending, Failed)
    assert ending.message == "the engine sent nothing for 0.8 s"
    assert outlet.order == ["heartbeat"]


# --- no run at all --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            json_answer({"error": {"message": f"no, {KEY} is bad", "code": "x"}}, status=422),
            "the engine refused the run with status 422: no, *** is bad",
        ),
        (
            [Head(500, {"content-type": "text/html"}), Send(b"<h1>" + b"oops " * 5000), Rst()],
            "the engine refused the run with status 500: <h1>oops",
        ),
        ([Head(503), Eof()], "the engine refused the run with status 503"),
        (
            [Head(302, {"location": "http://127.0.0.1:9/"}), Eof()],
            "the engine refused the run with status 302",
        ),
        (
            json_answer({"status": "accepted"}, status=200),
            'the engine\'s answer is no event stream: {"status":"accepted"}',
        ),
        ([Rst()], "the engine closed the connection before it answered"),
    ],
    ids=["json", "html", "empty", "redirect", "not a stream", "reset"],
)
async def test_w3_2_an_engine_that_does_not_start_the_run(steps: list[Step], message: str) -> None:
    ending, outlet = await run(*steps)
    assert isinstance(ending, Failed)
    assert ending.code == "engine_error"
    assert ending.message.startswith(message)
    assert len(ending.message) < 600
    assert outlet.said == []


async def test_w3_2_an_engine_that_is_not_there() -> None:
    async with engine_at(f"http://127.0.0.1:{free_port()}") as engine:
        ending = await engine.run(envelope(), KeepingOutlet())
        await engine.cancelled(EXECUTION)
    assert isinstance(ending, Failed)
    assert ending.message == "the engine cannot be reached: connection refused"


# --- cancelling -----------------------------------------------------------------------------------


async def test_w3_2_a_cancel_closes_everything_and_tells_the_engine() -> None:
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        both = started("a", remote.stream("a"), "token") + started("b", remote.stream("b"))
        await remote.script("/execute", Send(both + ended("a")), Gate("never"))
        token = b'event: token\ndata: {"delta": "x"}\n\n'
        await remote.script("/streams/a", Send(token), Gate("never"))
        await remote.script("/streams/b", Gate("never"))
        await remote.script(f"/executions/{EXECUTION}/cancel", *json_answer({"ok": True}))
        before = asyncio.all_tasks()
        task = asyncio.create_task(engine.run(envelope(), outlet))
        await outlet.until_text("a", "x")
        await remote.request("/streams/b")
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert task in done
        assert task.cancelled()
        assert asyncio.all_tasks() <= before
        said_by_then = list(outlet.said)
        for path in ("/execute", "/streams/a", "/streams/b"):
            await remote.request(path, closed=True)
        await engine.cancelled(EXECUTION)
        told = await remote.request(f"/executions/{EXECUTION}/cancel")
        assert (told.method, told.headers["authorization"]) == ("POST", f"Bearer {KEY}")
        assert outlet.said == said_by_then
        assert outlet.order == ["streaming_started a", "streaming_started b", "a:x"]


@pytest.mark.parametrize("steps", [json_answer({}, status=404), [Rst()], [Gate("never")]])
async def test_w3_2_telling_the_engine_is_best_effort(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relay.engines.remote.link._CANCEL_S", 0.5)
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script(f"/executions/{EXECUTION}/cancel", *steps)
        async with asyncio.timeout(10):
            await engine.cancelled(EXECUTION)
    assert "cancel" in caplog.text


# --- back-pressure --------------------------------------------------------------------------------


async def test_m3_5_an_engine_is_not_read_faster_than_the_journal_writes() -> None:
    outlet = KeepingOutlet(slow=True)
    frame = said("heartbeat", pad="x" * 10_000)
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script("/execute", Flood(frame, 2000), Send(outcome() + result()))
        task = asyncio.create_task(engine.run(envelope(), outlet))
        await outlet.until("heartbeat")
        written = -1
        while (now := (await remote.request("/execute")).written) != written:
            written = now
            await asyncio.sleep(0.3)
        assert written < 8 * 1024 * 1024  # the kernel's buffers, both ways
        assert len(outlet.said) <= 8
        outlet.catch_up()
        assert isinstance(await task, Completed)
        assert len(outlet.frames) == 2000


async def test_m3_5_what_is_held_stops_the_reading_of_the_engine() -> None:
    """B81, B84: a task's end is held, and the engine says 40 MB behind it."""
    outlet = KeepingOutlet()
    frame = said("heartbeat", pad="x" * 20_000)
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        head = started("a", remote.stream("a"), "token") + ended("a")
        await remote.script("/execute", Send(head), Flood(frame, 2000), Send(outcome() + result()))
        await remote.script("/streams/a", Head(), Gate("go"), Send(b"data: [DONE]\n\n"))
        task = asyncio.create_task(engine.run(envelope(), outlet))
        await outlet.until("streaming_started")
        written = -1
        while (now := (await remote.request("/execute")).written) != written:
            written = now
            await asyncio.sleep(0.3)
        assert written < 16 * 1024 * 1024
        assert outlet.order == ["streaming_started a"]
        await remote.open_gate("go")
        assert isinstance(await task, Completed)
        assert len(outlet.frames) == 2003
