"""What every section of the configuration shares (O3).

Errors raised here are `PydanticCustomError`s, whose text is ours and never holds the value: a
value in the wrong place may be a secret.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2, token


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN, no value in an error's text (O3)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )


def complaint(message: str) -> PydanticCustomError:
    """Return an error that reads `message` and names no value."""
    return PydanticCustomError("setting", message)


def not_served(what: str, instead: str) -> PydanticCustomError:
    """Return the refusal of a setting that a later release serves."""
    return PydanticCustomError("not_served_yet", f"{what} is not served yet; {instead}")


def matching(pattern: str, words: str) -> AfterValidator:
    """Return a validator of a text that must match `pattern` whole; `words` say what that is."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise complaint(words)
        return value

    return AfterValidator(check)


def by_kind(*kinds: str) -> Discriminator:
    """Return what tells the members of a union apart by their `kind`, which is their Tag too.

    A function, as only then pydantic takes a text of ours: its own shows the value.
    """

    def kind_of(value: object) -> str | None:
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        return kind if kind in kinds else None

    return Discriminator(
        kind_of,
        custom_error_type="setting",
        custom_error_message=f"must have a `kind` that is one of {', '.join(kinds)}",
    )


def _no_boolean(value: object) -> object:
    # pydantic would read `port: yes` as 1.
    if isinstance(value, bool):
        raise complaint("must be a number, not true or false")
    return value


def http_url(value: str) -> str:
    """Check a base URL and return it without trailing slashes (O3).

    Raises:
        PydanticCustomError: not http(s), no host, a bad port, or parts that a base cannot have.
    """
    parts = _http_parts(value)
    if parts.query or parts.fragment:
        raise complaint("must not have a query or a fragment: paths are appended to it")
    return value.rstrip("/")


def http_link(value: str) -> str:
    """Check a URL that is called as it is written.

    Raises:
        PydanticCustomError: not http(s), no host, a bad port, or a fragment.
    """
    if _http_parts(value).fragment:
        raise complaint("must not have a fragment: it would not be sent")
    return value


def _http_parts(value: str) -> SplitResult:
    if any(not c.isprintable() or c.isspace() for c in value):
        raise complaint("must not contain spaces or control characters")
    scheme = _SCHEME.match(value)
    if scheme is None or scheme[1].lower() not in ("http", "https"):
        # Only the scheme is shown: what stands here by mistake may be a key.
        got = f"{scheme[1]}://…" if scheme else "no scheme"
        raise complaint(f"must begin with http:// or https:// (got {got})")
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise complaint("is not a URL: its host or port cannot be read") from None
    if not host:
        raise complaint("must name a host")
    if parts.username is not None or parts.password is not None:
        raise complaint("must not hold a user or password; use the settings for secrets")
    return parts


def is_loopback(url: str) -> bool:
    """Say whether `url` leads to this machine only; no name is resolved."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _secret(value: SecretStr) -> SecretStr:
    # Keys travel in headers. Files and `$(cat …)` leave a line break at the end; inside it is a
    # mistake, and a non-ASCII key could never be matched (M1.2).
    text = value.get_secret_value().strip()
    if not all("!" <= c <= "~" for c in text):
        raise complaint("must be printable ASCII without spaces or line breaks")
    return SecretStr(text)


def _not_empty(value: SecretStr) -> SecretStr:
    if not value.get_secret_value():
        raise complaint("must not be empty")
    return value


def _header_name(value: str) -> str:
    if _HEADER_NAME.fullmatch(value) is None:
        raise complaint("must be a header name: letters, digits and !#$%&'*+-.^_`|~ only")
    return value


def _header_value(value: str) -> str:
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in value.replace("\t", " ")):
        raise complaint("must be a header value: no line breaks or control characters")
    return value


def _one_line(value: str) -> str:
    if not value.strip() or any(not c.isprintable() for c in value):
        raise complaint("must be one line of text and not empty")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
Count = Annotated[Integer, Field(ge=1)]
Amount = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Text = Annotated[str, StringConstraints(min_length=1)]
Line = Annotated[str, AfterValidator(_one_line)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
RequiredSecret = Annotated[Secret, AfterValidator(_not_empty)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
HttpLink = Annotated[str, AfterValidator(http_link)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[str, AfterValidator(_header_value)]
# `key:` with nothing behind it, and an unset `${KEY:-}` without quotes, are null in YAML. Both
# mean an empty key (the provider is off), never "needs no key".
ApiKey = Annotated[Secret | None, BeforeValidator(lambda value: "" if value is None else value)]
