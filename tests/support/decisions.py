"""A gateway with a decision plane, and streams on it, raw or by the real client."""

from __future__ import annotations

import itertools
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from system_zero import SystemZeroStreamClient

from tests.support.gateway import KEY, GatewayProcess
from tests.support.websocket import STREAM, RawSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_ORGS: Final = 100
SECOND_KEY: Final = "ozk_test_second_0123456789"
SUSPENDED_KEY: Final = "ozk_test_suspended_0123456789"
REVOKED_KEY: Final = "ozk_test_revoked_0123456789"
MODEL: Final = "rightnow-decision"
QUESTIONS: Final = {"ready": {"type": "boolean", "instructions": "Is it ready?"}}


def config(
    *,
    limits: Mapping[str, float] | None = None,
    server: dict[str, Any] | None = None,
    **decision: Any,
) -> dict[str, Any]:
    """A gateway whose decisions are scripted; see `tests.support.decision_gateway`."""
    return {
        "server": {"host": "127.0.0.1"} | (server or {}),
        "keys": [
            {"key": KEY, "org": "test", "max_concurrent": 4},
            {"key": SECOND_KEY, "org": "second"},
            *({"key": f"ozk_test_org_{i}_0123456789", "org": f"org-{i}"} for i in range(_ORGS)),
            {"key": SUSPENDED_KEY, "org": "suspended", "status": "suspended"},
            {"key": REVOKED_KEY, "org": "revoked", "status": "revoked"},
        ],
        "decision": {
            "backend": {"kind": "system-zero", "base_url": "http://127.0.0.1:9/v1"},
            "limits": dict(limits or {}),
        }
        | decision,
        "telemetry": {"log": "json"},
    }


def gateway(config: dict[str, Any], **more: Any) -> GatewayProcess:
    """The gateway of such a configuration."""
    return GatewayProcess(config, module="tests.support.decision_gateway", **more)


_next_org = itertools.count()


def fresh_key() -> str:
    """The key of an account that has done nothing yet: tests that share a gateway share none."""
    return f"ozk_test_org_{next(_next_org) % _ORGS}_0123456789"


def decides(process: GatewayProcess, what: str = "began") -> list[dict[str, Any]]:
    """The calls of the backend so far, in order."""
    file = process.workdir / "decides.jsonl"
    written = file.read_text() if file.exists() else ""
    lines = written.rpartition("\n")[0].splitlines()  # the last may be half written
    return [call for line in lines if (call := json.loads(line))["what"] == what]


def let_end(process: GatewayProcess, name: str) -> None:
    """Lets the decides of `!until=<name>` go on, those to come too."""
    (process.workdir / name).touch()


def start(state: Any = "Initial log\n", *, mode: str = "on_request", **more: Any) -> dict[str, Any]:
    """The fields of a `start`."""
    request = {"model": MODEL, "state": state, "questions": QUESTIONS}
    request |= more.pop("request", {})
    return {"type": "start", "event_id": "evt_1", "request": request, "decision_mode": mode} | more


@asynccontextmanager
async def opened(
    process: GatewayProcess, *, key: str | None = None, rcvbuf: int | None = None
) -> AsyncIterator[RawSocket]:
    """A raw stream whose `hello` was read.

    Args:
        key: without it, that of an account of its own.
    """
    async with process.client(rcvbuf=rcvbuf) as client:
        socket = RawSocket(client)
        status = await socket.open(STREAM, headers=[auth(key or fresh_key())])
        assert status == 101, client.body
        hello = await socket.json()
        assert hello["type"] == "hello"
        yield socket


def auth(key: str) -> tuple[str, str]:
    """The header of a key."""
    return ("authorization", f"Bearer {key}")


def real_client(
    process: GatewayProcess, *, key: str | None = None, **more: Any
) -> SystemZeroStreamClient:
    """The published client, unmodified."""
    url = f"ws://{process.host}:{process.port}{STREAM}"
    return SystemZeroStreamClient(key or fresh_key(), stream_url=url, **more)
