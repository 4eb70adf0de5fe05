"""Who serves models: the `providers` section (O3, M2.7, M3.3).

A provider is one of three things, told apart by `shape` or `kind`: a service on the network that
speaks a known shape, the local model, or recorded transcripts.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from planes.settings.base import (
    ApiKey,
    HeaderName,
    HeaderValue,
    HttpUrl,
    Positive,
    Section,
    Text,
    complaint,
    is_loopback,
)

Shape = Literal["openai", "anthropic", "gemini"]
NO_KEY = "api_key is empty"


class Reading(Section):
    """How a provider is asked and its reply is read, whatever it is."""

    stream_options: bool = Field(
        default=True, description="Whether the provider may be sent stream_options (M3.3)."
    )
    aggregate: bool = Field(
        default=False,
        description="Whether a plain request is dialled as a stream and aggregated (M4.1).",
    )
    reasoning: bool = Field(
        default=True,
        description="Whether the deployment takes reasoning parameters; false removes them (M2.7).",
    )
    cumulative_deltas: bool = Field(
        default=False, description="Whether each chunk repeats all the text so far (M2.7)."
    )
    inline_tool_calls: bool = Field(
        default=False, description="Whether tool calls arrive inside the text (M2.7)."
    )
    first_byte_timeout_s: Positive | None = Field(
        default=None,
        description="Seconds from dialling to the first byte of a stream that is not of a comment; "
        "then the next candidate is tried. The last one is not cut. null is off (M3.3).",
    )
    peek_first_event_s: Positive | None = Field(
        default=None,
        description="Seconds, from the status on, that a stream may take to its first event before "
        "it is sent as it is: an error or an end before it is a failed attempt. "
        "null is off (M3.3).",
    )
    idle_timeout_s: Positive | None = Field(
        default=None,
        description="Seconds of silence, comments counted as sound, that end a stream; "
        "null is off (M3.3).",
    )
    max_event_mb: Positive = Field(
        default=16, description="Largest event in MiB; beyond it the stream fails (M3.1)."
    )

    @property
    def max_event_bytes(self) -> int:
        """`max_event_mb` in bytes."""
        return int(self.max_event_mb * 1024 * 1024)

    @property
    def off_reason(self) -> str | None:
        """Why this provider is not served, or None if it is."""
        return None


class HttpProvider(Reading):
    """A service on the network."""

    shape: Shape = Field(description="The wire that it speaks (M5).")
    base_url: HttpUrl = Field(
        description="http(s) URL to which the shape's route is appended: /chat/completions, "
        "/v1/messages or /v1beta/models/… (the last two's version may stand in the URL)."
    )
    api_key: ApiKey = Field(
        default=None,
        description="The provider's key. Left out: no authentication. Empty: the provider is "
        "off, unless base_url is on this machine.",
    )
    connect_timeout_s: Positive = Field(default=5, description="Seconds to connect.")
    header_timeout_s: Positive = Field(
        default=120, description="Seconds to the response headers; beyond it 504 (M1.2)."
    )
    headers: Mapping[HeaderName, HeaderValue] = Field(
        default={}, repr=False, description="Headers added to each request; may hold secrets."
    )

    @field_validator("base_url")
    @classmethod
    def _is_a_base(cls, value: str) -> str:
        for route in ("/chat/completions", "/messages"):
            if value.endswith(route):
                raise complaint(f"must be cut before {route}: that is appended to it")
        return value

    @property
    def off_reason(self) -> str | None:
        """Why this provider is not served, or None if it is (O3)."""
        empty = self.api_key is not None and not self.api_key.get_secret_value()
        if empty and not is_loopback(self.base_url):
            return NO_KEY
        return None


class LocalProvider(Reading):
    """The model that runs in a child process of the gateway (O1.1)."""

    kind: Literal["local"] = Field(description="Says that the provider is the local model.")
    model: Literal["smollm2-135m"] = Field(
        default="smollm2-135m", description="Name of the local model; there is this one."
    )
    aggregate: Literal[True] = Field(
        default=True, description="Always true: the local server never stops a plain request."
    )
    header_timeout_s: Positive = Field(
        default=120, description="Seconds to the response headers, waiting for a slot included."
    )


class ReplayProvider(Reading):
    """Recorded transcripts instead of a model (O1.1)."""

    kind: Literal["replay"] = Field(description="Says that the provider replays transcripts.")
    path: Text | None = Field(
        default=None, description="Folder of transcripts; null takes those of the package."
    )


def _tag(value: object) -> str | None:
    if isinstance(value, Mapping):
        kind, shape = value.get("kind"), value.get("shape")
    else:
        kind, shape = getattr(value, "kind", None), getattr(value, "shape", None)
    if kind is None:
        return "http" if shape is not None else None
    return kind if kind in ("local", "replay") else None


Provider = Annotated[
    Annotated[HttpProvider, Tag("http")]
    | Annotated[LocalProvider, Tag("local")]
    | Annotated[ReplayProvider, Tag("replay")],
    Discriminator(
        _tag,
        custom_error_type="setting",
        custom_error_message="must have `shape: openai|anthropic|gemini` and `base_url`, "
        "or `kind: local`, or `kind: replay`",
    ),
]
