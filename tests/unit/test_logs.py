"""`planes.logs`: one line for each event, no secrets, no tracebacks of everyday disconnects."""

import io
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from planes import logs


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Leave logging to the other tests as it was found."""
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = (list(root.handlers), root.level, access.level)
    yield
    root.handlers, level, access_level = before
    root.setLevel(level)
    access.setLevel(access_level)
    structlog.reset_defaults()


@pytest.fixture
def out() -> io.StringIO:
    """What was logged."""
    return io.StringIO()


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    """Return the JSON lines that were logged; each ends with a line feed, the one within."""
    text = out.getvalue().removesuffix("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")]


def test_a_json_line_begins_with_time_level_and_event(out: io.StringIO) -> None:
    """ISO 8601, UTC; the event's own fields follow."""
    logs.configure("json", stream=out)
    structlog.get_logger().warning("provider off", provider="openai", attempts=2)
    (line,) = lines(out)
    assert list(line) == ["timestamp", "level", "event", "provider", "attempts"]
    assert line["timestamp"].endswith("Z")
    assert line["timestamp"][10] == "T"
    assert (line["level"], line["event"], line["attempts"]) == ("warning", "provider off", 2)


def test_the_standard_librarys_records_look_the_same(out: io.StringIO) -> None:
    """aiohttp and asyncio log there."""
    logs.configure("json", stream=out)
    logging.getLogger("aiohttp.server").error("no %s", "luck")
    (line,) = lines(out)
    assert list(line) == ["timestamp", "level", "event", "logger"]
    assert (line["level"], line["event"], line["logger"]) == ("error", "no luck", "aiohttp.server")


def test_a_record_may_have_fields_and_they_are_masked_too(out: io.StringIO) -> None:
    """The rooms below log with the standard library; their lines have fields as ours have."""
    logs.configure("json", stream=out)
    fields = {"status": "failed", "error": "sent with sk-abcdefgh", "api_key": "x"}
    logging.getLogger("sluicegate.runs").info("run", extra={"fields": fields})
    (line,) = lines(out)
    assert list(line) == ["timestamp", "level", "event", "logger", *fields]
    assert (line["event"], line["status"]) == ("run", "failed")
    assert (line["error"], line["api_key"]) == ("sent with sk-***", "***")


@pytest.mark.parametrize("mode", ["json", "console"])
def test_a_requests_line_looks_as_any_other(out: io.StringIO, mode: Any) -> None:
    """It goes a shorter way to the same end."""
    fields = {
        "status": 200,
        "model": "a\nb",
        "attempts": ["x/y: ok"],
        "ttft_ms": 1.5,
        "nan": math.nan,
    }
    fields |= {"api_key": "sk-abcdef", "error": "no\nsk-abcdefgh and Bearer xyz"}
    logs.configure(mode, stream=out)
    logs.request_line("warning", fields)
    structlog.get_logger().warning("request", **fields)
    short, long = (line.partition("warning")[2] for line in out.getvalue().splitlines())
    assert short == long
    assert "abcdef" not in out.getvalue()
    assert "xyz" not in out.getvalue()


def test_a_requests_line_obeys_the_level(out: io.StringIO) -> None:
    logs.configure("json", "warning", stream=out)
    logs.request_line("info", {"status": 200})
    assert out.getvalue() == ""
    logs.request_line("warning", {"status": 500})
    assert len(lines(out)) == 1


def test_a_log_that_cannot_be_written_stops_no_request(out: io.StringIO) -> None:
    logs.configure("json", stream=out)
    out.close()
    logs.request_line("info", {"status": 200})


def test_below_the_level_nothing_is_written(out: io.StringIO) -> None:
    """For both ways in."""
    logs.configure("json", "warning", stream=out)
    structlog.get_logger().info("a")
    logging.getLogger("x").info("b")
    assert out.getvalue() == ""
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("json", "loud")


def test_a_second_call_replaces_the_first(out: io.StringIO) -> None:
    """No line is written twice, and other handlers stay."""
    others = list(logging.getLogger().handlers)
    first = io.StringIO()
    logs.configure("json", stream=first)
    logs.configure("console", stream=out)
    logging.getLogger("x").warning("hello")
    assert first.getvalue() == ""
    assert len(out.getvalue().splitlines()) == 1
    assert logging.getLogger().handlers[:-1] == others


