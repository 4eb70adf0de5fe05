"""Calls agents over the models plane's relay, in process (W3.4).

    call ─▶ resolve ─▶ ask a model ──text──▶ AgentSink
                         ▲    ├─ calls of tools ─▶ run them, their results ─┐
                         │    └─ empty, at its limit: once ────────────────┤
                         └─────────────────────────────────────────────────┘

One call may be several requests to models: each has a hold, a row and a log line of its own, named
`<call_id>`, `<call_id>/2`, ….
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from encoders.deltas import decoded
from relay.agents.asking import Target
from relay.agents.base import AgentError, AgentReply
from relay.agents.http_tool import OF_THE_TOOL
from relay.agents.spec import opening, relay_request, request_fields
from relay.agents.tools import spoken
from relay.engines.base import Usage
from relay.errors import GatewayShutdown, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.agents.asking import Answer, Asker
    from relay.agents.base import AgentCall, AgentSink
    from relay.agents.default_model import DefaultModels
    from relay.agents.spec import AgentSpec
    from relay.agents.tools import Toolbox
    from relay.routing import Router

_log: Final = logging.getLogger("sluicegate.agents")
# What an answer with calls ends with if they are meant; "length" is a reply that was cut.
_CALLS_MEANT: Final = frozenset({"tool_calls", "stop", "function_call", "length"})
_FREE_CHOICES: Final = (None, "auto", "none")


class Caller:
    """Calls the agents of the configuration; see `relay.agents.base.AgentCaller`.

    Args:
        specs: by id. asker: asks models.
        router: the gateway's routes as they are now: they change when the providers have started.
        toolboxes: of the agents that have tools.
    """

    def __init__(
        self,
        specs: Mapping[str, AgentSpec],
        asker: Asker,
        router: Callable[[], Router],
        defaults: DefaultModels,
        toolboxes: Mapping[str, Toolbox],
    ) -> None:
        self._toolboxes = toolboxes
        self._specs = specs
        self._asker = asker
        self._router = router
        self._defaults = defaults
        # The slugs that do not change while the routes do not: all but providers' default models.
        self._slugs: tuple[Router, Mapping[str, str]] | None = None
        self._asks_providers = any(_only_provider(spec) is not None for spec in specs.values())

    def agents(self) -> Mapping[str, str]:
        router = self._router()
        if self._slugs is not None and self._slugs[0] is router:
            return self._slugs[1]
        found: dict[str, str] = {}
        for name, spec in self._specs.items():
            try:
                found[name] = self._known_target(router, spec).slug
            except ModelNotFound:
                continue  # nobody serves it; the start said so
        if not self._asks_providers:
            self._slugs = router, found
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
        toolbox = self._toolboxes.get(call.agent)
        return await _Conversation(self._asker, spec, target, call, sink, toolbox).run()

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
        self,
        asker: Asker,
        spec: AgentSpec,
        target: Target,
        call: AgentCall,
        sink: AgentSink,
        toolbox: Toolbox | None,
    ) -> None:
        self._asker = asker
        self._toolbox = toolbox
        self._rounds_left = spec.tool_rounds
        self._tool_calls = 0
        # Tools that run: what their dispatch said, and when it was.
        self._running: dict[str, tuple[Mapping[str, Any], float]] = {}
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
        try:
            return await self._talk()
        except (asyncio.CancelledError, GatewayShutdown):
            self._sink.interrupted(self._usage)
            raise

    async def _talk(self) -> AgentReply:
        while True:
            answer = await self._ask()
            if answer.message.get("tool_calls") and answer.finish_reason in _CALLS_MEANT:
                await self._run_tools(answer)
                continue
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
            request_id=call_id if number == 1 else f"{call_id}/{number}",
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

    async def _run_tools(self, answer: Answer) -> None:
        """Run what the answer calls, and take it and the results into the conversation. A reply
        that was cut runs none of its calls: the last may be half of one.
        """
        if not self._rounds_left or self._toolbox is None:
            self._fail("tool_rounds", "the model calls tools more often than this agent may")
        self._rounds_left -= 1
        calls = answer.message["tool_calls"]
        first, self._tool_calls = self._tool_calls + 1, self._tool_calls + len(calls)
        try:
            async with self._asker.interruptible():
                results = await self._toolbox.run(
                    calls, self._step, first=first, cut=answer.finish_reason == "length"
                )
        except GatewayShutdown:
            self._tell_cut_off("shutdown")
            raise
        except asyncio.CancelledError:
            late = self._call.why_cancelled() == "timeout"
            self._tell_cut_off("timeout" if late else "cancelled")
            raise
        self._messages += [spoken(answer.message, decoded(answer.raw)), *results]
        if self._fields.get("tool_choice") not in _FREE_CHOICES:
            del self._fields["tool_choice"]  # what was demanded is done: else it would go on

    def _step(self, name: str, data: Mapping[str, Any]) -> None:
        self._sink.step(name, data)
        if name == "task_dispatched":
            self._running[data["task_id"]] = data, time.monotonic()
            return
        del self._running[data["task_id"]]
        _tell_tool(self._call, data, code=data["error"]["code"] if "error" in data else None)

    def _tell_cut_off(self, outcome: str) -> None:
        for data, began in self._running.values():
            duration_ms = round((time.monotonic() - began) * 1000)
            _tell_tool(self._call, {**data, "duration_ms": duration_ms}, outcome=outcome)

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


def _tell_tool(
    call: AgentCall, data: Mapping[str, Any], *, code: str | None = None, outcome: str | None = None
) -> None:
    """Write the line of a tool's call: whose, which, how it went; never what was said (J3.4).

    Args:
        outcome: of one that did not end by itself.
    """
    fields = {
        "execution_id": call.execution_id,
        "org": call.payer.org,
        "plane": call.plane,
        "agent": call.agent,
        "tool": data.get("name"),
        "host": data.get("host"),
        "outcome": outcome,
        "error_code": code,
        "hint": "see `agents_plane.tool_networks`" if code == "refused" else None,
        "duration_ms": data["duration_ms"],
    }
    told = {name: value for name, value in fields.items() if value is not None}
    level = logging.WARNING if code in OF_THE_TOOL else logging.INFO
    _log.log(level, "tool", extra={"fields": told})
