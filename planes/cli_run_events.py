"""What a run's streams say, made one: each event once, over any number of connections (W2.6).

Pure: bytes in, events out. The first stream has positions and no offsets, the ones that follow it
have both; whoever reads the events cannot tell where one stream ended and the next one began.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import orjson

from encoders.json_text import dumps, loads
from encoders.sse import SseEvent

LAST = "workflow_result"
RESET = "stream_reset"  # of a client that took nothing for too long; it may follow again
_POSITION_DIGITS_MAX = 18
_COUNT_MAX = 2**53


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of a run.

    Attributes:
        position: of an engine's event, from 1; None for a token.
        payload: what its data is, parsed; None if it is no JSON object.
        raw: its data as one line of JSON.
    """

    name: str
    position: int | None
    payload: dict[str, Any] | None
    raw: bytes

    @property
    def data(self) -> dict[str, Any]:
        """The `data` of an engine's event; empty if there is none."""
        data = (self.payload or {}).get("data")
        return data if isinstance(data, dict) else {}

    @property
    def task_id(self) -> str | None:
        """The task that it is about."""
        told = (self.payload or {}) if self.name == "token" else self.data
        task_id = told.get("task_id")
        return task_id if isinstance(task_id, str) else None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the run began."""
        return seconds_of((self.payload or {}).get("elapsed_ms"))


@dataclass(slots=True)
class Cursor:
    """How far a run was read.

    Attributes:
        position: of the last engine event. last: its name.
        chars: of each task, the characters of its text since its last `streaming_started`.
    """

    position: int = 0
    last: str = ""
    chars: dict[str, int] = field(default_factory=dict)

    def take(self, event: SseEvent) -> RunEvent | None:
        """Take what a stream said; None if it was said before, or is about the stream alone."""
        name = event.event.decode("utf-8", "replace") or "message"
        payload, raw = _read(event.data)
        if name == RESET:
            return None
        if name == "token":
            return self._token(payload or {})
        is_one = event.id.isdigit() and len(event.id) <= _POSITION_DIGITS_MAX
        position = int(event.id) if is_one else self.position + 1
        if position <= self.position:
            return None
        self.position, self.last = position, name
        told = RunEvent(name, position, payload, raw)
        if name == "streaming_started" and told.task_id is not None:
            self.chars[told.task_id] = 0
        return told

    def _token(self, payload: dict[str, Any]) -> RunEvent | None:
        task_id, delta = payload.get("task_id"), payload.get("delta")
        if not isinstance(task_id, str) or not isinstance(delta, str):
            return None
        had = self.chars.get(task_id, 0)
        offset = count_of(payload.get("offset"))
        offset = had if offset is None else offset
        new = delta[max(0, had - offset) :]
        if not new:
            return None
        self.chars[task_id] = had + len(new)
        told = {"task_id": task_id, "delta": new}
        return RunEvent("token", None, told, dumps(told))


def count_of(value: Any) -> int | None:
    """A count as engines and gateways tell it, None for what is none: what they send is not ours,
    and a remote engine's frames pass as they came (W3.2).
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_MAX:
        return None
    return value


def seconds_of(value: Any) -> float | None:
    """Milliseconds as seconds, None for what is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value / 1000 if 0 <= value < _COUNT_MAX else None


def json_line(event: RunEvent) -> bytes:
    """One line for scripts: `{"event", "position"?, "data"}`, the data as it came (W2.1)."""
    position = b'"position":%d,' % event.position if event.position is not None else b""
    return b'{"event":%b,%b"data":%b}\n' % (dumps(event.name), position, event.raw)


def from_json_line(line: bytes | str) -> RunEvent:
    """The event of such a line.

    Raises:
        ValueError, KeyError: it is none.
    """
    told = loads(line)
    data = told["data"]
    payload = data if isinstance(data, dict) else None
    return RunEvent(told["event"], told.get("position"), payload, dumps(data))


def _read(data: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """The object that the data is, and the data as one line of JSON: a text if it is no JSON."""
    raw = data
    try:
        told: Any = _strict(data)
        if b"\n" in raw:  # a remote engine's data may stand on several lines
            raw = dumps(told)
    except (ValueError, RecursionError):
        try:
            told = loads(data)
        except ValueError:
            told = data.decode("utf-8", "replace")
        raw = dumps(told)
    return told if isinstance(told, dict) else None, raw


def _strict(data: bytes) -> Any:
    """As `loads`, without what JSON has no word for (NaN)."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:  # also of lone surrogates and of numbers beyond a float
        return json.loads(data.decode(), parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise ValueError(word)
