"""Who is calling (M1.1): keys of the configuration, hashed in memory.

Only SHA-256 digests are kept. What is presented is hashed first and compared with every known
digest in constant time; the time of a look-up tells nothing but how many keys there are.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from planes.settings import Key


class InvalidKey(RelayError):
    """No key, an unknown key, or a revoked one."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class AccountSuspended(RelayError):
    """The key is right and its account is suspended."""

    status = 403
    code = "account_suspended"
    type = "permission_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller of one request.

    Attributes:
        key_id: names the key in logs and rows; not a secret.
        max_concurrent: requests of the org at once, None for no limit.
        comments: whether its /api/v1 streams carry comments (M1.4).
    """

    org: str
    key_id: str
    max_concurrent: int | None
    comments: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    digest: bytes
    principal: Principal
    status: str


class KeyRing:
    """The keys that are known to this process.

    Args:
        keys: the configuration's; their text is not kept.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self._known = [_known(key) for key in keys]

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Return the caller of a request with `Authorization: Bearer` or `x-api-key` (M1.1).

        Raises:
            InvalidKey: 401. AccountSuspended: 403.
        """
        key = _presented(headers)
        if key is None:
            raise InvalidKey(
                "no API key: send `Authorization: Bearer <key>` or an `x-api-key` header"
            )
        known = self._find(_digest(key))
        if known is None or known.status == "revoked":
            raise InvalidKey("the API key is not known here, or it was revoked")
        if known.status == "suspended":
            raise AccountSuspended(f"the account {known.principal.org!r} is suspended")
        return known.principal

    def _find(self, digest: bytes) -> _Known | None:
        """Compare with every key, found or not."""
        found = None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found


def _known(key: Key) -> _Known:
    digest = _digest(key.key.get_secret_value())
    principal = Principal(
        org=key.org,
        key_id=f"key_{digest.hex()[:12]}",
        max_concurrent=key.max_concurrent,
        comments=key.comments,
    )
    return _Known(digest=digest, principal=principal, status=key.status)


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def _digest(key: str) -> bytes:
    # aiohttp makes surrogates of bytes that are not UTF-8: any bytes must come to a plain 401
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
