"""Who may call and what they may name: keys, models, agents (O3)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from planes.settings.base import (
    Amount,
    Count,
    Line,
    RequiredSecret,
    Section,
    Text,
    complaint,
    matching,
)
from planes.settings.tools import Tool, tool_name

# In micro-USD, and for the most tokens that a request can claim, these are far inside 64 bits.
BALANCE_USD_MAX = 1_000_000_000
PRICE_USD_MAX = 1_000_000
KeyStatus = Literal["active", "suspended", "revoked"]


class Key(Section):
    """A static key of a client."""

    key: RequiredSecret = Field(
        description="The key that clients send; the workflows plane takes only those that begin "
        "with `ozk_` (W1)."
    )
    org: Line = Field(description="The organisation that the key belongs to.")
    name: Line | None = Field(default=None, description="A name for people to tell keys apart.")
    trial: bool = Field(default=False, description="Whether usage is logged but never debited.")
    balance_usd: Annotated[Amount, Field(le=BALANCE_USD_MAX)] | None = Field(
        default=None, description="Opening balance of the org in US dollars; null sets none."
    )
    max_concurrent: Count | None = Field(
        default=None, description="Requests of the org in flight at once; null is no limit (M1.2)."
    )
    status: KeyStatus = Field(
        default="active", description="active, suspended (403) or revoked (401)."
    )
    comments: bool = Field(
        default=True, description="Whether /api/v1 streams carry comments (M1.4, M2.1)."
    )


class Price(Section):
    """What a model costs (M4.4)."""

    prompt_usd_per_mtok: Amount = Field(
        le=PRICE_USD_MAX, description="US dollars for a million prompt tokens."
    )
    completion_usd_per_mtok: Amount = Field(
        le=PRICE_USD_MAX, description="US dollars for a million completion tokens."
    )


class Candidate(Section):
    """One place that can serve a model."""

    provider: Text = Field(description="A name from `providers`.")
    model: Text = Field(description="The provider's own name of the model.")


class Model(Section):
    """A slug that clients may name."""

    candidates: tuple[Candidate, ...] = Field(
        min_length=1, description="Who serves it, in the order of failover (M3.3)."
    )
    price: Price | None = Field(
        default=None, description="Its price; null takes the bundled price list (M4.4)."
    )


class Agent(Section):
    """A model with a task of its own (W3.4)."""

    model: Text | None = Field(default=None, description="The model's slug.")
    candidates: tuple[Candidate, ...] | None = Field(
        default=None, min_length=1, description="Who serves it, in order, instead of `model`."
    )
    provider: Text | None = Field(
        default=None, description="A provider whose default model serves it (A1.2)."
    )
    system: str = Field(default="", description="The system prompt.")
    max_tokens: Count | None = Field(
        default=None, description="Largest output in tokens; null leaves it to the model."
    )
    parameters: Mapping[str, Any] = Field(
        default={}, description="Further request fields, passed as they are (temperature, …)."
    )
    tools: tuple[Tool, ...] = Field(
        default=(),
        description="Tools that the gateway runs, and others in the OpenAI form, which are passed "
        "as they are for what the provider itself runs: a call of one of these is an error to the "
        "model.",
    )
    tool_rounds: Count = Field(
        default=8, description="How often one call may run tools before it fails."
    )

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model is None and self.candidates is None and self.provider is None:
            raise complaint("must have `model`, `candidates` or `provider`")
        return self

    @model_validator(mode="after")
    def _names_tools_once(self) -> Self:
        names = [name for name in map(tool_name, self.tools) if name is not None]
        if len(set(names)) != len(names):
            raise complaint("has two `tools` of one name")
        return self


AgentId = Annotated[
    str, matching(r"[A-Za-z0-9_-]{1,64}", "must be 1 to 64 letters, digits, `_` or `-`")
]
ProviderName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be letters, digits, `.`, `_` and `-`: clients name it before a `/`",
    ),
]
Slug = Annotated[str, matching(r"[!-~]+", "must be printable ASCII without spaces")]
