"""Inline attachments: what is checked when they are sent and what when they are decided (D4.3)."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from encoders.decision_errors import DecisionError, error
from encoders.decision_json import compact

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_ITEMS: Final = 16
MAX_OF_KIND: Final = {"image": 4, "audio": 1}
MAX_DECODED_BYTES: Final = 2_621_440
KINDS: Final = ("image", "audio", "document", "video")

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_HEADER: Final = re.compile(r"data:([A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+);base64")
_HEAD_BYTES: Final = 12  # the longest signature
_SERVED: Final = {
    "image": ("image/png", "image/jpeg"),
    "audio": ("audio/wav",),
    "document": ("application/pdf",),
    "video": ("video/mp4",),
}
_UNPRICED: Final = ("image/gif", "image/webp")


@dataclass(frozen=True, slots=True)
class Attachment:
    """One inline file, of which only what the checks need was decoded.

    Attributes:
        encoded: its compact JSON, members in the order name, type, data.
        size: decoded bytes. head: the first of them.
    """

    name: str
    kind: str
    mime: str
    size: int
    head: bytes
    encoded: bytes


class AttachmentRefused(Exception):
    """An item that no state may hold; see `error`."""

    def __init__(self, refusal: DecisionError) -> None:
        super().__init__(refusal.code)
        self.error = refusal


def parse_items(items: list[Any], param: str) -> tuple[Attachment, ...]:
    """Read a list of attachments, each by itself; `check_list` looks at them together.

    Raises:
        AttachmentRefused: 400 `invalid_request`, with the item's place.
    """
    if len(items) > MAX_ITEMS:  # before the work of decoding them
        raise AttachmentRefused(_invalid(f"there are at most {MAX_ITEMS} attachments", param))
    return tuple(_item(item, f"{param}.{place}") for place, item in enumerate(items))


def check_list(attachments: Sequence[Attachment], param: str) -> DecisionError | None:
    """Check the whole list that a state would have (D4.3, at a mutation)."""
    if len(attachments) > MAX_ITEMS:
        return _invalid(f"there are at most {MAX_ITEMS} attachments", param)
    if len({item.name for item in attachments}) != len(attachments):
        return _invalid("a name is given to two attachments", param)
    for kind, most in MAX_OF_KIND.items():
        if sum(item.kind == kind for item in attachments) > most:
            return error("media_unsupported", f"there may be {most} of kind {kind}", param=param)
    return None


def check_media(
    attachments: Sequence[Attachment], served: Collection[str], param: str
) -> DecisionError | None:
    """Check what the files are (D4.3, at the decide).

    Args:
        served: the kinds that the configuration serves.
    """
    for item in attachments:
        if item.kind not in served:
            return error(f"{item.kind}_not_available", f"{item.kind} is not served", param=param)
    for place, item in enumerate(attachments):
        refusal = _check_file(item, f"{param}.{place}.data")
        if refusal is not None:
            return refusal
    if sum(item.size for item in attachments) > MAX_DECODED_BYTES:
        return error(
            "media_too_large", f"attachments decode to over {MAX_DECODED_BYTES} bytes", param=param
        )
    if len(attachments) > 1 and any(item.kind == "video" for item in attachments):
        return error("media_unsupported", "a video is the only attachment", param=param)
    return None


def _check_file(item: Attachment, param: str) -> DecisionError | None:
    unpriced = item.kind == "image" and item.mime in _UNPRICED
    if not unpriced and item.mime not in _SERVED[item.kind]:
        return error("media_unsupported", f"this type of {item.kind} is not served", param=param)
    if not _signed(item.mime, item.head):
        return error("media_decode_failed", "the bytes are not of the declared type", param=param)
    if unpriced:
        return error("media_unpriced", "this type of image has no price", param=param)
    return None


def _signed(mime: str, head: bytes) -> bool:
    match mime:
        case "image/png":
            return head.startswith(b"\x89PNG\r\n\x1a\n")
        case "image/jpeg":
            return head.startswith(b"\xff\xd8\xff")
        case "image/gif":
            return head.startswith((b"GIF87a", b"GIF89a"))
        case "image/webp":
            return head.startswith(b"RIFF") and head[8:12] == b"WEBP"
        case "audio/wav":
            return head.startswith(b"RIFF") and head[8:12] == b"WAVE"
        case "application/pdf":
            return head.startswith(b"%PDF-")
        case _:
            return head[4:8] == b"ftyp"


def _item(value: Any, param: str) -> Attachment:
    if not isinstance(value, dict) or value.keys() != {"name", "type", "data"}:
        raise AttachmentRefused(
            _invalid("an attachment has a name, a type and inline data and nothing else", param)
        )
    name, kind, data = value["name"], value["type"], value["data"]
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise AttachmentRefused(
            _invalid(
                "an attachment's name has 1 to 64 ASCII letters, digits, underscores and hyphens"
                " and begins with a letter",
                f"{param}.name",
            )
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise AttachmentRefused(
            _invalid(f"an attachment is one of {', '.join(KINDS)}", f"{param}.type")
        )
    mime, size, head = _data_url(data, f"{param}.data")
    encoded = compact({"name": name, "type": kind, "data": data})
    return Attachment(name, kind, mime, size, head, encoded)


def _data_url(data: Any, param: str) -> tuple[str, int, bytes]:
    """The type, size and first bytes of a data URL in canonical base64 (RFC 4648 §3.5)."""
    header, comma, payload = data.partition(",") if isinstance(data, str) else ("", "", "")
    match = _HEADER.fullmatch(header)
    if match is None or not comma:
        raise AttachmentRefused(_invalid("inline data is a base64 data URL", param))
    try:
        raw = binascii.a2b_base64(payload.encode("ascii"), strict_mode=True)
        canonical = base64.b64encode(raw).decode("ascii") == payload
    except (UnicodeEncodeError, binascii.Error):
        canonical = False
        raw = b""
    if not canonical:
        raise AttachmentRefused(_invalid("inline data is not canonical base64", param))
    return match[1].lower(), len(raw), raw[:_HEAD_BYTES]


def _invalid(message: str, param: str) -> DecisionError:
    return error("invalid_request", message, param=param)
