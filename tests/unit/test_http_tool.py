"""A tool that is one HTTP request (W3.4): where it may go, what it sends, what comes back."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from relay.agents.addresses import AddressRule
from relay.agents.http_tool import HttpTool, ToolFailure
from relay.agents.tools import arguments_of
from relay.engines.embedded.schemas import AnswerSchema
from tests.support.fake_upstream import (
    FakeUpstream,
    Flood,
    Head,
    Rst,
    Send,
    Wait,
    json_answer,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = "s3cret-tool-key"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]"}},
    "required": ["city"],
}
LOOPBACK = AddressRule([ipaddress.ip_network("127.0.0.0/8")])


def tool(url: str, *, addresses: AddressRule = LOOPBACK, **more: Any) -> HttpTool:
    fields: dict[str, Any] = {
        "name": "look",
        "url": url,
        "method": "POST",
        "headers": {"Authorization": f"Bearer {SECRET}"},
        "schema": AnswerSchema(SCHEMA),
        "addresses": addresses,
        "timeout_s": 5.0,
        "max_bytes": 1000,
    }
    return HttpTool(**(fields | more))


@pytest.fixture
async def up() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as up:
        yield up


async def failure_of(made: HttpTool, arguments: Any = None) -> ToolFailure:
    with pytest.raises(ToolFailure) as caught:
        await made.run({"city": "rome"} if arguments is None else arguments)
    assert SECRET not in caught.value.result()
    return caught.value


async def test_arguments_are_the_body_of_a_post(up: FakeUpstream) -> None:
    up.script(*json_answer({"sun": True}))
    answer = await tool(up.origin + "/look?v=1").run({"city": "rome"})
    assert json.loads(answer) == {"sun": True}
    (request,) = up.requests
    assert (request.method, request.path, request.json) == ("POST", "/look?v=1", {"city": "rome"})
    assert request.headers["authorization"] == f"Bearer {SECRET}"
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_arguments_are_the_query_of_a_get(method: str, up: FakeUpstream) -> None:
    """What the operator wrote into the query stays, whatever the model says."""
    up.script(*json_answer({}))
    made = tool(up.origin + "/look?key=mine", method=method)
    arguments = {"city": "a&b=c ?", "key": "theirs", "n": 2, "on": True, "no": None, "l": [1, "x"]}
    await made.run(arguments)
    (request,) = up.requests
    assert request.method == method
    assert request.body == b""
    assert parse_qsl(urlsplit(request.path).query) == [
        ("key", "mine"),
        ("city", "a&b=c ?"),
        ("n", "2"),
        ("on", "true"),
        ("l", '[1,"x"]'),
    ]


@pytest.mark.parametrize("arguments", [{}, {"city": 1}, {"city": "ROME"}, [], "x", 3])
async def test_arguments_that_do_not_fit_are_not_sent(arguments: Any, up: FakeUpstream) -> None:
    assert (await failure_of(tool(up.origin), arguments)).word == "invalid_arguments"
    assert up.requests == []


def test_arguments_are_read_exactly() -> None:
    """W3.4: the tool gets the numbers that the model wrote, or none."""
    call = {"function": {"arguments": '{"id": 123456789012345678901}'}}
    assert arguments_of(call) == {"id": 123456789012345678901}
    for text in ('{"id": 1e400}', '{"id": NaN}'):
        with pytest.raises(ToolFailure) as caught:
            arguments_of({"function": {"arguments": text}})
        assert caught.value.word == "invalid_arguments"


async def test_patterns_are_searched_in_linear_time(up: FakeUpstream) -> None:
    pattern = {"type": "string", "pattern": "^(a+)+$"}
    schema = AnswerSchema({"type": "object", "properties": {"city": pattern}})
    made = tool(up.origin, schema=schema)
    async with asyncio.timeout(5):
        assert (await failure_of(made, {"city": "a" * 50_000 + "!"})).word == "invalid_arguments"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_this_machine_is_not_reached(host: str, up: FakeUpstream) -> None:
    made = tool(f"http://{host}:{up.port}/", addresses=AddressRule())
    assert (await failure_of(made)).word == "refused"
    assert up.requests == []
    assert up.connections == []


async def test_a_name_is_judged_by_what_it_resolves_to(
    up: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time anew, at the address that is connected to: a name that was public once is not
    trusted the next time.
    """
    asked: list[str] = []

    def resolved(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    url = f"http://api.example.com:{up.port}/"
    assert (await failure_of(tool(url, addresses=AddressRule()))).word == "refused"
    up.script(*json_answer({}))
    await tool(url).run({"city": "rome"})
    assert asked == ["api.example.com", "api.example.com"]
    assert len(up.requests) == 1


async def test_the_address_that_is_allowed_is_taken(
    up: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("10.0.0.1", "169.254.169.254", "127.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    up.script(*json_answer({}))
    assert await tool(f"http://api.example.com:{up.port}/").run({"city": "rome"}) == "{}"


async def test_redirects_are_not_followed(up: FakeUpstream) -> None:
    up.script(Head(status=302, headers={"location": up.origin + "/elsewhere"}))
    assert (await failure_of(tool(up.origin))).word == "failed_status"
    assert len(up.requests) == 1


async def test_an_error_status_is_told_without_our_secrets(up: FakeUpstream) -> None:
    said = {"error": f"bad key {SECRET}, Bearer {SECRET}"}
    up.script(*json_answer(said, status=403))
    failure = await failure_of(tool(up.origin))
    assert failure.word == "failed_status"
    assert "403" in failure.detail
    assert "bad key" in failure.detail


async def test_an_answer_is_told_without_our_secrets(up: FakeUpstream) -> None:
    up.script(Head(), Send(f"you sent {SECRET} \xff".encode("latin-1")))
    assert await tool(up.origin).run({"city": "rome"}) == "you sent *** \ufffd"


async def test_an_answer_is_bounded(up: FakeUpstream) -> None:
    up.script(Head(), Send(b"x" * 1000))
    assert len(await tool(up.origin).run({"city": "rome"})) == 1000
    up.script(Flood(b"x" * 65536, 1000))
    assert (await failure_of(tool(up.origin))).word == "too_large"
    assert up.requests[1].bytes_written < 20_000_000
    await up.requests[1].wait_closed()


async def test_time_is_bounded(up: FakeUpstream) -> None:
    up.script(Head(), Send(b"x"), Wait(asyncio.Event()))
    assert (await failure_of(tool(up.origin, timeout_s=0.2))).word == "timeout"
    await up.requests[0].wait_closed()


async def test_what_breaks_is_unreachable(up: FakeUpstream) -> None:
    up.script(Head(), Send(b"x"), Rst())
    assert (await failure_of(tool(up.origin))).word == "unreachable"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert (await failure_of(tool(f"http://127.0.0.1:{port}"))).word == "unreachable"
