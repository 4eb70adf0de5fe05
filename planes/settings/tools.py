"""Tools of agents: what a model may have done (W3.4)."""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from planes.settings.base import (
    Count,
    HeaderName,
    HeaderValue,
    HttpLink,
    Positive,
    Section,
    Text,
    complaint,
    matching,
)

ToolName = Annotated[
    str, matching(r"[A-Za-z0-9_-]{1,64}", "must be 1 to 64 letters, digits, `_` or `-`")
]


HostPattern = Annotated[
    str,
    matching(
        r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?"
        r"|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?",
        "must be a host, as `api.example.com`, `*.example.com` or `api.example.com:8443`",
    ),
]


def _network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        raise complaint("must be a network, as `10.1.0.0/16`") from None


NetworkText = Annotated[str, AfterValidator(_network)]


class HttpTool(Section):
    """A tool that the gateway runs: one HTTP request."""

    name: ToolName = Field(description="The tool's name for the model.")
    description: Text = Field(description="What it does, for the model.")
    url: HttpLink = Field(
        description="http(s) URL that is called, its host one of `agents_plane.tool_hosts`. "
        "Redirects are not followed."
    )
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = Field(
        default="POST",
        description="Arguments are the query of GET and DELETE, else a JSON body.",
    )
    parameters: Mapping[str, Any] = Field(
        default={"type": "object", "properties": {}},
        description="JSON Schema of the arguments; a call that does not fit it is not run.",
    )
    headers: Mapping[HeaderName, HeaderValue] = Field(
        default={}, repr=False, description="Headers of each request; may hold secrets."
    )
    timeout_s: Positive = Field(default=30, description="Seconds for the whole request.")
    max_bytes: Count = Field(
        default=65536, description="Largest answer in bytes; a larger one is an error."
    )

    @field_validator("parameters")
    @classmethod
    def _is_a_schema(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        # Imported here: a configuration without tools is checked without the relay.
        from relay.engines.embedded.schemas import AnswerSchema, SchemaFault

        try:
            AnswerSchema(dict(value))
        except SchemaFault as error:
            raise complaint(str(error)) from None
        if value.get("type") != "object":
            raise complaint("must have `type: object`: arguments have names")
        return value

    def declaration(self) -> dict[str, Any]:
        """Return what a model is told of it, in the OpenAI form."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


def _form(value: object) -> str:
    if isinstance(value, HttpTool) or (isinstance(value, Mapping) and "url" in value):
        return "http"
    return "declared"


Tool = Annotated[
    Annotated[HttpTool, Tag("http")] | Annotated[Mapping[str, Any], Tag("declared")],
    Discriminator(_form),
]


def tool_name(tool: object) -> str | None:
    """Return the name of a tool of either form, None if it has none."""
    if isinstance(tool, HttpTool):
        return tool.name
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def host_matches(pattern: str, host: str, port: int | None) -> bool:
    """Whether a host is one that a pattern names.

    Args:
        pattern: `api.example.com`, `*.example.com` (below it, at any depth), each with `:port` or
            without; `[::1]:8080` for an address of IPv6.
        host: without brackets. port: the one that is connected to.
    """
    pattern, host = pattern.lower(), host.lower().rstrip(".")
    name, colon, wanted = pattern.rpartition(":")
    if not colon or name.endswith(":") or "]" in wanted or not wanted.isdecimal():
        name, wanted = pattern, ""
    if wanted and int(wanted) != port:
        return False
    name = name.strip("[]")
    return host.endswith(name[1:]) if name.startswith("*.") else host == name
