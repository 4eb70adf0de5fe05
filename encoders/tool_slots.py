"""Which call a tool-call delta belongs to, and what of it is new. [pure]

Rule M2.6. Providers omit `index`, count it anew in each chunk, start it at 1, repeat id, type and
name on every fragment, or tell them only at the end. A *slot* is one call of one choice; deltas
find theirs by id, else by index, else they continue the call that was opened last. A slot is told
to the client once its id and name are known; what comes before that waits. The number that the
client sees is counted in the order of telling, so it is 0, 1, 2 whatever the provider counts.
"""

from __future__ import annotations

import hashlib
import re
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps
from encoders.translator import CALLS_MAX, ReplyTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDEX_DIGITS_MAX: Final = 18
_USUAL: Final = frozenset({"index", "id", "type", "function", "custom"})
_USUAL_INSIDE: Final = frozenset({"name", "arguments", "input"})
_JSON_MARK: Final = re.compile(r'["\\{}\[\]]')


def made_call_id(seed: str, number: int) -> str:
    """An id for a call that has none; the same for the same stream, and short enough for all."""
    digest = hashlib.blake2s(f"{seed}/{number}".encode("utf-8", "replace"), digest_size=12)
    return f"call_{digest.hexdigest()}"


def argument_text(value: object) -> str:
    """Arguments as the text that they are on the wire; an object that holds nothing is none yet."""
    if isinstance(value, str):
        return value
    return dumps(value).decode() if value else ""


