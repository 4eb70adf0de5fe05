"""The tools of one agent: runs what a reply calls, and says what happens (W3.4, J3.4)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from encoders.json_exact import NumberTooLarge, loads_exact
from relay.agents.http_tool import MESSAGES, ToolFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.agents.http_tool import HttpTool

    Say = Callable[[str, Mapping[str, Any]], None]

AT_ONCE: Final = 4
CALLS_MAX: Final = 32
ARGUMENTS_CHARACTERS_MAX: Final = 256 * 1024


class Toolbox:
    """Runs the calls of an agent.

    Args:
        tools: those that are run here. declared: names of all that the models are told of.
    """

    def __init__(self, tools: Sequence[HttpTool], declared: Sequence[str]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._declared = frozenset(declared) | self._tools.keys()

    async def run(
        self, calls: Sequence[Mapping[str, Any]], say: Say, *, first: int, cut: bool
    ) -> list[dict[str, Any]]:
        """Run the calls of one reply, some at once; return a tool's message for each, in order.

        Args:
            calls: as they stand in an assistant's message. say: takes the steps.
            first: the number of the first of them. cut: the reply was cut by its output limit.
        """
        turn = asyncio.Semaphore(AT_ONCE)
        results: list[str] = [""] * len(calls)

        async def one(at: int) -> None:
            async with turn:
                results[at] = await self._one(calls[at], at, say, number=first + at, cut=cut)

        async with asyncio.TaskGroup() as group:
            for at in range(len(calls)):
                group.create_task(one(at))
        return [
            {"role": "tool", "tool_call_id": call.get("id") or "", "content": result}
            for call, result in zip(calls, results, strict=True)
        ]

    async def _one(
        self, call: Mapping[str, Any], at: int, say: Say, *, number: int, cut: bool
    ) -> str:
        name = name_of(call)
        tool = self._tools.get(name)
        # What the model invents is not repeated.
        told: dict[str, Any] = {"task_id": f"tool.{number}", "kind": "tool"}
        if name in self._declared:
            told["name"] = name
        if tool is not None:
            told["host"] = tool.host
        say("task_dispatched", {**told, "attempt": 1})
        began = time.monotonic()
        failure: ToolFailure | None = None
        result = ""
        try:
            if cut:
                raise ToolFailure("cut_short")
            if at >= CALLS_MAX:
                raise ToolFailure("too_many_calls")
            if tool is None:
                raise ToolFailure("not_runnable" if name in self._declared else "unknown_tool")
            result = await tool.run(arguments_of(call))
        except ToolFailure as error:
            failure = error
        told["duration_ms"] = round((time.monotonic() - began) * 1000)
        if failure is None:
            say("task_completed", told)
            return result
        why = {"code": failure.word, "message": MESSAGES[failure.word]}
        say("task_error", {**told, "error": why, "attempt": 1, "will_retry": False})
        return failure.result()


def name_of(call: Mapping[str, Any]) -> str:
    """The name of the tool that is called."""
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, dict) else ""


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, parsed; none at all are none.

    Raises:
        ToolFailure: they are not JSON, or too large.
    """
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or not text.strip():
        return {}
    if len(text) > ARGUMENTS_CHARACTERS_MAX:
        raise ToolFailure("invalid_arguments", f"more than {ARGUMENTS_CHARACTERS_MAX} characters")
    try:
        return loads_exact(text)
    except NumberTooLarge:
        raise ToolFailure("invalid_arguments", "a number is larger than a double holds") from None
    except ValueError:
        raise ToolFailure("invalid_arguments", "not JSON") from None


def spoken(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return an assistant's message with calls as a provider takes it back.

    Arguments that are no object, of a reply that was cut above all, become an empty one: some
    shapes have no words for anything else.
    """
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        try:
            sound = isinstance(arguments_of(call), dict) and function.get("arguments")
        except ToolFailure:
            sound = False
        if not sound:
            function["arguments"] = "{}"
        calls.append({**call, "function": function})
    return {**message, "content": text or None, "tool_calls": calls}
