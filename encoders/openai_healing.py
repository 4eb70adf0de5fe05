"""Healing of chunks that an openai-shape provider got wrong. [pure]

Rules M2.3 and M2.6, hazards B37, B38, B40, B42, B85, B86. Only chunks that were parsed come here,
and a chunk in which nothing is wrong leaves as it came: `heal` says whether it changed anything.

Nothing here knows a provider by its name. What a choice lacks is put before the chunk as choices of
our own (`before`), so that the provider's own chunk keeps its bytes where it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from encoders.tool_slots import ToolSlots, argument_text, made_call_id
from encoders.translator import CHOICES_MAX, ReplyTooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.openai import ChunkIdentity

# Texts that providers send where the wire has null.
_NO_REASON: Final = ("", "null")
# Endings that may have cut a call short: it must not look complete (M2.7).
CUT_SHORT: Final = frozenset({"length", "content_filter", "error"})


def choice_index(choice: Mapping[str, Any]) -> int:
    """The index of a choice; 0 if it says none."""
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def made_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """A choice of our own."""
    return {"index": index, "delta": delta, "finish_reason": None}


class ChoiceHealer:
    """Heals the choices of one stream, chunk by chunk.

    Args:
        identity: of the stream, from which the ids of calls without one are made.
        withheld_max: characters of arguments that may wait for the identity of their call.
        choices: how many choices were asked for.

    Attributes:
        started: indexes of the choices that were seen.
        ended: indexes of those that have their finish_reason.
    """

    def __init__(self, identity: ChunkIdentity, withheld_max: int, choices: int = 1) -> None:
        self._choices = choices
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self._seed = identity.id
        self._withheld_max = withheld_max
        self._slots: dict[int, ToolSlots] = {}

    def heal(self, choices: list[Any], before: list[dict[str, Any]]) -> bool:
        """Heal the choices of one chunk in place.

        Args:
            before: gets the choices of ours that must reach the client first.

        Returns:
            Whether `choices` was changed.
        """
        changed = False
        for choice in choices:
            if isinstance(choice, dict):
                changed |= self._heal(choice, before)
        return changed

    def flush(self) -> list[dict[str, Any]]:
        """Give back what still waits, as choices of ours; it completes no call."""
        return [
            made_choice(index, {"tool_calls": [call]})
            for index, slots in self._slots.items()
            for call in slots.flush()
        ]

    def close(self) -> list[dict[str, Any]]:
        """Complete calls without arguments where the stream completed without a finish_reason."""
        return [
            made_choice(index, {"tool_calls": [call]})
            for index, slots in self._slots.items()
            if index not in self.ended
            for call in slots.end(complete=True)
        ]

    def _heal(self, choice: dict[str, Any], before: list[dict[str, Any]]) -> bool:
        index = choice_index(choice)
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        changed = self._heal_role(index, delta, before)
        given = choice.get("finish_reason")
        reason = given if isinstance(given, str) and given not in _NO_REASON else None
        if reason:
            self.ended.add(index)
        elif given is not None:
            choice["finish_reason"] = None
            changed = True
        calls = delta.get("tool_calls")
        if isinstance(calls, list) and calls:
            slots = self._slots.get(index)
            if slots is None:
                slots = self._slots[index] = ToolSlots(f"{self._seed}/{index}", self._withheld_max)
            told = slots.take(calls)
            if not told:
                del delta["tool_calls"]
                changed = True
            else:
                changed |= told != calls
                delta["tool_calls"] = told
            calls = told
        if reason and index in self._slots:
            changed |= self._end_calls(index, reason, calls, before)
        return changed

    def _heal_role(self, index: int, delta: dict[str, Any], before: list[dict[str, Any]]) -> bool:
        """One role for each choice, in its first chunk. A null is no role and stays."""
        role = delta.get("role")
        if index not in self.started:
            if len(self.started) >= max(CHOICES_MAX, self._choices):
                raise ReplyTooLarge(f"more than {len(self.started)} choices")
            self.started.add(index)
            if role:
                return False
            before.append(made_choice(index, {"role": "assistant", "content": ""}))
        if role is None:
            return False
        del delta["role"]
        return True

    def _end_calls(
        self, index: int, reason: object, calls: Any, before: list[dict[str, Any]]
    ) -> bool:
        """Tell what still waits, and complete the calls that have no arguments (B42)."""
        complete = reason not in CUT_SHORT
        own = {call["index"]: call for call in calls} if isinstance(calls, list) else {}
        changed = False
        for call in self._slots[index].end(complete=complete):
            mine = own.get(call["index"])
            if mine is None:
                before.append(made_choice(index, {"tool_calls": [call]}))
            else:  # its first delta stands in this very chunk
                function = mine.get("function")
                mine["function"] = (function if isinstance(function, dict) else {}) | {
                    "arguments": call["function"]["arguments"]
                }
                changed = True
        return changed


def heal_reply(reply: Mapping[str, Any], seed: str) -> bool:
    """Heal the tool calls of a whole reply in place: arguments are a JSON text, and each call has
    an id and a type.

    Args:
        seed: from which missing ids are made.

    Returns:
        Whether `reply` was changed.
    """
    changed = False
    for choice in reply.get("choices") or ():
        message = choice.get("message") if isinstance(choice, dict) else None
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue
            arguments = argument_text(function.get("arguments"))
            right = {"arguments": arguments if arguments.strip() else "{}"}
            whole = {
                "id": call.get("id") or made_call_id(f"{seed}/{choice_index(choice)}", number),
                "type": call.get("type") or "function",
            }
            if function | right != function or call | whole != call:
                function |= right
                call |= whole
                changed = True
    return changed
