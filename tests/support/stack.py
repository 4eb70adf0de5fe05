"""One running gateway before one fake provider, shared by the end-to-end tests of the models plane.

    answer = await stack.ask(*openai_stream(["Hi"]))
    assert answer.text == "Hi"

Starting a gateway takes half a second and a question a few milliseconds; so the process is shared
and what a test must not leave behind (scripts nobody asked for, faults in the log) is checked after
each one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.ports import free_port
from tests.support.gateway import KEY, MODEL, UPSTREAM_KEY, UPSTREAM_MODEL, config_for
from tests.support.shapes import SERVED, provider_of
from tests.support.wire import chunks, data_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from tests.support.fake_upstream import FakeUpstream, RecordedRequest, Step
    from tests.support.gateway import GatewayProcess
    from tests.support.wire import RawClient

V1: Final = "/v1"
API_V1: Final = "/api/v1"
MESSAGES: Final = [{"role": "user", "content": "Hello"}]

SUSPENDED_KEY: Final = "ozk_test_suspended_0123456789"
REVOKED_KEY: Final = "ozk_test_revoked_0123456789"
QUIET_KEY: Final = "ozk_test_no_comments_0123456789"
SINGLE_KEY: Final = "ozk_test_single_0123456789"
SINGLE_KEY_2: Final = "ozk_test_single_second_0123456789"
SECRET_HEADER: Final = "team-token/with+signs=="
ODD_SECRET: Final = 'sk/odd"key\\0123456789'  # every JSON writer spells it in its own way

BODY_LIMIT_BYTES: Final = 1024 * 1024
EVENT_LIMIT_BYTES: Final = 64 * 1024
HEADER_TIMEOUT_S: Final = 0.4
_ANSWER_TIMEOUT_S: Final = 30.0
_UPSTREAM_MODEL_MEMBER: Final = b'"model":"%s"' % UPSTREAM_MODEL.encode()


def config(up: FakeUpstream, mute: socket.socket) -> dict[str, Any]:
    """The configuration of the shared gateway.

    Args:
        mute: a socket whose backlog is full: connecting to it takes for ever.
    """

    def provider(**more: Any) -> dict[str, Any]:
        return {"shape": "openai", "base_url": up.base_url, "api_key": UPSTREAM_KEY} | more

    def key(text: str, org: str, **more: Any) -> dict[str, Any]:
        return {"key": text, "org": org} | more

    base = config_for(up)
    base["server"]["max_body_mb"] = BODY_LIMIT_BYTES / 1024**2
    base["keys"] += [
        key(SUSPENDED_KEY, "suspended", status="suspended"),
        key(REVOKED_KEY, "revoked", status="revoked"),
        key(QUIET_KEY, "quiet", comments=False),
        key(SINGLE_KEY, "single", max_concurrent=1),
        key(SINGLE_KEY_2, "single", max_concurrent=1),
    ]
    base["providers"]["fake"]["headers"] = {"x-team": SECRET_HEADER}
    base["providers"] |= {
        "plain": provider(stream_options=False),
        "aggregate": provider(aggregate=True),
        "bounded": provider(max_event_mb=EVENT_LIMIT_BYTES / 1024**2),
        "impatient": provider(header_timeout_s=HEADER_TIMEOUT_S),
        "odd": provider(api_key=ODD_SECRET),
        "refusing": provider(base_url=f"http://127.0.0.1:{free_port()}/v1"),
        "nameless": provider(base_url="http://no-such-host.invalid/v1"),
        "mute": provider(
            base_url="http://{}:{}/v1".format(*mute.getsockname()),
            connect_timeout_s=HEADER_TIMEOUT_S,
        ),
    }
    base["providers"] |= {shape: provider_of(shape, up) for shape in SERVED}
    candidates = [{"provider": name, "model": "second"} for name in ("refusing", "fake")]
    base["models"]["failover/model"] = {"candidates": candidates}
    return base


def served(data: bytes, *, model: str = MODEL, provider: str = "fake") -> bytes:
    """A chunk of `tests.support.script.chunk` as the client must get it, to the byte (M2.2)."""
    ours = b'"model":"%s","provider":"%s"' % (model.encode(), provider.encode())
    assert data.count(_UPSTREAM_MODEL_MEMBER) == 1
    return data.replace(_UPSTREAM_MODEL_MEMBER, ours)


@dataclass(frozen=True)
class Answer:
    """One whole response."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header that came at most once."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that is one, in the envelope of M1.2, checked."""
        assert self.status >= 400, (self.status, self.body[:200])
        assert self.header("content-type") == "application/json"
        assert (self.header("x-request-id") or "").startswith("req_")
        document = self.json
        assert document.keys() == {"error"}
        error: dict[str, Any] = document["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def data(self) -> list[bytes]:
        """The data of every event; comments are left out."""
        return data_events(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Every chunk of a stream that ended in its one `[DONE]`, parsed (M2.1)."""
        assert self.status == 200, (self.status, self.body[:500])
        assert self.data[-1:] == [b"[DONE]"], self.body[-500:]
        assert self.data.count(b"[DONE]") == 1
        return chunks(self.body)

    @property
    def text(self) -> str:
        """The contents of the first choice."""
        deltas = [c["delta"] for chunk in self.chunks for c in chunk["choices"] if not c["index"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def in_band(self) -> dict[str, Any]:
        """The error of a stream that failed after its first byte, its form checked (M3.4)."""
        *before, last = self.chunks
        assert not any("error" in chunk for chunk in before)
        assert last["choices"][0]["finish_reason"] == "error"
        assert last["model"]
        assert last["provider"]
        assert "usage" not in last
        error: dict[str, Any] = last["error"]
        assert error.keys() == {"message", "type", "code", "metadata"}
        assert error["type"] == "upstream_error"
        assert error["metadata"].keys() == {"provider_name", "raw"}
        return error


class Stack:
    """A gateway and its provider, as one test sees them."""

    def __init__(self, up: FakeUpstream, gateway: GatewayProcess) -> None:
        self.up = up
        self.gateway = gateway
        self._first_request = len(up.requests)
        self._log_file = gateway.workdir / "stderr"
        self._log_start = self._log_file.stat().st_size
        self._names = itertools.count()

    async def ask(self, *steps: Step, **request: Any) -> Answer:
        """Asks once, the provider answering with `steps`, and reads the answer to its end.

        Args:
            request: see `client`.
        """
        async with self.client(*steps, **request) as client:
            await client.read_all(timeout=_ANSWER_TIMEOUT_S)
            assert client.complete, f"the answer was cut off: {client.body[-300:]!r}"
        return Answer(client.status, client.headers, client.body)

    @asynccontextmanager
    async def client(
        self,
        *steps: Step,
        base: str = V1,
        key: str | None = KEY,
        headers: Iterable[tuple[str, str]] = (),
        raw: bytes | None = None,
        version: str = "HTTP/1.1",
        **body: Any,
    ) -> AsyncIterator[RawClient]:
        """A client that has asked and read nothing yet.

        Args:
            steps: the provider's script; none if it is not to be asked.
            raw: the body as it is, instead of the fields of `body`.
            body: fields over those of a plain streaming request.
        """
        fields: Mapping[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True} | body
        if steps:
            self.up.script(*steps)
        named = [("authorization", f"Bearer {key}")] if key is not None else []
        async with self.gateway.client() as client:
            await client.request(
                "POST",
                f"{base}/chat/completions",
                headers=[*named, *headers],
                json=None if raw is not None else fields,
                body=raw,
                version=version,
            )
            yield client

    async def ask_all(
        self, scripts: Iterable[Sequence[Step]], *, provider: str = "fake", **request: Any
    ) -> list[Answer]:
        """Asks with every script, all at once; each by a model of its own, `provider/all-N`."""
        asked = []
        for steps in scripts:
            name = f"all-{next(self._names)}"
            self.up.script_for(name, *steps, repeat=False)
            asked.append(self.ask(model=f"{provider}/{name}", **request))
        return await asyncio.gather(*asked)

    async def get(self, path: str, *, method: str = "GET", key: str | None = KEY) -> Answer:
        """Asks for anything else, without a body."""
        headers = [("authorization", f"Bearer {key}")] if key is not None else []
        async with self.gateway.client() as client:
            await client.request(method, path, headers=headers)
            await client.read_all()
        return Answer(client.status, client.headers, client.body)

    @property
    def requests(self) -> list[RecordedRequest]:
        """What the provider was asked in this test."""
        return self.up.requests[self._first_request :]

    async def request(self, index: int = 0) -> RecordedRequest:
        """The request of that number in this test, waited for."""
        return await self.up.request(self._first_request + index)

    @property
    def log(self) -> str:
        """What the gateway has logged in this test, as whole lines."""
        with self._log_file.open("rb") as file:  # not all of it: a thousand tests write there
            file.seek(self._log_start)
            whole, _, _ = file.read().rpartition(b"\n")  # behind it, one may be half written
            return whole.decode(errors="replace")

    async def line(self, answer: Answer) -> dict[str, Any]:
        """The log's line about the request that was answered so, waited for."""
        request_id = answer.header("x-request-id")
        async with asyncio.timeout(5):
            while True:
                lines = [json.loads(line) for line in self.log.splitlines() if line[:1] == "{"]
                for line in lines:
                    if line["event"] == "request" and line["request_id"] == request_id:
                        found: dict[str, Any] = line
                        return found
                await asyncio.sleep(0.01)

    def check(self) -> None:
        """Nothing is left over and nothing went wrong unnoticed."""
        pending = self.up.forget()  # else the tests that follow would be answered by it
        assert not pending, "a script was never asked for"
        assert "Traceback" not in self.log, self.log
        assert '"event":"fault"' not in self.log, self.log


def mute_socket() -> tuple[socket.socket, list[socket.socket]]:
    """A listening socket whose backlog is full, and those that fill it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
    return listener, fillers
