"""The tools of agents in the configuration (W3.4)."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from planes.settings import HttpTool, Settings, explain, notices
from planes.settings.tools import host_matches

TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "url": "https://api.example.com/look",
}
DECLARED: dict[str, Any] = {"type": "function", "function": {"name": "click", "parameters": {}}}


def settings(*tools: dict[str, Any], **plane: Any) -> Settings:
    return Settings.model_validate(
        {
            "providers": {"replay": {"kind": "replay"}},
            "agents": {"a": {"provider": "replay", "tools": list(tools)}},
            "agents_plane": {"tool_hosts": ["api.example.com"]} | plane,
        }
    )


def problems(*tools: dict[str, Any], **plane: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        settings(*tools, **plane)
    assert "s3cret" not in str(caught.value)
    return [
        f"{'.'.join(map(str, complaint.path))}: {complaint.message}"
        for complaint in explain(caught.value)
    ]


def test_both_forms() -> None:
    tool, declared = settings(TOOL, DECLARED).agents["a"].tools
    assert isinstance(tool, HttpTool)
    assert (tool.method, tool.timeout_s, tool.max_bytes) == ("POST", 30, 65536)
    assert tool.declaration() == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    assert declared == DECLARED


def test_headers_are_in_no_text() -> None:
    found = settings(TOOL | {"headers": {"x-key": "s3cret"}})
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"url": "https://api.example.org/x"}, "url: names a host that is none of"),
        ({"url": "https://api.example.com.evil.net"}, "url: names a host that is none of"),
        ({"url": "ftp://api.example.com"}, "url: must begin with http:// or https://"),
        ({"name": "a b"}, "name: must be 1 to 64 letters"),
        ({"parameters": {"type": "obj"}}, "parameters: is no JSON Schema"),
        ({"parameters": {"type": "string"}}, "parameters: must have `type: object`"),
        ({"parameters": {"type": "object", "$ref": "http://x/y"}}, "parameters: `$ref:"),
        ({"headers": {"x y": "s3cret"}}, "must be a header name"),
        ({"headers": {"x": "s3cret\n"}}, "must be a header value"),
        ({"method": "TRACE"}, "method:"),
        ({"max_bytes": 0}, "max_bytes: must be at least 1"),
        ({"tymeout": 3}, "tymeout"),
    ],
)
def test_problems_have_their_place(tool: dict[str, Any], problem: str) -> None:
    (found,) = problems(DECLARED, TOOL | tool)
    assert found.startswith("agents.a.tools.1.")
    assert problem in found


def test_names_are_there_once() -> None:
    twice = DECLARED | {"function": {"name": "look"}}
    assert problems(TOOL, twice) == ["agents.a: has two `tools` of one name"]


def test_hosts_and_networks() -> None:
    found = problems(tool_hosts=["https://x"], tool_networks=["10.0.0.1/8"])
    assert found == [
        "agents_plane.tool_hosts.0: must be a host, as `api.example.com`, `*.example.com` or "
        "`api.example.com:8443`",
        "agents_plane.tool_networks.0: must be a network, as `10.1.0.0/16`",
    ]
    plane = settings(TOOL, tool_networks=["10.1.0.0/16", "::1"]).agents_plane
    assert plane.tool_networks == ("10.1.0.0/16", "::1/128")


@pytest.mark.parametrize(
    ("host", "networks", "refused"),
    [
        ("127.0.0.1", [], True),
        ("127.0.0.1", ["127.0.0.1/32"], False),
        ("localhost", ["10.0.0.0/8"], True),
        ("localhost", ["::1"], False),
        ("[::1]", [], True),
        ("10.1.2.3", ["10.1.0.0/16"], False),
        ("93.184.215.14", [], False),
        ("api.example.com", [], False),  # wherever it leads, that is seen when it is called
    ],
)
def test_a_tool_at_an_address_that_is_refused_is_a_notice(
    host: str, networks: list[str], refused: bool
) -> None:
    tool = TOOL | {"url": f"http://{host}/look"}
    found = notices(settings(tool, DECLARED, tool_hosts=[host], tool_networks=networks))
    told = [notice for notice in found if notice.startswith("agent a: calls of the tool look")]
    assert len(told) == refused
    assert all(host.strip("[]") in notice and "tool_networks" in notice for notice in told)


@pytest.mark.parametrize(
    ("pattern", "host", "port", "matches"),
    [
        ("api.example.com", "api.example.com", 443, True),
        ("api.example.com", "API.example.com.", 443, True),
        ("api.example.com", "evil-api.example.com", 443, False),
        ("api.example.com", "api.example.com.evil.net", 443, False),
        ("api.example.com:8443", "api.example.com", 8443, True),
        ("api.example.com:8443", "api.example.com", 443, False),
        ("*.example.com", "a.b.example.com", 80, True),
        ("*.example.com", "example.com", 80, False),
        ("*.example.com", "badexample.com", 80, False),
        ("[::1]:8080", "::1", 8080, True),
        ("[::1]:8080", "::1", 80, False),
        ("[2001:db8::1]", "2001:db8::1", 80, True),
        ("127.0.0.1", "127.0.0.1", 5000, True),
    ],
)
def test_hosts(pattern: str, host: str, port: int, matches: bool) -> None:
    assert host_matches(pattern, host, port) is matches
