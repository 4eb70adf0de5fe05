"""D6.5: real probabilities of the local model, on the socket, through the published client."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any, cast

import pytest
import pytest_asyncio
from system_zero import decisions_for

from planes.config_file import load_defaults
from tests.support.decisions import MODEL, opened, real_client, start
from tests.support.gateway import KEY, GatewayProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.local_model,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None,
        reason="xllamacpp has no wheel for this platform",
    ),
]

SLUG = "local/smollm2-135m"
BOUND_S = 60.0
QUESTIONS: dict[str, Any] = {
    "cat": {"type": "boolean", "instructions": "Is a cat named in the state?"},
    "which": {
        "type": "choice",
        "instructions": "Which animal is named in the state?",
        "criteria": {"cat": None, "dog": "a dog of any kind", "horse": None},
    },
    "only": {"type": "choice", "instructions": "?", "criteria": {"it": None}},
    "many": {
        "type": "choice",
        "instructions": "Which number is named in the state?",
        "criteria": {f"n{number}": None for number in range(62)},
    },
    "how": {"type": "score", "instructions": "How loud is it?", "criteria": ["low", "mid", "high"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    config = {
        "server": {"host": "127.0.0.1"},
        "keys": [{"key": KEY, "org": "test"}],
        "providers": {"local": {"kind": "local"}},
        "models": {SLUG: {"candidates": [{"provider": "local", "model": "smollm2-135m"}]}},
        "decision": {"backend": {"kind": "chat-logprobs", "model": SLUG}},
        "telemetry": {"log": "json"},
    }
    async with GatewayProcess(config) as process:
        yield process
        assert "Traceback" not in process.stderr()


async def decide(process: GatewayProcess, state: Any, questions: dict[str, Any]) -> dict[str, Any]:
    async with real_client(process, key=KEY) as client:
        ack = await client.start({"model": MODEL, "state": state, "questions": questions})
        measured = await asyncio.wait_for(client.wait_for_decision(ack), BOUND_S)
        return cast("dict[str, Any]", measured.decision["reply"])


@pytest.mark.asyncio(loop_scope="module")
async def test_d6_5_d6_6_every_kind_of_question(gateway: GatewayProcess) -> None:
    reply = await decide(gateway, "The cat sleeps. The cat purrs. It is a cat.", QUESTIONS)
    found = decisions_for(reply, {"questions": QUESTIONS})
    assert {name: decision.kind for name, decision in found.items()} == dict.fromkeys(
        QUESTIONS, "v1"
    )
    assert reply["served_by"] == "local/smollm2-135m"
    assert reply["usage"]["input_tokens"] > 4 * 50
    assert reply["answers"]["only"]["confidence"] == 1
    # The odds are the model's own: no option is left with none, and no two are the same.
    for name in ("cat", "which", "how"):
        odds = [found[name].confidence, *(item["confidence"] for item in found[name].alternatives)]
        assert all(0 < share < 1 for share in odds), name
        assert len(set(odds)) > 1, name
    assert (
        len(set(reply["answers"]["many"]["probabilities"].values())) > 60
    )  # all labels are listed


@pytest.mark.asyncio(loop_scope="module")
async def test_equal_states_have_equal_odds_and_others_have_others(gateway: GatewayProcess) -> None:
    asked = {"which": QUESTIONS["which"]}
    cat = await decide(gateway, "The cat sleeps. The cat purrs.", asked)
    again = await decide(gateway, "The cat sleeps. The cat purrs.", asked)
    dog = await decide(gateway, "The dog sleeps. The dog barks.", asked)
    odds = [reply["answers"]["which"]["probabilities"] for reply in (cat, again, dog)]
    assert odds[0] == pytest.approx(odds[1], abs=0.01)  # the prompt's cache changes the last digits
    assert odds[0] != pytest.approx(odds[2], abs=0.01)


@pytest.mark.asyncio(loop_scope="module")
async def test_d6_5_an_overflow_of_the_context(gateway: GatewayProcess) -> None:
    """SmolLM2 has 2,048 tokens for each stream."""
    async with opened(gateway, key=KEY) as socket:
        asked = {"questions": {"q": QUESTIONS["cat"]}}
        await socket.say(**start("word " * 5000, mode="on_change", request=asked))
        assert (await socket.json())["type"] == "ack"
        told = await socket.json(BOUND_S)
        assert (told["type"], told["http_status"]) == ("error", 413)
        assert told["envelope"]["error"]["code"] == "state_too_large"
        assert "2048" in told["envelope"]["error"]["message"]


def test_out_of_the_box_the_local_model_decides() -> None:
    backend = load_defaults({}).decision.backend
    assert backend is not None
    assert (backend.kind, getattr(backend, "model", None)) == ("chat-logprobs", SLUG)
