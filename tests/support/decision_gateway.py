"""The gateway over a decision backend that does what the state says; run in place of `planes.cli`.

    !delay=0.5             answers after half a second; if it is cancelled before, that is told too
    !until=NAME            answers once there is a file of that name in its working directory
    !error=CODE:RETRY_MS   fails with that code; without RETRY_MS it may not be tried again
    !times=2               does so the first two times that it sees this state, then decides

The last word of a kind counts, so that a text may be appended that changes its mind. Every call
is a line of `decides.jsonl` in the working directory, written at its beginning and at its end.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encoders.decision_errors import DecisionError, error
from planes import cli
from planes.decision import backends
from relay.deciders.instant import InstantBackend

if TYPE_CHECKING:
    from relay.deciders.base import DecisionReply

_WORD = re.compile(r"!(\w+)=([^\s\"]+)")


class ScriptedBackend:
    """See the module."""

    def __init__(self) -> None:
        self._instant = InstantBackend()
        self._seen: Counter[str] = Counter()
        self._calls = Path("decides.jsonl")

    async def decide(
        self, body: bytes, *, idempotency_key: str | None, deadline: float
    ) -> DecisionReply | DecisionError:
        state = json.dumps(json.loads(body)["state"])
        words = dict(_WORD.findall(state))
        self._seen[state] += 1
        call = {"state": state, "key": idempotency_key, "body": body.decode(), "at": time.time()}
        self._note("began", call)
        try:
            await asyncio.sleep(float(words.get("delay", 0)))
            while "until" in words and not Path(words["until"]).exists():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self._note("cancelled", call)
            raise
        self._note("ended", call)
        if "error" in words and self._seen[state] <= int(words.get("times", 1_000_000)):
            code, _, wait_ms = words["error"].partition(":")
            return error(code, "as scripted", retry_after_ms=int(wait_ms) if wait_ms else None)
        return await self._instant.decide(body, idempotency_key=idempotency_key, deadline=deadline)

    async def close(self) -> None:
        """Nothing is held."""

    def _note(self, what: str, call: dict[str, Any]) -> None:
        with self._calls.open("a") as file:
            file.write(json.dumps({"what": what, **call}) + "\n")


if __name__ == "__main__":
    backend = ScriptedBackend()
    backends.backend_of = lambda settings, **parts: backend
    sys.exit(cli.main())
