"""Random workflow documents, and a provider that fails at random; both by a seed."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

from tests.support.fake_upstream import FakeUpstream
from tests.support.script import (
    DONE,
    Eof,
    Fin,
    Rst,
    Send,
    Sleep,
    chunk,
    completed,
    json_answer,
    openai_stream,
    sse,
)

if TYPE_CHECKING:
    from tests.support.fake_upstream import RecordedRequest
    from tests.support.script import Step

_LEAVES: Final = ("task", "task", "task", "dynamic", "debate", "yield")
_HOLDERS: Final = ("sequential", "parallel", "condition", "batch")
_WORDS: Final = (
    "hello ", 'é\n"quoted" \\ ', "\U0001f642\U0001f3f3\ufe0f", "x" * 700, "\u2028\x7f\t",
)  # fmt: skip


class Documents:
    """Draws documents, small ones; ids count up in each."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._count = 0

    def document(self) -> dict[str, Any]:
        dice = self._dice
        self._count = 0
        tasks = [self._task(0) for _ in range(dice.randint(1, 3))]
        return {
            "workflow": {
                "name": "chaos",
                "timeout_s": dice.choice([1, 5, 20]),
                "on_error": dice.choice(["fail", "continue"]),
                "tasks": tasks,
            }
        }

    def _tasks(self, depth: int, most: int) -> list[dict[str, Any]]:
        return [self._task(depth + 1) for _ in range(self._dice.randint(1, most))]

    def _task(self, depth: int) -> dict[str, Any]:
        dice = self._dice
        holds = depth < 3 and dice.random() < 0.4
        kind = dice.choice(_HOLDERS if holds else _LEAVES)
        self._count += 1
        made: dict[str, Any] = {"type": kind, "id": f"t{self._count}"}
        if dice.random() < 0.25:
            made["retries"] = dice.randint(1, 2)
        if dice.random() < 0.15:
            made["timeout_s"] = dice.choice([0.1, 0.5, 5])
        if dice.random() < 0.3:
            made["on_error"] = dice.choice(["fail", "skip", "continue"])
        if dice.random() < 0.1:
            made["when"] = "false"
        return made | self._fields(kind, depth)

    def _fields(self, kind: str, depth: int) -> dict[str, Any]:
        dice = self._dice
        match kind:
            case "task":
                return {"agent": dice.choice("abc"), "prompt": f"p{dice.random()}"}
            case "sequential":
                return {"tasks": self._tasks(depth, 3)}
            case "parallel":
                return {"tasks": self._tasks(depth, 4), "max_concurrency": dice.randint(1, 3)}
            case "condition":
                test = dice.choice(["true", "false", "1 / 0"])
                then, other = self._tasks(depth, 2), self._tasks(depth, 2)
                return {"if": test, "then": then, "else": other}
            case "batch":
                items = list(range(dice.randint(0, 4)))
                task = self._task(depth + 1)
                return {"items": items, "task": task, "concurrency": dice.randint(1, 3)}
            case "dynamic":
                return {"planner": "planner", "prompt": "p", "agents": ["a", "b"]}
            case "debate":
                rounds = dice.randint(1, 2)
                return {"debaters": ["a", "b"], "judge": "c", "prompt": "p", "rounds": rounds}
            case _:
                return {"prompt": "?"}


class ChaosUpstream(FakeUpstream):
    """Answers each request by what it asks and how often that was asked; one in five fails."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._asked: dict[bytes, int] = {}

    def record(self, request: RecordedRequest) -> tuple[Step, ...]:
        super().record(request)
        times = self._asked[request.body] = self._asked.get(request.body, 0) + 1
        dice = random.Random(f"{self._seed}/{times}/{request.body!r}")
        return completed(_answer(dice, planner=request.json["model"] == "up-planner"))


def _answer(dice: random.Random, *, planner: bool) -> list[Step]:
    if dice.random() < 0.06:
        status = dice.choice([400, 429, 500, 503])
        return json_answer({"error": {"message": "no"}}, status=status)
    if planner and dice.random() < 0.9:
        return list(openai_stream([_plan(dice)]))
    words = [dice.choice(_WORDS) for _ in range(dice.randint(0, 12))]
    steps: list[Step] = []
    told = dice.random() < 0.8  # a provider that tells no usage is estimated
    for send in openai_stream(words, usage=told, finish=dice.choice(["stop", "stop", "length"])):
        if dice.random() < 0.15:
            steps.append(Sleep(dice.choice([0.001, 0.02, 0.1])))
        steps.append(send)
    if dice.random() < 0.15:
        steps = steps[: dice.randint(0, len(steps))]
        steps += dice.choice(_BREAKS)
    return steps


def _plan(dice: random.Random) -> str:
    names = dice.sample(["u", "v", "0", "tool"], dice.randint(1, 3))
    return json.dumps(
        {"tasks": [{"id": n, "agent": dice.choice("ab"), "prompt": n} for n in names]}
    )


_BREAKS: Final[list[list[Step]]] = [
    [Fin()],
    [Rst()],
    [Eof()],
    [Send(sse(b'{"error":{"message":"broke","code":"server_error"}}')), Send(DONE)],
    [Send(sse(b"{not json")), Send(DONE)],
    [Send(sse(chunk("half"))), Sleep(3)],
]
