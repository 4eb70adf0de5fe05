"""Calls agents over the models plane's relay, in process (W3.4).

    call ─▶ resolve ─▶ ask a model ──text──▶ AgentSink
                        ▲      └─ empty, at its limit ─▶ once more

One call may be several requests to models: each has a hold, a row and a log line of its own, named
`<call_id>`, `<call_id>.2`, ….
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from encoders.deltas import decoded
from relay.agents.asking import Target
from relay.agents.base import AgentError, AgentReply
from relay.agents.spec import opening, relay_request, request_fields
from relay.engines.base import Usage
from relay.errors import ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.agents.asking import Answer, Asker
    from relay.agents.base import AgentCall, AgentSink
    from relay.agents.default_model import DefaultModels
    from relay.agents.spec import AgentSpec
    from relay.routing import Router


class Caller:
    """Calls the agents of the configuration; see `relay.agents.base.AgentCaller`.

    Args:
        specs: by id. asker: asks models.
        router: the gateway's routes as they are now: they change when the providers have started.
    """

    def __init__(
        self,
        specs: Mapping[str, AgentSpec],
        asker: Asker,
        router: Callable[[], Router],
        defaults: DefaultModels,
    ) -> None:
        self._specs = specs
        self._asker = asker
        self._router = router
        self._defaults = defaults

    def agents(self) -> Mapping[str, str]:
        router = self._router()
        found: dict[str, str] = {}
        for name, spec in self._specs.items():
            try:
                found[name] = self._known_target(router, spec).slug
            except ModelNotFound:
                continue  # nobody serves it; the start said so
        return found

    async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
        spec = self._specs.get(call.agent)
        if spec is None:
            raise AgentError(
                "agent_not_found",
                f"there is no agent {call.agent!r} here",
                retryable=False,
                usage=Usage(),
            )
        try:
            target = await self._target(spec, call)
        except ModelNotFound as error:
            raise AgentError(error.code, error.message, retryable=False, usage=Usage()) from None
        return await _Conversation(self._asker, spec, target, call, sink).run()

    async def _target(self, spec: AgentSpec, call: AgentCall) -> Target:
        """Return who is asked, and ask a provider for its default model if that says it (A1.2).

        Raises:
            ModelNotFound: nobody that is on.
        """
        router = self._router()
        if call.model is not None:
            return Target(slug=call.model, candidates=router.resolve(call.model))
        name = call.provider or _only_provider(spec)
        provider = router.provider(name) if name is not None else None
        if name is not None and provider is not None:
            await self._defaults.find(name, provider)
        return self._known_target(router, spec, call.provider)

    def _known_target(self, router: Router, spec: AgentSpec, provider: str | None = None) -> Target:
        name = provider or _only_provider(spec)
        if name is not None:
            slug = f"{name}/{self._defaults.known(name, router.provider(name))}"
            return Target(slug=slug, candidates=router.resolve(slug))
        if spec.candidates:
            candidates = router.select(spec.candidates)
            first = candidates[0]
            slug = f"{first.provider.name}/{first.model}"
            return Target(slug=slug, candidates=candidates, listed=False)
        assert spec.model is not None, "an agent has a model, candidates or a provider"
        return Target(slug=spec.model, candidates=router.resolve(spec.model))


def _only_provider(spec: AgentSpec) -> str | None:
    return None if spec.candidates or spec.model is not None else spec.provider


class _Conversation:
    """One call from its first request to its reply."""

    def __init__(
        self, asker: Asker, spec: AgentSpec, target: Target, call: AgentCall, sink: AgentSink
    ) -> None:
        self._asker = asker
        self._target = target
        self._call = call
        self._sink = sink
        self._fields = request_fields(spec, call)
        self._messages = opening(spec, call)
        self._requests = 0
        self._started = False
        self._raw = b""
        self._usage = Usage()
        self._reported = True
        self._continued = False

    async def run(self) -> AgentReply:
        """Ask until there is a reply.

        Raises:
            AgentError, GatewayShutdown: see `AgentCaller.call`.
        """
        while True:
            answer = await self._ask()
            if answer.finish_reason == "length" and not answer.raw:
                if self._continued:
                    self._fail(
                        "empty_reply",
                        "the model reached its output limit twice without a word; raise max_tokens",
                    )
                self._continued = True
                continue
            return self._reply(answer)

    async def _ask(self) -> Answer:
        self._requests += 1
        call_id, number = self._call.call_id, self._requests
        request = relay_request(
            self._fields,
            self._messages,
            request_id=call_id if number == 1 else f"{call_id}.{number}",
            slug=self._target.slug,
            created=int(time.time()),
        )
        try:
            answer = await self._asker.ask(
                request, self._target, self._call, self._sink, started=self._answered
            )
        except AgentError as error:
            error.usage = self._usage + error.usage
            raise
        self._raw += answer.raw
        self._usage += answer.usage
        self._reported = self._reported and answer.reported
        return answer

    def _answered(self, model: str, provider: str) -> None:
        if not self._started:
            self._started = True
            self._sink.started(model, provider)

    def _reply(self, answer: Answer) -> AgentReply:
        return AgentReply(
            text=decoded(self._raw),
            finish_reason=answer.finish_reason,
            usage=self._usage,
            model=answer.model,
            provider=answer.provider,
            reported=self._reported,
        )

    def _fail(self, code: str, message: str) -> NoReturn:
        raise AgentError(code, message, retryable=False, usage=self._usage)