def test_aiohttps_access_lines_are_off(out: io.StringIO) -> None:
    """The gateway writes its own."""
    logs.configure("json", "debug", stream=out)
    logging.getLogger("aiohttp.access").info("GET /")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "Authorization",
        "api_key",
        "key",
        "x-api-key",
        "password",
        "token",
        "access_token",
        "set-cookie",
    ],
)
def test_values_with_a_secrets_name_are_masked(out: io.StringIO, name: str) -> None:
    """At any depth, whatever their type."""
    logs.configure("json", stream=out)
    structlog.get_logger().info("x", **{name: "hunter2"}, headers=[{name: {"a": "hunter2"}}])
    structlog.get_logger().info("x", **{name: 12345678901})  # no time has so many digits in a row
    assert "hunter2" not in out.getvalue()
    assert "12345678901" not in out.getvalue()
    assert lines(out)[0][name] == "***"
    assert lines(out)[0]["headers"] == [{name: "***"}]


def test_names_that_only_resemble_a_secrets_are_not_masked(out: io.StringIO) -> None:
    """A log without token counts would be of no use."""
    logs.configure("json", stream=out)
    structlog.get_logger().info("x", prompt_tokens=3, key_id="k1", keyboard="de", token=None)
    (line,) = lines(out)
    assert (line["prompt_tokens"], line["key_id"], line["keyboard"]) == (3, "k1", "de")
    assert line["token"] is None


@pytest.mark.parametrize("mode", ["json", "console"])
@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("key sk-proj-AbC_12.3 refused", "key sk-*** refused"),
        ("ozk_dev_0123456789abcdef", "ozk_***"),
        ("Authorization: Bearer abc.DEF-1_2=", "Authorization: Bearer ***"),
        ("bearer xyz", "bearer ***"),
        ("https://h/?key=AIzaSyAbc", "https://h/?key=AIza***"),
    ],
)
def test_secrets_inside_of_text_are_masked(
    out: io.StringIO, mode: Any, text: str, masked: str
) -> None:
    """In the event, its fields, bytes, objects, arguments and exceptions, in both modes."""
    logs.configure(mode, stream=out)
    structlog.get_logger().info(text, a=[text], b={"c": text.encode()}, d=ValueError(text))
    logging.getLogger("x").info("%s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        structlog.get_logger().exception("failed")
        logging.getLogger("x").exception("failed")
    assert text not in out.getvalue()
    assert out.getvalue().count(masked) == 7


@pytest.mark.parametrize("text", ["task-12345678", "risk-free", "prozk_x", "the bearer"])
def test_ordinary_words_stay(text: str) -> None:
    """A prefix counts at the beginning of a word only."""
    assert logs.redact(text) == text


def test_an_exception_is_structured_on_one_line(out: io.StringIO) -> None:
    """In JSON mode; without local variables, which may hold secrets of any name."""
    logs.configure("json", stream=out)
    unsuspicious = "hunter2"
    try:
        raise ValueError(f"no\n{len(unsuspicious)}")
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = lines(out)
    (error,) = line["exception"]
    assert (error["exc_type"], error["exc_value"]) == ("ValueError", "no\n7")
    assert error["frames"][-1]["name"] == "test_an_exception_is_structured_on_one_line"
    assert "hunter2" not in out.getvalue()


def test_console_lines_are_plain_text_off_a_terminal(out: io.StringIO) -> None:
    """No colours in a file; an exception as Python prints it."""
    logs.configure("console", stream=out)
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("failed", provider="openai")
    first, *traceback = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert "error" in first
    assert "provider=openai" in first
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: no"


def test_console_lines_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless NO_COLOR is set."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for no_color, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        out = Terminal()
        logs.configure("console", stream=out)
        structlog.get_logger().info("hello")
        assert ("\x1b[" in out.getvalue()) is coloured


class Hostile:
    """An object that no serialiser knows."""

    def __repr__(self) -> str:
        return "Hostile(sk-abcdef)"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(),
    st.just(Hostile()),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner),
        st.dictionaries(st.one_of(st.text(st.characters()), st.integers()), inner),
    ),
    max_leaves=20,
)


