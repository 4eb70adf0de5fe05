"""A tool that is one HTTP request, made for a model (W3.4).

What leads anywhere else is refused: an address that is not allowed, at the moment it is connected
to; a redirect; an answer over its bound. No header, argument or answer is logged or told but to the
model that asked.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final, Literal

import aiohttp
from yarl import URL

from encoders.json_text import dumps
from relay.redact import Redactor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.agents.addresses import AddressRule
    from relay.engines.embedded.schemas import AnswerSchema

Word = Literal[
    "cut_short",
    "unknown_tool",
    "not_runnable",
    "invalid_arguments",
    "too_many_calls",
    "refused",
    "unreachable",
    "timeout",
    "failed_status",
    "too_large",
]
MESSAGES: Final[Mapping[Word, str]] = {
    "cut_short": "the reply reached its output limit, so none of its calls was run",
    "unknown_tool": "there is no such tool",
    "not_runnable": "this tool is declared, and nobody here runs it",
    "invalid_arguments": "the arguments do not fit the tool's schema",
    "too_many_calls": "the reply has more calls than are run at once",
    "refused": "the tool's address is not allowed",
    "unreachable": "the tool could not be reached",
    "timeout": "the tool took too long",
    "failed_status": "the tool answered with an error status or a redirect",
    "too_large": "the tool's answer is too large",
}
# Those that an operator can do something about; the others are the model's.
OF_THE_TOOL: Final[frozenset[Word]] = frozenset(
    {"refused", "unreachable", "timeout", "failed_status", "too_large", "not_runnable"}
)
_EXCERPT_CHARACTERS: Final = 1000
_READ_BYTES: Final = 16 * 1024
_WITH_QUERY: Final = frozenset({"GET", "DELETE"})


class ToolFailure(Exception):
    """A call of a tool came to nothing.

    Attributes:
        word: of the closed vocabulary, for everybody (J3.4).
        detail: for the model alone; empty for none.
    """

    def __init__(self, word: Word, detail: str = "") -> None:
        super().__init__(MESSAGES[word])
        self.word = word
        self.detail = detail

    def result(self) -> str:
        """What the model is told."""
        said = {"error": self.word, "message": MESSAGES[self.word]}
        return dumps(said | ({"detail": self.detail} if self.detail else {})).decode()


class RefusedAddress(OSError):
    """What was about to be connected to is not allowed."""


class HttpTool:
    """One tool. Each run has a connection of its own: nothing of one is there for another.

    Args:
        name: the model's. url: as configured; what stands in its query stays.
        method: arguments go into the query of GET and DELETE, else into a JSON body.
        headers: may hold secrets. schema: of the arguments.
        timeout_s: for all of a run. max_bytes: of the answer.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str,
        method: str,
        headers: Mapping[str, str],
        schema: AnswerSchema,
        addresses: AddressRule,
        timeout_s: float,
        max_bytes: int,
        user_agent: str = "sluicegate",
    ) -> None:
        self.name = name
        self._url = URL(url)
        self._method = method
        self._headers = {"User-Agent": user_agent, "Accept-Encoding": "identity", **headers}
        self._schema = schema
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        values = [*headers.values(), *self._url.query.values()]
        self._redactor = Redactor((*values, *(value.rpartition(" ")[2] for value in values)))

    @property
    def host(self) -> str:
        """Where it is, for people."""
        return self._url.host or ""

    async def run(self, arguments: Any) -> str:
        """Run it; return the answer's text.

        Args:
            arguments: parsed, as the model gave them.

        Raises:
            ToolFailure: for whatever reason.
        """
        problems = self._schema.problems(arguments)
        if problems or not isinstance(arguments, dict):
            raise ToolFailure("invalid_arguments", "; ".join(problems) or "must be an object")
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._fetch(arguments)
        except TimeoutError:
            raise ToolFailure("timeout") from None
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, RefusedAddress)
            raise ToolFailure("refused" if refused else "unreachable") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise ToolFailure("unreachable") from None
        text = self._redactor.text(body.decode("utf-8", "replace"))
        if not 200 <= status < 300:
            raise ToolFailure("failed_status", f"{status}: {text[:_EXCERPT_CHARACTERS]}")
        return text

    async def _fetch(self, arguments: dict[str, Any]) -> tuple[int, bytes]:
        connector = aiohttp.TCPConnector(
            socket_factory=self._checked_socket, use_dns_cache=False, force_close=True
        )
        url, body, headers = self._url, None, self._headers
        if self._method in _WITH_QUERY:
            url = url.extend_query(
                [
                    (name, _query_text(value))
                    for name, value in arguments.items()
                    if value is not None and name not in url.query
                ]
            )
        else:
            body, headers = dumps(arguments), {"Content-Type": "application/json", **headers}
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.request(
                self._method, url, data=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            read = bytearray()
            while data := await response.content.read(_READ_BYTES):
                read += data
                if len(read) > self._max_bytes:
                    response.close()
                    raise ToolFailure("too_large")
            return response.status, bytes(read)

    def _checked_socket(self, to: aiohttp.AddrInfoType) -> socket.socket:
        """Make the socket for an address that is about to be connected to: the one place where no
        name, answer of a resolver or spelling of an address stands between check and use.
        """
        family, kind, protocol, _, address = to
        if not self._addresses.allows(str(address[0])):
            raise RefusedAddress("this address is not allowed")
        return socket.socket(family, kind, protocol)


def _query_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value).decode()
