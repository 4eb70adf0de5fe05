"""What is known of one request when it ends: the log line, later the usage row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoders.usage import TokenUsage
    from relay.errors import RelayError
    from relay.lifecycle import Outcome
    from relay.money import Settlement


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One candidate that was tried.

    Attributes:
        asked: whether the provider may have seen the request; not if its shape has no words for it.
        status: HTTP status of its answer, None if it did not come so far.
        error_code: why it failed, None if it answered; "cancelled" by a hang-up or a shutdown, and
            until it has ended.
        started: of the monotonic clock.
        duration_ms: until it was known whether it serves.
    """

    provider: str
    model: str
    started: float
    status: int | None = None
    error_code: str | None = "cancelled"
    duration_ms: float = 0.0
    asked: bool = True

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        told = self.error_code or "ok"
        if not self.asked:
            return f"{self.provider}/{self.model}: not asked, {told}"
        return f"{self.provider}/{self.model}: {told}{status} {self.duration_ms:.0f} ms"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Filled while a request runs; read once at its end. Times are of the monotonic clock.

    Attributes:
        plane: for the usage row. agent: whose call of a model this is, None for a client's request.
        model: the slug. provider, upstream_model: the candidate that was tried last.
        stream: whether a stream was asked for. streamed: whether the client got its status line.
        execution_id: the run that it began or looks at, None for most.
        settlement: what it used and costs; None if it had no hold.
        cooling: candidates that were behind the others when this began, and for how long (M3.3).
    """

    request_id: str
    started: float
    plane: str = "models"
    agent: str | None = None
    org: str | None = None
    key_id: str | None = None
    model: str | None = None
    provider: str | None = None
    upstream_model: str | None = None
    stream: bool = False
    streamed: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    cooling: list[str] = field(default_factory=list)
    first_byte: float | None = None
    usage: TokenUsage | None = None
    outcome: Outcome | None = None
    error: RelayError | None = None
    settlement: Settlement | None = None
    execution_id: str | None = None

    def attempt_lines(self) -> list[str]:
        """Return the candidates that were tried, in order, for people to read."""
        return [str(attempt) for attempt in self.attempts]

    def fields(self, now: float) -> dict[str, Any]:
        """Return the fields of the log line; absent ones are left out."""
        paid = self.settlement
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "org": self.org,
            "key_id": self.key_id,
            "execution_id": self.execution_id,
            "plane": self.plane if self.agent is not None else None,
            "agent": self.agent,
            "model": self.model,
            "provider": self.provider,
            "stream": self.stream if self.model else None,
            "outcome": str(self.outcome) if self.outcome else None,
            "error_code": self.error.code if self.error else None,
            "error": self.error.message if self.error else None,
            "attempts": list(paid.attempts) if paid else self.attempt_lines() or None,
            "cooling": self.cooling or None,
            "prompt_tokens": paid.prompt_tokens if paid else None,
            "completion_tokens": paid.completion_tokens if paid else None,
            "source": str(paid.source) if paid else None,
            "cost_micro_usd": paid.cost_micro_usd if paid else None,
            "ttft_ms": round((self.first_byte - self.started) * 1000, 1)
            if self.first_byte is not None
            else None,
            "duration_ms": round((now - self.started) * 1000, 1),
        }
        return {key: value for key, value in fields.items() if value is not None}
