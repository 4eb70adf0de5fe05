"""One HTTP service that a decision backend asks, over the relay's own HTTP upstream (D6.5)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from relay.errors import UpstreamProtocolError
from relay.redact import Redactor
from relay.retry_after import retry_after_ms
from relay.upstreams.http import HttpUpstream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
# No reply of 1,024 questions with 255 options each is as large; ours could not be sent either.
_REPLY_BYTES_MAX: Final = 32 * 1024 * 1024
# So much is made a decision reply in 3 ms.
_READ_HERE_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a service answered.

    Attributes:
        wait_ms: how long it asks to wait, None if it does not.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    wait_ms: int | None


async def read(answer: Answer, reader: Callable[[bytes], T]) -> T:
    """Return what `reader` makes of the body; a large one is read in a thread, beside the loop."""
    if len(answer.body) <= _READ_HERE_MAX:
        return reader(answer.body)
    return await asyncio.to_thread(reader, answer.body)


class Endpoint:
    """One URL that decide bodies are posted to.

    Args:
        name: who it is, in messages.
        api_key: the gateway's own for it; empty for none.
        timeout_s: for a whole answer; what waits for it has the same limit.
    """

    def __init__(
        self, name: str, url: str, *, api_key: str, timeout_s: float, user_agent: str
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.redactor = Redactor((api_key,) if api_key else ())
        self._url = url
        self._upstream = HttpUpstream(
            name, url, api_key=api_key, header_timeout_s=timeout_s, user_agent=user_agent
        )
        self._started = False

    async def post(self, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """Post a body and read the whole answer; cancelled, the connection is closed at once.

        Args:
            headers: added to the request.

        Raises:
            UpstreamError: there is no answer, or it is too large.
        """
        if not self._started:
            self._started = True
            await self._upstream.start()
        reply = await self._upstream.post(
            self._url, body, {"Accept": "application/json", **(headers or {})}
        )
        data = bytearray()
        try:
            while part := await reply.read():
                data += part
                if len(data) > _REPLY_BYTES_MAX:
                    raise UpstreamProtocolError(f"{self.name} sent a reply that is too large")
        except BaseException:
            reply.abort()
            raise
        await reply.release()
        return Answer(
            status=reply.status,
            headers=reply.headers,
            body=bytes(data),
            wait_ms=retry_after_ms(reply.headers, time.time()),
        )

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        await self._upstream.close()
