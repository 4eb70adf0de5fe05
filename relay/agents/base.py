"""One call of an agent: what an engine asks for, and what it gets (W3.4).

`relay.agents.caller` implements `AgentCaller` over the models plane's relay, in process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from relay.engines.base import Payer, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """What is asked of an agent.

    Attributes:
        call_id: names this call and its usage rows (`request_id`); unique for each attempt.
        agent: an id of `agents:`.
        messages: after the agent's system prompt, in the OpenAI form.
        max_tokens: over the agent's own; None leaves that.
        overrides: request fields over the agent's `parameters`; `messages`, `model`, `n`, `tools`,
            `stream` and `stream_options` among them are not heeded.
        model: a slug instead of the agent's own. provider: one whose default model serves instead,
            if there is no `model` (A1.1).
        plane: for the usage rows. execution_id: of the run, for the log.
        why_cancelled: asked while the call is being cancelled: the code of the task failure that
            stops it ("timeout", …), None if nothing in the run does.
    """

    call_id: str
    agent: str
    messages: Sequence[Mapping[str, Any]]
    payer: Payer
    plane: str = "workflows"
    execution_id: str | None = None
    max_tokens: int | None = None
    model: str | None = None
    provider: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    why_cancelled: Callable[[], str | None] = lambda: None


class AgentSink(Protocol):
    """Takes the reply as it comes. Plain calls; see `relay.engines.base.Outlet.token`."""

    def started(self, model: str, provider: str) -> None:
        """A candidate has answered; called once, before any text. `model` is the slug served."""

    def text(self, raw: bytes) -> bool:
        """A piece of the text: what stands between the quotes of a JSON string, never empty.

        Returns:
            Whether more may come at once; if not, `ready` is awaited.
        """

    async def ready(self) -> None:
        """Wait until more may come."""

    def interrupted(self, usage: Usage) -> None:
        """The call is being cancelled, or the gateway stops; so much was used, which no reply will
        tell. May be called more than once: each tells of more.
        """

    def step(self, name: str, data: Mapping[str, Any]) -> None:
        """A tool step, as an event of the engine, never as content: `task_dispatched`,
        `task_completed` or `task_error` of `kind` "tool". `task_id` is `tool.<n>` in order of the
        calls: the engine puts its task's id and a dot before it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """A finished call.

    Attributes:
        text: all that `AgentSink.text` was given, decoded.
        finish_reason: of the last answer of the model: stop, length, content_filter, ….
        usage: summed over all answers of the model.
        model, provider: who served the last one.
        reported: whether every answer's usage came from its provider (A1.2).
    """

    text: str
    finish_reason: str
    usage: Usage
    model: str
    provider: str
    reported: bool = True


class AgentError(Exception):
    """The call failed.

    Attributes:
        code: of the relay's error (`upstream_error`, `rate_limit_exceeded`, `insufficient_credits`,
            …), or `agent_not_found`, `empty_reply`, `tool_rounds`.
        retryable: whether the same call may do better.
        usage: what was used all the same.
        retry_after_s: how long a provider asked to be left alone, in whole seconds; None if none
            did.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool,
        usage: Usage,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.usage = usage
        self.retry_after_s = retry_after_s


class AgentCaller(Protocol):
    """Calls agents."""

    def agents(self) -> Mapping[str, str]:
        """The ids that can be called, with their model's slug."""

    async def call(self, call: AgentCall, sink: AgentSink) -> AgentReply:
        """Call an agent; a cancellation closes its upstream connection and settles what was used.

        Raises:
            AgentError: it failed.
            GatewayShutdown: the gateway stops; nothing is wrong with the call.
        """
