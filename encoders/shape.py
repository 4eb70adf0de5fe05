"""How a provider is asked and how its answer is read: the seam of the shapes. [pure]

Rule M5. `encoders.shapes` holds the shapes by name; nothing else asks which one a provider speaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from encoders.openai import ChunkIdentity
    from encoders.translator import StreamWants, Translator
    from encoders.usage import TokenUsage


class Untranslatable(ValueError):
    """A request holds what a shape has no words for.

    Attributes:
        param: the path of the field, as `messages.2.content.0`.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeReply:
    """A plain reply as its client gets it.

    Attributes:
        body: one `chat.completion` as JSON.
        usage: as reported, None if it was not.
        characters: of text, reasoning and tool arguments.
    """

    body: bytes
    usage: TokenUsage | None
    characters: int


class Shape(Protocol):
    """A wire that providers speak. Implementations hold no state."""

    def url(self, base_url: str, model: str, *, stream: bool) -> str:
        """Return the URL of a request; `base_url` has no trailing slash."""

    def auth(self, api_key: str) -> dict[str, str]:
        """Return the headers that a request always bears; with the provider's key unless empty."""

    def request(
        self, body: Mapping[str, Any], *, model: str, stream: bool, stream_options: bool
    ) -> dict[str, Any]:
        """Return the provider's request for a chat completion request.

        Args:
            body: as the client sent it; never changed.
            model: the provider's own name of the model.
            stream: whether a stream is asked for.
            stream_options: whether the provider may be sent `stream_options` (M3.3).

        Raises:
            Untranslatable: it cannot be said in this shape.
        """

    def translator(self, identity: ChunkIdentity, wants: StreamWants) -> Translator:
        """Return what reads one stream."""

    def is_reply(self, reply: object) -> bool:
        """Whether a parsed JSON document is a plain reply of this shape (not an error)."""

    def events_of(self, reply: Any) -> list[bytes]:
        """Take a plain reply apart into the data of the events that would have streamed it."""

    def whole(
        self, data: bytes, reply: Any, identity: ChunkIdentity, wants: StreamWants
    ) -> WholeReply:
        """Return a plain reply as its client gets it.

        Args:
            data: as it came. reply: the same, parsed; `is_reply` holds.
        """


def collected(shape: Shape, reply: Any, identity: ChunkIdentity, wants: StreamWants) -> WholeReply:
    """Translate a plain reply by the code that translates streams.

    Args:
        wants: with `collect_bytes_max` set.
    """
    translator = shape.translator(identity, wants)
    for data in shape.events_of(reply):
        translator.rewrite(data, [])
    translator.flush()
    return WholeReply(
        body=translator.result(), usage=translator.usage, characters=translator.characters
    )
