"""The decision plane (O3, D1 to D6)."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, Tag, field_validator

from planes.settings.base import (
    Amount,
    ApiKey,
    Count,
    HttpUrl,
    Line,
    Positive,
    Section,
    Text,
    by_kind,
    complaint,
)
from planes.settings.catalog import Price

Media = Literal["image", "audio", "document", "video"]
Limit = Annotated[Amount, AfterValidator(lambda v: int(v) if v.is_integer() else v)]
Limits = Mapping[Text, Limit]
_MODEL_LIMITS = ("questions", "choice_options", "score_levels")


class ChatLogprobsBackend(Section):
    """Decides by the token probabilities of a chat model (D6.5)."""

    kind: Literal["chat-logprobs"] = Field(description="Says which backend it is.")
    model: Text = Field(
        description="Slug of the chat model; all of its providers have the openai shape."
    )
    top_logprobs: Annotated[Count, Field(ge=2)] | None = Field(
        default=None,
        description="Tokens that the model lists at most, and so options of a question; null is "
        "20, and 400 for the local model.",
    )
    max_questions: Count = Field(default=64, description="Questions of a decide at most (D4.4).")
    questions_at_once: Count = Field(
        default=4, description="Chat requests that one decide has in flight at most."
    )
    images: bool = Field(default=False, description="Whether the model takes images.")


class SystemOneBackend(Section):
    """Asks a server with `POST /v1/systemone` (D6.5)."""

    kind: Literal["systemone"] = Field(description="Says which backend it is.")
    base_url: HttpUrl = Field(description="http(s) URL of the server.")
    api_key: ApiKey = Field(default=None, description="The server's key; left out: none is sent.")
    model: Text = Field(description="The server's own name of the model.")
    images: bool = Field(default=False, description="Whether the model takes images.")
    timeout_s: Positive = Field(
        default=130, description="Seconds to a whole answer; beyond it 504 (D5.6)."
    )


class SystemZeroBackend(Section):
    """Forwards to a compatible service (D6.5)."""

    kind: Literal["system-zero"] = Field(description="Says which backend it is.")
    base_url: HttpUrl = Field(description="http(s) URL of the service.")
    api_key: ApiKey = Field(default=None, description="The service's key; left out: the client's.")
    timeout_s: Positive = Field(
        default=130, description="Seconds to a whole answer; beyond it 504 (D5.6)."
    )

    @field_validator("api_key")
    @classmethod
    def _not_empty(cls, value: SecretStr | None) -> SecretStr | None:
        # An unset `${KEY:-}` must not turn into the forwarding of clients' keys, nor into no key.
        if value is not None and not value.get_secret_value():
            raise complaint("is empty: set it, or leave it out to forward the client's key")
        return value


DecisionBackend = Annotated[
    Annotated[ChatLogprobsBackend, Tag("chat-logprobs")]
    | Annotated[SystemOneBackend, Tag("systemone")]
    | Annotated[SystemZeroBackend, Tag("system-zero")],
    by_kind("chat-logprobs", "systemone", "system-zero"),
]


class DecisionModel(Section):
    """A decision model that clients may name."""

    id: Line = Field(description="Its name.")
    aliases: tuple[Line, ...] = Field(default=(), description="Further names of it.")
    limits: Limits = Field(
        default={},
        description="Its limits: `questions`, `choice_options`, `score_levels` (D4.4).",
    )
    price: Price | None = Field(
        default=None,
        description="What its text costs; null: as the chat model behind it, else nothing (D6.7).",
    )

    @field_validator("limits")
    @classmethod
    def _served(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        for name, most in value.items():
            if name not in _MODEL_LIMITS:
                raise complaint(f"has no limit of that name; there are {', '.join(_MODEL_LIMITS)}")
            if most < 1 or most != int(most):
                raise complaint(f"{name} must be a whole number from 1")
        return value


class DecisionPrice(Section):
    """What an answered decision costs beside its text (D6.7)."""

    image_usd: Amount = Field(default=0.003, description="US dollars for an image.")
    question_usd: Amount = Field(default=0.0001, description="US dollars for a question.")
    call_usd: Amount = Field(default=0.00001, description="US dollars for a call.")


def _account_streams(value: object) -> object:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not number and value != "half_concurrency":
        raise complaint("must be a whole number from 1, or half_concurrency")
    return value


class Decision(Section):
    """The decision plane."""

    backend: DecisionBackend | None = Field(
        default=None, description="What decides; null switches the plane off (D6.5)."
    )
    models: tuple[DecisionModel, ...] = Field(
        default=(DecisionModel(id="rightnow-decision", aliases=("system-zero",)),),
        description="The models that clients may name (D6.3).",
    )
    media: tuple[Media, ...] = Field(
        default=("image", "audio", "document", "video"),
        description="Kinds of attachments that are served (D4.3).",
    )
    price: DecisionPrice = Field(default=DecisionPrice(), description="Prices (D6.7).")
    account_streams: Annotated[
        int | Literal["half_concurrency"], BeforeValidator(_account_streams)
    ] = Field(default=1, description="Open sockets for an account: a number or a policy (D1.5).")
    limits: Limits = Field(
        default={}, description="Any limit by its name, whose unit is in the name (D1.7, D3)."
    )

    @field_validator("limits")
    @classmethod
    def _known(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        # Imported here: `check` is fast because it loads the relay only if it has to.
        from relay.decisions.limits import DecisionLimits

        try:
            DecisionLimits.of(value)
        except ValueError as error:
            raise complaint(str(error)) from None
        return value
