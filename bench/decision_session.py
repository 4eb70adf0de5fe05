"""How fast the decision stream's machine is, without a socket.

    python -m bench.decision_session [--seconds 2]

appends            1 KiB `append_text`: bytes in, strict JSON, checks, accounting, the ack out
growth             a state of 3 MB grown by 10,000 appends, in ten parts: the last is as fast as the
                   first if an append does not cost the state (D4.9)
dispatch           a decide of a 3 MB state: snapshot, body, decision frame
large messages     `decode` of what is run in a thread
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Final

from encoders.decision_messages import decode
from relay.decisions.effects import Decided, StartDecide
from relay.decisions.limits import DecisionLimits
from relay.decisions.session import DecisionSession

KIB: Final = "x" * 1024
REPLY: Final = b'{"id":"szd_1","answers":{}}'
UNBOUNDED: Final = DecisionLimits.of(
    {
        "max_events_per_second": 1e9,
        "event_burst": 1e9,
        "max_messages_per_second": 1e9,
        "message_burst": 1e9,
        "max_pending_events": 1e9,
        "max_events": 1e9,
        "max_decide_body_bytes": 1e12,
        "max_message_bytes": 1e9,
    }
)


class Stream:
    """A started session whose frames are written at once."""

    def __init__(self, state: str) -> None:
        self.session = DecisionSession(
            UNBOUNDED, stream_id="szws_" + "0" * 32, request_id="bench", now=0.0
        )
        question = {"type": "boolean", "instructions": "Is it?"}
        request = {"model": "m", "state": state, "questions": {"q": question}}
        start = {"type": "start", "event_id": "evt_1", "request": request}
        self.send(json.dumps(start | {"decision_mode": "on_request"}).encode())

    def send(self, data: bytes) -> None:
        """Take a message and write what it caused."""
        self.session.receive(data, 0.0)
        while self.session.next_frame() is not None:
            self.session.written(0.0)

    def appends(self, count: int, text: str) -> float:
        """Append so often; returns seconds."""
        first = self.session.state_version + 1
        message = '{"type":"append_text","event_id":"evt_%d","text":"%s"}'
        messages = [(message % (first + n, text)).encode() for n in range(count)]
        began = time.perf_counter()
        for data in messages:
            self.send(data)
        took = time.perf_counter() - began
        if self.session.state_version != first + count - 1:
            raise RuntimeError("an append was refused")
        return took

    def decide(self) -> float:
        """Decide the state; returns seconds."""
        began = time.perf_counter()
        self.send(b'{"type":"decide","state_version":%d}' % self.session.state_version)
        self.session.next_effect()
        self.session.start_granted(0.0)
        effect = self.session.next_effect()
        if not isinstance(effect, StartDecide):
            raise TypeError("no decide was started")
        self.session.resolve(effect.ticket, Decided(reply=REPLY, request_id="d"), 0.0)
        self.send(b'{"type":"decide","state_version":%d}' % self.session.state_version)
        return time.perf_counter() - began


def measure_appends(seconds: float) -> None:
    """Appends of 1 KiB a second; a new stream for each 10,000."""
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not rates:
        rates.append(10_000 / Stream("").appends(10_000, KIB))
    print(f"appends of 1 KiB        {max(rates):>10,.0f} a second (best of {len(rates)} x 10,000)")


def measure_growth() -> None:
    """Ten parts of 1,000 appends to 3 MB."""
    stream = Stream("x" * 3_000_000)
    parts = [stream.appends(1_000, "y" * 60) * 1000 for _ in range(10)]
    print("3 MB and 10,000 appends " + " ".join(f"{part:.1f}" for part in parts) + " ms each 1,000")
    print(f"decide of it            {stream.decide() * 1000:>10.1f} ms")


def measure_decode() -> None:
    """Large messages of several kinds."""
    numbers = [n / 8 for n in range(300_000)]
    objects = [{"id": n, "name": "item", "tags": ["a", "b"]} for n in range(50_000)]
    for name, state in (("text", "line\n" * 700_000), ("numbers", numbers), ("objects", objects)):
        message = {"type": "replace", "event_id": "evt_2", "state": state}
        data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
        began = time.perf_counter()
        decode(data)
        took = (time.perf_counter() - began) * 1000
        print(f"decode {name:<16} {took:>10.1f} ms for {len(data) / 1e6:.1f} MB")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    measure_appends(arguments.seconds)
    measure_growth()
    measure_decode()


if __name__ == "__main__":
    main()
