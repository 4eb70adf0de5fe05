"""Reads what a remote engine says. [pure] Rules W2.1, W2.3, W3.2; hazard B16.

A frame passes as it came: its name and its data are the same, the JSON is not written anew. What
SSE has around them does not pass: line ends become LF, comments, `id:`, `retry:` and a BOM are
dropped (positions are the gateway's); data over several lines keeps its lines. A frame without a
name is a `message`, as in any reader of SSE. A name that a reader could not take again (NUL, over
200 bytes) is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from yarl import URL

from encoders.json_text import dumps, loads
from encoders.usage import token_count
from encoders.workflow import TEXT_ENDS
from relay.engines.base import Completed, Failed, Usage, Yielded
from relay.engines.embedded.schemas import AnswerSchema, SchemaFault
from relay.ordering import LAST_WORDS, STARTED, YIELDED, EngineFrame, Offer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from encoders.sse import SseEvent
    from relay.engines.base import Ending
    from relay.ordering import Say
    from relay.redact import Redactor

SHAPES: Final = ("openai", "anthropic", "gemini", "token")
TOKEN: Final = "token"
_ABOUT_TASKS: Final = TEXT_ENDS | {STARTED}
_COUNTED: Final = ("tasks", "completed", "failed", "skipped")
_NAME_BYTES_MAX: Final = 200
_LOOKED_INTO_MAX: Final = 64 * 1024
_TASK_ID_MAX: Final = 512
_URL_MAX: Final = 8192
_MESSAGE_MAX: Final = 2000
_COMPLAINTS_MAX: Final = 16


class Inline(NamedTuple):
    """A token that the engine says itself, as the frame that clients get it in (W2.2)."""

    task_id: str
    raw: bytes


class FrameReader:
    """Reads the frames of one run.

    Args:
        base_url: of the engine. allowed: further origins whose sub-streams may be opened.
        redactor: the engine's key: a frame that tells of an error may repeat it.

    Attributes:
        complaints: what was ignored and why, each once; whoever logs them empties it.
    """

    def __init__(self, base_url: str, allowed: Sequence[str], redactor: Redactor) -> None:
        self._base = URL(base_url)
        self._origin = _origin(self._base)
        self._allowed = frozenset(_origin(URL(url)) for url in allowed)
        self._redactor = redactor
        self._complained: set[str] = set()
        self.complaints: list[str] = []

    def read(self, event: SseEvent) -> EngineFrame | Inline | None:
        """Read one event; None if it is dropped."""
        if b"\0" in event.event or len(event.event) > _NAME_BYTES_MAX:
            self._complain("a frame whose name no reader could take")
            return None
        name = event.event.decode("utf-8", "replace")
        data = event.data
        if b'"error"' in data:
            data = self._redactor.data(data)
        if name == TOKEN:
            return self._token(data)
        lines = b"".join(b"data: " + line + b"\n" for line in data.split(b"\n"))
        frame = (b"event: " + event.event + b"\n" if event.event else b"") + lines + b"\n"
        task_id, offer = None, None
        if name in _ABOUT_TASKS or len(data) <= _LOOKED_INTO_MAX:
            said = data_of(data)
            task_id = _text(said.get("task_id"))
            if task_id is not None and len(task_id) > _TASK_ID_MAX:
                task_id = None
            if name == STARTED and task_id is not None and said.get("stream_url") is not None:
                offer = self._offer(said["stream_url"], said.get("shape"))
        return EngineFrame(name=name or "message", frame=frame, task_id=task_id, offer=offer)

    def _token(self, data: bytes) -> Inline | None:
        said = _object(data)
        task_id, delta = said.get("task_id"), said.get("delta")
        if isinstance(task_id, str) and isinstance(delta, str):
            return Inline(task_id, raw_of(delta)) if delta else None
        self._complain("a token frame without task_id and delta")
        return None

    def _offer(self, url: object, shape: object) -> Offer | None:
        """What is advertised, if it may be opened: the engine does not decide who gets its key, or
        what else this process can reach.
        """
        shape = "openai" if shape is None else shape
        if shape not in SHAPES:
            self._complain("a sub-stream of a shape that is not known")
            return None
        try:
            target = self._target(url)
        except ValueError:
            self._complain("a stream_url that is no http(s) URL")
            return None
        origin = _origin(target)
        if origin != self._origin and origin not in self._allowed:
            scheme, host, port = origin
            self._complain(
                f"a sub-stream at {scheme}://{host}:{port}, which is neither the engine's origin "
                "nor one of allow_stream_origins"
            )
            return None
        return Offer(url=str(target), shape=str(shape), ours=origin == self._origin)

    def _target(self, url: object) -> URL:
        """The URL as it will be dialled: whoever compares origins must read it as the dialler."""
        if not isinstance(url, str) or not 0 < len(url) <= _URL_MAX:
            raise ValueError("not a URL")
        if any(not "!" <= c <= "~" or c == "\\" for c in url):
            raise ValueError("not a URL")
        target = self._base.join(URL(url, encoded=True)).with_fragment(None)
        if target.scheme not in ("http", "https") or not target.host:
            raise ValueError("not http")
        if target.user is not None or target.password is not None:
            raise ValueError("holds a user")
        return target

    def _complain(self, what: str) -> None:
        if what not in self._complained and len(self._complained) < _COMPLAINTS_MAX:
            self._complained.add(what)
            self.complaints.append(what)


def _origin(url: URL) -> tuple[str, str, int | None]:
    """Scheme, host and port, the port also where it is the scheme's own (RFC 6454)."""
    return url.scheme, (url.host or "").lower(), url.port


