"""What `sluicegate run` is given: a document, inputs, answers."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoders.json_exact import NumberTooLarge, loads_exact
from encoders.json_text import dumps
from planes.cli_common import USAGE
from planes.cli_gateway import unreadable, wrong


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be run."""

    document: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)


def read_asked(options: argparse.Namespace) -> Asked:
    """Read the document and the inputs; exits with 2 if one cannot be read."""
    data = sys.stdin.buffer.read() if options.file == "-" else _bytes(options.file)
    try:
        document = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        print(f"{options.file}:{line}: the document is not UTF-8", file=sys.stderr)
        raise SystemExit(USAGE) from None
    inputs: dict[str, Any] = {}
    for given in options.input:
        name, equals, text = given.partition("=")
        if not equals or not name:
            wrong(options, f"--input must be NAME=VALUE, not {given!r}")
        if name in inputs:
            wrong(options, f"--input {name} is given twice")
        inputs[name] = read_value(options, f"--input {name}", text)
    return Asked(document, inputs)


def read_value(options: argparse.Namespace, name: str, text: str) -> Any:
    """JSON if it is JSON, else text; `@FILE` is a file's text."""
    if text.startswith("@"):
        try:
            return _bytes(text[1:]).decode("utf-8-sig")
        except UnicodeDecodeError:
            wrong(options, f"{name}: {text[1:]} is not UTF-8")
    try:
        return loads_exact(text)
    except NumberTooLarge as error:
        wrong(options, f"{name}: {error}")
    except ValueError:
        return text


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        unreadable(path, error)


def parsed(document: str) -> Any:
    """The document as a value, for where its tasks stand; None if only the gateway can tell."""
    from relay.engines.base import DocumentError
    from relay.engines.embedded.reading import read

    try:
        return read(document).value
    except DocumentError:
        return None


# -- answers --------------------------------------------------------------------------------------


def can_ask(options: argparse.Namespace) -> bool:
    """Whether somebody sits there who can be asked: the document is not on their input."""
    return bool(
        not options.json and options.file != "-" and sys.stdin.isatty() and sys.stderr.isatty()
    )


def prompt(waits: dict[str, Any]) -> tuple[Any, bool]:
    """Ask on the terminal; the answer and whether there was one."""
    schema = waits.get("schema")
    tell_question(waits)
    while True:
        print("answer> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return None, False
        text = line.rstrip("\r\n")
        if schema is None:
            return text, True
        try:
            return loads_exact(text), True
        except NumberTooLarge as error:
            say(str(error))
        except ValueError as error:
            say(f"that is no JSON: {error}")


def tell_question(waits: dict[str, Any]) -> None:
    """Say what a run waits for."""
    say(f"the run waits for an answer: {waits.get('prompt')}")
    if waits.get("schema") is not None:
        from planes.cli_run_view import printable

        print(printable(f"JSON that fits {dumps(waits['schema']).decode()}"), file=sys.stderr)


def say(text: str) -> None:
    """Say something on standard error."""
    from planes.cli_run_view import printable

    print(f"sluicegate: {printable(text, lines=True)}", file=sys.stderr)
