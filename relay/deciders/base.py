"""What decides: one protocol for every backend (D6.5)."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from encoders.decision_errors import DecisionError

# The key of the client whose decide runs, for the one backend that may be told to forward it: no
# other code has to carry a secret. Set around `DecideService.decide`, in its task.
CLIENT_KEY: Final[ContextVar[str | None]] = ContextVar("client_key", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionReply:
    """An answered decide.

    Attributes:
        body: the HTTP decision reply, compact JSON in the form of D6.6.
        input_tokens, cached_input_tokens, media_tokens, long_input_tokens, media_items,
        thought_tokens: the reply's usage.
        answered: questions that were answered and not refused; what is billed (D6.7).
        server_timing: the backend's own, or None.
    """

    body: bytes
    input_tokens: int = 0
    cached_input_tokens: int = 0
    media_tokens: int = 0
    long_input_tokens: int = 0
    media_items: int = 0
    thought_tokens: int = 0
    answered: int = 0
    server_timing: str | None = None


class DecisionBackend(Protocol):
    """Answers the questions of a decide body."""

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        """Decide once.

        Args:
            body: a checked decide body, canonical JSON (D4.10).
            idempotency_key: already derived from account and key (D6.2), or None.
            deadline: when the answer is no longer wanted, on the event loop's clock, seconds. A
                backend that is not done then returns 504 `system_zero_timeout`.

        Returns:
            The reply, or the error that the client is told. A cancelled call may have been done.
        """
        ...

    async def close(self) -> None:
        """Free what it holds; nothing is asked any more. Idempotent."""
        ...
