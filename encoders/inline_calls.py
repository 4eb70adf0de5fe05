"""Tool calls that a chat template rendered into the text, cut out of it as it streams. [pure]

Rule M2.7 (`inline_tool_calls`). Three forms are known, all of the Hermes and Qwen families:

    <tool_call>{"name": "f", "arguments": {…}}</tool_call>
    <tool_call><function=f><parameter=key>value</parameter></function></tool_call>
    <function=f>…</function>        without its wrapper, if the request offers a tool `f`

A JSON call is told once it is closed; if it is not a call after all it is given back as text. An
XML call is told from its head on: a string parameter flows as it comes, as a growing JSON string,
and the arguments become valid JSON only with the call's closing marker. What follows a call that
breaks off in mid-markup is text again, and that call stays incomplete for ever.

Work and memory are linear: what is left of the buffer after a piece is a marker cut in two, at
most `_TAG_MAX` characters, and nothing else is looked at twice.
"""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Final

from encoders.inline_markup import (
    CLOSE,
    FUNCTION_END,
    HEAD,
    JSON_MARK,
    OPEN,
    OPENING,
    PARAMETER,
    SPACES,
    STRING_MARK,
    VALUE_END,
    Cut,
    calls_of,
    escaped,
    partial,
    without_newline,
)
from encoders.json_text import dumps

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.tool_schema import ToolSchema

_TAG_MAX: Final = 512
_SPACE_MAX: Final = 1024


