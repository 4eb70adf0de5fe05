"""The seam between a stream and whatever shape its upstream speaks. [pure]

A `Translator` takes the data of one upstream event and appends what the client gets. It is stateful
and belongs to one stream; `relay.stream` owns framing, the end of the stream and its errors.
`encoders.shape` says which translator belongs to which shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from encoders.openai import ChunkIdentity
    from encoders.usage import TokenUsage

WITHHELD_MAX: Final = 16 * 1024 * 1024
# What is remembered for each of them lasts as long as the stream; no real one has as many (M3.5).
CHOICES_MAX: Final = 4096
CALLS_MAX: Final = 16 * 1024

ReasoningField = Literal["reasoning_content", "reasoning"]


class Kind(Enum):
    """What an event of the upstream was."""

    CHUNK = auto()
    DONE = auto()
    ERROR = auto()  # an openai-shape error event, which passes as sent; `error_payload` holds it
    FAILED = auto()  # an error in a shape of its own, which becomes our error chunk (M3.4)
    SKIPPED = auto()  # a valid event that is not for the client


class NotAChunk(ValueError):
    """The data of an event is not JSON."""


class ReplyTooLarge(ValueError):
    """More than the bound of what is kept of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWants:
    """What a stream shall bring its client, and what its provider is known for.

    Attributes:
        choices: how many choices were asked for (`n`).
        include_usage: whether the client asked for the usage chunk (M2.4).
        usage_is_ours: whether only we asked the upstream for usage, so that a `"usage":null` on a
            chunk is our doing and is cut out (M2.2).
        reasoning_field: where reasoning of a translated shape stands in a delta (M2.6).
        cumulative_deltas, inline_tool_calls: the provider's descriptor flags (M2.7).
        tools: those of the request, as sent: inline calls have values of the types that they say.
        withheld_max: characters that may be withheld until it is known what they are.
        collect_bytes_max: nothing is emitted but collected into one plain reply, which may take so
            many bytes of chunks (M4.1); None: a stream.
    """

    choices: int = 1
    include_usage: bool = False
    usage_is_ours: bool = True
    reasoning_field: ReasoningField = "reasoning_content"
    cumulative_deltas: bool = False
    inline_tool_calls: bool = False
    tools: object = None
    withheld_max: int = WITHHELD_MAX
    collect_bytes_max: int | None = None


class Translator(Protocol):
    """Turns the events of one stream into chunks, and observes them."""

    @property
    def identity(self) -> ChunkIdentity:
        """Model, provider, id and time of the stream's chunks."""

    @property
    def usage(self) -> TokenUsage | None:
        """The last usage reported, None if there was none."""

    @property
    def characters(self) -> int:
        """Characters of text, reasoning and tool arguments that the upstream sent so far (M4.2)."""

    @property
    def has_choice(self) -> bool:
        """Whether any choice was seen (M3.4)."""

    @property
    def finished(self) -> bool:
        """Whether every choice that was seen has a finish_reason (and one was seen)."""

    @property
    def all_finished(self) -> bool:
        """Whether every choice that was asked for has a finish_reason."""

    @property
    def error_payload(self) -> bytes:
        """The upstream's own error event, once `rewrite` returned ERROR."""

    @property
    def last_skipped(self) -> bytes:
        """The last event that was kept from the client, for error reports."""

    def splice(self, events: bytes) -> tuple[bytes, int] | None:
        """Rewrite a run of events at once, without looking at them singly.

        Args:
            events: whole events as they came.

        Returns:
            What the client gets for the first of them, and how many bytes these are; None if the
            first event has to be looked at.
        """

    def rewrite(self, data: bytes, out: list[bytes]) -> Kind:
        """Take the data of one event; append what the client gets to `out`.

        Raises:
            NotAChunk: `data` is not JSON.
            ReplyTooLarge: a collected reply, or what has to be remembered, is over its bound.
        """

    def flush(self) -> bytes:
        """Return what is still withheld from the client: called once, before any end of the stream
        that the client is there to see.
        """

    def closing(self) -> bytes:
        """Return what precedes `[DONE]` on a stream that completed: the usage chunk, if the client
        asked for it (M2.4).
        """

    def result(self) -> bytes:
        """Return the collected `chat.completion` as JSON (`collect_bytes_max` only)."""