@given(value=VALUES)
def test_any_value_makes_one_json_line(value: object) -> None:
    """Lone surrogates, NaN, huge integers, bytes and objects included."""
    out = io.StringIO()
    logs.configure("json", stream=out)
    structlog.get_logger().info("x", value=value)
    (line,) = lines(out)
    assert "value" in line
    assert "sk-abcdef" not in out.getvalue()


def test_a_value_that_holds_itself_is_logged(out: io.StringIO) -> None:
    """Cut, rather than a log line lost."""
    logs.configure("json", stream=out)
    loop: list[object] = ["sk-abcdef"]
    loop.append(loop)
    structlog.get_logger().info("x", loop=loop)
    assert lines(out)[0]["loop"][0] == "sk-***"


DISCONNECTS = [ConnectionResetError("peer"), BrokenPipeError(32, "pipe"), ConnectionError("gone")]


def log_error(name: str, error: BaseException) -> None:
    """Log `error` as asyncio does: several lines of text and a traceback."""
    try:
        raise error
    except type(error):
        logging.getLogger(name).exception("Fatal error on transport\nprotocol: <x>")


@pytest.mark.parametrize("error", DISCONNECTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["asyncio", "aiohttp.server"])
def test_a_disconnect_is_a_debug_line(out: io.StringIO, name: str, error: BaseException) -> None:
    """M4.1: everyday life, told without a traceback, and not at all above debug."""
    logs.configure("json", "info", stream=out)
    log_error(name, error)
    assert out.getvalue() == ""
    logs.configure("json", "debug", stream=out)
    log_error(name, error)
    (line,) = lines(out)
    assert (line["level"], line["logger"]) == ("debug", name)
    assert line["event"] == (
        f"client disconnected: Fatal error on transport ({type(error).__name__})"
    )
    assert "exception" not in line


def test_asyncios_warning_about_a_gone_transport_is_a_debug_line(out: io.StringIO) -> None:
    """It carries no exception, and comes once for each write."""
    logs.configure("json", "info", stream=out)
    logging.getLogger("asyncio").warning("socket.send() raised exception.")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("asyncio", ValueError("a bug")),
        ("aiohttp.server", ConnectionRefusedError("an upstream")),
        ("planes.app", ConnectionResetError("ours to explain")),
        ("aiohttp_else", ConnectionResetError("not aiohttp")),
    ],
)
def test_other_errors_keep_their_level_and_traceback(
    out: io.StringIO, name: str, error: BaseException
) -> None:
    """Only ordinary disconnects of the two libraries are demoted."""
    logs.configure("json", "info", stream=out)
    log_error(name, error)
    (line,) = lines(out)
    assert line["level"] == "error"
    assert line["exception"][0]["exc_type"] == type(error).__name__


def test_a_client_cannot_forge_console_lines(out: io.StringIO) -> None:
    """Control characters of what a client sends are spelt, in names of models for one."""
    logs.configure("console", stream=out)
    forged = "x\n2026-01-01 [error] forged \x1b[31mred\r\u2028"
    structlog.get_logger().info(f"no price for {forged}", model=forged)
    logging.getLogger("sluicegate").info("and %s", forged)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    assert r"x\n2026" in lines[0]


def test_a_client_cannot_forge_json_lines(out: io.StringIO) -> None:
    """Nor move a terminal that shows them; their values stay what they are."""
    logs.configure("json", stream=out)
    forged = 'x\n{"level":"error"}\r\u2028{}\u2029{}\x85{}\x9b31m\x7f\x0b é'
    structlog.get_logger().info("event", model=forged)
    structlog.get_logger().info("event", model=forged, other="sk-0123456789", half="\ud800")
    whole = out.getvalue().splitlines()
    assert len(whole) == 2
    assert all(line.isprintable() for line in whole)
    assert [line["model"] for line in lines(out)] == [forged, forged]
