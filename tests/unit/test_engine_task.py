"""W3.1, W2.2: one task from its dispatch to its end; retries, time limits, JSON, tools."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from relay.agents.base import AgentCall, AgentReply, AgentSink
from relay.engines.base import Completed, Failed, Usage
from relay.engines.embedded import answers, calls, lives
from relay.engines.embedded.engine import EmbeddedEngine
from relay.errors import GatewayShutdown
from tests.support.clock import run_virtually
from tests.support.engines import play, task
from tests.support.runs import (
    EXECUTION,
    HANG,
    RecordingOutlet,
    ScriptedAgents,
    by_task,
    envelope,
    fails,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

USAGE = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}


def test_a_task_says_all_its_events_in_order_and_no_more() -> None:
    played = play([task("t")], {"t": ["he", "llo"]}, inputs={})
    assert [(said.name, said.data) for said in played.outlet.said] == [
        ("request_received", {"source": "inline"}),
        ("workflow_loaded", {"name": "w", "task_count": 1}),
        ("workflow_started", {"inputs": {}}),
        (
            "task_dispatched",
            {"task_id": "t", "kind": "task", "agent": "a", "model": "fake/a", "attempt": 1},
        ),
        ("streaming_started", {"task_id": "t", "model": "fake/a", "provider": "fake"}),
        ("token", {"task_id": "t", "raw": b"he"}),
        ("token", {"task_id": "t", "raw": b"llo"}),
        ("streaming_completed", {"task_id": "t", "chars": 5, "finish_reason": "stop"}),
        (
            "task_completed",
            {
                "task_id": "t",
                "kind": "task",
                "duration_ms": 0,
                "usage": USAGE,
                "output_preview": "hello",
            },
        ),
        (
            "output_delivered",
            {
                "task_id": "t",
                "bytes": 5,
                "result_url": f"/v1/workflows/results/{EXECUTION}/t",
            },
        ),
    ]
    assert played.ending == Completed(
        final_task_id="t",
        summary={"tasks": 1, "completed": 1, "failed": 0, "skipped": 0},
        usage=Usage(prompt_tokens=1, completion_tokens=5, cost_micro_usd=2),
    )
    assert played.outlet.steps == {
        "task/t": {
            "status": "completed",
            "output": "hello",
            "usage": {"prompt_tokens": 1, "completion_tokens": 5, "cost_micro_usd": 2},
            "final": {
                "finish_reason": "stop",
                "model": "fake/a",
                "provider": "fake",
                "reported": True,
            },
        }
    }


def test_the_call_has_what_the_document_says() -> None:
    document = [task("t", "b", prompt="{{ inputs.x }}!", max_tokens=7)]
    played = play(
        {"workflow": {"name": "w", "inputs": {"x": 1}, "tasks": document}}, inputs={"x": 2}
    )
    (call,) = played.agents.calls
    assert (call.agent, call.max_tokens, call.plane) == ("b", 7, "workflows")
    assert call.messages == [{"role": "user", "content": "2!"}]
    assert call.payer.key_id == "key"
    assert played.outlet.data("workflow_started") == [{"inputs": {"x": 2}}]


def test_the_preview_is_cut_and_the_bytes_are_those_of_utf8() -> None:
    played = play([task("t")], {"t": "ü" * 600})
    assert played.outlet.data("task_completed")[0]["output_preview"] == "ü" * 512
    assert played.outlet.data("output_delivered")[0]["bytes"] == 1200


def test_an_error_before_anything_was_served_has_no_stream() -> None:
    played = play([task("t")], {"t": [fails("rate_limit_exceeded", tokens=3)]})
    assert played.outlet.names("t") == ["task_dispatched", "task_error"]
    (error,) = played.outlet.data("task_error")
    assert error == {
        "task_id": "t",
        "kind": "task",
        "error": {
            "code": "rate_limit_exceeded",
            "message": "rate_limit_exceeded of the script",
        },
        "attempt": 1,
        "will_retry": False,
    }
    ending = played.ending
    assert isinstance(ending, Failed)
    assert (ending.code, ending.task_id) == ("task_failed", "t")
    assert "task t failed: rate_limit_exceeded" in ending.message
    assert ending.usage == Usage(prompt_tokens=3)
    assert ending.summary == {"tasks": 1, "completed": 0, "failed": 1, "skipped": 0}


def test_a_retry_starts_over() -> None:
    played = play(
        [task("t", retries=2)], {"t/1": ["ab", fails(tokens=4)], "t/2": [fails()], "t/3": "cd"}
    )
    assert played.outlet.names("t") == [
        *("task_dispatched", "streaming_started", "token", "task_error"),
        *("task_dispatched", "task_error"),
        *("task_dispatched", "streaming_started", "token", "streaming_completed"),
        *("task_completed", "output_delivered"),
    ]
    errors = played.outlet.data("task_error")
    assert [(error["attempt"], error["will_retry"]) for error in errors] == [(1, True), (2, True)]
    assert played.outlet.output("t") == "cd"
    used = Usage(prompt_tokens=5, completion_tokens=2, cost_micro_usd=2)
    assert played.ending.usage == used
    assert played.outlet.data("task_completed")[0]["usage"] == used.document()


@pytest.mark.parametrize(
    ("retries", "error", "called"),
    [(0, fails(), 1), (5, fails(), 6), (5, fails(retryable=False), 1)],
)
def test_only_what_is_retryable_is_retried_and_not_for_ever(
    retries: int, error: Any, called: int
) -> None:
    played = play([task("t", retries=retries)], {"t": [error]})
    assert played.agents.called("t") == called
    assert isinstance(played.ending, Failed)
    told = [data["will_retry"] for data in played.outlet.data("task_error")]
    assert told == [True] * (called - 1) + [False]


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_pauses_have_full_jitter_and_double(jitter: float) -> None:
    times: list[float] = []

    def reply(call: AgentCall) -> list[Any]:
        times.append(asyncio.get_running_loop().time())
        return [fails()]

    outlet = RecordingOutlet()
    engine = EmbeddedEngine(ScriptedAgents(reply), jitter=lambda: jitter)
    run_virtually(engine.run(envelope([task("t", retries=5)]), outlet))
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == pytest.approx([jitter * pause for pause in (0.5, 1, 2, 4, 8)])
    assert lives.RETRY_MAX_S > 8


@pytest.mark.parametrize(("asked_s", "pause_s"), [(None, 0.25), (0, 0.25), (7, 7.25), (900, 60.25)])
def test_a_provider_that_asks_to_be_left_alone_is(asked_s: int | None, pause_s: float) -> None:
    played = play(
        [task("t", retries=1), task("u")],
        {"t/1": [fails(retry_after_s=asked_s)], "t/2": "well"},
        heartbeat_s=pause_s - 0.01,
    )
    assert len(played.outlet.data("heartbeat")) == 1
    assert played.outlet.data("heartbeat") == [{"running": []}]
    late = play([task("t", retries=1)], {"t/1": [fails(retry_after_s=asked_s)], "t/2": "well"},
                heartbeat_s=pause_s + 0.01)  # fmt: skip
    assert late.outlet.data("heartbeat") == []


def test_a_time_limit_ends_an_attempt_and_may_be_retried() -> None:
    played = play([task("t", retries=1, timeout_s=5)], {"t/1": ["ab", HANG], "t/2": [4.0, "well"]})
    (error,) = played.outlet.data("task_error")
    assert error["error"]["code"] == "timeout"
    assert "timeout_s (5" in error["error"]["message"]
    assert error["will_retry"]
    assert played.outlet.output("t") == "well"  # each attempt has the whole time
    assert played.outlet.data("task_completed")[0]["duration_ms"] == 4000


def test_the_limit_of_the_run_ends_all_that_is_open_first() -> None:
    document = {
        "workflow": {
            "name": "w",
            "timeout_s": 10,
            "tasks": [
                {"type": "parallel", "id": "p", "tasks": [task("x"), task("y", retries=5)]},
            ],
        }
    }
    played = play(document, {"x": ["ab", HANG], "y": [HANG]})
    assert isinstance(played.ending, Failed)
    assert (played.ending.code, played.ending.task_id) == ("timeout", None)
    assert "10" in played.ending.message
    errors = {data["task_id"]: data for data in played.outlet.data("task_error")}
    assert {key: data["error"]["code"] for key, data in errors.items()} == dict.fromkeys(
        ("x", "y", "p"), "timeout"
    )
    assert not any(data["will_retry"] for data in errors.values())
    assert played.outlet.said[-1].task_id == "p"


def test_when_false_skips() -> None:
    played = play([task("t", when="1 > 2"), task("u", prompt="{{ tasks.t.status }}")])
    assert played.outlet.data("task_skipped") == [
        {"task_id": "t", "kind": "task", "reason": "when"}
    ]
    assert played.outlet.names("t") == ["task_skipped"]
    assert "output" not in played.outlet.steps["task/t"]  # nothing is stored as its result
    assert played.outlet.output("u") == "a says: skipped"
    assert played.ending.summary == {"tasks": 2, "completed": 1, "failed": 0, "skipped": 1}


@pytest.mark.parametrize("fields", [{"when": "1 / inputs.n"}, {"prompt": "{{ 1 / inputs.n }}"}])
def test_a_template_without_a_value_fails_the_task(fields: dict[str, str]) -> None:
    document = {"workflow": {"name": "w", "inputs": {"n": 0}, "tasks": [task("t", **fields)]}}
    played = play(document)
    assert played.outlet.names("t") == ["task_dispatched", "task_error"]
    (error,) = played.outlet.data("task_error")
    assert error["error"]["code"] == "template_error"
    assert "division by zero" in error["error"]["message"]
    assert not played.agents.calls


@pytest.mark.parametrize(
    "text", ['{"n": 3}', '```json\n{"n": 3}\n```', 'Here:\n```\n{"n": 3}\n```\nas asked']
)
def test_json_is_the_output(text: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    played = play(
        [task("t", json=schema), task("u", prompt="{{ tasks.t.output.n + 1 }}")], {"t": text}
    )
    assert played.outlet.output("t") == {"n": 3}
    assert played.outlet.data("task_completed", "t")[0]["output_preview"] == '{"n":3}'
    assert played.outlet.data("output_delivered", "t")[0]["bytes"] == len('{"n":3}')
    assert played.outlet.output("u") == "a says: 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("three", "no JSON"),
        ('{"n": NaN}', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"n": "x"}', "does not fit the schema: n"),
        ('"' + "x" * answers.JSON_CHARS + '"', f"{answers.JSON_CHARS:,}"),
    ],
)
def test_json_that_does_not_fit_is_retried(text: str, message: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    played = play([task("t", json=schema, retries=1)], {"t/1": text, "t/2": '{"n": 3}'})
    (error,) = played.outlet.data("task_error")
    assert error["error"]["code"] == "invalid_output"
    assert message in error["error"]["message"]
    assert error["will_retry"]
    assert played.outlet.output("t") == {"n": 3}
    assert played.outlet.names("t")[:5] == [
        *("task_dispatched", "streaming_started", "token", "streaming_completed", "task_error")
    ]


def test_a_reply_that_is_too_large_stops_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TEXT_BYTES", 100)
    played = play([task("t", retries=3)], {"t": ["x" * 60, "y" * 60, HANG]})
    (error,) = played.outlet.data("task_error")
    assert error["error"]["code"] == "output_too_large"
    assert "100 bytes" in error["error"]["message"]
    assert not error["will_retry"]
    assert len([said for said in played.outlet.said if said.name == "token"]) == 1


def test_a_reply_that_ends_just_when_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TEXT_BYTES", 100)

    class Quick(ScriptedAgents):
        async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
            sink.started("m", "p")
            sink.text(b"x" * 101)
            return AgentReply(
                text="x" * 101, finish_reason="stop", usage=Usage(), model="m", provider="p"
            )

    outlet = RecordingOutlet()
    ending = run_virtually(EmbeddedEngine(Quick(by_task({}))).run(envelope([task("t")]), outlet))
    outlet.ended(ending)
    assert outlet.data("task_error")[0]["error"]["code"] == "output_too_large"


def test_an_output_that_is_put_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "OUTPUT_BYTES", 100)
    held = [task("x"), task("y")]
    played = play(
        [{"type": "sequential", "id": "s", "tasks": held}], {"x": "x" * 60, "y": "y" * 60}
    )
    assert played.outlet.status("y") == "completed"
    (error,) = played.outlet.data("task_error")
    assert (error["task_id"], error["error"]["code"]) == ("s", "output_too_large")
    assert "100 bytes" in error["error"]["message"]


def test_a_full_journal_holds_the_call_back() -> None:
    quick = play([task("t")], {"t": ["a"] * 10}, outlet=RecordingOutlet())
    full = play([task("t")], {"t": ["a"] * 10}, outlet=RecordingOutlet(full_every=2))
    assert full.outlet.waits == quick.outlet.waits + 5
    assert full.outlet.output("t") == "a" * 10


def test_a_late_sink_says_nothing() -> None:
    kept: list[AgentSink] = []

    class Careless(ScriptedAgents):
        async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
            kept.append(sink)
            return await super().call(call, sink)

    outlet = RecordingOutlet()
    agents = Careless(by_task({"t/1": ["a", fails()]}))
    run_virtually(EmbeddedEngine(agents).run(envelope([task("t", retries=1)]), outlet))
    before = list(outlet.said)
    for sink in kept:
        sink.started("m", "p")
        assert sink.text(b"x")
        sink.step("task_dispatched", {"task_id": "tool.1", "kind": "tool", "attempt": 1})
    assert outlet.said == before


SILENT = task("t")
WHY: list[tuple[Any, str | None]] = [
    ([{**SILENT, "timeout_s": 5}], "timeout"),
    ([{"type": "parallel", "id": "p", "timeout_s": 5, "tasks": [SILENT]}], "timeout"),
    ({"workflow": {"name": "w", "timeout_s": 5, "tasks": [SILENT]}}, "timeout"),
    ([{"type": "parallel", "id": "p", "tasks": [SILENT, task("u")]}], "cancelled"),
    ([SILENT], None),
]


@pytest.mark.parametrize(("asked", "why"), WHY)
def test_a_call_that_is_cancelled_can_ask_why(asked: Any, why: str | None) -> None:
    """For the lines of the tools that it cuts off: in the moment in which it is."""
    seen: list[str | None] = []

    class Asking(ScriptedAgents):
        async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
            assert call.why_cancelled() is None
            try:
                return await super().call(call, sink)
            except asyncio.CancelledError:
                seen.append(call.why_cancelled())
                raise

    async def run() -> None:
        agents = Asking(by_task({"t": [HANG], "u": [1.0, fails(retryable=False)]}))
        work = asyncio.create_task(EmbeddedEngine(agents).run(envelope(asked), RecordingOutlet()))
        await asyncio.sleep(60)
        work.cancel()
        await asyncio.wait({work})

    run_virtually(run())
    assert seen == [why]


def tool(name: str, number: int, **data: Any) -> tuple[str, dict[str, Any]]:
    return name, {"task_id": f"tool.{number}", "kind": "tool", **data}


def test_tool_steps_stand_under_their_task() -> None:
    ok: Mapping[str, Any] = {"duration_ms": 1, "output_preview": "r"}
    error = {"error": {"code": "tool_error", "message": "m"}, "attempt": 1, "will_retry": False}
    played = play(
        [task("t")],
        {
            "t": [
                tool("task_dispatched", 1, attempt=1),
                tool("task_dispatched", 2, attempt=1),
                tool("task_completed", 1, **ok),
                tool("task_error", 2, **error),
                "done",
            ]
        },
    )
    assert played.outlet.names("t.tool.1") == ["task_dispatched", "task_completed"]
    assert played.outlet.names("t.tool.2") == ["task_dispatched", "task_error"]
    assert played.ending.summary["tasks"] == 1  # a tool step is no task of the document


def test_an_open_tool_step_ends_before_its_task() -> None:
    played = play(
        [task("t", retries=1, timeout_s=5)],
        {
            "t/1": [tool("task_dispatched", 1, attempt=1), HANG],
            "t/2": [tool("task_dispatched", 1, attempt=1), fails(retryable=False)],
        },
    )
    told = [
        (said.name, said.task_id, said.data["attempt"], said.data.get("will_retry"))
        for said in played.outlet.said
        if said.name in ("task_dispatched", "task_error")
    ]
    assert told == [
        ("task_dispatched", "t", 1, None),
        ("task_dispatched", "t.tool.1", 1, None),
        ("task_error", "t.tool.1", 1, False),
        ("task_error", "t", 1, True),
        ("task_dispatched", "t", 2, None),
        ("task_dispatched", "t.tool.1", 2, None),
        ("task_error", "t.tool.1", 2, False),
        ("task_error", "t", 2, False),
    ]


def test_heartbeats_come_only_in_silence() -> None:
    replies: dict[str, list[Any]] = {"x": [14.0, "a", 14.0, "b", 31.0, "c"], "y": [14.5, "a"]}
    document = [{"type": "parallel", "id": "p", "tasks": [task("x"), task("y")]}]
    played = play(document, replies)
    assert played.outlet.data("heartbeat") == [{"running": ["p", "x"]}] * 2
    names = played.outlet.names()
    at = names.index("heartbeat")
    assert names[at - 1 : at + 3] == ["token", "heartbeat", "heartbeat", "token"]


def test_tokens_are_no_silence() -> None:
    played = play([task("t")], {"t": ["a", 10.0, "b", 10.0, "c", 10.0, "d"]})
    assert played.outlet.data("heartbeat") == []


def test_other_heartbeat_intervals() -> None:
    played = play([task("t")], {"t": [10.5, "a"]}, heartbeat_s=2)
    assert len(played.outlet.data("heartbeat")) == 5


# -- the end of a run from outside ----------------------------------------------------------------

HANGING = [
    {
        "type": "parallel",
        "id": "p",
        "tasks": [
            task("x"),
            {"type": "batch", "id": "b", "items": [1, 2], "task": task("i", timeout_s=50)},
            task("z", retries=5),
        ],
    }
]


def test_a_cancellation_ends_all_and_says_nothing() -> None:
    outlet = RecordingOutlet()
    agents = ScriptedAgents(
        by_task({"x": ["a", HANG], "i.0": [HANG], "i.1": [HANG], "z": [fails()]})
    )

    async def main() -> None:
        run = asyncio.create_task(EmbeddedEngine(agents).run(envelope(HANGING), outlet))
        await asyncio.sleep(0.9)
        assert agents.active == 3
        before = len(outlet.said)
        run.cancel()
        started = asyncio.get_running_loop().time()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert asyncio.get_running_loop().time() - started < 1
        assert agents.active == 0
        assert len(outlet.said) == before

    run_virtually(main())


def test_a_cancellation_wins_over_a_failure_of_the_same_turn() -> None:
    outlet = RecordingOutlet()
    go = asyncio.Event()

    class Waiting(ScriptedAgents):
        async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
            await go.wait()
            raise fails()

    async def main() -> None:
        document = [
            {"type": "parallel", "id": "p", "on_error": "continue", "tasks": [task("x")]},
            task("y"),
        ]
        run = asyncio.create_task(
            EmbeddedEngine(Waiting(by_task({}))).run(envelope(document), outlet)
        )
        await asyncio.sleep(0.5)
        go.set()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert "y" not in [said.task_id for said in outlet.said]

    run_virtually(main())


def test_a_shutdown_passes_through_and_says_nothing() -> None:
    outlet = RecordingOutlet()
    agents = ScriptedAgents(
        by_task(
            {
                "x": ["a", HANG],
                "i.0": [HANG],
                "i.1": [1.0, GatewayShutdown("it stops")],
                "z": [HANG],
            }
        )
    )

    async def main() -> None:
        with pytest.raises(GatewayShutdown):
            await EmbeddedEngine(agents).run(envelope(HANGING), outlet)

    run_virtually(main())
    assert agents.active == 0
    assert "task_error" not in outlet.names()
    assert set(outlet.past().open) == {"p", "x", "b", "i.0", "i.1", "z"}


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), TimeoutError("another")])
def test_a_bug_ends_what_is_open_and_passes_through(bug: Exception) -> None:
    outlet = RecordingOutlet()
    agents = ScriptedAgents(
        by_task({"x": ["a", HANG], "i.0": [HANG], "i.1": [1.0, bug], "z": [HANG]})
    )
    with pytest.raises(type(bug)):
        run_virtually(EmbeddedEngine(agents).run(envelope(HANGING), outlet))
    assert agents.active == 0
    assert outlet.past().open == {}
    assert {data["error"]["code"] for data in outlet.data("task_error")} == {"engine_error"}


def test_an_agent_that_is_gone_since_the_check_ends_the_run() -> None:
    outlet = RecordingOutlet()
    engine = EmbeddedEngine(ScriptedAgents(by_task({}), names=("a",)))
    assert engine.check({"workflow": {"name": "w", "tasks": [task("t")]}}, {}).task_count == 1
    ending = run_virtually(engine.run(envelope([task("t", "b")]), outlet))
    assert isinstance(ending, Failed)
    assert ending.code == "invalid_workflow"
    assert "b" in ending.message
    assert outlet.said == []
