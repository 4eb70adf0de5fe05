"""M3.4: what is ours and secret is in nothing that a provider makes us say, nor in the log."""

from __future__ import annotations

import base64
import html
import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import pytest

from tests.support.fake_upstream import DONE, Eof, Head, Send, Step, chunk, json_answer, sse
from tests.support.gateway import UPSTREAM_KEY
from tests.support.stack import ODD_SECRET, SECRET_HEADER, Stack

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.asyncio(loop_scope="session")

A: Final = sse(chunk("a", role="assistant"))
JSON: Final = {"content-type": "application/json"}


def refused(status: int) -> Callable[[bytes], list[Step]]:
    return lambda said: [Head(status, JSON, "length"), Send(b'{"error":{"message":"%s"}}' % said)]


# How a provider may say something: as JSON text inside the quotes of a string, or as it is.
VOICES: Final[dict[str, Callable[[bytes], list[Step]]]] = {
    "400": refused(400),
    "401": refused(401),
    "404 code and param": lambda said: [
        Head(404, JSON, "length"),
        Send(
            b'{"error":{"message":"m","code":"%s","param":"%s","type":"%s"}}' % (said, said, said)
        ),
    ],
    "429": refused(429),
    "500": refused(500),
    "500 key": lambda said: [
        Head(500, JSON, "length"),
        Send(b'{"error":{"message":{"%s":1}}}' % said),
    ],
    "500 text": lambda said: [Head(500, {}, "length"), Send(b"<p>%s</p>" % said)],
    "200 json": refused(200),
    "200 no completion": lambda said: [Head(200, JSON, "length"), Send(b'{"x":"%s"}' % said)],
    "own error event": lambda said: [Send(A + b'data: {"error":{"message":"%s"}}\n\n' % said)],
    "own error chunk": lambda said: [
        Send(A + sse(chunk("", error={"message": "@"}).replace(b"@", said)) + DONE)
    ],
    "error of a choice": lambda said: [
        Send(A + sse(b'{"choices":[{"index":0,"delta":{},"error":{"message":"%s"}}]}' % said))
    ],
    "named error": lambda said: [Send(A + b'event: error\ndata: {"why":["%s"]}\n\n' % said)],
    "not JSON": lambda said: [Send(A + b"data: what? %s\n\n" % said)],
    "no answer": lambda said: [Send(b'data: {"hint":"%s"}\n\n' % said), Eof()],
}
SECRETS: Final = {
    "fake key": ("fake", UPSTREAM_KEY),
    "header": ("fake", SECRET_HEADER),
    "odd": ("odd", ODD_SECRET),
}
SPELLINGS: Final[dict[str, Callable[[str], str]]] = {
    "json": lambda text: json.dumps(text)[1:-1],
    "slashes": lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    "unicode": lambda text: "".join(f"\\u{ord(c):04X}" for c in text),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    "unicode in JSON": lambda text: "".join(f"\\\\u{ord(c):04x}" for c in text),
    "URL": lambda text: quote(text, safe=""),
    "all of it in a URL": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "HTML": lambda text: json.dumps(html.escape(text))[1:-1],
    "numbers in HTML": lambda text: "".join(f"&#{ord(c)};" for c in text),
    "upper case": lambda text: json.dumps(text.upper())[1:-1],
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 in a header": lambda text: base64.b64encode(f"Bearer {text}".encode()).decode(),
    "in a sentence": lambda text: "Incorrect key: Bearer " + json.dumps(text)[1:-1] + "; see docs",
}


def leaks(text: str, secret: str) -> str:
    """The longest beginning of the secret, if it is a telling one, that stands in the text."""
    for size in range(len(secret), 8, -1):
        for spelled in (secret[:size], json.dumps(secret[:size])[1:-1]):
            if spelled in text or spelled.replace("/", "\\/") in text:
                return secret[:size]
    return ""


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize(("provider", "secret"), SECRETS.values(), ids=SECRETS.keys())
@pytest.mark.parametrize("voice", VOICES.values(), ids=VOICES.keys())
async def test_no_secret_is_repeated(
    stack: Stack,
    voice: Callable[[bytes], list[Step]],
    provider: str,
    secret: str,
    spell: Callable[[str], str],
) -> None:
    """M1.2, M3.4: in whatever way it is said and spelled; the rest of the answer stays."""
    answer = await stack.ask(*voice(spell(secret).encode()), model=f"{provider}/m")
    documents = answer.chunks if answer.status == 200 else [answer.json]
    assert "error" in documents[-1]
    text = json.dumps(documents, ensure_ascii=False)
    await stack.line(answer)
    for said in (text, answer.body.decode(), stack.log):
        assert not leaks(said, secret)
        assert spell(secret) not in said
        assert json.loads(f'"{spell(secret)}"') not in said


async def test_a_plain_reply_repeats_no_secret(stack: Stack) -> None:
    """M3.4: an error of one choice passes as sent, but for that."""
    choice = {"index": 0, "message": {"content": "a"}, "error": {"message": UPSTREAM_KEY}}
    for stream in (True, False):
        reply = json_answer({"object": "chat.completion", "choices": [choice]})
        answer = await stack.ask(*reply, stream=stream)
        assert answer.status == 200
        assert b'"error":{"message":"***"}' in answer.body


@pytest.mark.parametrize("limit", [500, 2000, 65536])
@pytest.mark.parametrize(
    "voice", ["500 text", "named error", "not JSON", "no answer", "200 no completion"]
)
async def test_no_part_of_a_secret_is_left_where_a_text_is_cut(
    stack: Stack, voice: str, limit: int
) -> None:
    """M3.4: long texts are shortened; the cut may fall inside the secret."""
    for at in range(limit - len(UPSTREAM_KEY) - 30, limit + 1, 5):
        answer = await stack.ask(*VOICES[voice](b"x" * at + UPSTREAM_KEY.encode()))
        assert not leaks(answer.body.decode(), UPSTREAM_KEY)
    assert not leaks(stack.log, UPSTREAM_KEY)
