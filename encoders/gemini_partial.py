"""A function call whose arguments arrive in pieces (`partialArgs`). [pure]

Rule M2.6. Vertex AI sends them if it was asked to (`streamFunctionCallArguments`): the name first,
then values by JSON path (RFC 9535), a text in several pieces, at the end often an empty call. It
is told when it is complete: before that its arguments are no JSON object.
"""

from __future__ import annotations

import re
from typing import Any, Final

from encoders.json_text import dumps
from encoders.translator import ReplyTooLarge

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d{1,9})\]|\[(?:'([^']*)'|\"([^\"]*)\")\]")
_STEPS_MAX: Final = 100
_VALUES: Final = ("numberValue", "boolValue")


class PartialCall:
    """One call while its arguments arrive.

    Args:
        size_max: bytes of the pieces, which all wait for the last one.

    Attributes:
        name, call_id, signature: as told.
        complete: whether the last piece said that none follows.
    """

    def __init__(self, size_max: int) -> None:
        self._left = size_max
        self.name = ""
        self.call_id: object = None
        self.signature: object = None
        self.complete = False
        self._args: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}  # by path
        self._values: dict[str, Any] = {}  # by path; of a text None

    def is_continued_by(self, call: dict[str, Any]) -> bool:
        """Whether a `functionCall` is the next piece: it has no name, or the id of this one."""
        call_id = call.get("id")
        return not call.get("name") or (call_id is not None and call_id == self.call_id)

    def add(self, call: dict[str, Any], signature: object) -> None:
        """Take the next piece: a `functionCall`.

        Raises:
            ReplyTooLarge: the pieces are over their bound.
        """
        name = call.get("name")
        if isinstance(name, str) and name:
            self.name = name
        self.call_id = call.get("id") or self.call_id
        self.signature = signature or self.signature
        self.complete = not call.get("willContinue")
        self._left -= len(dumps(call))
        if self._left < 0:
            raise ReplyTooLarge("the arguments of a tool call are too large")
        args, pieces = call.get("args"), call.get("partialArgs")
        if isinstance(args, dict):
            self._args.update(args)
        for piece in pieces if isinstance(pieces, list) else ():
            if isinstance(piece, dict) and isinstance(piece.get("jsonPath"), str):
                self._take(piece["jsonPath"], piece)

    def _take(self, path: str, piece: dict[str, Any]) -> None:
        text = piece.get("stringValue")
        if isinstance(text, str):
            self._texts.setdefault(path, []).append(text)
            self._values[path] = None
            return
        told = [piece[key] for key in _VALUES if piece.get(key) is not None]
        if told or "nullValue" in piece:
            self._texts.pop(path, None)
            self._values[path] = told[0] if told else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as far as they came."""
        root: Any = dict(self._args)
        for path, value in self._values.items():
            pieces = self._texts.get(path)
            _put(root, _steps(path), value if pieces is None else "".join(pieces))
        return dict(root)


def _steps(path: str) -> list[str | int]:
    """The steps of a path like `$.a.b[0]['c']`; empty if it is another kind of path."""
    steps: list[str | int] = []
    at = 1 if path.startswith("$") else 0
    if at == 0:
        path = "." + path
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or len(steps) == _STEPS_MAX:
            return []
        key, number, single, double = match.groups()
        if number is not None:
            steps.append(int(number))
        else:
            steps.append(key if key is not None else single if single is not None else double)
        at = match.end()
    return steps


def _put(root: Any, steps: list[str | int], value: Any) -> None:
    """Set the value at a path, with the objects and lists on its way; else leave all as it is."""
    for position, step in enumerate(steps):
        following = steps[position + 1] if position + 1 < len(steps) else None
        inner = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(step, int) and isinstance(root, list):
            if step >= len(root):
                root.append(inner)
            elif following is None:
                root[step] = inner
            root = root[min(step, len(root) - 1)]
        elif isinstance(step, str) and isinstance(root, dict):
            if following is None:
                root[step] = inner
            root = root.setdefault(step, inner)
        else:
            return
