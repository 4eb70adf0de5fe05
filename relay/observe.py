"""The seam between the relay and whatever measures it. Metrics and spans are made of the finished
`RequestRecord`; this tells only what that cannot: that a stream runs, and when its bytes come.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from relay.record import RequestRecord


class Observer(Protocol):
    """One who watches streams. Nothing it does may block or raise."""

    def streaming(self, record: RequestRecord) -> AbstractContextManager[Callable[[], None] | None]:
        """Watch one stream for the length of the block.

        Args:
            record: names its model and who serves it.

        Returns:
            What to call whenever a read gave something for the client; None for nothing. It is on
            the path of every chunk: one clock call and one count is all that it may cost.
        """


class Unobserved:
    """Nobody watches."""

    def streaming(self, record: RequestRecord) -> AbstractContextManager[None]:
        """Nothing to call."""
        return nullcontext()


UNOBSERVED: Final = Unobserved()
