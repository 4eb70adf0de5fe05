"""The engine `http`: sub-streams that it advertises, of every shape, and what befalls them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from relay.engines.base import Completed
from relay.engines.http import HttpEngine
from relay.engines.remote.link import RemoteLimits
from relay.ordering import OrderingLimits
from tests.support.remote_engine import Gate, RemoteEngine, ended, outcome, result, said, started
from tests.support.remote_outlet import KeepingOutlet
from tests.support.script import DONE, Fin, Flood, Head, Pings, Rst, Send, Sleep, chunk, sse
from tests.support.shapes import broken_script_for, script_for
from tests.unit.test_remote_engine import KEY, LIMITS, engine_at, envelope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.script import Step

WORDS = ["Hé", 'llo "', "\U0001f600\n"]
TEXT = "".join(WORDS)
TOKEN = b'event: token\ndata: {"delta": "%b"}\n\n'
TOKENS = [Send(TOKEN % word) for word in (b"H\\u00e9", b'llo \\"', b"\\ud83d", b"\\ude00\\n")]
SHAPES: dict[str, list[Step]] = {
    "openai": script_for("openai", words=WORDS),
    "anthropic": script_for("anthropic", words=WORDS),
    "gemini": script_for("gemini", words=WORDS),
    "token": [*TOKENS, Send(b": bye\n\ndata: [DONE]\n\n")],
}
WHOLE = [
    "streaming_started a",
    f"a:{TEXT}",
    "streaming_completed a",
    "task_completed a",
]


async def run(
    script: Callable[[RemoteEngine], Awaitable[None]],
    *,
    limits: RemoteLimits = LIMITS,
    **more: Any,
) -> KeepingOutlet:
    """What is said of a run that completes all the same, whatever its sub-streams do."""
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url, limits, **more) as engine:
        await script(remote)
        async with asyncio.timeout(40):
            ending = await engine.run(envelope(), outlet)
        assert isinstance(ending, Completed)
        assert [name for name, _ in ending.verbatim] == ["workflow_completed", "workflow_result"]
    outlet.check()
    return outlet


async def frames_of_one_task(remote: RemoteEngine, shape: str | None = None) -> None:
    """All frames of the engine at once: its sub-stream is never ahead of them."""
    head = started("a", remote.stream("a"), shape)
    await remote.script("/execute", Send(head + ended("a") + outcome() + result()))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
async def test_w3_2_every_shape_is_drained_before_the_end_of_its_task(shape: str) -> None:
    async def script(remote: RemoteEngine) -> None:
        await frames_of_one_task(remote, shape)
        paced = [step for send in SHAPES[shape] for step in (send, Sleep(0.02))]
        await remote.script("/streams/a", *paced)

    outlet = await run(script)
    assert outlet.order == WHOLE
    assert outlet.outputs == {"a": TEXT}


async def test_w3_2_openai_is_the_default_and_only_choice_0s_content_is_text() -> None:
    deltas = [
        chunk(None, delta={"reasoning_content": "hm"}),
        chunk("yes"),
        chunk("other", index=1),
        chunk(None, delta={"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}),
        chunk(None, finish_reason="stop"),
    ]

    async def script(remote: RemoteEngine) -> None:
        await frames_of_one_task(remote)
        await remote.script("/streams/a", *[Send(sse(delta)) for delta in deltas], Send(DONE))

    assert (await run(script)).texts == {"a": "yes"}


async def test_w2_2_two_tasks_interleave_and_none_holds_the_other() -> None:
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        both = started("a", remote.stream("a"), "token") + started("b", remote.stream("b"), "token")
        frames = both + ended("a") + said("heartbeat") + started("c") + ended("b")
        await remote.script("/execute", Send(frames + outcome() + result()))
        await remote.script("/streams/a", Send(TOKEN % b"a1"), Gate("a"), Send(TOKEN % b"a2"))
        await remote.script(
            "/streams/b", Send(TOKEN % b"b1"), Gate("b"), Send(TOKEN % b"b2"), Gate("c")
        )
        task = asyncio.create_task(engine.run(envelope(), outlet))
        await outlet.until_text("a", "a1")
        await outlet.until_text("b", "b1")
        await remote.open_gate("b")
        await outlet.until_text("b", "b1b2")  # passes the frames that a holds
        assert [name for name, _ in outlet.said if name != "token"] == ["streaming_started"] * 2
        await remote.open_gate("a")
        await outlet.until("heartbeat", "streaming_started")  # b's end is still held
        assert "streaming_completed b" not in outlet.order
        await remote.open_gate("c")
        assert isinstance(await task, Completed)
    outlet.check()
    assert outlet.order[-5:] == [
        "task_completed a",
        "heartbeat",
        "streaming_started c",
        "streaming_completed b",
        "task_completed b",
    ]
    assert outlet.texts == {"a": "a1a2", "b": "b1b2"}
    assert outlet.outputs == {"a": "a1a2", "b": "b1b2"}


async def test_w2_2_a_retry_starts_over() -> None:
    async def script(remote: RemoteEngine) -> None:
        frames = started("a", remote.stream("1"), "token")
        frames += said("task_error", task_id="a", will_retry=True)
        frames += started("a", remote.stream("2"), "token") + ended("a") + outcome() + result()
        await remote.script("/execute", Send(frames))
        await remote.script("/streams/1", Send(TOKEN % b"old"), Sleep(0.2), Send(TOKEN % b"er"))
        await remote.script("/streams/2", Send(TOKEN % b"new"))

    outlet = await run(script)
    assert outlet.order == [
        "streaming_started a",
        "a:older",
        "task_error a",
        "streaming_started a",
        "a:new",
        "streaming_completed a",
        "task_completed a",
    ]
    assert outlet.outputs == {"a": "new"}


# --- what befalls them ----------------------------------------------------------------------------

BROKEN: dict[str, tuple[list[Step | Gate], str, str]] = {
    "reset": ([*broken_script_for("openai", words=["half"])], "half", "broke off"),
    "cut": ([*broken_script_for("openai", words=["half"])[:-1], Fin()], "half", "broke off"),
    "ended early": ([Send(sse(chunk("half")))], "half", "before the answer was finished"),
    "stalled": ([Send(sse(chunk("half"))), Gate("never")], "half", "sent nothing for 0.6 s"),
    "never answered": ([Gate("never")], "", "no response headers within 0.8 s"),
    "not found": ([Head(404), Send(b"{}")], "", "refused with status 404"),
    "no stream": ([Head(200, {"content-type": "text/html"}), Send(b"<p>")], "", "no event stream"),
    "redirect": ([Head(307, {"location": "http://127.0.0.1:1/"})], "", "refused with status 307"),
    "garbage": ([Send(sse(chunk("half"))), Send(b"data: {oops\n\n")], "half", "not JSON"),
    "error": (
        [Send(sse(chunk("half"))), Send(b'data: {"error": {"message": "too hot"}}\n\n')],
        "half",
        "too hot",
    ),
    "no end of line": ([Send(b"data: "), Flood(b"x" * 1_000_000, 40)], "", "16777216 bytes"),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_w3_2_a_sub_stream_that_breaks_lets_the_run_end(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps, text, why = BROKEN[fault]
    limits = RemoteLimits(header_s=0.8, stream_idle_s=0.6, finish_s=20)

    async def script(remote: RemoteEngine) -> None:
        await frames_of_one_task(remote)
        await remote.script("/streams/a", *steps)

    with caplog.at_level(logging.WARNING, "sluicegate.engines"):
        outlet = await run(script, limits=limits)
    expected = ["streaming_started a", "streaming_completed a", "task_completed a"]
    if text:
        expected.insert(1, f"a:{text}")
    assert outlet.order == expected
    assert outlet.outputs == ({"a": text} if text else {})
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1


async def test_w3_2_a_sub_stream_without_an_end_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not silent, so only the bound of the hold ends it; nothing is invented."""
    limits = RemoteLimits(finish_s=0.6, stream_idle_s=20)
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url, limits) as engine:
        await frames_of_one_task(remote, "token")
        await remote.script("/streams/a", Send(TOKEN % b"x"), Pings(1000, 0.05))
        async with asyncio.timeout(20):
            assert isinstance(await engine.run(envelope(), outlet), Completed)
        await remote.request("/streams/a", closed=True)
    assert outlet.order == [
        "streaming_started a",
        "a:x",
        "streaming_completed a",
        "task_completed a",
    ]
    assert "did not finish within 0.6 s" in caplog.text


