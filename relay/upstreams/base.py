"""The seam between the relay and whatever serves a model.

An `Upstream` is one configured provider. `open` dials it and returns as soon as the status is
known; the reply then hands over its body as the bytes arrive. Nothing here knows about SSE: the
pure `relay.stream` does. Two implementations share this seam: `http` (a provider on the network;
the local model is one too, behind `local`) and `replay` (recorded transcripts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
    """What is asked of a provider, in the provider's own shape.

    Attributes:
        model: the provider's own name of the model.
        body: the JSON request as it is sent.
        stream: whether a stream is asked for.
    """

    model: str
    body: Mapping[str, Any]
    stream: bool


class UpstreamReply(Protocol):
    """An answered request: status and headers are known, the body is still arriving."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers, case-insensitive or with lower-case names."""

    async def read(self) -> bytes:
        """Return the next bytes of the (decompressed) body, `b""` at its end.

        Raises:
            UpstreamTruncated: the connection died before the body was complete.
        """

    async def forward(self, push: Callable[[bytes], bool]) -> None:
        """Hand what arrives to `push`, in the call that read it from the socket.

        Returns when `push` returned False or nothing can be pushed (the body ended or broke off,
        or this reply cannot push at all): what follows is for `read`.

        Args:
            push: takes the next bytes of the body; returns whether it can take more at once. What
                it raises is raised here.
        """

    def abort(self) -> None:
        """Close the connection at once. Synchronous, idempotent, safe while a read waits."""

    async def release(self) -> None:
        """The answer is complete: give the connection back if its body ends at once, else close
        it. Never raises, takes a tenth of a second at most. Idempotent."""


class Upstream(Protocol):
    """One configured provider."""

    @property
    def name(self) -> str:
        """The canonical id that answers carry in `provider` (M2.2)."""

    async def start(self) -> None:
        """Acquire what the provider needs (a child process, files); called once, before serving.

        Raises:
            UpstreamUnavailable: it cannot serve; the message says why and what to do.
        """

    async def open(self, request: UpstreamRequest) -> UpstreamReply:
        """Send the request and wait for the status line.

        Raises:
            UpstreamUnreachable: refused, no route, name not found, connect timeout.
            UpstreamTimeout: no headers within `header_timeout_s`.
            UpstreamTruncated: the connection closed before a status line.
        """

    async def close(self) -> None:
        """Free everything. Idempotent."""
