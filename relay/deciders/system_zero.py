"""Forwards decides to a compatible service (D6.5)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from encoders.decision_envelope import read_failure
from encoders.decision_reply import ServiceReply, UnusableReply, read_reply
from encoders.json_text import loads
from relay.deciders.base import CLIENT_KEY, DecisionReply
from relay.deciders.endpoint import read
from relay.deciders.failures import failure_of, timed_out, unusable
from relay.errors import RelayError
from relay.redact import Redactor

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError
    from relay.deciders.endpoint import Endpoint

ROUTE: Final = "/v1/system-zero/decide"


def url_of(base_url: str) -> str:
    """Return where to post: the base may end in `/v1`."""
    return base_url.removesuffix("/v1") + ROUTE


class SystemZeroBackend:
    """Sends the body as it is, so that equal bodies are equal to the service too.

    Args:
        endpoint: its URL is that of `url_of`.
        own_credential: whether `endpoint` has a key; without one the client's is forwarded.
    """

    def __init__(self, endpoint: Endpoint, *, own_credential: bool) -> None:
        self._endpoint = endpoint
        self._own = own_credential

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """See `DecisionBackend`."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        client_key = None if self._own else CLIENT_KEY.get()
        redactor = self._endpoint.redactor
        if client_key is not None:
            headers["Authorization"] = f"Bearer {client_key}"
            redactor = Redactor((client_key,))
        seconds = min(self._endpoint.timeout_s, deadline - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(seconds):
                answer = await self._endpoint.post(body, headers)
        except TimeoutError:
            return timed_out(seconds)
        except RelayError as failure:
            return failure_of(failure)
        if answer.status != 200:
            return read_failure(
                answer.status,
                answer.headers,
                redactor.data(answer.body),
                wait_ms=answer.wait_ms,
                own_credential=self._own,
            )
        try:
            service_reply = await read(answer, lambda data: _read(data, body))
        except UnusableReply as problem:
            return unusable(problem)
        return DecisionReply(
            body=service_reply.body,
            **asdict(service_reply.usage),
            answered=service_reply.answered,
            server_timing=answer.headers.get("server-timing"),
        )

    async def close(self) -> None:
        """See `DecisionBackend`."""
        await self._endpoint.close()


def _read(data: bytes, body: bytes) -> ServiceReply:
    try:
        reply = loads(data)
    except ValueError:
        raise UnusableReply("it is not JSON") from None
    return read_reply(reply, loads(body)["questions"])
