"""`sluicegate decide` and `sluicegate stream`: the decision plane from the command line (D1, D6.1).

Clients of a gateway that runs, as any other; they print what comes as it comes.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planes.cli_common import FAILED, OK, USAGE, Commands, add_command, add_config
from planes.cli_gateway import HOW, add_gateway, gateway_of, no_connection, unreadable

_ANSWER_S = 150.0
_MUTATIONS = frozenset({"start", "append_text", "append_items", "append_attachments", "replace"})


def add_commands(commands: Commands) -> None:
    """Add both."""
    decide = add_command(
        commands,
        "decide",
        "Ask a running gateway for one decision: FILE is the JSON body of a decide, the reply is "
        f"printed.\n\nExit code 1 if it is refused.\n\n{HOW}",
        """\
  sluicegate decide question.json
  echo '{"model": "rightnow-decision", "state": "Paid.", "questions": {"ready":
    {"type": "boolean", "instructions": "Is it paid?"}}}' | sluicegate decide -
  sluicegate decide question.json --events --idempotency-key order-7""",
    )
    _add_common(decide)
    decide.add_argument("--idempotency-key", metavar="K", help="the same key, the same answer")
    decide.add_argument("--events", action="store_true", help="ask for the reply as events")
    stream = add_command(
        commands,
        "stream",
        "Open a decision stream on a running gateway: FILE has one message on each line, the "
        "frames that\ncome are printed with their time. FILE is read to its end before anything is "
        "sent.\n\nA message is sent when the one before "
        "is answered, a `decide` when its decision is there. An\n`event_id` or `state_version` "
        "that is left out is the next one. Pings are answered. Exit code 1 if\na message is "
        f"refused, a decide fails or the gateway ends the stream.\n\n{HOW}",
        """\
  sluicegate stream messages.jsonl
  sluicegate stream messages.jsonl --json | jq 'select(.frame.type == "decision")'
  sluicegate stream - --server https://gateway.example.com < messages.jsonl""",
    )
    _add_common(stream)
    stream.add_argument("--json", action="store_true", help="frames as JSON lines")


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="what to send; `-` is standard input")
    add_gateway(command)
    add_config(command)


