"""Whole replies of the OpenAI wire: rewritten, put together from chunks, taken apart. [pure]

Rules M1.1 (`stream:false` returns one `chat.completion`), M2.2, M3.2 (an error body with status
200), M4.1 (a plain request dialled as a stream and aggregated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.json_text import dumps, edit, members
from encoders.reasoning_details import FIELD as REASONING_DETAILS
from encoders.reasoning_details import ReasoningDetails

if TYPE_CHECKING:
    from encoders.openai import ChunkIdentity

# What Anthropic's error types mean, for an error that came without its own status.
_STATUS_OF_TYPE: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}

# What the aggregator writes itself, whatever the chunks say.
_OWN_KEYS: Final = frozenset({"choices", "object", "model", "provider", "id", "created", "usage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An error object as providers send it.

    Attributes:
        status: an HTTP status carried in `code`, as OpenRouter does, or meant by an error type of
            Anthropic's; None if there is none.
        bad_credential: whether it is about our key, whatever its status (Google says 400).
        retry_after: seconds to wait, as written in the body (Google's `RetryInfo`).
    """

    message: str
    code: str | None
    type: str | None
    param: str | None
    status: int | None
    bad_credential: bool = False
    retry_after: str | None = None


def error_of(body: object) -> ErrorBody | None:
    """Read the error in a parsed reply, in any of the spellings seen in the wild.

    `{"error": {...}}`, `{"error": "text"}`, `{"object": "error", "message": ...}`,
    `{"message": ...}` and `{"detail": ...}`, also as the only element of a list; None if the reply
    is not an error. Google's `{"error": {"code": 400, "message", "status", "details"}}` has its
    code in `status`.
    """
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    if not isinstance(body, Mapping) or ("choices" in body and not body.get("error")):
        return None
    error = body.get("error")
    if not error:
        if body.get("object") != "error" and not (body.keys() & {"message", "detail"}):
            return None
        error = body
    if not isinstance(error, Mapping):
        error = {"message": error}
    message = error.get("message") or error.get("detail") or error.get("msg")
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else None
    if status is None and body.get("type") == "error":  # Anthropic's envelope
        status = _STATUS_OF_TYPE.get(str(error.get("type")))
    details = _google_details(error.get("details"))
    return ErrorBody(
        message=message if isinstance(message, str) else dumps(message or error).decode(),
        code=code if isinstance(code, str) else _google_code(error.get("status")),
        type=_text(error.get("type")),
        param=_text(error.get("param")),
        status=status,
        bad_credential=str(details.get("reason")).startswith("API_KEY_"),
        retry_after=_seconds(details.get("retryDelay")),
    )


def _google_code(status: object) -> str | None:
    """The name of a google.rpc.Code, as `INVALID_ARGUMENT`."""
    return status if isinstance(status, str) and status.isupper() and " " not in status else None


def _google_details(details: object) -> dict[str, Any]:
    """The fields of all `details` of a Google error (google.rpc.ErrorInfo, RetryInfo, …)."""
    fields: dict[str, Any] = {}
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, Mapping):
            fields |= detail
    return fields


def _seconds(duration: object) -> str | None:
    """The number in a protobuf duration, as `37.8s`."""
    text = duration.removesuffix("s") if isinstance(duration, str) else ""
    return text if text.replace(".", "", 1).isdecimal() else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def rewrite_whole(data: bytes, *, model: str, provider: str, choices: bytes | None = None) -> bytes:
    """Put the served slug and provider into a `chat.completion`; all else stays as sent (M2.2).

    Args:
        choices: healed ones, if something was wrong with those that came (M2.6).

    Raises:
        NotAnObject: `data` is not a JSON object.
    """
    values = {"model": dumps(model), "provider": dumps(provider)}
    if choices is not None:
        values["choices"] = choices
    return edit(data, members(data), values=values, after="model")


def whole_to_chunks(reply: Mapping[str, Any]) -> list[bytes]:
    """Take a `chat.completion` apart into the data of chunks, for an upstream that answered a
    streaming request with a whole reply.
    """
    common = {k: v for k, v in reply.items() if k not in ("choices", "usage", "object")}
    common["object"] = "chat.completion.chunk"
    out: list[bytes] = []
    for choice in reply.get("choices") or []:
        if not isinstance(choice, Mapping):
            continue
        message = choice.get("message")
        delta = dict(message) if isinstance(message, Mapping) else {}
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            delta["tool_calls"] = [
                {"index": i, **call} for i, call in enumerate(calls) if isinstance(call, Mapping)
            ]
        rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason")}
        first = {**rest, "delta": delta, "finish_reason": None}
        last = {"index": choice.get("index", 0), "delta": {}}
        last["finish_reason"] = choice.get("finish_reason") or "stop"
        out += [dumps({**common, "choices": [first]}), dumps({**common, "choices": [last]})]
    if reply.get("usage"):
        out.append(dumps({**common, "choices": [], "usage": reply["usage"]}))
    return out


