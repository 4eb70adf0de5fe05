"""Keeps our secrets out of what a provider says. [pure]

Providers repeat the key that they refuse ("Incorrect API key provided: sk-..."), and what they say
travels into messages and `metadata.raw` (M3.4).
"""

from __future__ import annotations

import re
from typing import Any, Final

MASK: Final = "***"
_SHORTEST: Final = 6  # shorter values would mask ordinary words


class Redactor:
    """Masks the secrets of one provider, in every spelling that JSON has for them.

    Cut a text only after it was redacted: what is left of a secret at a cut is not found.

    Args:
        secrets: the provider's key and the values of its configured headers.
    """

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        known = sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(_spellings, known))) if known else None

    def text(self, value: str) -> str:
        """Return `value` without our secrets."""
        return value if self._secrets is None else self._secrets.sub(MASK, value)

    def data(self, value: bytes) -> bytes:
        """Return `value` without our secrets; all else stays, also what is not UTF-8."""
        text = value.decode("utf-8", "surrogateescape")
        return self.text(text).encode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """Return a parsed JSON value without our secrets, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value


def _spellings(secret: str) -> str:
    """Return a pattern for `secret` as it is and as any JSON writer may spell it."""
    return "".join(map(_spellings_of_character, secret))


def _spellings_of_character(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    escaped = "".join(rf"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    short = rf"\\{re.escape(char)}|" if char in '"\\/' else ""
    return f"(?:{short}{re.escape(char)}|(?i:{escaped}))"
