"""Decides by the token probabilities of a chat model of the gateway (D6.5).

Each question is a chat request for one token, dialled as any other: candidates in order, those that
failed lately behind the others, the provider's refusals read in one place.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from encoders import decision_chat
from encoders.decision_reply import (
    UnusableReply,
    Usage,
    make_answer,
    make_reply,
    only_outcome,
)
from encoders.json_text import loads
from encoders.shapes import OPENAI
from relay.deciders.base import DecisionReply
from relay.deciders.failures import by_status, failure_of, timed_out, unavailable, unusable
from relay.errors import RelayError, UpstreamError
from relay.record import RequestRecord
from relay.request import RelayRequest
from relay.upstreams.replay import ReplayUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from encoders.decision_errors import DecisionError
    from relay.attempts import Dialler
    from relay.routing import Candidate, Router

# What hosted providers list at most, and what the local model needs for all labels to be among it.
HOSTED_TOP_LOGPROBS: Final = 20
LOCAL_TOP_LOGPROBS: Final = 400


@dataclass(frozen=True, slots=True)
class _Answered:
    """One question's answer; who gave it, None if nobody had to be asked."""

    answer: dict[str, Any]
    usage: Usage
    served_by: str | None


class _Unavailable(Exception):
    """The model cannot decide as things are; see `error`."""

    def __init__(self, problem: DecisionError) -> None:
        super().__init__(problem.message)
        self.error = problem


class ChatLogprobsBackend:
    """Asks the questions of a decide one by one, some at once.

    Args:
        slug: of the chat model.
        router: the gateway's routes as they are now: they change when the providers have started.
        top_logprobs: how many tokens the model is asked to list.
        questions_at_once: requests that one decide has in flight at most.
    """

    def __init__(
        self,
        slug: str,
        router: Callable[[], Router],
        dialler: Dialler,
        *,
        top_logprobs: int,
        questions_at_once: int,
    ) -> None:
        self._slug = slug
        self._router = router
        self._dialler = dialler
        self._top_logprobs = top_logprobs
        self._at_once = questions_at_once

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """See `DecisionBackend`; chat requests have no idempotency keys."""
        del idempotency_key
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._decide(loads(body))
        except TimeoutError:
            return timed_out(round(clock() - started))
        except ExceptionGroup as group:  # of the questions; the first failure ended the others
            failure: BaseException = group
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            return _told(failure)
        except (RelayError, UnusableReply, _Unavailable) as failure:
            return _told(failure)

    async def _decide(self, request: dict[str, Any]) -> DecisionReply:
        questions = request["questions"]
        images = [(item["name"], item["data"]) for item in request.get("attachments", ())]
        known = {name: only_outcome(question) for name, question in questions.items()}
        state = decision_chat.text_of(request["state"])
        places = asyncio.Semaphore(self._at_once)
        candidates = self._candidates() if None in known.values() else ()

        async def answer(name: str, question: dict[str, Any]) -> _Answered:
            only = known[name]
            if only is not None:
                return _Answered(only, Usage(), None)
            async with places:  # a prompt is as large as the state: no more of them than needed
                chat = decision_chat.make_request(
                    state, question, images=images, top_logprobs=self._top_logprobs
                )
                return await self._ask(candidates, chat, question)

        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(answer(name, question))
                for name, question in questions.items()
            }
        found = {name: task.result() for name, task in tasks.items()}
        usage = Usage(
            input_tokens=sum(one.usage.input_tokens for one in found.values()),
            cached_input_tokens=sum(one.usage.cached_input_tokens for one in found.values()),
            media_items=len(images),
        )
        servers = dict.fromkeys(one.served_by for one in found.values() if one.served_by)
        return DecisionReply(
            body=make_reply(
                reply_id=f"szd_{secrets.token_hex(16)}",
                model=request["model"],
                served_by=", ".join(servers) or self._slug,
                created=int(time.time()),
                answers={name: one.answer for name, one in found.items()},
                usage=usage,
            ),
            input_tokens=usage.input_tokens,
            cached_input_tokens=usage.cached_input_tokens,
            media_items=usage.media_items,
            answered=len(questions),
        )

    def _candidates(self) -> tuple[Candidate, ...]:
        """Those of the model that list probabilities.

        Raises:
            ModelNotFound: its providers are off.
            _Unavailable: only recorded transcripts serve it now, or another shape.
        """
        candidates = self._router().resolve(self._slug)
        able = tuple(
            # One token needs no stream, which is what `aggregate` would make of it.
            replace(candidate, provider=replace(candidate.provider, aggregate=False))
            for candidate in candidates
            if candidate.provider.shape is OPENAI
            and not isinstance(candidate.provider.upstream, ReplayUpstream)
        )
        if not able:
            raise _Unavailable(
                unavailable(
                    f"the model {self._slug} is served by recorded transcripts now, as the local "
                    "model could not be started; they hold no probabilities (the log says why)",
                    retryable=False,
                )
            )
        return able

    async def _ask(
        self, candidates: tuple[Candidate, ...], chat: dict[str, Any], question: dict[str, Any]
    ) -> _Answered:
        """Ask one question.

        Raises:
            RelayError: no candidate answered.
            UnusableReply: one did, and not with probabilities.
        """
        request_id = f"req_{secrets.token_hex(12)}"
        record = RequestRecord(request_id=request_id, started=time.monotonic())
        request = RelayRequest(
            request_id=request_id,
            slug=self._slug,
            stream=False,
            include_usage=False,
            choices=1,
            created=int(time.time()),
            body=chat,
            prompt_tokens=0,
        )
        try:
            opened = await self._dialler.open_first(candidates, request, record)
        except UpstreamError as failure:
            raise by_status(failure, record.attempts[-1].status) from None
        await opened.reply.release()
        self._dialler.ended(opened, None)
        assert opened.whole is not None
        _, reply = opened.whole
        return _Answered(
            make_answer(question, decision_chat.read_weights(reply, question)),
            decision_chat.read_usage(reply),
            f"{record.provider}/{record.upstream_model}",
        )

    async def close(self) -> None:
        """Nothing of its own: the providers end with the gateway."""


def _told(failure: BaseException) -> DecisionError:
    match failure:
        case _Unavailable():
            return failure.error
        case UnusableReply():
            return unusable(failure)
        case RelayError():
            return failure_of(failure)
        case _:
            raise failure
