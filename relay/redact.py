"""Keeps our secrets out of what a provider says. [pure]

Providers repeat the key that they refuse ("Incorrect API key provided: sk-..."), and what they say
travels into messages and `metadata.raw` (M3.4).
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MASK: Final = "***"
_ENTITIES: Final = {'"': "&quot;", "&": "&amp;", "'": "&apos;", "<": "&lt;", ">": "&gt;"}
_SHORTEST: Final = 6  # shorter values would mask ordinary words


class Redactor:
    """Masks the secrets of one provider, in every spelling that JSON, HTML and URLs have for them,
    in any case, and as base64, alone or as part of more.

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
    """Return a pattern for `secret` as it is and as any writer may spell it."""
    plain = "".join(map(_spellings_of_character, secret))
    return "|".join([f"(?i:{plain})", *_base64(secret)])


def _spellings_of_character(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    # JSON inside of JSON doubles the backslashes. Bounds keep the search linear.
    escaped = "".join(rf"\\{{1,8}}u{units[at : at + 4]}" for at in range(0, len(units), 4))
    in_url = "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "replace"))
    in_html = rf"&#(?:0{{0,6}}{ord(char)}|x0{{0,6}}{ord(char):x});"
    spellings = [re.escape(char), escaped, in_url, in_html]
    if char in '"\\/':
        spellings.append(rf"\\{{1,8}}{re.escape(char)}")
    if char in _ENTITIES:
        spellings.append(_ENTITIES[char])
    return f"(?:{'|'.join(spellings)})"


def _base64(secret: str) -> Iterator[str]:
    """Yield what base64 always makes of `secret`, for each of its three places in what is encoded;
    characters that its neighbours have a part in are left out.
    """
    data = secret.encode("utf-8", "replace")
    for before in range(3):
        bits = 8 * (before + len(data))
        text = base64.b64encode(bytes(before) + data).decode()[(8 * before + 5) // 6 : bits // 6]
        if len(text) >= _SHORTEST:
            yield re.escape(text).replace(r"\+", "[+-]").replace("/", "[/_]")
