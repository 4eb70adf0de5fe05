"""The parts of a message's content in Gemini's form: text, images, sound, files. [pure] M5."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from encoders.shape import Untranslatable

# By the last extension of a link. A table of ours: that of the standard library reads files.
_MIME_TYPES: Final = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp",
    "gif": "image/gif", "heic": "image/heic", "heif": "image/heif", "bmp": "image/bmp",
    "pdf": "application/pdf", "txt": "text/plain", "md": "text/markdown", "html": "text/html",
    "csv": "text/csv", "json": "application/json", "xml": "text/xml", "rtf": "text/rtf",
    "mp4": "video/mp4", "mpeg": "video/mpeg", "mpg": "video/mpeg", "mov": "video/quicktime",
    "avi": "video/x-msvideo", "webm": "video/webm", "wmv": "video/x-ms-wmv", "3gp": "video/3gpp",
    "mp3": "audio/mp3", "wav": "audio/wav", "aac": "audio/aac", "ogg": "audio/ogg",
    "flac": "audio/flac", "aiff": "audio/aiff", "m4a": "audio/m4a", "opus": "audio/opus",
}  # fmt: skip
_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parts_of(content: object, path: str) -> list[dict[str, Any]]:
    """Return the parts of a message's `content`; empty texts make none.

    Args:
        path: of the content, for errors.

    Raises:
        Untranslatable: it holds a part that Gemini has no word for.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}] if content else []
    if not isinstance(content, list):
        raise Untranslatable("content must be a text or a list of parts", param=path)
    parts = [_part(part, f"{path}.{number}") for number, part in enumerate(content)]
    return [part for part in parts if part.get("text") != ""]


def _part(part: object, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise Untranslatable("a content part must be an object with a type", param=path)
    if kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise Untranslatable(f"a part of type {kind} must hold a text", param=path)
        return {"text": text}
    match kind:
        case "image_url" | "video_url":
            named = part.get(kind)
            url = named.get("url") if isinstance(named, dict) else named
            default = "image/jpeg" if kind == "image_url" else "video/mp4"
            return _linked(url, default, f"{path}.{kind}.url")
        case "input_audio":
            return _audio(part.get("input_audio"), f"{path}.input_audio")
        case "file":
            return _file(part.get("file"), f"{path}.file")
        case _:
            raise Untranslatable(f"Gemini has no word for a part of type {kind}", param=path)


def _linked(url: object, default: str, path: str) -> dict[str, Any]:
    """A data URL travels inside; any other link is fetched by the provider, or refused there."""
    if not isinstance(url, str) or not url:
        raise Untranslatable("a URL must be a text", param=path)
    if url[:5].lower() == "data:":
        return _inline(*_data_url(url, default, path))
    return {"fileData": {"mimeType": _mime_type(url) or default, "fileUri": url}}


def _inline(mime_type: str, data: str) -> dict[str, Any]:
    return {"inlineData": {"mimeType": mime_type, "data": data}}


def _data_url(url: str, default: str, path: str) -> tuple[str, str]:
    """Return media type and base64 text of a data URL (RFC 2397)."""
    head, comma, data = url[5:].partition(",")
    if not comma:
        raise Untranslatable("a data URL must have a comma before its data", param=path)
    mime_type, *parameters = head.split(";")
    if "base64" in (parameter.strip().lower() for parameter in parameters):
        if not _is_base64(data):
            raise Untranslatable("a data URL must hold base64", param=path)
    else:
        data = base64.b64encode(unquote_to_bytes(data)).decode("ascii")
    return mime_type.strip().lower() or default, data


def _is_base64(data: str) -> bool:
    try:
        base64.b64decode(data, altchars=b"-_" if set(data) & {"-", "_"} else None, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _mime_type(url: str) -> str | None:
    try:
        path = urlsplit(url).path
    except ValueError:
        return None
    return _MIME_TYPES.get(path.rpartition(".")[2].lower())


def _audio(audio: object, path: str) -> dict[str, Any]:
    data = audio.get("data") if isinstance(audio, dict) else None
    kind = audio.get("format") if isinstance(audio, dict) else None
    if not isinstance(data, str) or not isinstance(kind, str):
        raise Untranslatable("input_audio must hold data and format", param=path)
    return _inline(f"audio/{kind}", data)


def _file(file: object, path: str) -> dict[str, Any]:
    """A file by its data, or by the URI that Google's file service gave it."""
    if not isinstance(file, dict):
        raise Untranslatable("file must be an object", param=path)
    data, file_id, name = file.get("file_data"), file.get("file_id"), file.get("filename")
    default = _MIME_TYPES.get(str(name).rpartition(".")[2].lower(), "application/pdf")
    if isinstance(data, str) and data:
        if data.startswith(("https://", "http://", "gs://")) or data[:5].lower() == "data:":
            return _linked(data, default, f"{path}.file_data")
        return _inline(default, data)
    if isinstance(file_id, str) and file_id.startswith(("https://", "http://", "gs://")):
        return _linked(file_id, default, f"{path}.file_id")
    raise Untranslatable(
        "Gemini knows a file by file_data, or by a URI in file_id", param=f"{path}.file_id"
    )
