"""Which model serves who names only a provider (A1.2)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import relay.agents.default_model
from relay.agents.default_model import ASK_AGAIN_S, KEEP_S, DefaultModels
from relay.routing import Provider
from relay.upstreams.http import HttpUpstream
from relay.upstreams.unavailable import UnavailableUpstream
from tests.support.fake_upstream import FakeUpstream, Flood, Head, Rst, Send, Wait, json_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


@pytest.fixture
async def provider(up: FakeUpstream) -> AsyncIterator[Provider]:
    upstream = HttpUpstream("fake", up.base_url, api_key="sk-test", connect_timeout_s=1)
    await upstream.start()
    yield Provider(name="fake", upstream=upstream)
    await upstream.close()


@pytest.mark.parametrize(
    ("health", "model"),
    [
        ({"default_model": "own"}, "own"),
        ({"default_model": "fake/own"}, "own"),
        ({"default_model": " a/b "}, "a/b"),
        ({"default_model": ""}, "default"),
        ({"default_model": 7}, "default"),
        ({"default_model": "a\nb"}, "default"),
        ({"default_model": "x" * 300}, "default"),
        ({}, "default"),
        (["default_model"], "default"),
    ],
)
async def test_what_health_says(
    health: Any, model: str, up: FakeUpstream, provider: Provider
) -> None:
    up.script(*json_answer(health))
    defaults = DefaultModels()
    assert defaults.known("fake", provider) == "default"
    assert await defaults.find("fake", provider) == model
    assert defaults.known("fake", provider) == model
    (request,) = up.requests
    assert (request.method, request.path) == ("GET", "/v1/health")
    assert request.headers["authorization"] == "Bearer sk-test"


async def test_it_is_asked_once_at_a_time_and_kept(up: FakeUpstream, provider: Provider) -> None:
    clock = Clock()
    defaults = DefaultModels(clock)
    up.script(*json_answer({"default_model": "one"}))
    found = await asyncio.gather(*(defaults.find("fake", provider) for _ in range(5)))
    assert found == ["one"] * 5
    clock.now += KEEP_S - 1
    assert await defaults.find("fake", provider) == "one"
    assert len(up.requests) == 1
    clock.now += 1
    up.script(*json_answer({}, status=503))
    assert await defaults.find("fake", provider) == "one"  # what it told before stays good
    clock.now += ASK_AGAIN_S
    up.script(*json_answer({"default_model": "two"}))
    assert await defaults.find("fake", provider) == "two"
    assert len(up.requests) == 3


@pytest.mark.parametrize(
    "steps",
    [
        (Head(status=404),),
        (Head(status=302, headers={"location": "/v1/elsewhere"}),),
        (Head(), Send(b"no JSON")),
        (Head(), Rst()),
        (Flood(b" " * 65536, 100),),
    ],
)
async def test_who_does_not_tell(
    steps: tuple[Any, ...], up: FakeUpstream, provider: Provider
) -> None:
    up.script(*steps)
    assert await DefaultModels().find("fake", provider) == "default"
    assert len(up.requests) == 1


async def test_the_wait_is_bounded(
    up: FakeUpstream, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.agents.default_model, "ASK_WAIT_S", 0.1)
    up.script(Head(), Send(b"{"), Wait(asyncio.Event()))
    async with asyncio.timeout(2):
        assert await DefaultModels().find("fake", provider) == "default"
    await up.requests[0].wait_closed()


async def test_who_is_not_asked() -> None:
    upstream = UnavailableUpstream("local", "no llama")
    local = Provider(name="local", upstream=upstream, default_model="smollm2-135m")
    defaults = DefaultModels()
    assert await defaults.find("local", local) == "smollm2-135m"
    down = Provider(name="down", upstream=upstream)
    assert await defaults.find("down", down) == "default"
