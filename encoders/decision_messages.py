"""Client messages of a decision stream: JSON bytes in, checked values out (D2.2, D2.3, D4).

`decode` does all the work that grows with a message and needs no state, so that it may run in a
thread: strict JSON, shapes, attachments, and the compact bytes of what will be in the decide body.
Nothing of a state is kept as Python objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

from encoders.decision_errors import DecisionError, error
from encoders.decision_json import MalformedJson, NestedTooDeeply, compact, compact_text, loads
from encoders.decision_request import (
    StateValue,
    idempotency_key,
    read_attachments,
    read_request,
    read_state,
)
from encoders.decision_shapes import WrongShape, exact_members, one_of, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from encoders.decision_attachments import Attachment

Mode = Literal["on_change", "on_request"]

MAX_ITEMS: Final = 4096
MAX_VERSION: Final = 100_000
MAX_INTERVAL_MS: Final = 60_000
MAX_NONCE: Final = 9_007_199_254_740_991

_LONGEST_ECHO: Final = 128  # an event id that a refusal repeats
_SCANNED_TOKENS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What all mutations have.

    Attributes:
        idempotency_key: trimmed, or None (D4.7).
        refusal: why it is refused once it is known to be next in order, or None.
    """

    is_mutation: ClassVar[bool] = True
    event_id: str
    idempotency_key: str | None
    refusal: DecisionError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Mutation):
    """`start`. `policy` is compact JSON; what is None is left out of the decide body.

    Attributes:
        questions: by name. encoded_questions: their compact JSON.
    """

    model: str
    state: StateValue
    questions: Mapping[str, Any]
    encoded_questions: bytes
    attachments: tuple[Attachment, ...]
    prompt_cache_key: str | None
    route: str | None
    mode: str | None
    policy: bytes | None
    decision_mode: Mode
    min_interval_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(Mutation):
    """`append_text` or `append_items`: content to append to a state of its kind."""

    addition: StateValue


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendAttachments(Mutation):
    """`append_attachments`."""

    attachments: tuple[Attachment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace(Mutation):
    """`replace`; attachments None keep those that are there."""

    state: StateValue
    attachments: tuple[Attachment, ...] | None


@dataclass(frozen=True, slots=True)
class Decide:
    """`decide`."""

    is_mutation: ClassVar[bool] = False
    state_version: int


@dataclass(frozen=True, slots=True)
class Pong:
    """`pong`."""

    is_mutation: ClassVar[bool] = False
    nonce: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """Not strict JSON in UTF-8: closes with 1007."""

    is_mutation: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that no state accepts.

    Attributes:
        event_id: the mutation's own, None for anything else (D2.3).
        is_mutation: does it count against the budget of mutations?
    """

    error: DecisionError
    event_id: str | None
    is_mutation: bool


Incoming: TypeAlias = (
    Start | Append | AppendAttachments | Replace | Decide | Pong | Malformed | Refused
)


def decode(data: bytes) -> Incoming:
    """Read one text message; never raises."""
    try:
        value = loads(data)
    except MalformedJson:
        return Malformed()
    except NestedTooDeeply as problem:
        kind, event_id = _named(data)
        mutation = kind in _MUTATIONS
        refusal = error("state_too_large", str(problem))
        return Refused(refusal, event_id if mutation else None, mutation)
    if not isinstance(value, dict):
        return Refused(error("stream_invalid_message", "a message is an object"), None, False)
    kind = value.get("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    mutation = kind in _MUTATIONS if isinstance(kind, str) else False
    try:
        if reader is None:
            raise WrongShape("there is no such type of message", "type")
        return reader(value)
    except WrongShape as problem:
        refusal = error("stream_invalid_message", str(problem), param=problem.param)
        event_id = _echo(value.get("event_id")) if mutation else None
        return Refused(refusal, event_id, mutation)


def decode_body(data: bytes) -> Start | DecisionError:
    """Read the body of the decide API as the start of a stream with that one state; never raises.

    `session_id` is checked and left out: it is for a service that keeps sessions (D6.1).
    """
    try:
        value = loads(data)
        request = read_request(value, "", frozenset({"session_id"}))
    except MalformedJson as problem:
        return error("invalid_request", f"the body is not strict JSON: {problem}")
    except NestedTooDeeply as problem:
        return error("state_too_large", str(problem))
    except WrongShape as problem:
        return error("invalid_request", str(problem), param=problem.param)
    return Start(
        event_id="evt_1",
        idempotency_key=None,
        **request,
        decision_mode="on_request",
        min_interval_ms=0,
    )


def _start(value: dict[str, Any]) -> Start:
    exact_members(
        value,
        frozenset({"type", "event_id", "request", "decision_mode"}),
        frozenset({"idempotency_key", "min_interval_ms"}),
    )
    request = read_request(value["request"], "request", frozenset())
    mode = one_of(value["decision_mode"], "decision_mode", ("on_change", "on_request"))
    return Start(
        **_common(value),
        **request,
        decision_mode="on_change" if mode == "on_change" else "on_request",
        min_interval_ms=whole(
            value.get("min_interval_ms", 0), "min_interval_ms", 0, MAX_INTERVAL_MS
        ),
    )


def _append_text(value: dict[str, Any]) -> Append:
    exact_members(value, frozenset({"type", "event_id", "text"}), _KEY)
    addition = StateValue("string", compact_text(text(value["text"], "text")))
    return Append(**_common(value), addition=addition)


def _append_items(value: dict[str, Any]) -> Append:
    exact_members(value, frozenset({"type", "event_id", "items"}), _KEY)
    items = value["items"]
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
        raise WrongShape(f"items must be an array of 1 to {MAX_ITEMS} values", "items")
    return Append(**_common(value), addition=StateValue("array", compact(items)[1:-1]))


def _append_attachments(value: dict[str, Any]) -> AppendAttachments:
    exact_members(value, frozenset({"type", "event_id", "attachments"}), _KEY)
    if not isinstance(value["attachments"], list) or not value["attachments"]:
        raise WrongShape("attachments must be an array and not empty", "attachments")
    attachments, refusal = read_attachments(value["attachments"], "attachments")
    return AppendAttachments(**_common(value), refusal=refusal, attachments=attachments or ())


def _replace(value: dict[str, Any]) -> Replace:
    exact_members(value, frozenset({"type", "event_id", "state"}), _KEY | {"attachments"})
    attachments, refusal = read_attachments(value.get("attachments"), "attachments")
    return Replace(
        **_common(value),
        refusal=refusal,
        state=read_state(value["state"], "state"),
        attachments=attachments,
    )


def _decide(value: dict[str, Any]) -> Decide:
    exact_members(value, frozenset({"type", "state_version"}), frozenset())
    return Decide(whole(value["state_version"], "state_version", 1, MAX_VERSION))


def _pong(value: dict[str, Any]) -> Pong:
    exact_members(value, frozenset({"type", "nonce"}), frozenset())
    return Pong(whole(value["nonce"], "nonce", 1, MAX_NONCE))


def _common(value: dict[str, Any]) -> dict[str, Any]:
    event_id = text(value["event_id"], "event_id")
    key = None
    if "idempotency_key" in value:
        key = idempotency_key(text(value["idempotency_key"], "idempotency_key"))
        if key is None:
            raise WrongShape(
                "idempotency_key must have 1 to 255 printable ASCII characters", "idempotency_key"
            )
    return {"event_id": event_id, "idempotency_key": key}


def _echo(event_id: Any) -> str | None:
    return event_id if isinstance(event_id, str) and len(event_id) <= _LONGEST_ECHO else None


def _named(data: bytes) -> tuple[str | None, str | None]:
    """The `type` and `event_id` of a message that is nested too deeply to be decoded."""
    found: dict[str, str] = {}
    depth = 0
    for number, match in enumerate(_HEAD_TOKEN.finditer(data)):
        if len(found) == 2 or number == _SCANNED_TOKENS:
            break
        if match[1] is not None:
            if depth == 1:
                found.setdefault(match[1].decode(), match[2].decode())
        elif match[0] in b"[{":
            depth += 1
        elif match[0] in b"]}":
            depth -= 1
    return found.get("type"), found.get("event_id")


_HEAD_TOKEN: Final = re.compile(
    rb'"(type|event_id)"\s*:\s*"([A-Za-z0-9_-]{1,128})"|"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL
)
_KEY: Final = frozenset({"idempotency_key"})
_READERS: Final[Mapping[str, Callable[[dict[str, Any]], Incoming]]] = {
    "start": _start,
    "append_text": _append_text,
    "append_items": _append_items,
    "append_attachments": _append_attachments,
    "replace": _replace,
    "decide": _decide,
    "pong": _pong,
}
_MUTATIONS: Final = frozenset(_READERS) - {"decide", "pong"}
