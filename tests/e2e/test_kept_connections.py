"""A kept connection of a provider never hands bytes of one answer to another request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.support.checks import until
from tests.support.fake_upstream import DONE, Head, Raw, Sleep, chunk, openai_stream, sse

if TYPE_CHECKING:
    from tests.support.fake_upstream import Step
    from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

_STRAY_BODY: Final = sse(chunk("stray", role="assistant")) + sse(chunk(None, finish_reason="stop"))
_STRAY: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_STRAY_BODY + DONE), _STRAY_BODY + DONE)
)
_TIMEOUT: Final = b"HTTP/1.1 408 Request Time-out\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

# What a provider may send behind the end of its answer, and when.
BEHIND: Final[dict[str, list[Step]]] = {
    "a second answer at once": [Raw(_STRAY)],
    "a second answer later": [Sleep(0.05), Raw(_STRAY)],
    "many answers": [Raw(_STRAY * 3), Sleep(0.05), Raw(_STRAY)],
    "half of a second answer": [Sleep(0.05), Raw(_STRAY[:40])],
    "half of one at once": [Raw(_STRAY[:40])],
    "a time-out of an idle connection": [Sleep(0.05), Raw(_TIMEOUT)],
    "no HTTP": [Sleep(0.05), Raw(b"data: x\n\n")],
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
@pytest.mark.parametrize("stream", [True, False])
async def test_bytes_behind_an_answer_reach_nobody(
    stack: Stack, behind: list[Step], stream: bool
) -> None:
    """The next request gets its own answer."""
    steps = [Head(framing="length"), *openai_stream(["one"]), *behind]
    first = await stack.ask(*steps, model="fake/a")
    assert first.text == "one"
    asked = stack.requests[0]
    await until(lambda: asked.answered.is_set() or asked.closed.is_set(), 20)
    if stream:
        second = await stack.ask(*openai_stream(["two"]), model="fake/b")
        assert second.text == "two"
    else:
        second = await stack.ask(*openai_stream(["two"]), model="aggregate/b", stream=False)
        assert second.json["choices"][0]["message"]["content"] == "two"
