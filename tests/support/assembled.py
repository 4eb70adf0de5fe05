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
        reasons: every finish_reason that was told.
        roles: how many were.
    """

    reasons: list[str] = field(default_factory=list)
    roles: int = 0
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: list[tuple[str, str, list[str]]] = field(default_factory=list)

    @property
    def texts(self) -> dict[str, str]:
        """Field of the delta → its text."""
        return {key: "".join(pieces) for key, pieces in self._texts.items()}

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, arguments) of each call."""
        return [(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls]

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
                assert (self.roles, self._texts, self._calls) == (1, {}, []), "a role that is late"
            elif key == "tool_calls":
                for call in value or ():
                    self._add_call(call)
            elif isinstance(value, str) and value:
                self._texts.setdefault(key, []).append(value)

    def _add_call(self, call: dict[str, Any]) -> None:
        assert type(call["index"]) is int
        function = call["function"]
        fragment = function.get("arguments", "")
        assert isinstance(fragment, str)
        if call["index"] == len(self._calls):
            assert call["type"] == "function"
            assert call["id"]
            assert function["name"]
            self._calls.append((call["id"], function["name"], [fragment]))
            return
        assert call["index"] < len(self._calls), "an index that was skipped"
        assert [call[key] for key in ("id", "type") if call.get(key) is not None] == []
        assert function.get("name") is None, "told again"
        self._calls[call["index"]][2].append(fragment)


def assembled(chunks: Iterable[dict[str, Any]]) -> dict[int, AssembledChoice]:
    """The choices of a stream by their index."""
    choices: dict[int, AssembledChoice] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], AssembledChoice()).add(choice)
    return choices
