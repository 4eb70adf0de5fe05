"""A task's call of its agent, and what is said of it (W2.2, W3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from relay.agents.base import AgentCall, AgentError
from relay.engines.embedded.failures import TaskFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relay.agents.base import AgentReply
    from relay.engines.base import Usage
    from relay.engines.embedded.lives import Life

TEXT_BYTES: Final = 16 * 1024 * 1024  # of a reply, as JSON writes it


class _Sink:
    """Takes one reply.

    Args:
        streamed: whether its text is the task's own; what a planner says is not.
    """

    def __init__(self, life: Life, *, streamed: bool) -> None:
        self._life = life
        self._streamed = streamed
        self._has_started = False
        self.closed = False
        self.size = 0

    def started(self, model: str, provider: str) -> None:
        if not self.closed:
            self.say_started(model, provider)

    def say_started(self, model: str, provider: str) -> None:
        if self._streamed and not self._has_started:
            self._has_started = True
            data = {"task_id": self._life.task_id, "model": model, "provider": provider}
            self._life.run.emit("streaming_started", data)

    def text(self, raw: bytes) -> bool:
        if self.closed:
            return True
        self.size += len(raw)
        if self.size > TEXT_BYTES:
            self.closed = True
            self._life.abort(self.too_large())
            return False
        return not self._streamed or self._life.run.token(self._life.task_id, raw)

    async def ready(self) -> None:
        await self._life.run.outlet.ready()

    def interrupted(self, usage: Usage) -> None:
        self._life.usage += usage

    def step(self, name: str, data: Mapping[str, Any]) -> None:
        if self.closed:
            return
        life = self._life
        tool_id = f"{life.task_id}.{data['task_id']}"
        said = {**data, "task_id": tool_id}
        if name != "task_completed":
            said["attempt"] = life.attempt
        if name == "task_dispatched":
            life.tools.append(tool_id)
        elif tool_id in life.tools:
            life.tools.remove(tool_id)
        life.run.emit(name, said)

    def too_large(self) -> Any:
        return self._life.failure(
            "output_too_large", f"the reply has more than {TEXT_BYTES} bytes, which is the bound"
        )


async def ask(
    life: Life, agent: str, prompt: str, *, max_tokens: int | None = None, streamed: bool = True
) -> AgentReply:
    """Ask an agent one thing under the task's id; see `call_agent`."""
    messages = [{"role": "user", "content": prompt}]
    return await call_agent(life, agent, messages, max_tokens=max_tokens, streamed=streamed)


async def call_agent(
    life: Life,
    agent: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int | None = None,
    streamed: bool = True,
    **more: Any,
) -> AgentReply:
    """Call an agent under the task's id.

    Args:
        more: further fields of `AgentCall`.

    Raises:
        TaskFailed: the call failed, or its reply is too large.
    """
    run = life.run
    call = AgentCall(
        call_id=f"{run.envelope.execution_id}/{life.task_id}/{life.attempt}/{run.leg}",
        agent=agent,
        messages=messages,
        payer=run.envelope.payer,
        plane=run.envelope.plane,
        max_tokens=max_tokens,
        execution_id=run.envelope.execution_id,
        why_cancelled=life.why_stopped,
        **more,
    )
    sink = _Sink(life, streamed=streamed)
    try:
        reply = await run.caller.call(call, sink)
    except AgentError as error:
        life.usage += error.usage
        raise TaskFailed(
            error.code,
            error.message,
            task_id=life.task_id,
            retryable=error.retryable,
            retry_after_s=error.retry_after_s or 0,
        ) from None
    finally:
        sink.closed = True
    life.usage += reply.usage
    if sink.size > TEXT_BYTES:
        raise sink.too_large()
    life.final = {
        "finish_reason": reply.finish_reason,
        "model": reply.model,
        "provider": reply.provider,
        "reported": reply.reported,
    }
    if streamed:
        sink.say_started(reply.model, reply.provider)
        run.emit(
            "streaming_completed",
            {
                "task_id": life.task_id,
                "chars": len(reply.text),
                "finish_reason": reply.finish_reason,
            },
        )
    return reply