class _Nesting:
    """Follows a JSON text piece by piece, to know when its one value is complete."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_opened")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._opened = False

    @property
    def complete(self) -> bool:
        return self._opened and not self._depth and not self._in_string

    def feed(self, text: str) -> None:
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while (mark := _JSON_MARK.search(text, at)) is not None:
            at = mark.end()
            char = mark.group()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif not self._in_string:
                self._opened = True
                self._depth += 1 if char in "{[" else -1


class _Slot:
    """One call of a choice."""

    __slots__ = (
        "body",
        "first",
        "has_arguments",
        "id",
        "index",
        "name",
        "nesting",
        "number",
        "wait",
        "waits",
    )

    def __init__(self, index: int | None) -> None:
        self.index = index  # the provider's
        self.number: int | None = None  # the client's, once told
        self.id = self.name = ""
        self.body = "function"  # the member that holds name and arguments; or "custom"
        self.has_arguments = False
        self.first: dict[str, Any] = {}  # other members of the deltas that wait
        self.wait = StringIO()
        self.waits = 0  # characters that wait, those of other members among them
        # Without an id, only complete arguments can tell a repeated name from a second call.
        self.nesting = _Nesting()

    @property
    def arguments_key(self) -> str:
        return "input" if self.body == "custom" else "arguments"


class ToolSlots:
    """The tool calls of one choice.

    Args:
        seed: from which the ids of calls without one are made.
        withheld_max: characters of arguments that may wait for an identity.
    """

    def __init__(self, seed: str, withheld_max: int) -> None:
        self._seed = seed
        self._left = withheld_max
        self._slots: list[_Slot] = []
        self._by_id: dict[str, _Slot] = {}
        self._by_index: dict[int, _Slot] = {}
        self._told = 0

    def take(self, calls: list[Any]) -> list[dict[str, Any]]:
        """Return the deltas of one chunk as the client gets them; equal to `calls` if those are
        right.
        """
        told: list[dict[str, Any]] = []
        touched: set[_Slot] = set()
        for call in calls:
            if isinstance(call, dict):
                right = self._take(call, touched)
                if right is not None:
                    told.append(right)
        return told

    def end(self, *, complete: bool) -> Iterator[dict[str, Any]]:
        """The choice is finished: tell what waits, and complete calls without arguments.

        Args:
            complete: whether the ending says that the calls are whole.
        """
        yield from self._join_nameless()
        for slot in self._slots if complete else ():
            if not slot.has_arguments and slot.body == "function":
                slot.has_arguments = True
                if slot.number is None:
                    slot.wait.write("{}")
                else:
                    yield {"index": slot.number, "function": {"arguments": "{}"}}
        yield from self._tell_waiting()

    def flush(self) -> Iterator[dict[str, Any]]:
        """Tell what waits."""
        yield from self._join_nameless()
        yield from self._tell_waiting()

    def _tell_waiting(self) -> Iterator[dict[str, Any]]:
        for slot in self._slots:
            if slot.number is None:
                yield self._tell(slot)

    def _join_nameless(self) -> Iterator[dict[str, Any]]:
        """Fragments that never got an identity continue the call before them."""
        kept: list[_Slot] = []
        for slot in self._slots:
            if not kept or slot.number is not None or slot.name or slot.id:
                kept.append(slot)
                continue
            previous, text = kept[-1], slot.wait.getvalue()
            previous.has_arguments |= slot.has_arguments
            slot.number = previous.number
            if previous.number is None:
                previous.wait.write(text)
            else:
                yield {"index": previous.number, previous.body: {previous.arguments_key: text}}
        self._slots = kept

    def _take(self, call: dict[str, Any], touched: set[_Slot]) -> dict[str, Any] | None:
        body = "custom" if isinstance(call.get("custom"), dict) else "function"
        inner = call.get(body)
        inner = inner if isinstance(inner, dict) else {}
        name = _text(inner.get("name"))
        slot = self._find(call, name, argument_text(inner.get("arguments")), touched)
        if slot is None:
            slot = self._open(_index(call))
            slot.body = body
        touched.add(slot)
        call_id = _text(call.get("id"))
        if call_id:
            self._by_id.setdefault(call_id, slot)
            slot.id = slot.id or call_id
        text = argument_text(inner.get(slot.arguments_key))
        slot.has_arguments = slot.has_arguments or bool(text.strip())
        if not slot.id:
            slot.nesting.feed(text)
        if slot.number is not None:
            return self._continued(slot, call, inner, name, text)
        if name and name != slot.name:
            slot.name += name
        if slot.id and slot.name and not slot.first:
            return self._first(slot, call, inner, text)
        return self._waiting(slot, call, inner, name, text)

    def _first(
        self, slot: _Slot, call: dict[str, Any], inner: dict[str, Any], text: str
    ) -> dict[str, Any]:
        """The first delta of a call, and nothing of it has waited."""
        slot.number, self._told = self._told, self._told + 1
        right = call | {"index": slot.number, "id": slot.id, "type": call.get("type") or slot.body}
        key = slot.arguments_key
        if key in inner and inner[key] != text:
            right[slot.body] = inner | {key: text}
        return right

    def _waiting(
        self, slot: _Slot, call: dict[str, Any], inner: dict[str, Any], name: str, text: str
    ) -> dict[str, Any] | None:
        """A delta of a call whose identity is not told yet."""
        known = {key: value for key, value in inner.items() if key != "name"}
        slot.first |= {k: v for k, v in call.items() if v is not None}
        slot.first[slot.body] = known | {slot.arguments_key: ""}
        slot.wait.write(text)
        waits = len(text) + len(name)
        if call.keys() - _USUAL or inner.keys() - _USUAL_INSIDE:
            waits += len(dumps(call))
        slot.waits += waits
        self._left -= waits
        if (slot.id and slot.name) or self._left < 0:
            return self._tell(slot)
        return None

    def _tell(self, slot: _Slot) -> dict[str, Any]:
        """The first delta of a call of which something has waited."""
        slot.number, self._told = self._told, self._told + 1
        slot.id = slot.id or made_call_id(self._seed, slot.number)
        waited = slot.wait.getvalue()
        self._left += slot.waits
        slot.wait = StringIO()
        first = slot.first
        return first | {
            "index": slot.number,
            "id": slot.id,
            "type": first.get("type") or slot.body,
            slot.body: first[slot.body] | {"name": slot.name, slot.arguments_key: waited},
        }

    def _continued(
        self, slot: _Slot, call: dict[str, Any], inner: dict[str, Any], name: str, text: str
    ) -> dict[str, Any]:
        """A later delta of a call: the identity was told, only what is new remains."""
        right = {k: v for k, v in call.items() if k not in ("id", "type") or v is None}
        right["index"] = slot.number
        fixed = dict(inner)
        if "name" in inner and inner["name"] is not None and name in ("", slot.name):
            del fixed["name"]
        key = slot.arguments_key
        if not fixed or (key in fixed and fixed[key] != text):
            fixed[key] = text
        right[slot.body] = fixed
        return right

    def _open(self, index: int | None) -> _Slot:
        if len(self._slots) >= CALLS_MAX:
            raise ReplyTooLarge(f"more than {CALLS_MAX} tool calls")
        slot = _Slot(index)
        if index is None:
            self._by_index.setdefault(len(self._slots), slot)
        else:
            self._by_index[index] = slot
        self._slots.append(slot)
        return slot

    def _find(
        self, call: dict[str, Any], name: str, arguments: str, touched: set[_Slot]
    ) -> _Slot | None:
        """Return the slot that a delta belongs to, None if it opens one."""
        index, call_id = _index(call), _text(call.get("id"))
        if call_id and (slot := self._by_id.get(call_id)) is not None:
            another = name and slot.name and name != slot.name and index != slot.index
            return None if another else slot
        if index is None:
            slot = self._slots[-1] if self._slots else None
        else:
            slot = self._by_index.get(index)
        if slot is None or (call_id and slot.id):
            return None
        if not name or not (slot.name or slot in touched):
            return slot
        if slot in touched:
            return None  # two names in one chunk are two calls
        if name != slot.name:
            return None if slot.has_arguments else slot  # else a fragment of the name
        again = slot.nesting.complete and arguments.lstrip()[:1] in ("{", "[")
        return None if again else slot


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _index(call: dict[str, Any]) -> int | None:
    index = call.get("index")
    if isinstance(index, str) and index.isdecimal() and len(index) <= _INDEX_DIGITS_MAX:
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else None
