"""`Retry-After` in the forms that providers use. [pure] Source: RFC 9110 §10.2.3; M1.2."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_S: Final = 86_400  # a provider's longer wait is told as a day


def retry_after_s(headers: Mapping[str, str], now: float) -> int | None:
    """Read how long to wait, in whole seconds, rounded up; None if the provider does not say.

    Args:
        headers: response headers, case-insensitive or lower-case: `retry-after-ms`, then
            `retry-after` as seconds or as an HTTP date.
        now: Unix seconds.
    """
    seconds = _seconds(headers, now)
    return None if seconds is None else min(math.ceil(seconds), LONGEST_S)


def retry_after_ms(headers: Mapping[str, str], now: float) -> int | None:
    """`retry_after_s` in whole milliseconds."""
    seconds = _seconds(headers, now)
    return None if seconds is None else min(math.ceil(seconds * 1000), LONGEST_S * 1000)


def _seconds(headers: Mapping[str, str], now: float) -> float | None:
    milliseconds = headers.get("retry-after-ms")
    value = headers.get("retry-after", "").strip()
    if milliseconds is not None:
        seconds = _number(milliseconds)
        if seconds is not None:
            return seconds / 1000
    if not value:
        return None
    seconds = _number(value)
    if seconds is None:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
        seconds = max(seconds, 0.0)
    return seconds


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
