"""The markup in which chat templates render tool calls, and what is read from it. [pure]

Used by `encoders.inline_calls` (M2.7).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from encoders.json_text import dumps

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
VALUE_END: Final = "</parameter>"
FUNCTION_END: Final = "</function>"
# Bounded, so that a tag that is whole is never longer than 512.
_NAME: Final = (
    r"""(?:[ \t\r\n]{0,8}=|[ \t\r\n]{1,8}name[ \t\r\n]{0,8}=)[ \t\r\n]{0,8}"""
    r"""(["']?)([^<>"'\s]{1,256})\1[ \t\r\n]{0,8}>"""
)
HEAD: Final = re.compile("<function" + _NAME)
PARAMETER: Final = re.compile("<parameter" + _NAME)
OPENING: Final = re.compile(f"{OPEN}|{HEAD.pattern}")
JSON_MARK: Final = re.compile(f'"|{CLOSE}')
STRING_MARK: Final = re.compile(r'["\\]')
SPACES: Final = re.compile(r"[ \t\r\n]*")


class Cut:
    """What one piece of text came to."""

    def __init__(self) -> None:
        self._text: list[str] = []
        # Of each delta: the id of its call, its name where it begins, fragments of its arguments.
        self._calls: list[tuple[str, str | None, list[str]]] = []

    @property
    def text(self) -> str:
        """What is left of the text."""
        return "".join(self._text)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool-call deltas, each with the id of its call and without an index."""
        deltas: list[dict[str, Any]] = []
        for call_id, name, fragments in self._calls:
            function: dict[str, Any] = {"arguments": "".join(fragments)}
            delta: dict[str, Any] = {"index": None, "id": call_id}
            if name is not None:
                delta["type"] = "function"
                function = {"name": name, **function}
            deltas.append({**delta, "function": function})
        return deltas

    def say(self, text: str) -> None:
        """This is text."""
        self._text.append(text)

    def open(self, call_id: str, name: str, arguments: str) -> None:
        """A call begins."""
        self._calls.append((call_id, name, [arguments]))

    def arguments(self, call_id: str, fragment: str) -> None:
        """More of the arguments of a call."""
        if self._calls and self._calls[-1][0] == call_id:
            self._calls[-1][2].append(fragment)
        else:
            self._calls.append((call_id, None, [fragment]))


def partial(buffer: str, at: int, marker: str) -> int:
    """Where a marker that is cut off by the end of the buffer begins; its end if there is none."""
    start = buffer.rfind("<", max(at, len(buffer) - len(marker)))
    return start if start >= 0 and marker.startswith(buffer[start:]) else len(buffer)


def without_newline(buffer: str, at: int, stop: int) -> int:
    """`stop` without one line end before it."""
    if stop > at and buffer[stop - 1] == "\n":
        stop -= 1
        if stop > at and buffer[stop - 1] == "\r":
            stop -= 1
    elif stop > at and stop == len(buffer) and buffer[stop - 1] == "\r":
        stop -= 1
    return stop


def escaped(text: str) -> str:
    """What stands between the quotes of `text` as a JSON string."""
    return dumps(text).decode()[1:-1] if text else ""


def calls_of(body: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls that a JSON body tells; none if it is not such a body."""
    try:
        value = json.loads(body, strict=False)  # models write line breaks into strings
    except (ValueError, RecursionError):
        return []
    calls: list[tuple[str, str]] = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            return []
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False) if arguments.strip() else None
            except (ValueError, RecursionError):
                return []
        if not isinstance(arguments, dict | None):
            return []
        calls.append((name, dumps(arguments or {}).decode()))
    return calls