async def test_w3_2_a_text_that_is_complete_is_not_waited_for_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relay.engines.remote.run._FINISHING_S", 0.3)

    async def script(remote: RemoteEngine) -> None:
        await frames_of_one_task(remote)
        end = Send(sse(chunk("done", finish_reason="stop")))
        await remote.script("/streams/a", end, Pings(1000, 0.05))

    assert (await run(script)).texts == {"a": "done"}


async def test_w2_3_the_text_of_open_sub_streams_precedes_the_end_of_a_dead_engine() -> None:
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await remote.script("/execute", Send(started("a", remote.stream("a"), "token")), Rst())
        await remote.script("/streams/a", Send(TOKEN % b"1"), Sleep(0.3), Send(TOKEN % b"2"))
        ending = await engine.run(envelope(), outlet)
    assert not isinstance(ending, Completed)
    assert outlet.order == ["streaming_started a", "a:12"]


async def test_w3_2_a_text_that_is_too_large_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from relay.engines.remote.texts import Texts

    monkeypatch.setattr("relay.engines.remote.run.Texts", lambda: Texts(100_000, 1_000_000))

    async def script(remote: RemoteEngine) -> None:
        await frames_of_one_task(remote, "token")
        await remote.script("/streams/a", Flood(TOKEN % (b"x" * 1000), 100_000))

    outlet = await run(script)
    assert 100_000 <= outlet.token_bytes < 200_000
    assert outlet.outputs == outlet.texts
    assert "too large to keep" in caplog.text