def run(options: argparse.Namespace) -> int:
    """Run a command and return its exit code."""
    data = _read(options)
    messages = _messages(data, options) if options.command == "stream" else []
    url, key = gateway_of(options)
    try:
        if options.command == "decide":
            return asyncio.run(_decide(options, url, key, data))
        return asyncio.run(_stream(options, url, key, messages))
    except (OSError, TimeoutError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else no_connection(error)
        print(f"sluicegate: {url}: {why}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return FAILED


def _read(options: argparse.Namespace) -> bytes:
    try:
        return sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    except OSError as error:
        unreadable(options.file, error)


def _messages(data: bytes, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Exits with 2 at the first line that is no message."""
    messages = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                message = json.loads(line)
            except ValueError as error:
                message = error
            if not isinstance(message, dict):
                print(f"{options.file}:{number}: not a JSON object", file=sys.stderr)
                raise SystemExit(USAGE)
            messages.append(message)
    return messages


# -- decide ---------------------------------------------------------------------------------------


async def _decide(options: argparse.Namespace, url: str, key: str, data: bytes) -> int:
    import aiohttp

    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if options.idempotency_key is not None:
        headers["Idempotency-Key"] = options.idempotency_key
    if options.events:
        headers["Accept"] = "text/event-stream"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/system-zero/decide", data=data, headers=headers) as reply,
        ):
            if reply.status != 200:
                return _refused(reply.status, await reply.read())
            if options.events:
                return await _print_events(reply.content.iter_any())
            sys.stdout.buffer.write(await reply.read() + b"\n")
            return OK
    except aiohttp.ClientError as error:
        raise OSError(no_connection(error)) from error


async def _print_events(pieces: AsyncIterator[bytes]) -> int:
    seen = b""
    async for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        seen = (seen + piece)[-4096:] if b"event: error" not in seen else seen
    return FAILED if b"event: error" in seen else OK


def _refused(status: int, body: bytes) -> int:
    try:
        envelope = json.loads(body)
        error = envelope["error"]
        told = f"{status} {error['code']}: {error['message']}"
        if "request_id" in envelope:  # not from what is no decision plane
            told += f" (request {envelope['request_id']})"
    except (ValueError, KeyError, TypeError):
        told = f"HTTP {status}"
    print(f"sluicegate: {told}", file=sys.stderr)
    return FAILED


# -- stream ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Conversation:
    """What a stream has said so far.

    Attributes:
        version: of the accepted state. owed: the version that a decision is to come for, or 0.
        failed: whether anything went wrong. over: the gateway is about to close.
    """

    version: int = 0
    owed: int = 0
    failed: bool = False
    over: bool = False
    on_change: bool = False

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with what it leaves out."""
        kind = message.get("type")
        if kind == "start":
            self.on_change = message.get("decision_mode") == "on_change"
        if kind in _MUTATIONS:
            return {"event_id": f"evt_{self.version + 1}"} | message
        if kind == "decide":
            return {"state_version": self.version} | message
        return message

    def take(self, frame: dict[str, Any]) -> bool:
        """Take a frame; whether it answers what was sent last."""
        match frame.get("type"):
            case "ack":
                self.version = frame["state_version"]
                self.owed = self.version if frame["scheduled"] else self.owed
                return True
            case "scheduled":
                self.owed = frame["state_version"]
                return True
            case "decision":
                self.owed = 0 if frame["state_version"] >= self.owed else self.owed
            case "error":
                self.failed, self.over = True, self.over or frame["fatal"]
                retried = self.on_change and frame["retry"]["should_retry"] and not self.over
                if frame["phase"] == "decide" and not retried:
                    self.owed = 0
                return bool(frame["phase"] == "protocol")
            case "goodbye":
                self.failed = self.over = True
            case _:
                pass
        return False


async def _stream(
    options: argparse.Namespace, url: str, key: str, messages: list[dict[str, Any]]
) -> int:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.typing import Subprotocol

    try:
        async with connect(
            f"ws{url.removeprefix('http')}/v1/system-zero/stream",
            additional_headers={"Authorization": f"Bearer {key}"},
            subprotocols=[Subprotocol("system-zero.stream.v1")],
            compression=None,
            max_size=None,
            ping_interval=None,
        ) as socket:
            told = _printer(json_lines=options.json)
            try:
                return await _converse(socket, messages, told)
            except ConnectionClosed as closed:
                frame = closed.rcvd
                why = f"{frame.code} {frame.reason}".rstrip() if frame else "the connection is lost"
                print(f"sluicegate: closed: {why}", file=sys.stderr)
                return FAILED
    except InvalidStatus as refused:
        return _refused(refused.response.status_code, bytes(refused.response.body or b""))
    except InvalidHandshake as error:
        raise OSError(no_connection(error)) from error


async def _converse(
    socket: Any, messages: list[dict[str, Any]], told: Callable[[str, dict[str, Any]], None]
) -> int:
    """Say everything, hear everything that is owed."""
    said = Conversation()

    async def hear() -> bool:
        async with asyncio.timeout(_ANSWER_S):
            frame = json.loads(await socket.recv())
        told("<", frame)
        if frame.get("type") == "ping":
            pong = {"type": "pong", "nonce": frame["nonce"]}
            told(">", pong)
            await socket.send(json.dumps(pong))
        return said.take(frame)

    await hear()
    for message in messages:
        if said.over:
            break
        whole = said.complete(message)
        told(">", whole)
        await socket.send(json.dumps(whole))
        while whole.get("type") != "pong" and not await hear():
            pass
        while whole.get("type") == "decide" and said.owed:
            await hear()
    while said.owed or said.over:
        await hear()
    return FAILED if said.failed else OK


def _printer(*, json_lines: bool) -> Callable[[str, dict[str, Any]], None]:
    began = time.monotonic()

    def told(way: str, frame: dict[str, Any]) -> None:
        at = time.monotonic() - began
        if json_lines:
            if way == "<":
                print(json.dumps({"at_s": round(at, 6), "frame": frame}), flush=True)
            return
        text = json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
        print(f"{at:9.3f} {way} {text}", flush=True)

    return told
