"""The way to a gateway that runs workflows: requests, and streams that are followed to their end.

A connection that is lost is nothing: the run goes on, and is followed again from the position that
was read last, after a pause with full jitter (W2.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from encoders.json_exact import loads_exact
from encoders.json_text import dumps, loads
from encoders.sse import SseDecoder, SseEventTooLarge
from planes.cli_gateway import no_connection
from planes.cli_run_events import LAST, Cursor

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    from planes.cli_run_events import RunEvent

BASE: Final = "/v1/workflows"
SILENCE_S: Final = 120.0  # a run says something each 15 s, unless it is told otherwise
BACKOFF_S: Final = 0.5  # before the first new connection at most so long, then doubled
BACKOFF_MAX_S: Final = 15.0
GIVE_UP_S: Final = 300.0  # without a word of the gateway
EVENT_BYTES_MAX: Final = 64 * 1024 * 1024  # a text of 16 MiB is one event, and may be escaped
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
_REFUSAL_BYTES_MAX: Final = 1024 * 1024


class Refused(Exception):
    """The gateway said no.

    Attributes:
        status, code, message: of its answer. details: more, in an `invalid_workflow` its problems.
        retry_after_s: when it may say yes, if it said so.
    """

    def __init__(
        self, status: int, body: bytes, request_id: str, *, retry_after_s: float | None = None
    ) -> None:
        error: Any = None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = loads(body)["error"]
        if not isinstance(error, dict):
            error = {}
        self.status = status
        self.code = str(error.get("code") or f"http_{status}")
        self.message = str(error.get("message") or f"HTTP {status}")
        details = error.get("details")
        self.details: dict[str, Any] = details if isinstance(details, dict) else {}
        self.retry_after_s = retry_after_s
        told = f" (request {request_id})" if request_id else ""
        super().__init__(f"{status} {self.code}: {self.message}{told}")

    @property
    def may_pass(self) -> bool:
        """Whether the same may be asked again."""
        return self.status == 429 or self.status >= 500


class Unreachable(Exception):
    """The gateway does not answer."""


class Lost(Unreachable):
    """The connection broke in a stream that had begun: what was read was read."""


class Link:
    """One gateway, for one key; an async context manager.

    Attributes:
        execution_id: the run that is followed, as soon as it is known.
        cursor: how far it was read.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        told: Callable[[RunEvent], None],
        notice: Callable[[str], None],
        execution_id: str = "",
        cursor: Cursor | None = None,
    ) -> None:
        self._url = url
        self._key = key
        self._told = told
        self._notice = notice
        self.execution_id = execution_id
        self.cursor = cursor or Cursor()
        self._heard_at = 0.0
        self._failures = 0  # in a row, without an event between them

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    # -- streams ----------------------------------------------------------------------------------

    async def begin(self, document: str, inputs: dict[str, Any]) -> None:
        """Begin a run and follow it to its end, or until it waits for an answer.

        Raises:
            Refused: the document, or something else. Unreachable.
        """
        body = {"workflow": document, "inputs": inputs}
        await self._leg(f"{BASE}/execute-stream?positions=true", body)

    async def resume(self, answer: Any) -> None:
        """Give a run that waits its answer, then as `begin`.

        Raises:
            Refused: the answer, or the run waits for none. Unreachable.
        """
        self.cursor.last = ""
        path = f"{self._execution}/resume?positions=true"
        await self._leg(path, {"answer": answer})

    async def follow(self) -> None:
        """Follow the run from where it was read to, until it ends or waits for an answer.

        Raises:
            Refused, Unreachable: it cannot be followed any more.
        """
        self._heard_at = time.monotonic()
        while True:
            before = self.cursor.position
            path = f"{self._execution}/events?after={before}"
            why: Exception = Lost("the stream ended early")
            try:
                if await self._open("GET", path) == 204 or self.cursor.last == LAST:
                    return
            except Refused as refused:
                if not refused.may_pass:
                    raise
                why = refused
            except Unreachable as error:
                why = error
            if self.cursor.position > before:
                self._failures = 0
            await self._pause(why, f"following again from position {self.cursor.position}")

    async def _leg(self, path: str, body: Any) -> None:
        why: Lost = Lost("the stream ended early")
        try:
            await self._open("POST", path, body)
        except Lost as lost:
            why = lost
        if self.cursor.last != LAST:
            await self._pause(why, f"following again from position {self.cursor.position}")
            await self.follow()

    async def _pause(self, why: Exception, next_: str) -> None:
        if time.monotonic() - self._heard_at > GIVE_UP_S:
            raise Unreachable(f"no word of the gateway for {GIVE_UP_S:.0f} s: {why}") from why
        pause = random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(self._failures, 10)))
        if isinstance(why, Refused) and why.retry_after_s is not None:
            pause += min(why.retry_after_s, BACKOFF_MAX_S)
        self._failures += 1
        self._notice(f"{why}; {next_} in {pause:.1f} s")
        await asyncio.sleep(pause)

    async def _open(self, method: str, path: str, body: Any = None) -> int:
        """Read one stream to its end; return the answer's status.

        Raises:
            Refused: the answer is no stream. Unreachable: there was none. Lost.
        """
        began = False
        try:
            async with self._request(method, path, body) as response:
                if response.status not in (200, 204):
                    raise await _refused(response)
                began = True
                self.execution_id = response.headers.get("x-execution-id", self.execution_id)
                self._heard_at = time.monotonic()
                decoder = SseDecoder(EVENT_BYTES_MAX)
                async for piece in response.content.iter_any():
                    self._heard_at = time.monotonic()
                    for event in decoder.feed(piece):
                        told = self.cursor.take(event)
                        if told is not None:
                            self._told(told)
                return response.status
        except SseEventTooLarge as error:
            raise Lost(f"the stream has {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if began:
                raise Lost(f"the connection is lost ({_what(error)})") from error
            raise Unreachable(f"no connection ({_what(error)})") from error

    # -- requests ---------------------------------------------------------------------------------

    async def ask(self, method: str, path: str) -> dict[str, Any]:
        """Ask for something that is no stream.

        Raises:
            Refused, Unreachable.
        """
        try:
            async with self._request(method, path, None) as response:
                if response.status not in (200, 202):
                    raise await _refused(response)
                document = loads_exact(await _read(response, ANSWER_BYTES_MAX))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"no answer ({_what(error)})") from error
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unreachable("the answer is no JSON object: is this a gateway?")
        return document

    async def status(self) -> dict[str, Any]:
        """The run's row."""
        return await self.ask("GET", self._execution)

    async def cancel(self) -> dict[str, Any]:
        """Cancel the run; its row afterwards."""
        return await self.ask("POST", f"{self._execution}/cancel")

    async def output(self, task_id: str) -> Any:
        """The stored output of a task of the run that has ended."""
        self._heard_at = time.monotonic()
        while True:
            try:
                told = await self.ask(
                    "GET", f"{BASE}/results/{_part(self.execution_id)}/{_part(task_id)}"
                )
                return told.get("output")
            except Unreachable as error:
                await self._pause(error, "asking for the output again")

    @property
    def _execution(self) -> str:
        return f"{BASE}/executions/{_part(self.execution_id)}"

    def _request(
        self, method: str, path: str, body: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            url = URL(str(URL(self._url)).rstrip("/") + path, encoded=True)  # as `_part` made it
        except ValueError:
            raise aiohttp.InvalidURL(self._url) from None
        return self._session.request(method, url, data=data, headers=headers, allow_redirects=False)


def _part(name: str) -> str:
    """A name as one part of a path: a remote engine's tasks may have any (W3.2)."""
    return quote(name.encode("utf-8", "replace"), safe="")


async def _refused(response: aiohttp.ClientResponse) -> Refused:
    asked = response.headers.get("retry-after", "")
    return Refused(
        response.status,
        await _read(response, _REFUSAL_BYTES_MAX),
        response.headers.get("x-request-id", ""),
        retry_after_s=float(asked) if asked.isascii() and asked.isdigit() else None,
    )


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The answer's body, or so much of it: what is longer is nothing that a gateway sends."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            response.close()
            break
    return bytes(body)


def _what(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it broke off"
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    return no_connection(error)