async def test_m3_5_a_flood_is_not_read_faster_than_the_journal_writes() -> None:
    outlet = KeepingOutlet(slow=True)
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        await frames_of_one_task(remote, "token")
        await remote.script("/streams/a", Flood(TOKEN % (b"x" * 1000), 10_000))
        task = asyncio.create_task(engine.run(envelope(), outlet))
        await outlet.until("streaming_started")
        written = -1
        while (now := (await remote.request("/streams/a")).written) != written:
            written = now
            await asyncio.sleep(0.3)
        assert written < 8 * 1024 * 1024
        assert outlet.token_bytes < 100_000
        outlet.catch_up()
        assert isinstance(await task, Completed)
    assert outlet.outputs == {"a": "x" * 10_000_000}


async def test_m3_5_a_sub_stream_whose_start_is_held_is_read_within_a_bound() -> None:
    outlet = KeepingOutlet()
    async with RemoteEngine() as remote, engine_at(remote.base_url) as engine:
        frames = started("a", remote.stream("a"), "token") + ended("a")
        frames += started("b", remote.stream("b"), "token") + ended("b") + outcome() + result()
        await remote.script("/execute", Send(frames))
        await remote.script("/streams/a", Head(), Gate("a"), Send(TOKEN % b"a"))
        await remote.script("/streams/b", Flood(TOKEN % (b"x" * 1000), 10_000))
        task = asyncio.create_task(engine.run(envelope(), outlet))
        written = 0
        while (now := (await remote.request("/streams/b")).written) != written or not now:
            written = now
            await asyncio.sleep(0.3)
        assert 0 < written < 8 * 1024 * 1024
        assert outlet.order == ["streaming_started a"]
        await remote.open_gate("a")
        assert isinstance(await task, Completed)
    outlet.check()
    assert outlet.outputs == {"a": "a", "b": "x" * 10_000_000}


