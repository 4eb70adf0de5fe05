"""Parts of an OpenAI message as content blocks of the Messages API. [pure]

Rule M5. A part of a type that OpenAI does not have is taken for a block of the API's own and passes
as it is (M1.1).
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from encoders.shape import Untranslatable

Block = dict[str, Any]

_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal", "input_text": "text"}
_NO_WORDS: Final = ("input_audio", "audio", "video_url", "input_video")
_PDF: Final = "application/pdf"
# Keys of a part that the API knows on a block too.
_KEPT: Final = ("cache_control", "citations")


def blocks_of(content: Any, where: str) -> list[Block]:
    """Return the blocks of a message's content; texts of nothing but spaces are left out, for the
    API refuses them.

    Args:
        where: the path of the content, as `messages.2.content`.

    Raises:
        Untranslatable: a part has no words in this API, or is not what its type says.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [_text(content)] if content.strip() else []
    if not isinstance(content, list):
        raise Untranslatable(f"`{where}` must be a text or a list of parts", param=where)
    out: list[Block] = []
    for number, part in enumerate(content):
        block = _block(part, f"{where}.{number}")
        if block.get("type") != "text" or str(block.get("text", "")).strip():
            out.append(block)
    return out


def content_of(blocks: list[Block]) -> str | list[Block]:
    """Return blocks as a message's content: one that is only a text is said as a text."""
    if len(blocks) == 1 and blocks[0].keys() == {"type", "text"}:
        text = blocks[0]["text"]
        if blocks[0]["type"] == "text" and isinstance(text, str):
            return text
    return blocks


def with_cache_control(blocks: list[Block], message: dict[str, Any]) -> list[Block]:
    """Put a `cache_control` of a whole message on its last block."""
    mark = message.get("cache_control")
    if mark is not None and blocks:
        blocks[-1] = {**blocks[-1], "cache_control": mark}
    return blocks


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _block(part: Any, where: str) -> Block:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, dict):
        raise Untranslatable(f"`{where}` must be an object", param=where)
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise Untranslatable(f"`{where}.{_TEXT_PARTS[kind]}` must be a text", param=where)
        return _text(text) | _kept(part)
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        return _of_url(url, f"{where}.image_url.url", "image") | _kept(part)
    if kind == "file":
        return _file(part.get("file"), f"{where}.file") | _kept(part)
    if kind in _NO_WORDS:
        raise Untranslatable(f"`{where}`: this provider takes no {kind} parts", param=where)
    return part


def _kept(part: dict[str, Any]) -> Block:
    return {key: part[key] for key in _KEPT if part.get(key) is not None}


def _of_url(url: Any, where: str, kind: str) -> Block:
    """Return an image, or a document if that is what the URL holds."""
    if not isinstance(url, str):
        raise Untranslatable(f"`{where}` must be a URL", param=where)
    if url[:5].lower() == "data:":
        return _of_data_url(url, where)
    if url.lower().startswith(("https://", "http://")):
        return {"type": kind, "source": {"type": "url", "url": url}}
    raise Untranslatable(f"`{where}` must be a data: or an http(s) URL", param=where)


def _of_data_url(url: str, where: str) -> Block:
    head, comma, data = url[5:].partition(",")
    media, *options = (word.strip() for word in head.lower().split(";"))
    if not comma or not data:
        raise Untranslatable(f"`{where}` is an empty data: URL", param=where)
    if "base64" not in options:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    if media.startswith("image/"):
        media = "image/jpeg" if media == "image/jpg" else media
        return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    if media == _PDF:
        return {"type": "document", "source": {"type": "base64", "media_type": _PDF, "data": data}}
    if media.startswith("text/") or media in ("", "application/json"):
        try:
            text = base64.b64decode(data).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise Untranslatable(f"`{where}` is not base64 of UTF-8", param=where) from None
        source = {"type": "text", "media_type": "text/plain", "data": text}
        return {"type": "document", "source": source}
    raise Untranslatable(f"`{where}`: this provider takes no {media} files", param=where)


def _file(file: Any, where: str) -> Block:
    if not isinstance(file, dict):
        raise Untranslatable(f"`{where}` must be an object", param=where)
    data, file_id, name = file.get("file_data"), file.get("file_id"), file.get("filename")
    if isinstance(data, str):
        if ":" not in data[:8]:  # bare base64, which is a PDF wherever this is allowed
            data = f"data:{_PDF};base64,{data}"
        block = _of_url(data, f"{where}.file_data", "document")
    elif isinstance(file_id, str):
        block = {"type": "document", "source": {"type": "file", "file_id": file_id}}
    else:
        raise Untranslatable(f"`{where}` needs file_data or file_id", param=where)
    if isinstance(name, str) and name and block["type"] == "document":
        block["title"] = name
    return block
