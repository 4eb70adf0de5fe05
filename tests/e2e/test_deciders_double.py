"""D6.5: `systemone` against dev-double, which serves that wire; what its own client reads of it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from system_zero import decisions_for

from encoders.systemone import make_request
from relay.upstreams.local import LlamaProcess
from tests.support.decisions import MODEL, opened, start
from tests.support.decisions import config as decision_config
from tests.support.double import DevDouble, DoubleMissing, install_double
from tests.support.gateway import GatewayProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first time, it is installed
    pytest.mark.asyncio(loop_scope="module"),
]

BOUND_S = 60.0
STATE: dict[str, Any] = {"log": "the cat sleeps on the sofa"}
QUESTIONS: dict[str, Any] = {
    "cat": {"type": "boolean", "instructions": "Is there a cat?", "criteria": {"true": "a cat"}},
    "which": {
        "type": "choice",
        "instructions": "Which animal?",
        "criteria": {"cat": "a cat that sleeps", "dog": None, "horse": None},
    },
    "only": {"type": "choice", "instructions": "?", "criteria": {"it": None}},
    "how": {"type": "score", "instructions": ["How", "loud?"], "criteria": ["low", "mid", "high"]},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    try:
        install_double()
    except DoubleMissing as missing:
        pytest.skip(str(missing))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def double(_installed: None) -> AsyncIterator[DevDouble]:
    async with DevDouble("--engine", "mock") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(double: DevDouble) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(config(double)) as process:
        yield process
        assert "Traceback" not in process.stderr()


def config(double: DevDouble) -> dict[str, Any]:
    backend = {"kind": "systemone", "base_url": double.origin, "model": "any"}
    return decision_config(backend=backend)


async def ask(process: GatewayProcess, state: Any, questions: dict[str, Any]) -> dict[str, Any]:
    async with opened(process) as socket:
        asked = {"model": MODEL, "questions": questions}
        await socket.say(**start(state, mode="on_change", request=asked))
        assert (await socket.json())["type"] == "ack"
        return await socket.json(BOUND_S)


def agree(reply: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The odds are those that its own client reads, but for what it rounded."""
    answers = reply["answers"]
    assert answers["cat"]["probability"] == pytest.approx(theirs["noul"]["cat"], abs=1e-6)
    for kind, name in (("choice", "which"), ("score", "how")):
        odds = theirs[kind][name]
        total = sum(odds.values())
        expected = {key: share / total for key, share in odds.items()}
        assert answers[name]["probabilities"] == pytest.approx(expected, abs=2e-6)


async def test_d6_5_its_odds_are_ours(gateway: GatewayProcess, double: DevDouble) -> None:
    frame = await ask(gateway, STATE, QUESTIONS)
    assert frame["type"] == "decision", frame
    reply = frame["reply"]
    found = decisions_for(reply, {"questions": QUESTIONS})
    assert (found["cat"].decision, found["which"].decision) == (True, "cat")
    assert found["only"].confidence == 1
    assert reply["usage"]["input_tokens"] > 0
    asked = {name: question for name, question in QUESTIONS.items() if name != "only"}
    agree(reply, double.ask(STATE, make_request("any", STATE, asked)["questions"]))


async def test_d6_5_its_refusals(gateway: GatewayProcess) -> None:
    many = {"type": "choice", "instructions": "?", "criteria": {str(n): None for n in range(27)}}
    frame = await ask(gateway, STATE, {"q": many})
    assert (frame["http_status"], frame["envelope"]["error"]["code"]) == (400, "invalid_request")
    assert "2 to 26 entries" in frame["envelope"]["error"]["message"]
    frame = await ask(gateway, "word " * 20_000, {"cat": QUESTIONS["cat"]})
    assert (frame["http_status"], frame["envelope"]["error"]["code"]) == (413, "state_too_large")


@pytest.mark.local_model
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None,
    reason="xllamacpp has no wheel for this platform",
)
async def test_d6_5_with_a_real_model_behind_it() -> None:
    llama = LlamaProcess()
    await llama.start()
    try:
        options = ("--engine", "openai", "--base-url", llama.base_url, "--model", llama.model)
        async with DevDouble(*options) as double, GatewayProcess(config(double)) as process:
            frame = await ask(process, STATE, QUESTIONS)
            assert frame["type"] == "decision", frame
            reply = frame["reply"]
            found = decisions_for(reply, {"questions": QUESTIONS})
            assert 0 < reply["answers"]["cat"]["probability"] < 1
            assert all(decision.kind == "v1" for decision in found.values())
    finally:
        await llama.close()