def whole(events: Sequence[SseEvent]) -> list[SseEvent]:
    """Of the last events of a stream, which may lack their blank line, those that are whole: half
    an outcome is none (B08, B15).
    """
    return [event for event in events if _is_json(event.data)]


def raw_of(text: str) -> bytes:
    """The text as it stands between the quotes of a JSON string."""
    return dumps(text)[1:-1]


def ending_of(finals: Sequence[Say]) -> Ending | None:
    """Make a run's ending of an engine's last frames; None if there is no outcome among them."""
    if not finals or finals[0].name not in LAST_WORDS:
        return None
    verbatim = tuple((said.name, said.frame) for said in finals)
    outcome = finals[0]
    said = data_of(frame_data(outcome.frame))
    told = said.get("execution_summary")
    told = told if isinstance(told, dict) else {}
    summary = {name: token_count(told, name) or 0 for name in _COUNTED}
    usage = _usage(told.get("usage"))
    if outcome.name == YIELDED:
        return Yielded(
            task_id=_text(said.get("task_id")) or "",
            prompt=_text(said.get("prompt")) or "",
            schema=_schema(said.get("schema")),
            summary=summary,
            usage=usage,
            verbatim=verbatim,
        )
    if outcome.name == "workflow_completed":
        return Completed(
            final_task_id=_text(said.get("final_task_id")),
            summary=summary,
            usage=usage,
            verbatim=verbatim,
        )
    error = said.get("error")
    error = error if isinstance(error, dict) else {"message": error}
    return Failed(
        code=(_text(error.get("code")) or "engine_error")[:_NAME_BYTES_MAX],
        message=(_text(error.get("message")) or "the engine failed")[:_MESSAGE_MAX],
        task_id=_text(error.get("task_id")),
        summary=summary,
        usage=usage,
        verbatim=verbatim,
    )


def frame_data(frame: bytes) -> bytes:
    """The data of a frame that `FrameReader` made."""
    lines = frame.split(b"\n")
    return b"\n".join(line[6:] for line in lines if line.startswith(b"data: "))


def data_of(payload: bytes) -> dict[str, Any]:
    """The `data` of a frame's payload; empty if it has none."""
    data = _object(payload).get("data")
    return data if isinstance(data, dict) else {}


def _is_json(data: bytes) -> bool:
    try:
        loads(data)
    except ValueError:
        return False
    return True


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _schema(value: object) -> dict[str, Any] | None:
    """The schema of an answer, None unless answers can be held to it: then the engine judges."""
    if not isinstance(value, dict):
        return None
    try:
        AnswerSchema(value)
    except SchemaFault:
        return None
    return value


def _usage(value: object) -> Usage:
    """A run's usage; what it cost is between the engine and its providers."""
    return Usage(
        prompt_tokens=token_count(value, "prompt_tokens") or 0,
        completion_tokens=token_count(value, "completion_tokens") or 0,
    )
