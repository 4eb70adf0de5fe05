"""`sluicegate run`: a workflow on a gateway that runs, shown as it goes (W1, W2).

A client as any other: it may be cut off, leave and come back; the run does not notice.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from encoders.json_text import dumps
from planes.cli_common import FAILED, OK, USAGE, Commands, add_command, add_config, program
from planes.cli_gateway import HOW, add_gateway, gateway_of, wrong
from planes.cli_run_given import (
    Asked,
    can_ask,
    parsed,
    prompt,
    read_asked,
    read_value,
    say,
    tell_question,
)

if TYPE_CHECKING:
    from planes.cli_run_events import Cursor, RunEvent
    from planes.cli_run_link import Link, Refused
    from planes.cli_run_tree import RunTree
    from planes.cli_run_view import View

_OTHERS = ("attach", "resume", "cancel")


def add_commands(commands: Commands) -> None:
    """Add it."""
    command = add_command(
        commands,
        "run",
        "Run a workflow on a running gateway and follow it: FILE is the document.\n\n"
        "The tasks are shown on standard error as they go, the run's output is printed on standard "
        "output.\nThe run is the gateway's: a connection that is lost is taken up again, Ctrl-C "
        "only stops watching.\n\nExit code 0 if it completes; 1 if it fails, is cancelled, waits "
        "for an answer, or is left; 2 if the\ndocument cannot be run: its problems are printed as "
        f"FILE:line:column: path: message.\n\n{HOW}",
        """\
  sluicegate run triage.yaml
  sluicegate run triage.yaml --input ticket=@mail.txt --input 'tags=["a", "b"]' > answer.txt
  sluicegate run triage.yaml --json | jq -r 'select(.event == "token") | .data.delta'
  sluicegate run --attach 9f86d081884c7d659a2feaa0c55ad015
  sluicegate run --resume 9f86d081884c7d659a2feaa0c55ad015 --answer '{"ok": true}'
  sluicegate run --cancel 9f86d081884c7d659a2feaa0c55ad015""",
    )
    command.add_argument("file", metavar="FILE", nargs="?", help="the document; `-` is stdin")
    command.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an input: JSON if the value is JSON, else text; @FILE is the text of a file",
    )
    command.add_argument("--attach", metavar="ID", help="follow an execution from its beginning")
    command.add_argument("--resume", metavar="ID", help="answer an execution that waits")
    command.add_argument("--answer", metavar="JSON", help="the answer, read as an input is")
    command.add_argument("--cancel", metavar="ID", help="cancel an execution")
    command.add_argument(
        "--cancel-on-interrupt", action="store_true", help="Ctrl-C cancels the run, not only stops"
    )
    command.add_argument("--json", action="store_true", help="events as JSON lines, nothing else")
    add_gateway(command)
    add_config(command)


@dataclass(slots=True)
class Session:
    """What a command does, leg by leg, of one run.

    Attributes:
        cursor: how far the run was read. execution_id: empty until the gateway has named it.
        detached: whether Ctrl-C was said.
    """

    options: argparse.Namespace
    url: str
    key: str
    tree: "RunTree"
    view: "View"
    cursor: "Cursor"
    execution_id: str = ""
    detached: bool = False

    def told(self, event: "RunEvent") -> None:
        """An event came."""
        self.tree.take(event)
        self.view.told(event)

    def link(self) -> "Link":
        """A new way to the gateway."""
        from planes.cli_run_link import Link

        return Link(
            self.url,
            self.key,
            told=self.told,
            notice=self.view.notice,
            execution_id=self.execution_id,
            cursor=self.cursor,
        )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    chosen = [name for name in ("file", *_OTHERS) if getattr(options, name) is not None]
    if len(chosen) != 1:
        wrong(options, "give FILE, or one of --attach, --resume and --cancel")
    if options.input and options.file is None:
        wrong(options, "--input is for a run that begins: give FILE")
    if options.answer is not None and options.resume is None:
        wrong(options, "--answer is for --resume")
    asked = read_asked(options) if options.file is not None else Asked()
    url, key = gateway_of(options)

    from planes.cli_run_events import Cursor
    from planes.cli_run_link import Refused, Unreachable
    from planes.cli_run_tree import RunTree, held_by
    from planes.cli_run_view import OutputGone, view_for

    tree = RunTree(held_by(parsed(asked.document)))
    view = view_for(tree, json_lines=options.json)
    session = Session(options, url, key, tree, view, Cursor())
    try:
        return _run(session, asked)
    except Refused as refused:
        return _refused(session, refused)
    except Unreachable as error:
        say(f"{url}: {error}")
        if session.execution_id:
            _tell_ways(session)
        return FAILED
    except OutputGone as gone:
        raise BrokenPipeError from gone
    except KeyboardInterrupt:  # where no stream is followed, as at a prompt
        _tell_ways(session)
        return FAILED


def _run(session: Session, asked: Asked) -> int:
    options = session.options
    if options.cancel is not None:
        return _cancel(session)
    if options.attach is not None:
        session.execution_id = options.attach
        _leg(session, lambda link: link.follow())
    elif options.resume is not None:
        session.execution_id = options.resume
        from planes.cli_run_events import count_of

        row = _short(session, lambda link: link.status())
        session.tree.take_row(row)
        session.cursor.position = count_of(row.get("position")) or 0
        if options.answer is not None:
            answer = read_value(options, "--answer", options.answer)
            _leg(session, partial(_resume, answer))
        elif session.tree.status != "yielded":
            say(f"the execution is {session.tree.status}")
            return FAILED
    else:
        _leg(session, lambda link: link.begin(asked.document, asked.inputs))
    while session.tree.status == "yielded" and not session.detached and can_ask(options):
        if not _answer(session):
            break
    return _ended(session)


async def _resume(answer: Any, link: "Link") -> None:
    await link.resume(answer)


def _answer(session: Session) -> bool:
    """Ask the user and go on with the answer; whether there was one."""
    from planes.cli_run_link import Refused

    while True:
        answer, given = prompt(session.tree.waits or {})
        if not given:
            return False
        try:
            _leg(session, partial(_resume, answer))
        except Refused as refused:
            if refused.status != 400:
                raise
            say(refused.message)
        else:
            return True


# -- legs: one stream and those that replace it ---------------------------------------------------


def _short(session: Session, work: Callable[["Link"], Awaitable[Any]]) -> Any:
    async def do() -> Any:
        async with session.link() as link:
            return await work(link)

    return asyncio.run(do())


def _leg(session: Session, work: Callable[["Link"], Awaitable[None]]) -> None:
    """Follow one leg to its end, or until Ctrl-C."""
    asyncio.run(_follow(session, work))


async def _follow(session: Session, work: Callable[["Link"], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    async with session.link() as link:
        cancels: list[asyncio.Task[None]] = []

        async def follow() -> None:
            await work(link)

        async def cancel() -> None:
            from planes.cli_run_link import Refused, Unreachable

            session.view.notice("cancelling the run; Ctrl-C again leaves it")
            try:
                await link.cancel()
            except (Refused, Unreachable) as error:
                session.view.notice(f"the run could not be cancelled: {error}")

        def interrupted() -> None:
            if session.options.cancel_on_interrupt and link.execution_id and not cancels:
                cancels.append(loop.create_task(cancel()))
                return
            session.detached = True
            following.cancel()

        following = loop.create_task(follow())
        loop.add_signal_handler(signal.SIGINT, interrupted)
        try:
            with session.view:
                showing = loop.create_task(session.view.keep_showing())
                try:
                    await following
                except asyncio.CancelledError:
                    if not session.detached:
                        raise
                finally:
                    session.execution_id = link.execution_id
                    for task in (showing, *cancels):
                        task.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await task
        finally:
            loop.remove_signal_handler(signal.SIGINT)


# -- ends -----------------------------------------------------------------------------------------


def _ended(session: Session) -> int:
    tree = session.tree
    if session.detached:
        _tell_ways(session)
        return FAILED
    if tree.status == "yielded":
        if tree.waits and tree.waits.get("prompt"):
            tell_question(tree.waits)
        command = _command(session, "--resume", session.execution_id, "--answer", "JSON")
        say(f"to answer:\n  {command}")
        return FAILED
    if tree.status != "completed":
        say(why(tree))
        return FAILED
    if tree.final_task_id is not None and not session.options.json:
        final = tree.final_task_id
        _print_output(_short(session, lambda link: link.output(final)))
    return OK


def why(tree: "RunTree") -> str:
    """How it ended: the code unless the status or the message says it, the task likewise."""
    error = tree.error or {}
    code, message, task_id = (error.get(name) for name in ("code", "message", "task_id"))
    said = [tree.status, *([] if code in (tree.status, "task_failed") else [code]), message]
    where = f" (task {task_id})" if task_id and f"task {task_id} " not in f"{message} " else ""
    return ": ".join(str(word) for word in said if word) + where


def _print_output(output: Any) -> None:
    from planes.cli_run_view import printable

    if isinstance(output, str):
        data = output.encode("utf-8", "replace")
    else:
        try:
            data = orjson.dumps(output, option=orjson.OPT_INDENT_2)
        except orjson.JSONEncodeError:  # whole numbers and texts that it does not take
            data = dumps(output)
    if sys.stdout.isatty():
        data = printable(data.decode(), lines=True).encode()
    sys.stdout.buffer.write(data if data.endswith(b"\n") else data + b"\n")
    sys.stdout.flush()


def _cancel(session: Session) -> int:
    session.execution_id = session.options.cancel
    row = _short(session, lambda link: link.cancel())
    asked = ", a cancel is asked for" if row.get("status") == "running" else ""
    say(f"the execution is {row.get('status')}{asked}")
    return OK


def _refused(session: Session, refused: "Refused") -> int:
    """Tell a refusal; a document's problems one by one, at their places (W1.4)."""
    problems = refused.details.get("problems")
    if refused.code != "invalid_workflow" or not isinstance(problems, list):
        say(str(refused))
        usage = refused.status == 400 and session.options.attach is None
        return USAGE if usage else FAILED
    from planes.cli_run_view import printable

    for told in problems:
        problem = told if isinstance(told, dict) else {"message": told}
        place = [session.options.file]
        if problem.get("line") is not None:
            place += [str(problem["line"]), str(problem.get("column") or 1)]
        path = f"{problem['path']}: " if problem.get("path") else ""
        line = f"{':'.join(place)}: {path}{problem.get('message')}"
        print(printable(line, lines=True), file=sys.stderr)
    return USAGE


def _tell_ways(session: Session) -> None:
    if not session.execution_id:
        say("left before the gateway had named the run")
        return
    say("not followed any more; the run goes on. To follow it, to cancel it:")
    for way in ("--attach", "--cancel"):
        print(f"  {_command(session, way, session.execution_id)}", file=sys.stderr)


def _command(session: Session, *arguments: str) -> str:
    """A command for the same gateway; its key is not shown."""
    given = [
        word
        for name in ("server", "config")
        if (value := getattr(session.options, name)) is not None
        for word in (f"--{name}", value)
    ]
    from planes.cli_run_view import printable

    return printable(shlex.join([program(), "run", *arguments, *given]))
