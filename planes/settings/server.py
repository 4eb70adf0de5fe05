"""The process and what it stands on: server, store, bus, journal, billing, telemetry (O3)."""

import base64
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator

from planes.settings.base import (
    Amount,
    Count,
    HttpLink,
    HttpUrl,
    Integer,
    Positive,
    RequiredSecret,
    Section,
    Text,
    complaint,
    not_served,
)

_SQLITE = "sqlite:///"


class Server(Section):
    """The listening process."""

    host: Text = Field(default="127.0.0.1", description="Address or name to listen on.")
    port: Annotated[Integer, Field(ge=0, le=65535)] = Field(
        default=8080, description="TCP port to listen on; 0 takes a free one."
    )
    workers: Count = Field(default=1, description="Worker processes; only 1 is served yet.")
    shutdown_grace_s: Amount = Field(
        default=25, description="Seconds that running streams get after SIGTERM (M3.6)."
    )
    max_body_mb: Positive = Field(
        default=32, description="Largest request body in MiB; beyond it 413 (M1.1)."
    )
    write_stall_s: Positive = Field(
        default=300,
        description="Seconds after which a reader that takes nothing counts as hung up (M3.5).",
    )

    @field_validator("workers")
    @classmethod
    def _one_worker(cls, value: int) -> int:
        if value > 1:
            raise not_served("more than one worker", "`workers: 1` is")
        return value

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * 1024 * 1024)


class Store(Section):
    """The database for keys, usage, runs and journals."""

    url: str = Field(
        default="sqlite:///sluicegate.db",
        repr=False,
        description="Database URL: sqlite:///FILE (a fourth slash begins an absolute path).",
    )

    @field_validator("url")
    @classmethod
    def _sqlite(cls, value: str) -> str:
        if value.startswith("postgres"):
            raise not_served("postgresql://", "sqlite:///FILE is")
        if not value.startswith(_SQLITE) or len(value) == len(_SQLITE):
            raise complaint("must be sqlite:///FILE")
        return value

    @property
    def sqlite_path(self) -> str:
        """The file behind a sqlite URL, as written."""
        return self.url.removeprefix(_SQLITE)


class Bus(Section):
    """How processes tell each other of news."""

    url: str = Field(
        default="memory://",
        repr=False,
        description="Message bus URL: memory:// (within one process).",
    )

    @field_validator("url")
    @classmethod
    def _memory(cls, value: str) -> str:
        if value.startswith(("redis://", "rediss://", "valkey://")):
            raise not_served("redis://", "memory:// is")
        if value != "memory://":
            raise complaint("must be memory://")
        return value


class Journal(Section):
    """What is kept of finished runs."""

    retention_days: Positive = Field(
        default=30, description="Days that journals and outputs of runs are kept."
    )


class Webhook(Section):
    """A URL that is told of every settled request, and may be asked before it (M4.3)."""

    url: HttpLink = Field(repr=False, description="http(s) URL that notices are posted to.")
    secret: RequiredSecret = Field(
        description="Signs every notice; the receiver checks it. With the prefix `whsec_`, base64."
    )
    timeout_s: Positive = Field(default=5, description="Seconds that one call may take.")
    authorize: bool = Field(
        default=False, description="Whether it is asked before each request; 402 refuses it."
    )

    @field_validator("secret")
    @classmethod
    def _usable(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if text.startswith("whsec_"):
            try:
                decoded = base64.b64decode(text.removeprefix("whsec_"), validate=True)
            except ValueError:
                raise complaint("must be base64 after `whsec_`") from None
            if not decoded:
                raise complaint("must not be empty after `whsec_`")
        return value


class Billing(Section):
    """Holds, settlements and their sweeper (M4.2, M4.3)."""

    sweep_interval_s: Positive = Field(
        default=300, description="Seconds between two sweeps of abandoned holds."
    )
    hold_ttl_s: Positive = Field(
        default=900, description="Age in seconds at which a hold without a worker is settled."
    )
    hold_output_tokens: Count = Field(
        default=4096, description="Output tokens to hold for a request without max_tokens."
    )
    webhook: Webhook | None = Field(
        default=None, description="A webhook beside the ledger; null is none."
    )


class Telemetry(Section):
    """Logs, metrics and traces."""

    log: Literal["json", "console"] = Field(
        default="json", description="Log lines as JSON, or for a human to read."
    )
    metrics: bool = Field(
        default=True, description="Whether there is GET /metrics (Prometheus); it asks for no key."
    )
    otlp_endpoint: HttpUrl | None = Field(
        default=None,
        description="Base URL of an OTLP/HTTP collector for traces, as `http://localhost:4318`; "
        "needs the extra `otel`. Null is no traces.",
    )
