"""Asks a server with `POST /v1/systemone`: llama.cpp and Ollama with a model for it (D6.5)."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

from encoders import systemone
from encoders.decision_reply import UnusableReply, Usage, make_reply, only_outcome
from encoders.json_text import dumps, loads
from relay.deciders.base import DecisionReply
from relay.deciders.endpoint import read
from relay.deciders.failures import by_status, failure_of, timed_out, unusable
from relay.errors import RelayError
from relay.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.decision_errors import DecisionError
    from relay.deciders.endpoint import Answer, Endpoint
    from relay.errors import UpstreamError


class SystemOneBackend:
    """Asks all questions of a decide in one request.

    Args:
        endpoint: its URL is that of `systemone.url_of`.
        model: the server's own name of it.
    """

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """See `DecisionBackend`; the wire has no idempotency keys."""
        del idempotency_key
        seconds = min(self._endpoint.timeout_s, deadline - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(seconds):
                return await self._decide(loads(body))
        except TimeoutError:
            return timed_out(seconds)
        except RelayError as failure:
            return failure_of(failure)
        except UnusableReply as problem:
            return unusable(problem)

    async def _decide(self, request: dict[str, Any]) -> DecisionReply | DecisionError:
        questions = request["questions"]
        known = {name: only_outcome(question) for name, question in questions.items()}
        asked = {name: question for name, question in questions.items() if known[name] is None}
        images = [item["data"].partition(",")[2] for item in request.get("attachments", ())]
        usage = Usage()
        if asked:
            wire = systemone.make_request(self._model, request["state"], asked, images)
            answer = await self._endpoint.post(dumps(wire))
            if answer.status != 200:
                return failure_of(self._failure(answer), wait_ms=answer.wait_ms)
            answers, usage = await read(answer, lambda data: _read(data, asked))
            known |= answers
        return DecisionReply(
            body=make_reply(
                reply_id=f"szd_{secrets.token_hex(16)}",
                model=request["model"],
                served_by=self._model,
                created=int(time.time()),
                answers={name: known[name] for name in questions},
                usage=usage,
            ),
            input_tokens=usage.input_tokens,
            answered=len(questions),
        )

    def _failure(self, answer: Answer) -> UpstreamError:
        failure = refusal(
            self._endpoint.name,
            answer.status,
            answer.headers,
            answer.body,
            redactor=self._endpoint.redactor,
            now=time.time(),
        )
        return by_status(failure, answer.status)

    async def close(self) -> None:
        """See `DecisionBackend`."""
        await self._endpoint.close()


def _read(body: bytes, asked: Mapping[str, Any]) -> tuple[dict[str, Any], Usage]:
    try:
        reply = loads(body)
    except ValueError:
        raise UnusableReply("it is not JSON") from None
    return systemone.read_answers(reply, asked), systemone.read_usage(reply)
