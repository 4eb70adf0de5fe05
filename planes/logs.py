"""Logs: one line for each event, as JSON or for a human, and never a secret (O3 `telemetry.log`).

structlog's events and the standard library's records (aiohttp, asyncio) take the same way:

    structlog --+
                +--> root handler --> DisconnectFilter --> exception --> mask --> JSON | console
    logging ----+

The line of a request goes a shorter way to the same end (`request_line`).

What is masked: values whose name is that of a secret, and keys and bearer tokens inside any text,
the text of exceptions included. Access lines of aiohttp are off: the gateway writes its own.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

MASK = "***"

_SECRET_NAMES = frozenset(
    {"authorization", "proxy_authorization", "api_key", "apikey", "key", "x_api_key"}
    | {"x_goog_api_key", "password", "passwd", "token", "secret", "cookie", "set_cookie"}
)
_SECRET_ENDINGS = ("_api_key", "_password", "_token", "_secret")
_SECRET_TEXT = re.compile(
    r"\b((?:sk-|ozk_|gsk_|csk-|xai-|AIza)|(?i:bearer)\s+)[A-Za-z0-9._~+/=-]+", re.ASCII
)
# What `_SECRET_TEXT` begins with, in lower case, also where an escape of JSON stands before it.
_MAY_BE_SECRET = ("sk-", "gsk_", "ozk_", "xai-", "aiza", "bearer")
_PLAIN = frozenset({str, int, bool, type(None)})
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_log = structlog.get_logger("sluicegate")
_direct: TextIO | None = None  # where lines of requests go the short way
_MAX_DEPTH = 8  # deeper values, and those that contain themselves, are logged as text
_ON_EVERY_LINE = ("timestamp", "level", "event")


def configure(
    mode: Literal["json", "console"], level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Set up all logging of the process; a second call replaces the first.

    Args:
        mode: JSON lines, or lines for a human (coloured on a terminal only).
        level: name of the lowest level to write.
        stream: where to write; standard error if None.

    Raises:
        ValueError: there is no such level.
    """
    out = stream if stream is not None else sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = _Handler(out)
    handler.addFilter(DisconnectFilter())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=_json() if mode == "json" else _console(out),
            foreign_pre_chain=[*shared, _add_logger_name],
        )
    )
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if not isinstance(h, _Handler)]
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.CRITICAL + 1)
    global _direct
    _direct = out if mode == "json" and root.isEnabledFor(logging.INFO) else None


def request_line(
    level: Literal["info", "warning"], fields: Mapping[str, Any], event: str = "request"
) -> None:
    """Write the one line of a request, or of what else has a record.

    It is most of what is ever logged, so as JSON it goes the short way: the same masking and the
    same form as all other lines, but no record and no chain of processors.

    Args:
        fields: values of JSON's own types, none of them named like a secret.
    """
    if _direct is None:
        getattr(_log, level)(event, **fields)
        return
    now = datetime.now(UTC).isoformat()[:-6]
    line = {"timestamp": f"{now}Z", "level": level, "event": event, **fields}
    try:
        _direct.write(_of_plain(line) + "\n")
        _direct.flush()
    except (OSError, ValueError):
        pass  # a log that cannot be written stops no request


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, as opposed to what a host program or a test runner has put on the root logger."""


class DisconnectFilter(logging.Filter):
    """Turns tracebacks of ordinary client disconnects into one debug line.

    asyncio and aiohttp log them as errors; on a streaming gateway they are everyday life, and the
    request's own line tells of them already (M4.1).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Demote a disconnect in place; False if debug lines are not wanted."""
        if record.name.partition(".")[0] not in ("asyncio", "aiohttp"):
            return True
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        # asyncio's warning about writes to a transport that is gone; it carries no exception.
        if not _is_disconnect(error) and text != "socket.send() raised exception.":
            return True
        kind = f" ({type(error).__name__})" if error else ""
        record.msg = f"client disconnected: {text.partition(chr(10))[0]}{kind}"
        record.args = ()
        record.exc_info = record.exc_text = record.stack_info = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger().isEnabledFor(logging.DEBUG)


def _is_disconnect(error: BaseException | None) -> bool:
    # A refused connection is an upstream's, never a client's.
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)


def redact(text: str) -> str:
    """Return `text` with keys and bearer tokens masked but for their prefix."""
    return _SECRET_TEXT.sub(rf"\1{MASK}", text)


def mask(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask secrets in all of an event (structlog processor); leaves only JSON's own types."""
    return {name: _masked(name, value, 0) for name, value in event.items()}


def _masked(name: str, value: object, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if _is_secret(name):
        return MASK
    if isinstance(value, int | float):
        return value if math.isfinite(value) else str(value)  # JSON has no NaN
    if isinstance(value, str):
        return redact(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(k): _masked(str(k), v, depth + 1) for k, v in value.items()}
        if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
            return [_masked("", item, depth + 1) for item in value]
    return redact(str(value))


@lru_cache(maxsize=512)
def _is_secret(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDINGS)


def _json() -> list[Processor]:
    # show_locals would print what masking by name cannot find.
    errors = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.ExceptionRenderer(errors),
        _in_order,
        _to_json,
    ]


def _console(out: TextIO) -> list[Processor]:
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        mask,
        _in_order,
        _on_one_line,
        structlog.dev.ConsoleRenderer(
            colors=out.isatty() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
            sort_keys=False,
        ),
    ]


def _add_logger_name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    record = event["_record"]
    event["logger"] = record.name
    # `extra={"fields": …}`: what a line of the rooms below says besides its words.
    return {**event, **getattr(record, "fields", {})}


def _in_order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {**{name: event[name] for name in _ON_EVERY_LINE if name in event}, **event}


def _on_one_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Spell control characters: what a client sends must not write lines or colours of its own.

    A traceback of ours has its lines.
    """
    return {
        name: _CONTROL.sub(lambda found: repr(found.group())[1:-1], value)
        if isinstance(value, str) and name not in ("exception", "stack")
        else value
        for name, value in event.items()
    }


def _to_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Mask and encode an event (structlog processor).

    Nearly every line is a request's: plain values, none of them a secret. One search of the encoded
    line tells so; only what is found, or is not plain, is masked value by value.
    """
    if _no_secret_names(tuple(event)) and all(map(_is_plain, event.values())):
        return _of_plain(event)
    return _serialise(mask(logger, method, event))


def _of_plain(event: EventDict) -> str:
    line = _serialise(event)
    lower = line.lower()
    for sign in _MAY_BE_SECRET:
        if sign in lower:
            return _serialise(mask(None, "", event))
    return line


@lru_cache(maxsize=512)
def _no_secret_names(names: tuple[str, ...]) -> bool:
    return not any(map(_is_secret, names))


def _is_plain(value: object) -> bool:
    """Whether JSON has the value as it is."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is float:
        return math.isfinite(cast("float", value))
    return kind is list and all(type(item) is str for item in cast("list[object]", value))


def _serialise(event: EventDict) -> str:
    try:
        line = orjson.dumps(event).decode()
    except TypeError:  # lone surrogates, integers beyond 64 bits
        line = json.dumps(event, separators=(",", ":"))
    if line.isascii() and "\x7f" not in line:
        return line
    # JSON lets them stand, but a terminal obeys them, and many a reader of lines ends one there.
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", line)
