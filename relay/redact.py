"""Keeps our secrets out of what a provider says. [pure]

Providers repeat the key that they refuse ("Incorrect API key provided: sk-..."), and what they say
travels into messages and `metadata.raw` (M3.4).
"""

from __future__ import annotations

from typing import Any, Final

MASK: Final = "***"
_SHORTEST: Final = 6  # shorter values would mask ordinary words


class Redactor:
    """Masks the secrets of one provider.

    Args:
        secrets: the provider's key and the values of its configured headers.
    """

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True)
        self._secret_bytes = [secret.encode() for secret in self._secrets]

    def text(self, value: str) -> str:
        """Return `value` without our secrets."""
        for secret in self._secrets:
            value = value.replace(secret, MASK)
        return value

    def data(self, value: bytes) -> bytes:
        """Return `value` without our secrets."""
        for secret in self._secret_bytes:
            value = value.replace(secret, MASK.encode())
        return value

    def value(self, value: Any) -> Any:
        """Return a parsed JSON value without our secrets, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value
