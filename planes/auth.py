"""Who is calling (M1.1): keys of the configuration and of the store, hashed in memory.

Only SHA-256 digests are kept. What is presented is hashed first, so that no comparison ever sees
the bytes of a key, and the digest that the table finds is compared once more in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relay.errors import RelayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from planes.settings import Key
    from relay.stores.base import StoredKey

_UNKNOWN: Final = "the API key is not known here, or it was revoked"


class InvalidKey(RelayError):
    """No key, an unknown key, or a revoked one."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class RevokedKey(InvalidKey):
    """A key that was revoked; only the decision plane tells it from an unknown one (D1.4)."""


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
        trial: its usage is logged but never debited (M4.2).
    """

    org: str
    key_id: str
    max_concurrent: int | None
    comments: bool = True
    trial: bool = False


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
        self._configured = {known.digest: known for known in map(_configured, keys)}
        self._stored: dict[bytes, _Known] = {}

    def set_stored(self, keys: Iterable[StoredKey]) -> None:
        """Replace the keys that come from the store; one of the configuration goes first."""
        self._stored = {known.digest: known for known in map(_from_store, keys)}

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Return the caller of a request with `Authorization: Bearer` or `x-api-key` (M1.1).

        Raises:
            InvalidKey: 401, RevokedKey with it. AccountSuspended: 403.
        """
        key = presented(headers)
        if key is None:
            raise InvalidKey(
                "no API key: send `Authorization: Bearer <key>` or an `x-api-key` header"
            )
        known = self._find(_digest(key))
        if known is None:
            raise InvalidKey(_UNKNOWN)
        if known.status == "revoked":
            raise RevokedKey(_UNKNOWN)
        if known.status == "suspended":
            raise AccountSuspended(f"the account {known.principal.org!r} is suspended")
        return known.principal

    def _find(self, digest: bytes) -> _Known | None:
        known = self._configured.get(digest) or self._stored.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest):
            return None
        return known


def key_id_of(digest: bytes) -> str:
    """Return the name of a key for logs and rows."""
    return f"key_{digest.hex()[:12]}"


def _configured(key: Key) -> _Known:
    digest = _digest(key.key.get_secret_value())
    principal = Principal(
        org=key.org,
        key_id=key_id_of(digest),
        max_concurrent=key.max_concurrent,
        comments=key.comments,
        trial=key.trial,
    )
    return _Known(digest=digest, principal=principal, status=key.status)


def _from_store(key: StoredKey) -> _Known:
    principal = Principal(
        org=key.org.id,
        key_id=key.id,
        max_concurrent=key.org.max_concurrent,
        trial=key.org.trial,
    )
    return _Known(digest=key.digest, principal=principal, status=key.status)


def presented(headers: Mapping[str, str]) -> str | None:
    """Return the text of the key that a request has, or None."""
    scheme, _, token = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None


def _digest(key: str) -> bytes:
    # aiohttp makes surrogates of bytes that are not UTF-8: any bytes must come to a plain 401
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
