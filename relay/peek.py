"""Looks at the beginning of a stream while nothing of it has been sent (M3.3).

Two opt-ins of a provider meet here. `first_byte_timeout_s`: the caller's timeout runs until the
first byte that is not of a comment. `peek_first_event_s`: the stream is read up to the first event
that brings something of an answer, and an error or an end before it is a failed attempt; if neither
comes in time or in PEEK_BYTES_MAX, the stream is taken as it is, for a slow one is no broken one.
What was read is not lost. Where both are off nothing is read.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from encoders.openai import ChunkIdentity
from encoders.translator import StreamWants
from relay.lifecycle import Lifecycle, StreamInput
from relay.refusals import error_in_first_event
from relay.replies import Resumed
from relay.stream import StreamRelay

if TYPE_CHECKING:
    from relay.routing import Provider
    from relay.upstreams.base import UpstreamReply

PEEK_BYTES_MAX: Final = 64 * 1024
_COMMENTS_KEPT_MAX: Final = 4 * 1024
# A line that is neither empty nor a comment begins.
_CONTENT: Final = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?+|[\r\n])[^:\r\n]")


async def peek(
    provider: Provider, reply: UpstreamReply, first_byte: asyncio.Timeout | None
) -> UpstreamReply:
    """Return the reply, to be read from its beginning, once it may be committed.

    Args:
        first_byte: ends the attempt where the first byte does not come in time; None, or without a
            deadline, if nothing does. It is switched off here, when the byte is there.

    Raises:
        UpstreamError: the stream fails before it has brought anything of an answer.
        UpstreamTruncated: also: its connection died.
    """
    if first_byte is not None and first_byte.when() is None:
        first_byte = None
    needs_event = provider.peek_first_event_s is not None
    if first_byte is None and not needs_event:
        return reply
    relay = _relay(provider)
    held = _Held()
    clock = asyncio.get_running_loop().time
    until = clock() + (provider.peek_first_event_s or 0.0)
    while first_byte is not None or needs_event:
        await asyncio.sleep(0)  # comments that are always there would let no timeout come
        if needs_event and clock() >= until:
            needs_event = False
            continue
        waiting = asyncio.timeout_at(until if needs_event else None)
        try:
            async with waiting:
                data = await reply.read()
        except TimeoutError:
            if not waiting.expired():
                raise
            continue
        held.add(data)
        if first_byte is not None and held.content:
            first_byte.reschedule(None)
            first_byte = None
        relay.feed(data) if data else relay.eof()
        if relay.has_choice:
            break
        if relay.error is not None and (needs_event or not data):
            raise relay.error
        if relay.closed or len(held.data) > PEEK_BYTES_MAX:
            break
    return Resumed(reply, bytes(held.data)) if held.data else reply


class _Held:
    """What was read and not handed on. Of comments alone only so much is kept: they pass nowhere.

    Attributes:
        content: whether there is more than comments.
    """

    def __init__(self) -> None:
        self.data = bytearray()
        self.content = False

    def add(self, data: bytes) -> None:
        self.data += data
        if not self.content:
            self.content = _CONTENT.search(self.data) is not None
        if not self.content and len(self.data) > _COMMENTS_KEPT_MAX:
            # Their last line end stays: what is behind it begins a line, and not the stream.
            del self.data[: max(self.data.rfind(b"\n"), self.data.rfind(b"\r"), 0)]


def _relay(provider: Provider) -> StreamRelay:
    """What would read the stream, made to be thrown away."""
    identity = ChunkIdentity(model="", provider=provider.name, id="", created=0)
    lifecycle = Lifecycle()
    lifecycle.advance(StreamInput.DIAL)
    lifecycle.advance(StreamInput.HEADERS)
    return StreamRelay(
        translator=provider.shape.translator(identity, StreamWants()),
        lifecycle=lifecycle,
        redactor=provider.redactor,
        max_event_bytes=provider.max_event_bytes,
        read_error=error_in_first_event,
    )
