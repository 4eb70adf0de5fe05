"""The state of a stream as the bytes of its decide body. [pure] D4.2, D4.3, D4.5, D4.9, D4.10.

A state is a list of chunks of compact JSON, so that an append costs its own length and the byte
accounting is an addition. The chunks are joined when a decide needs the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from encoders.decision_attachments import check_list
from encoders.decision_errors import DecisionError, error
from encoders.decision_json import compact
from encoders.decision_messages import Append, AppendAttachments, Replace
from encoders.decision_served import Subject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from encoders.decision_attachments import Attachment
    from encoders.decision_messages import Start
    from encoders.decision_request import StateKind, StateValue

_AROUND: Final[dict[StateKind, tuple[bytes, bytes]]] = {
    "string": (b'"', b'"'),
    "array": (b"[", b"]"),
    "object": (b"", b""),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A checked mutation that was not made yet.

    Attributes:
        chunks: what is added, or with `fresh` the whole state.
        state_bytes: of the state after it.
    """

    kind: StateKind
    chunks: tuple[bytes, ...]
    fresh: bool
    state_bytes: int
    attachments: tuple[Attachment, ...]


class StateDocument:
    """State, attachments and the members that `start` fixed.

    Args:
        stream_id: the cache key of a start without one; None has none.
    """

    def __init__(self, start: Start, stream_id: str | None) -> None:
        key = start.prompt_cache_key if start.prompt_cache_key is not None else stream_id
        self._head = b'{"model":' + compact(start.model) + b',"state":'
        self._questions = b',"questions":' + start.encoded_questions
        tail = b"" if key is None else b',"prompt_cache_key":' + compact(key)
        if start.route is not None:
            tail += b',"route":' + compact(start.route)
        if start.mode is not None:
            tail += b',"mode":' + compact(start.mode)
        if start.policy is not None:
            tail += b',"policy":' + start.policy
        self._tail = tail + b"}"
        self._fixed_bytes = len(self._head) + len(self._questions) + len(self._tail)
        self._attachments_param = "attachments" if stream_id is None else "request.attachments"
        self._model = start.model
        self._asked = start.questions
        self.kind: StateKind = start.state.kind
        self.attachments = start.attachments
        self.state_bytes = _size(start.state)
        self._chunks = [start.state.content]

    @property
    def body_bytes(self) -> int:
        """The length of `body()`, without making it (D4.5)."""
        return self._body_bytes(self.state_bytes, self.attachments)

    def _body_bytes(self, state_bytes: int, attachments: tuple[Attachment, ...]) -> int:
        return self._fixed_bytes + state_bytes + _attachments_bytes(attachments)

    def check(self, max_body_bytes: int) -> DecisionError | None:
        """Check a state that has just begun."""
        refusal = check_list(self.attachments, self._attachments_param)
        return refusal or _too_large(self.body_bytes, max_body_bytes)

    def prepare(
        self, mutation: Append | AppendAttachments | Replace, max_body_bytes: int
    ) -> Change | DecisionError:
        """Check a mutation against the state and say what it would make of it (D4.6)."""
        if mutation.refusal is not None:
            return mutation.refusal
        attachments = self.attachments
        if isinstance(mutation, Append):
            if mutation.addition.kind != self.kind:
                return error(
                    "stream_state_type",
                    f"the state is of type {self.kind}: it takes no {mutation.addition.kind}",
                )
            change = self._appended(mutation.addition.content)
        elif isinstance(mutation, Replace):
            if mutation.attachments is not None:
                attachments = mutation.attachments
            state = mutation.state
            change = Change(state.kind, (state.content,), True, _size(state), attachments)
        else:
            attachments = (*attachments, *mutation.attachments)
            change = Change(self.kind, (), False, self.state_bytes, attachments)
        if attachments is not self.attachments:
            refusal = check_list(attachments, "attachments")
            if refusal is not None:
                return refusal
        body_bytes = self._body_bytes(change.state_bytes, attachments)
        return _too_large(body_bytes, max_body_bytes) or change

    def _appended(self, content: bytes) -> Change:
        empty = self.state_bytes == 2  # the quotes or brackets alone
        chunks = (content,) if self.kind == "string" or empty else (b",", content)
        size = self.state_bytes + sum(map(len, chunks))
        return Change(self.kind, chunks, False, size, self.attachments)

    def commit(self, change: Change) -> None:
        """Make the change that `prepare` returned."""
        if change.fresh:
            self._chunks = list(change.chunks)
        else:
            self._chunks.extend(change.chunks)
        self.kind = change.kind
        self.state_bytes = change.state_bytes
        self.attachments = change.attachments

    def subject(self) -> Subject:
        """What is checked when this state is decided."""
        return Subject(self._model, self._asked, self.attachments)

    def body(self) -> bytes:
        """The decide body: equal content gives equal bytes, whatever led to it (D4.10)."""
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        opening, closing = _AROUND[self.kind]
        attachments = b""
        if self.attachments:
            encoded = b",".join(item.encoded for item in self.attachments)
            attachments = b',"attachments":[' + encoded + b"]"
        state = self._chunks[0]
        return b"".join(
            (self._head, opening, state, closing, self._questions, attachments, self._tail)
        )


def _size(state: StateValue) -> int:
    opening, closing = _AROUND[state.kind]
    return len(opening) + len(state.content) + len(closing)


def _attachments_bytes(attachments: Iterable[Attachment]) -> int:
    sizes = [len(item.encoded) for item in attachments]
    return len(b',"attachments":[]') + sum(sizes) + len(sizes) - 1 if sizes else 0


def _too_large(body_bytes: int, max_body_bytes: int) -> DecisionError | None:
    if body_bytes <= max_body_bytes:
        return None
    return error("payload_too_large", f"the decide body would have over {max_body_bytes} bytes")
