"""Drives a DecisionSession on a fake clock: messages in as dicts, frames out as dicts."""

from __future__ import annotations

import base64
import json
from collections import deque
from typing import TYPE_CHECKING, Any

from encoders.decision_errors import DecisionError, error
from relay.decisions.effects import Close, Decided, Failed, Opcode, StartDecide, TakeStart
from relay.decisions.limits import DecisionLimits
from relay.decisions.session import DecisionSession

if TYPE_CHECKING:
    from encoders.decision_frames import RateLimit
    from relay.decisions.effects import Effect

STREAM_ID = "szws_0123456789abcdef0123456789abcdef"
REQUEST_ID = "example-opening"
QUESTIONS: dict[str, Any] = {"ready": {"type": "boolean", "instructions": "Is the job ready?"}}
REPLY = b'{"id":"szd_1","answers":{}}'
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def encode(message: object) -> bytes:
    """A message as the real client encodes it."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def attachment(
    name: str, data: bytes = PNG, *, kind: str = "image", mime: str = "image/png"
) -> dict[str, str]:
    """An inline attachment."""
    payload = base64.b64encode(data).decode()
    return {"name": name, "type": kind, "data": f"data:{mime};base64,{payload}"}


def start_message(state: Any = "", *, mode: str = "on_request", **request: Any) -> dict[str, Any]:
    """A `start`; further arguments are members of its request."""
    members = {"model": "MODEL_ID", "state": state, "questions": QUESTIONS} | request
    return {"type": "start", "event_id": "evt_1", "request": members, "decision_mode": mode}


class Driver:
    """A session, its clock, and everything that came out of it.

    Args:
        grant: answer `TakeStart` with a start at once. write: take and write every frame at once.
        limits: overrides by name.

    Attributes:
        frames: JSON frames so far, decoded. raw: the same, as bytes. pings: payloads of native
            pings. decides: `StartDecide` effects that were not resolved yet. asked: how often a
            start was asked for. closed: the `Close`.
    """

    def __init__(
        self,
        *,
        grant: bool = True,
        write: bool = True,
        now: float = 1000.0,
        rate_limit: RateLimit | None = None,
        **limits: float,
    ) -> None:
        self.now = now
        self.grant = grant
        self.write = write
        self.frames: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.pings: list[bytes] = []
        self.decides: deque[StartDecide] = deque()
        self.asked = 0
        self.closed: Close | None = None
        self.limits = DecisionLimits.of(limits)
        self.session = DecisionSession(
            self.limits,
            stream_id=STREAM_ID,
            request_id=REQUEST_ID,
            now=now,
            rate_limit=rate_limit,
        )
        self.pump()

    def pump(self) -> list[dict[str, Any]]:
        """Take what the session has; returns the new JSON frames."""
        before = len(self.frames)
        while True:
            if self.write:
                self._take_frames()
            effect = self.session.next_effect()
            if effect is None:
                return self.frames[before:]
            self._do(effect)

    def _take_frames(self) -> None:
        for frame in self.session.frames_to_send():
            if frame.opcode is Opcode.PING:
                self.pings.append(frame.payload)
            else:
                self.raw.append(frame.payload)
                self.frames.append(json.loads(frame.payload))
            self.session.written(self.now)

    def _do(self, effect: Effect) -> None:
        assert self.closed is None, "an effect after the Close"
        if isinstance(effect, TakeStart):
            self.asked += 1
            if self.grant:
                assert self.session.start_granted(self.now)
        elif isinstance(effect, StartDecide):
            self.decides.append(effect)
        else:
            self.closed = effect

    def send(self, message: object) -> list[dict[str, Any]]:
        """Send a message: bytes as they are, all else as JSON. Returns the frames it caused."""
        data = message if isinstance(message, bytes) else encode(message)
        self.session.receive(data, self.now)
        return self.pump()

    def start(self, state: Any = "", **more: Any) -> dict[str, Any]:
        """Send a `start` that is accepted; returns its ack."""
        (ack,) = self.send(start_message(state, **more))
        assert ack["type"] == "ack", ack
        return ack

    def append(self, text: Any = "x", **more: Any) -> list[dict[str, Any]]:
        """Send the next `append_text`."""
        return self.send({"type": "append_text", "event_id": self.next_id, "text": text} | more)

    def replace(self, state: Any, **more: Any) -> list[dict[str, Any]]:
        """Send the next `replace`."""
        return self.send({"type": "replace", "event_id": self.next_id, "state": state} | more)

    def decide(self, version: int | None = None) -> list[dict[str, Any]]:
        """Send a `decide` for the current version, or another."""
        named = self.session.state_version if version is None else version
        return self.send({"type": "decide", "state_version": named})

    @property
    def next_id(self) -> str:
        """The event id that is next."""
        return f"evt_{self.session.state_version + 1}"

    def answer(self, reply: bytes = REPLY, **more: Any) -> list[dict[str, Any]]:
        """Resolve the running decide with a reply."""
        decided = Decided(reply=reply, request_id="example-decision", **more)
        self.session.resolve(self.decides.popleft().ticket, decided, self.now)
        return self.pump()

    def fail(self, problem: DecisionError | str, **more: Any) -> list[dict[str, Any]]:
        """Resolve the running decide with an error, or with the error of a code."""
        if isinstance(problem, str):
            problem = error(problem, "it failed", **more)
        failed = Failed(error=problem, request_id="example-decision")
        self.session.resolve(self.decides.popleft().ticket, failed, self.now)
        return self.pump()

    def advance(self, seconds: float) -> list[dict[str, Any]]:
        """Let time pass, waking the session at each of its deadlines."""
        before = len(self.frames)
        target = self.now + seconds
        while (due := self.session.next_deadline()) is not None and due <= target:
            self.now = max(self.now, due)
            self.session.handle_timeout(self.now)
            self.pump()
            after = self.session.next_deadline()
            assert after is None or after > self.now, "woken for nothing"
        self.now = target
        return self.frames[before:]

    def advance_alive(self, seconds: float) -> list[dict[str, Any]]:
        """Let time pass while the peer answers every heartbeat at once."""
        before = len(self.frames)
        target = self.now + seconds
        while (due := self.session.next_deadline()) is not None and due <= target:
            frames, pings = len(self.frames), len(self.pings)
            self.advance(max(0.0, due - self.now))
            for payload in self.pings[pings:]:
                self.session.receive_control(10, payload, self.now)
            for frame in self.frames[frames:]:
                if frame["type"] == "ping":
                    self.send({"type": "pong", "nonce": frame["nonce"]})
        self.now = target
        return self.frames[before:]

    def drain(self) -> list[dict[str, Any]]:
        """The process stops."""
        self.session.drain(self.now)
        return self.pump()

    @property
    def types(self) -> list[str]:
        """The types of all JSON frames so far."""
        return [frame["type"] for frame in self.frames]