async def test_w3_2_more_sub_streams_than_may_be_open_are_not_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "relay.engines.remote.run.OrderingLimits",
        lambda finish_s: OrderingLimits(finish_s=finish_s, streams_max=2),
    )

    async def script(remote: RemoteEngine) -> None:
        tasks = "abc"
        frames = b"".join(started(task, remote.stream(task), "token") for task in tasks)
        frames += b"".join(ended(task) for task in tasks) + outcome() + result()
        await remote.script("/execute", Send(frames))
        for task in tasks:
            await remote.script(f"/streams/{task}", Send(TOKEN % task.encode()))

    outlet = await run(script)
    assert outlet.texts == {"a": "a", "b": "b"}
    assert "1 stream" in caplog.text


# --- who is asked, and with what key --------------------------------------------------------------


async def test_w3_2_the_key_goes_to_the_engines_origin_alone() -> None:
    outlet = KeepingOutlet()
    async with RemoteEngine() as other, RemoteEngine() as remote:
        allowed = (other.origin,)
        async with engine_at(remote.base_url, allow_stream_origins=allowed) as engine:
            frames = started("a", remote.stream("a?x=1#part"), "token")
            frames += started("b", other.stream("b"), "token")
            frames += started("c", "/engine/v1/streams/c", "token")  # relative: the engine's own
            frames += ended("a") + ended("b") + ended("c") + outcome() + result()
            await remote.script("/execute", Send(frames))
            for at, name in ((remote, "a"), (other, "b"), (remote, "c")):
                await at.script(f"/streams/{name}", Send(TOKEN % name.encode()))
            assert isinstance(await engine.run(envelope(), outlet), Completed)
            own, foreign = await remote.request("/streams/a"), await other.request("/streams/b")
    assert outlet.texts == {"a": "a", "b": "b", "c": "c"}
    assert (own.method, own.path) == ("GET", "/engine/v1/streams/a?x=1")
    assert own.headers["authorization"] == f"Bearer {KEY}"
    assert own.headers["accept"] == "text/event-stream"
    assert "authorization" not in foreign.headers
    assert KEY not in str(foreign.headers)


async def test_w3_2_other_origins_are_never_asked_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with RemoteEngine() as other:

        async def script(remote: RemoteEngine) -> None:
            urls = [
                other.stream("a"),
                other.stream("b"),
                f"http://127.0.0.1:{remote.port}@127.0.0.1:{other.port}/engine/v1/streams/c",
                f"//127.0.0.1:{other.port}/engine/v1/streams/d",
                f"http:\\\\127.0.0.1:{other.port}\\engine\\v1\\streams\\e",
                f"https://127.0.0.1:{remote.port}/engine/v1/streams/f",
                "file:///etc/passwd",
                "http://127.0.0.1:99999/",
                "",
                " ",
            ]
            frames = b"".join(started("a", url, "token") for url in urls)
            frames += started("a", remote.stream("z"), "carrier pigeon")
            await remote.script("/execute", Send(frames + ended("a") + outcome() + result()))

        outlet = await run(script)
        for name in "abcde":
            assert await other.seen(f"/streams/{name}") == []
    assert outlet.order == ["streaming_started a"] * 11 + [
        "streaming_completed a",
        "task_completed a",
    ]
    told = [record.getMessage() for record in caplog.records]
    assert len([message for message in told if str(other.port) in message]) == 1
    assert len([message for message in told if "no http(s) URL" in message]) == 1
    assert len([message for message in told if "shape that is not known" in message]) == 1
    assert KEY not in caplog.text


async def test_an_engine_without_a_key_sends_none() -> None:
    async with RemoteEngine() as remote:
        engine = HttpEngine(remote.base_url, limits=LIMITS)
        await frames_of_one_task(remote, "token")
        await remote.script("/streams/a", Send(TOKEN % b"a"))
        assert isinstance(await engine.run(envelope(), KeepingOutlet()), Completed)
        await engine.close()
        for path in ("/execute", "/streams/a"):
            assert "authorization" not in (await remote.request(path)).headers
