"""Runs of many tasks: workflows and agents_plane (O3, W1 to W3, A1)."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from planes.settings.base import ApiKey, Count, HttpUrl, Line, Positive, Section, by_kind
from planes.settings.tools import HostPattern, NetworkText


class EmbeddedEngine(Section):
    """Runs documents in this process (W3.1)."""

    kind: Literal["embedded"] = Field(default="embedded", description="Says which engine it is.")


class HttpEngine(Section):
    """Hands documents to a remote engine (W3.2)."""

    kind: Literal["http"] = Field(description="Says which engine it is.")
    base_url: HttpUrl = Field(description="http(s) URL of the engine.")
    api_key: ApiKey = Field(default=None, description="The engine's key; left out: none is sent.")
    allow_stream_origins: tuple[HttpUrl, ...] = Field(
        default=(),
        description="Further origins whose sub-streams may be opened, without the key; "
        "a path behind them is not looked at.",
    )
    connect_timeout_s: Positive = Field(
        default=10, description="Seconds to connect, to the engine or to a sub-stream."
    )
    header_timeout_s: Positive = Field(
        default=60, description="Seconds to the response headers of either."
    )
    idle_timeout_s: Positive = Field(
        default=600,
        description="Seconds of silence, heartbeats and comments counted as sound, after which the "
        "engine is taken for dead: the run ends with engine_error.",
    )
    stream_idle_timeout_s: Positive = Field(
        default=60, description="Seconds of silence after which a sub-stream is closed."
    )
    stream_finish_timeout_s: Positive = Field(
        default=30,
        description="Seconds that a task's end frame waits for its sub-stream, and the outcome for "
        "workflow_result.",
    )


class DurableEngine(Section):
    """Runs documents so that a run survives its process (W3.3)."""

    kind: Literal["durable"] = Field(description="Says which engine it is.")


Engine = Annotated[
    Annotated[EmbeddedEngine, Tag("embedded")]
    | Annotated[HttpEngine, Tag("http")]
    | Annotated[DurableEngine, Tag("durable")],
    by_kind("embedded", "http", "durable"),
]


class Workflows(Section):
    """The workflows plane."""

    engine: Engine = Field(default=EmbeddedEngine(), description="What runs the documents (W3).")
    orphan_after_s: Positive = Field(
        default=300, description="Seconds without a sign of life that make a run an orphan (W2.5)."
    )
    heartbeat_s: Positive = Field(
        default=15, description="Seconds of silence between two heartbeat events (W2.4)."
    )
    max_runs: Count = Field(
        default=1000, description="Runs that work at once in one process; more are answered 503."
    )


class AgentsPlane(Section):
    """The agents plane's wire (A1.3)."""

    keepalive_s: Positive = Field(
        default=15, description="Seconds of silence after which a comment is sent."
    )
    keepalive_comment: Line = Field(
        default="OCEAN PROCESSING", description="Text of that comment; one line."
    )
    tool_hosts: tuple[HostPattern, ...] = Field(
        default=(),
        description="Hosts that tools of agents may call (W3.4): `api.example.com`, "
        "`*.example.com` for all below it; with `:8443`, that port only.",
    )
    tool_networks: tuple[NetworkText, ...] = Field(
        default=(),
        description="Networks, as `10.1.0.0/16`, in which tools may be although their addresses "
        "are not public. Any other such address is refused, whatever a name resolves to.",
    )