class InlineCalls:
    """Cuts the calls out of one text (a field of a choice).

    Args:
        new_id: makes the id of the next call.
        schema: the tools of the request.
        withheld_max: characters of a JSON call or of a typed value that may be withheld; a longer
            one is given back as text.

    Attributes:
        closed: calls that were told to their end.
        broken: calls that were told and never closed.
    """

    def __init__(self, new_id: Callable[[], str], schema: ToolSchema, withheld_max: int) -> None:
        self.closed = 0
        self.broken = 0
        self._new_id = new_id
        self._schema = schema
        self._withheld_max = withheld_max
        self._state: Callable[[], bool] = self._in_text
        self._buffer = ""
        self._at = 0
        self._out = Cut()
        self._space = ""  # white space that is dropped if a call follows
        self._after_call = False
        self._withheld = StringIO()
        self._body_at = 0  # where in `_withheld` the JSON begins
        self._in_string = False
        self._wrapped = False
        self._call_id = self._name = self._key = ""
        self._separator = ""
        self._fresh = False  # nothing of the value was seen yet
        self._flows = False

    def feed(self, text: str, out: Cut) -> None:
        """Take the next piece of the text."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        self._out = out
        while self._state():
            pass

    def end(self, out: Cut) -> None:
        """The text is over: what is withheld is given back, an open call stays incomplete."""
        self._out = out
        rest = self._buffer[self._at :]
        self._buffer, self._at = "", 0
        if self._state in (self._opened, self._in_json):
            self._give_back(rest)
        elif self._state in (self._in_text, self._behind_bare):
            self._say(rest)
        else:
            if self._state == self._in_value:
                self._value_piece(rest)
                if not self._flows:
                    self._tell('"' + escaped(self._withheld.getvalue()))
            self._break_off()
        if not self._after_call:
            out.say(self._space)
        self._space = ""

    # --- text -----------------------------------------------------------------------------------

    def _in_text(self) -> bool:
        buffer, at = self._buffer, self._at
        mark = OPENING.search(buffer, at)
        if mark is None:
            self._at = self._cut_at(at)
            self._say(buffer[at : self._at])
            return False
        self._at = mark.end()
        name = mark.group(2)
        if name is None:
            self._say(buffer[at : mark.start()])
            self._withhold(OPEN)
            self._state = self._opened
        elif name in self._schema:
            self._say(buffer[at : mark.start()])
            self._open(name, wrapped=False)
        else:
            self._say(buffer[at : mark.end()])
        return True

    def _cut_at(self, at: int) -> int:
        """Where the text ends and what may become an opening marker begins."""
        start = max(self._buffer.rfind("<"), at - 1)
        grows = start >= at and self._may_become(start, OPEN, "<function")
        return start if grows else len(self._buffer)

    def _say(self, text: str) -> None:
        said = text.rstrip(" \t\r\n")
        if said:
            self._out.say(self._space + said)
            self._space = ""
            self._after_call = False
        self._space += text[len(said) :]
        if len(self._space) > _SPACE_MAX:
            self._out.say(self._space[:-_SPACE_MAX])
            self._space = self._space[-_SPACE_MAX:]

    # --- what is withheld -----------------------------------------------------------------------

    def _withhold(self, text: str) -> None:
        self._withheld = StringIO()
        self._withheld.write(text)

    def _give_back(self, rest: str = "") -> None:
        """No call after all."""
        self._state = self._in_text
        self._say(self._withheld.getvalue() + rest)
        self._withheld = StringIO()

    def _opened(self) -> bool:
        """Behind `<tool_call>`: which form is it?"""
        start = self._skip_space()
        self._withheld.write(self._buffer[self._at : start])
        self._at = start
        if start == len(self._buffer):
            return self._over_bound()
        if self._buffer[start] in "{[":
            self._body_at = self._withheld.tell()
            self._in_string = False
            self._state = self._in_json
        elif head := HEAD.match(self._buffer, start):
            self._at = head.end()
            self._open(head.group(2), wrapped=True)
        elif self._may_become(start, "<function"):
            return False
        else:
            self._give_back()
        return True

    def _in_json(self) -> bool:
        buffer, at = self._buffer, self._at
        position = at
        keep = -1  # up to where the buffer is read for good, once it is known
        while keep < 0:
            pattern = STRING_MARK if self._in_string else JSON_MARK
            mark = pattern.search(buffer, position)
            if mark is None:
                keep = len(buffer) if self._in_string else partial(buffer, at, CLOSE)
                continue
            position = mark.end()
            if mark.group() == '"':
                self._in_string = not self._in_string
            elif mark.group() == CLOSE:
                self._withheld.write(buffer[at : mark.start()])
                self._at = mark.end()
                self._close_json()
                return True
            elif position == len(buffer):  # a backslash, and what it escapes is to come
                keep = mark.start()
            else:
                position += 1
        self._withheld.write(buffer[at:keep])
        self._at = keep
        return self._over_bound()

    def _over_bound(self) -> bool:
        if self._withheld.tell() <= self._withheld_max:
            return False
        self._give_back()
        return True

    def _close_json(self) -> None:
        calls = calls_of(self._withheld.getvalue()[self._body_at :])
        if not calls:
            self._give_back(CLOSE)
            return
        self._space = ""
        for name, arguments in calls:
            self._out.open(self._new_id(), name, arguments)
        self.closed += len(calls)
        self._after_call = True
        self._state = self._in_text

    # --- the XML form ---------------------------------------------------------------------------

    def _open(self, name: str, *, wrapped: bool) -> None:
        self._space = ""
        self._wrapped = wrapped
        self._name = name
        self._call_id = self._new_id()
        self._separator = ""
        self._out.open(self._call_id, name, "{")
        self._state = self._between

    def _close(self) -> None:
        self._tell("}")
        self.closed += 1
        self._after_call = True

    def _break_off(self) -> None:
        self.broken += 1
        self._state = self._in_text

    def _tell(self, fragment: str) -> None:
        if fragment:
            self._out.arguments(self._call_id, fragment)

    def _between(self) -> bool:
        """Inside a function, outside its parameters."""
        self._at = start = self._skip_space()
        buffer = self._buffer
        if parameter := PARAMETER.match(buffer, start):
            self._at = parameter.end()
            self._begin_value(parameter.group(2))
        elif buffer.startswith(FUNCTION_END, start):
            self._at = start + len(FUNCTION_END)
            self._state = self._behind_function if self._wrapped else self._behind_bare
            if not self._wrapped:
                self._close()
        elif self._wrapped and buffer.startswith(CLOSE, start):
            self._at = start + len(CLOSE)  # models leave `</function>` out
            self._close()
            self._state = self._in_text
        elif start == len(buffer) or self._may_become(start, "<parameter", FUNCTION_END, CLOSE):
            return False
        else:
            self._break_off()
        return True

    def _behind_function(self) -> bool:
        """Only the closing marker, or another function, closes the call."""
        self._at = start = self._skip_space()
        if self._buffer.startswith(CLOSE, start):
            self._at = start + len(CLOSE)
            self._close()
            self._state = self._in_text
        elif head := HEAD.match(self._buffer, start):
            self._at = head.end()
            self._close()
            self._open(head.group(2), wrapped=True)
        elif start == len(self._buffer) or self._may_become(start, CLOSE, "<function"):
            return False
        else:
            self._break_off()
        return True

    def _behind_bare(self) -> bool:
        """A wrapper that was not opened is often closed all the same."""
        start = self._skip_space()
        if start - self._at <= _SPACE_MAX:
            if self._buffer.startswith(CLOSE, start):
                self._at = start + len(CLOSE)
            elif start == len(self._buffer) or self._may_become(start, CLOSE):
                return False
        self._state = self._in_text
        return True

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._flows = self._schema.is_text(self._name, key)
        self._fresh = True
        self._withhold("")
        self._tell(self._separator + dumps(key).decode() + (':"' if self._flows else ":"))
        self._separator = ","
        self._state = self._in_value

    def _in_value(self) -> bool:
        buffer = self._buffer
        if self._fresh:  # the template puts the value on lines of its own
            if buffer.startswith("\r\n", self._at):
                self._at += 2
            elif buffer.startswith("\n", self._at):
                self._at += 1
            elif self._at == len(buffer) or buffer[self._at :] == "\r":
                return False
            self._fresh = False
        end = buffer.find(VALUE_END, self._at)
        stop = end if end >= 0 else partial(buffer, self._at, VALUE_END)
        stop = without_newline(buffer, self._at, stop)
        self._value_piece(buffer[self._at : stop])
        self._at = stop
        if end < 0:
            return False
        self._at = end + len(VALUE_END)
        if self._flows:
            self._tell('"')
        else:
            self._tell(self._schema.value(self._name, self._key, self._withheld.getvalue()))
        self._state = self._between
        return True

    def _value_piece(self, text: str) -> None:
        if self._flows:
            self._tell(escaped(text))
            return
        self._withheld.write(text)
        if self._withheld.tell() > self._withheld_max:  # then it flows, whatever its type
            self._flows = True
            self._tell('"' + escaped(self._withheld.getvalue()))
            self._withhold("")

    # --- markers --------------------------------------------------------------------------------

    def _skip_space(self) -> int:
        spaces = SPACES.match(self._buffer, self._at)
        return spaces.end() if spaces else self._at

    def _may_become(self, start: int, *tags: str) -> bool:
        """Whether the rest of the buffer may be the beginning of one of these tags."""
        if len(self._buffer) - start > _TAG_MAX or self._buffer.find(">", start) >= 0:
            return False
        rest = self._buffer[start:]
        return any(
            tag.startswith(rest) or (rest.startswith(tag) and rest[len(tag)] in "= \t\r\n")
            for tag in tags
        )