class ChunkAggregator:
    """Puts chunks together to one `chat.completion`; linear in the bytes it takes.

    Args:
        identity: model, provider, id and time of the reply.
    """

    def __init__(self, identity: ChunkIdentity) -> None:
        self._identity = identity
        self._choices: dict[int, _Choice] = {}
        self._common: dict[str, Any] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take one parsed chunk."""
        for key, value in chunk.items():
            if key not in _OWN_KEYS and (value is not None or key not in self._common):
                self._common[key] = value
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, Mapping):
                index = choice.get("index")
                index = index if isinstance(index, int) else 0
                self._choices.setdefault(index, _Choice()).add(choice)

    def result(self, usage: Mapping[str, Any] | None) -> bytes:
        """Return the `chat.completion` as JSON, with `usage` if the provider reported any."""
        identity = self._identity
        return dumps(
            {
                "id": identity.id,
                "object": "chat.completion",
                "created": identity.created,
                "model": identity.model,
                "provider": identity.provider,
                "choices": [
                    {"index": index, **choice.result()}
                    for index, choice in sorted(self._choices.items())
                ],
                **self._common,
                **({"usage": usage} if usage is not None else {}),
            }
        )


class _Choice:
    """One choice while it grows."""

    def __init__(self) -> None:
        self._text: dict[str, list[str]] = {"content": []}
        self._other: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {}
        self._details = ReasoningDetails()
        self._calls: dict[int, _ToolCall] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._rest: dict[str, Any] = {"finish_reason": None}

    def add(self, choice: Mapping[str, Any]) -> None:
        for key, value in choice.items():
            if key == "delta":
                self._add_delta(value)
            elif key == "logprobs":
                self._add_logprobs(value)
            elif key != "index" and (value is not None or key not in self._rest):
                self._rest[key] = value

    def _add_delta(self, delta: Any) -> None:
        if not isinstance(delta, Mapping):
            return
        for key, value in delta.items():
            if key == "tool_calls":
                for position, call in enumerate(value if isinstance(value, list) else []):
                    if isinstance(call, Mapping):
                        index = call.get("index")
                        index = index if isinstance(index, int) else position
                        self._calls.setdefault(index, _ToolCall()).add(call)
            elif key == "role":
                self._other["role"] = value or self._other.get("role")
            elif isinstance(value, str):
                self._text.setdefault(key, []).append(value)
            elif key == REASONING_DETAILS:
                self._details.add(value)
            elif isinstance(value, list):  # annotations, images: each delta brings further ones
                self._lists.setdefault(key, []).extend(value)
            elif value is not None:
                self._other[key] = value

    def _add_logprobs(self, logprobs: Any) -> None:
        if isinstance(logprobs, Mapping):
            for key, value in logprobs.items():
                self._logprobs.setdefault(key, []).extend(value if isinstance(value, list) else [])

    def result(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._other.pop("role", None) or "assistant"}
        message |= {key: "".join(pieces) for key, pieces in self._text.items()}
        message |= self._other
        message |= self._lists
        if details := self._details.result():
            message[REASONING_DETAILS] = details
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.result() for _, call in sorted(self._calls.items())]
        return {"message": message, "logprobs": self._logprobs or None, **self._rest}


class _ToolCall:
    """One tool call while its arguments arrive."""

    def __init__(self) -> None:
        self._rest: dict[str, Any] = {}
        self._function: dict[str, Any] = {}
        self._arguments: list[str] = []

    def add(self, call: Mapping[str, Any]) -> None:
        self._rest |= {k: v for k, v in call.items() if k not in ("index", "function") and v}
        function = call.get("function")
        if isinstance(function, Mapping):
            self._function |= {k: v for k, v in function.items() if k != "arguments" and v}
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                self._arguments.append(arguments)

    def result(self) -> dict[str, Any]:
        function = {**self._function, "arguments": "".join(self._arguments)}
        return {"type": "function", **self._rest, "function": function}
