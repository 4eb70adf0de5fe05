"""D4.4, D6.5: what a backend lets clients ask, and how it ends."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from encoders.decision_errors import DecisionError
from encoders.decision_served import ModelLimits
from encoders.json_text import dumps
from planes.decision.backends import backend_of, served_of
from planes.settings import Settings
from relay.attempts import Dialler
from relay.deciders.base import DecisionReply
from relay.deciders.chat_logprobs import ChatLogprobsBackend
from relay.errors import UpstreamUnavailable, UpstreamUnreachable
from relay.routing import Candidate, Provider, Router
from relay.upstreams.replay import ReplayUpstream
from relay.upstreams.unavailable import UnavailableUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.upstreams.base import Upstream, UpstreamReply, UpstreamRequest

OPENAI = {"shape": "openai", "base_url": "https://api.example.com/v1", "api_key": "sk-1"}
BOOLEAN: dict[str, Any] = {"type": "boolean", "instructions": "?"}
ONLY: dict[str, Any] = {"type": "choice", "instructions": "?", "criteria": {"it": None}}


def settings(backend: dict[str, Any], **decision: Any) -> Settings:
    return Settings.model_validate(
        {
            "providers": {"o": OPENAI, "local": {"kind": "local"}},
            "models": {
                "both": {
                    "candidates": [
                        {"provider": "local", "model": "smollm2-135m"},
                        {"provider": "o", "model": "x"},
                    ]
                }
            },
            "decision": {"backend": backend, **decision},
        }
    )


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"kind": "chat-logprobs", "model": model} | more


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (chat("o/x"), (64, 20, 10)),
        (chat("both"), (64, 20, 10)),  # its other candidate lists no more
        (chat("local/smollm2-135m"), (64, 62, 10)),  # as many as there are labels
        (chat("o/x", top_logprobs=5, max_questions=3), (3, 5, 5)),
        ({"kind": "systemone", "base_url": "http://h", "model": "m"}, (1024, 255, 10)),
        ({"kind": "system-zero", "base_url": "http://h"}, (1024, 255, 10)),
    ],
)
def test_d4_4_the_backend_sets_the_limits(
    backend: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    limits = ModelLimits(
        questions=expected[0], choice_options=expected[1], score_levels=expected[2]
    )
    served = served_of(settings(backend))
    assert served.models == {"rightnow-decision": limits, "system-zero": limits}


def test_d4_4_a_model_may_have_smaller_limits_and_no_larger_ones() -> None:
    given = {"questions": 2, "choice_options": 100}
    served = served_of(settings(chat("o/x"), models=[{"id": "m", "limits": given}]))
    assert served.models == {"m": ModelLimits(questions=2, choice_options=20, score_levels=10)}


@pytest.mark.parametrize(
    ("backend", "media"),
    [
        (chat("o/x"), ()),
        (chat("o/x", images=True), ("image",)),
        ({"kind": "systemone", "base_url": "http://h", "model": "m"}, ()),
        ({"kind": "systemone", "base_url": "http://h", "model": "m", "images": True}, ("image",)),
        ({"kind": "system-zero", "base_url": "http://h"}, ("audio", "image")),
    ],
)
def test_d4_3_the_backend_and_the_configuration_both_take_an_attachment(
    backend: dict[str, Any], media: tuple[str, ...]
) -> None:
    assert tuple(served_of(settings(backend, media=["audio", "image"])).media) == media


def test_without_a_backend_the_plane_is_off() -> None:
    off = Settings.model_validate({})
    assert backend_of(off, router=lambda: Router({}, {}), dialler=Dialler()) is None


# --- chat-logprobs --------------------------------------------------------------------------------


class Reply:
    """A whole reply that is here at once."""

    status = 200
    headers = {"content-type": "application/json"}  # noqa: RUF012

    def __init__(self, body: bytes) -> None:
        self._left = [body]
        self.aborted = False

    async def read(self) -> bytes:
        return self._left.pop() if self._left else b""

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """There is nothing to push."""

    def abort(self) -> None:
        self.aborted = True

    async def release(self) -> None:
        """Nothing is held."""


class Chat:
    """A provider whose model finds `A` likely, when it is let."""

    name = "fake"

    def __init__(self, *, go: asyncio.Event | None = None) -> None:
        self.go = go
        self.asked: list[UpstreamRequest] = []
        self.running = 0

    async def start(self) -> None:
        """Nothing to start."""

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        self.asked.append(request)
        self.running += 1
        try:
            if self.go is not None:
                await self.go.wait()
        finally:
            self.running -= 1
        tokens = [
            {"token": "A", "logprob": math.log(0.8)},
            {"token": "B", "logprob": math.log(0.2)},
        ]
        content = [{"token": "A", "logprob": -1, "top_logprobs": tokens}]
        return Reply(dumps({"choices": [{"logprobs": {"content": content}}]}))

    async def close(self) -> None:
        """Nothing to free."""


def backend(upstream: Upstream | None) -> ChatLogprobsBackend:
    providers = (
        {} if upstream is None else {"p": Provider(name="p", upstream=upstream, aggregate=True)}
    )
    off = {"p": "api_key is empty"} if upstream is None else None
    routes = {"slug": tuple(Candidate(provider=one, model="m") for one in providers.values())}
    router = Router(providers, routes, off)
    return ChatLogprobsBackend(
        "slug", lambda: router, Dialler(), top_logprobs=20, questions_at_once=2
    )


async def decide(
    decider: ChatLogprobsBackend, *, within_s: float = 10.0, **questions: Any
) -> DecisionReply | DecisionError:
    body = dumps({"model": "m", "state": "s", "questions": questions})
    deadline = asyncio.get_running_loop().time() + within_s
    return await decider.decide(body, idempotency_key=None, deadline=deadline)


async def test_d6_5_a_single_option_is_answered_here() -> None:
    upstream = Chat()
    found = await decide(backend(upstream), q=ONLY)
    assert isinstance(found, DecisionReply)
    assert json.loads(found.body)["answers"]["q"]["decision"] == "it"
    assert (found.answered, upstream.asked) == (1, [])


async def test_d6_5_each_question_is_asked_once_and_not_as_a_stream() -> None:
    upstream = Chat()
    found = await decide(backend(upstream), b=BOOLEAN, only=ONLY, a=BOOLEAN)
    assert isinstance(found, DecisionReply)
    answers = json.loads(found.body)["answers"]
    assert list(answers) == ["b", "only", "a"]
    assert (answers["a"]["probability"], found.answered) == (0.8, 3)
    assert [request.stream for request in upstream.asked] == [False, False]
    assert {request.body["model"] for request in upstream.asked} == {"m"}


async def test_d6_5_the_deadline_ends_every_request() -> None:
    upstream = Chat(go=asyncio.Event())
    questions = {f"q{number}": BOOLEAN for number in range(5)}
    found = await decide(backend(upstream), within_s=0.05, **questions)
    assert isinstance(found, DecisionError)
    assert (found.code, found.status) == ("system_zero_timeout", 504)
    assert (len(upstream.asked), upstream.running) == (2, 0)


async def test_d6_5_a_cancelled_decide_leaves_nothing() -> None:
    upstream = Chat(go=asyncio.Event())
    before = asyncio.all_tasks()
    task = asyncio.ensure_future(decide(backend(upstream), a=BOOLEAN, b=BOOLEAN, c=BOOLEAN))
    while upstream.running < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert upstream.running == 0
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("upstream", "code", "said"),
    [
        (ReplayUpstream("replay"), "system_zero_unavailable", "recorded transcripts"),
        (UnavailableUpstream("p", "no weights"), "system_zero_unavailable", "no weights"),
        (None, "system_zero_unavailable", "switched off"),
    ],
)
async def test_d5_6_a_model_that_cannot_be_had(
    upstream: Upstream | None, code: str, said: str
) -> None:
    """O1.1: where the local model cannot start, the plane answers 503 and says why."""
    found = await decide(backend(upstream), q=BOOLEAN)
    assert isinstance(found, DecisionError)
    assert (found.code, found.status) == (code, 503)
    assert said in found.message


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UpstreamUnreachable("it is starting", retry_after_s=1), "starting"),
        (UpstreamUnavailable("busy"), "system_zero_unavailable"),
    ],
)
async def test_d5_6_the_first_failure_is_told(failure: Exception, code: str) -> None:
    class Failing(Chat):
        async def open(self, request: UpstreamRequest) -> UpstreamReply:
            raise failure

    found = await decide(backend(Failing()), a=BOOLEAN, b=BOOLEAN)
    assert isinstance(found, DecisionError)
    assert found.code == code


async def test_a_bug_is_not_told_as_a_failure_of_the_backend() -> None:
    class Broken(Chat):
        async def open(self, request: UpstreamRequest) -> UpstreamReply:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await decide(backend(Broken()), a=BOOLEAN, b=BOOLEAN)
