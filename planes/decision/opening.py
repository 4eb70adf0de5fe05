"""What an opening must look like (D1.1 to D1.4), and how a refusal looks (D1.6)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion11, hdrs, web

from encoders.decision_errors import DecisionError, error
from encoders.decision_frames import PROTOCOL
from planes.auth import AccountSuspended, InvalidKey, RevokedKey
from planes.gateway import RECORD
from relay.errors import RelayError

if TYPE_CHECKING:
    from planes.auth import KeyRing, Principal

_GUID: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 §1.3
_NONCE_BYTES: Final = 16


class Refusal(RelayError):
    """A refused opening, for the log line."""

    def __init__(self, problem: DecisionError) -> None:
        super().__init__(problem.message, param=problem.param)
        self.status, self.code, self.type = problem.status, problem.code, problem.type


def check(request: web.Request) -> DecisionError | None:
    """Say what is wrong with an opening's form; None if nothing is."""
    headers = request.headers
    upgrade = headers.get(hdrs.UPGRADE, "").strip().lower()
    connection = {t.strip().lower() for t in headers.get(hdrs.CONNECTION, "").split(",")}
    version = headers.get(hdrs.SEC_WEBSOCKET_VERSION, "").strip()
    upgrades = upgrade == "websocket" and "upgrade" in connection
    if not upgrades or version != "13" or request.version < HttpVersion11:
        return error("stream_upgrade_required", "this endpoint accepts WebSocket connections only")
    if request.query_string or request.raw_path.endswith("?"):
        return _wrong("a stream has no query string")
    for name in (hdrs.ORIGIN, hdrs.COOKIE):
        if name in headers:
            return _wrong(f"a stream is server to server: no {name} header")
    if request.body_exists:
        return _wrong("an opening has no body")
    if headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, []) != [PROTOCOL]:
        return _wrong(f"Sec-WebSocket-Protocol must be {PROTOCOL}")
    keys = headers.getall(hdrs.SEC_WEBSOCKET_KEY, [])
    if len(keys) != 1 or not _is_nonce(keys[0]):
        return _wrong("Sec-WebSocket-Key must be 16 bytes in base64")
    return None


def authenticate(keys: KeyRing, request: web.Request) -> Principal | DecisionError:
    """Return who opens, or the refusal of D1.4."""
    try:
        return keys.authenticate(request.headers)
    except RevokedKey as refused:
        return error("auth_error", refused.message)
    except AccountSuspended as refused:
        return error("account_suspended", refused.message)
    except InvalidKey as refused:
        return error("invalid_api_key", refused.message)


def handshake(request: web.Request, request_id: str) -> dict[str, str]:
    """The headers of the 101."""
    key = request.headers[hdrs.SEC_WEBSOCKET_KEY].strip()
    digest = hashlib.sha1(f"{key}{_GUID}".encode(), usedforsecurity=False).digest()
    return {
        hdrs.UPGRADE: "websocket",
        hdrs.CONNECTION: "Upgrade",
        hdrs.SEC_WEBSOCKET_ACCEPT: base64.b64encode(digest).decode(),
        hdrs.SEC_WEBSOCKET_PROTOCOL: PROTOCOL,
        "x-request-id": request_id,
    }


def refuse(request: web.Request, problem: DecisionError) -> web.Response:
    """Answer with a refusal (D1.6)."""
    record = request[RECORD]
    record.error = Refusal(problem)
    response = web.Response(
        status=problem.status,
        body=problem.body(record.request_id),
        headers=problem.headers(),
        content_type="application/json",
    )
    if problem.status == 426:
        response.headers[hdrs.UPGRADE] = "websocket"
        response.headers[hdrs.CONNECTION] = "Upgrade"
        response.headers[hdrs.SEC_WEBSOCKET_VERSION] = "13"
    elif problem.status == 401:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response


def _wrong(message: str) -> DecisionError:
    return error("invalid_request", message)


def _is_nonce(value: str) -> bool:
    try:
        return len(base64.b64decode(value.strip(), validate=True)) == _NONCE_BYTES
    except (binascii.Error, ValueError):
        return False
