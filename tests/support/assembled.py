"""What a client makes of a stream: a small model of one, written apart from the gateway's code.

    (choice,) = assembled(chunks).values()
    assert choice.calls == [("call_1", "f", '{"a":1}')]

It is stricter than the clients of the world: identity comes once, with the first delta of a call,
and indexes are 0, 1, 2 in the order in which calls appear.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class AssembledChoice:
    """One choice, put together.

    Attributes:
        texts: field of the delta → its text.
        calls: (id, name, arguments) of each call.
        reasons: every finish_reason that was told.
    """

    texts: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    roles: int = 0

    @property
    def content(self) -> str:
        """The text of the answer."""
        return self.texts.get("content", "")

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        """(name, arguments) of each call, the arguments parsed."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]

    def add(self, choice: dict[str, Any]) -> None:
        """Take one choice of a chunk."""
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") is not None:
            self.reasons.append(choice["finish_reason"])
        for key, value in delta.items():
            if key == "role" and value:
                self.roles += 1
                assert (self.roles, self.texts, self.calls) == (1, {}, []), "a role that is late"
            elif key == "tool_calls":
                for call in value or ():
                    self._add_call(call)
            elif isinstance(value, str) and value:
                self.texts[key] = self.texts.get(key, "") + value

    def _add_call(self, call: dict[str, Any]) -> None:
        assert type(call["index"]) is int
        function = call["function"]
        fragment = function.get("arguments", "")
        assert isinstance(fragment, str)
        if call["index"] == len(self.calls):
            assert call["type"] == "function"
            assert call["id"]
            assert function["name"]
            self.calls.append((call["id"], function["name"], fragment))
            return
        assert call["index"] < len(self.calls), "an index that was skipped"
        known = ("id", "type")
        assert [call[key] for key in known if call.get(key) is not None] == [], "told again"
        assert function.get("name") is None, "told again"
        call_id, name, arguments = self.calls[call["index"]]
        self.calls[call["index"]] = (call_id, name, arguments + fragment)


def assembled(chunks: Iterable[dict[str, Any]]) -> dict[int, AssembledChoice]:
    """The choices of a stream by their index."""
    choices: dict[int, AssembledChoice] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], AssembledChoice()).add(choice)
    return choices
